"""The commands `adaptree drafter ...`, which inspect and move drafters, and `adaptree trainer`, which learns for other
replicas.

Imports nothing heavy before a command runs, so that help answers at once.
"""

import json
import logging
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer
from pydantic import SecretStr
from rich.console import Console
from rich.table import Column, Table

from adaptation.config import AdaptationConfig
from service.config import LoadedConfig, ServiceConfig
from service.errors import StartupError
from service.training.commands import adapt_drafter

if TYPE_CHECKING:
    from service.learning.moving import Learnt

logger = logging.getLogger(__name__)

WithSettings = Callable[[Callable[..., None]], Callable[..., None]]
"""Adds one option per setting to a command, whose first argument then is the configuration."""

_SHAPES = ("num_layers", "block_size", "draft_vocab_size", "rank_hidden", "tap_layers")
_TARGET_SHAPES = ("model_type", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
_MOST_ROWS = 8  # of one table among the facts; the rest is for --json


def drafter_app(with_settings: WithSettings) -> typer.Typer:
    """The commands, each with every setting as an option."""
    app = typer.Typer(
        help="Inspect, export, import and adapt drafters.",
        no_args_is_help=True,
    )
    app.command("inspect")(with_settings(_inspect))
    app.command("export")(with_settings(_export))
    app.command("import")(with_settings(_import))
    app.command("adapt")(adapt_drafter)
    return app


def _inspect(
    loaded: LoadedConfig,
    folder: Annotated[
        Path | None,
        typer.Argument(
            metavar="[FOLDER]",
            help="A drafter folder, or a learning folder. Unset: what the configured server has learnt.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
) -> None:
    """Say what a drafter folder holds, or without one what was learnt here and which version is served.

    Of a folder: shapes, size, hash, target, and facts: how it was trained, or what it was learnt from.

    Of what was learnt: every version kept in state_dir for the configured model, with the scores that the gate saw.

    Loads no model and changes nothing; the server may go on running.

    adaptree drafter inspect my-drafter

    adaptree drafter inspect --model Qwen/Qwen3-0.6B --json
    """
    from adaptation.checkpoint import SNAPSHOTS
    from service.learning.moving import described, learnt, look_at

    if folder is not None and not (folder / SNAPSHOTS).is_dir():
        content = described(folder)
        print(json.dumps(content, indent=2)) if as_json else Console(markup=False).print(_folder_table(content))
        return
    found = learnt(loaded.config) if folder is None else [look_at(folder)]
    if as_json:
        print(json.dumps({"learnt": [one.as_json() for one in found]}, indent=2))
        return
    _print_learnt(loaded.config, found)


def _export(
    loaded: LoadedConfig,
    out: Annotated[Path, typer.Option("--out", metavar="FOLDER", help="New folder for the drafter.")],
    version: Annotated[
        int | None, typer.Option("--version", min=1, help="One of the kept versions. Unset: the one that is served.")
    ] = None,
    source: Annotated[
        Path | None,
        typer.Option(
            "--from", metavar="FOLDER", help="Learning folder, where several drafters have learnt; or a drafter folder."
        ),
    ] = None,
    form: Annotated[
        str,
        typer.Option(
            "--format",
            metavar="FORM",
            help="adaptree, or what other engines read: eagle3 (vLLM, SGLang, llama.cpp), speculators (vLLM), dflash, "
            "specblock.",
        ),
    ] = "adaptree",
) -> None:
    """Write what was learnt as a drafter folder, which any server of the same target takes.

    Give it to a server with --drafter-path, or for good with adaptree drafter import; in other forms, to other engines.

    Weights are stored in bf16; its config.json (facts.lineage) and README.md say what they were learnt from.

    Loads no model; the server may go on running.

    adaptree drafter export --out learnt

    adaptree drafter export --out before --version 3

    adaptree drafter export --from my-drafter --format eagle3 --out for-vllm
    """
    from service.learning.export import export
    from service.logging import say

    written = export(loaded.config, out, version=version, source=source, form=form)
    say(f"{written} is in {out}: serve with --drafter-path {out}")


def _import(
    loaded: LoadedConfig,
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A drafter folder: config.json, model.safetensors.")],
    force: Annotated[bool, typer.Option("--force", help="Replace the one that was imported before.")] = False,
) -> None:
    """Check a drafter folder, and copy it to where the configured model finds it.

    The next start takes it where drafter is auto or asks for weights, and drafter_path is unset.

    Refused are folders that are damaged, or hold weights that are not finite or of another shape than they should be.

    adaptree drafter import learnt --model Qwen/Qwen3-0.6B
    """
    from drafters.registry import needs_of
    from service.learning.moving import import_drafter
    from service.logging import say

    place = import_drafter(loaded.config, folder, force=force)
    say(f"imported for {loaded.config.model_source}: the next start serves with it; without it again: delete {place}")
    if loaded.config.drafter_path is not None:
        say(f"as configured the next start does not: drafter_path is {loaded.config.drafter_path}; unset it")
    elif loaded.config.drafter != "auto" and "weights" not in needs_of(loaded.config.drafter):
        say(f"as configured the next start does not: drafter is {loaded.config.drafter}; set it to auto")


def _folder_table(content: Mapping[str, Any]) -> Table:
    table = Table(Column("drafter", no_wrap=True), Column(content["folder"], overflow="fold"))
    shape = content["drafter"]
    head = "stored" if content["stores_head"] else "the target's own"
    rows: dict[str, object] = {
        "architecture": content["architecture"],
        "kind": shape.get("kind", "specblock"),
        "target identity": content["target_identity"],
        **{name: shape[name] for name in _SHAPES},
        **{f"layers.{name}": shape["target"].get(name) for name in _TARGET_SHAPES},
        "parameters": f"{content['parameters']:,}; head: {head}",
        "bytes": f"{content['bytes']:,}, {content['dtype']}",
        "weights SHA-256": content["weights_sha256"],
        **dict(_flat(content["facts"], "facts")),
    }
    for name, value in rows.items():
        table.add_row(name, "" if value is None else str(value))
    return table


def _flat(values: Mapping[str, Any], name: str) -> Iterator[tuple[str, object]]:
    """Nested facts by dotted names."""
    for key, value in values.items():
        if not isinstance(value, Mapping):
            yield f"{name}.{key}", value
        elif len(value) > _MOST_ROWS and name != "facts":
            yield f"{name}.{key}", f"{len(value)} entries"
        else:
            yield from _flat(value, f"{name}.{key}")


def _print_learnt(config: ServiceConfig, found: "Sequence[Learnt]") -> None:
    console = Console(markup=False)
    if not found:
        console.print(
            f"nothing was learnt for {config.model} in {config.state_dir}: serve with --adaptation.enabled true",
            soft_wrap=True,
        )
    for one in found:
        content = one.as_json()
        known = (
            f"learnt from drafter {content['origin_sha256'][:16]}" if content["origin_sha256"] else "made from traffic"
        )
        title = f"{one.folder.name}: {known if one.origin else 'of an unknown drafter'}"
        table = Table("version", "parent", "date", "tokens per verify, by the gate", "weights SHA-256", "", title=title)
        as_deployed = "served" if one.served == 0 else ""
        table.add_row("0", "", "", "", "as deployed", as_deployed)
        for row in content["versions"]:
            scores = ", ".join(f"{name} {value:.3f}" for name, value in (row["scores"] or {}).items())
            marks = [mark for mark in ("served", "taken_back") if row[mark]]
            state = row["complaint"] or ", ".join(marks).replace("_", " ")
            cells = (row["version"], row["parent"], row["date"], scores, (row["weights_sha256"] or "")[:16], state)
            table.add_row(*("" if cell is None else str(cell) for cell in cells))
        console.print(table)
        for complaint in content["complaints"]:
            console.print(complaint, soft_wrap=True)


def trainer(
    loaded: LoadedConfig,
    redis: Annotated[
        str | None, typer.Option("--redis", metavar="URL", help="The same as --adaptation.redis-url.")
    ] = None,
) -> None:
    """Learn for the replicas that share a Redis server, in a process of its own that serves no requests."""
    from service.logging import configure_logging

    configure_logging(loaded.config.log_level, as_json=loaded.config.log_json)
    train(with_url(loaded.config, redis))


def with_url(config: ServiceConfig, url: str | None) -> ServiceConfig:
    """The configuration of the trainer: it learns even if the replicas of the same configuration do not. Raises
    StartupError without a store."""
    settings = config.adaptation
    chosen = settings.redis_url if url is None else SecretStr(url)
    if chosen is None:
        raise StartupError("a trainer needs replicas to learn for: give --redis URL, or set adaptation.redis_url")
    policy = AdaptationConfig().policy if settings.policy == "never" else settings.policy
    changes = {"enabled": True, "redis_url": chosen, "policy": policy}
    return config.model_copy(update={"adaptation": settings.model_copy(update=changes)})


def train(config: ServiceConfig) -> None:
    """Learn until SIGTERM or SIGINT. Raises StartupError."""
    from kernels.cpu.library import use_threads
    from service.learning.adaptive import build_trainer, stop_learning

    use_threads(1)
    worker, replicas = build_trainer(config)
    stopped = threading.Event()

    def stop(number: int, frame: FrameType | None) -> None:
        stopped.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    worker.start()
    replicas.start()
    logger.info("ready: learning for the replicas that share the store")
    stopped.wait()
    stop_learning(worker, replicas)
