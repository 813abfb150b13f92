"""The commands `adaptree train ...`, which run the stages of training together or one by one, and `adaptree drafter
...`, which inspect, export and adapt drafters.

Heavy modules are imported only when a command runs, so that --help is fast.
"""

import inspect
import json
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from service.config import LoadedConfig, ServiceConfig
from service.config_sources import load_config
from service.errors import StartupError
from service.learning.options import FitOptions

WithSettings = Callable[[Callable[..., None]], Callable[..., None]]
"""Adds one option per setting to a command whose first argument is the configuration."""

_ANSWER_SHARE = 0.4
"""Largest share of the time of `train drafter` that answering prompts may take."""

_LONG = ("tensors", "target")
"""Keys of a drafter's description that are printed only with --json, because their values are long."""

KEPT_EXIT_CODE = 3
"""Exit code of `drafter adapt` if the new drafter does not win."""

_Target = Annotated[
    str,
    typer.Option(
        "--target", help="The model to draft for: smollm2-135m, a Hugging Face id, a folder, or a .gguf file."
    ),
]
_PROMPTS = typer.Option("--prompts", metavar="FILE", help="JSONL file with id, task and messages; repeatable.")
_Prompts = Annotated[list[Path], _PROMPTS]
_Device = Annotated[str, typer.Option(help="auto (a GPU if there is one), cpu, cuda or cuda:N.")]
_Threads = Annotated[int | None, typer.Option(min=1, help="CPU threads. Unset: one per physical core.")]
_MaxTokens = Annotated[int, typer.Option("--max-new-tokens", min=8, help="Longest answer.")]
_Concurrency = Annotated[int, typer.Option(min=1, max=1024, help="Prompts answered at the same time.")]
_Seed = Annotated[int, typer.Option(min=0, max=2**31, help="Seed of everything random.")]
_Folder = Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder for the drafter; resumes a run in it.")]


def with_fit_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add one option per field of `FitOptions` to a command whose first argument is a `FitOptions`."""
    _, *own = inspect.signature(command, eval_str=True).parameters.values()
    added = inspect.signature(FitOptions, eval_str=True).parameters.values()

    def run(**options: object) -> None:
        given = {parameter.name: options.pop(parameter.name) for parameter in added}
        command(FitOptions(**given), **options)  # type: ignore[arg-type]

    keywords = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in (*own, *added)]
    run.__signature__ = inspect.Signature(keywords)  # type: ignore[attr-defined]
    run.__doc__ = command.__doc__
    return run


def train_app() -> typer.Typer:
    """Build the command group `adaptree train`."""
    app = typer.Typer(help="Train a drafter for a target.", no_args_is_help=True)
    app.command("drafter")(with_fit_options(_drafter))
    app.command("regenerate")(_regenerate)
    app.command("features")(_features)
    app.command("fit")(with_fit_options(_fit))
    return app


def drafter_app(with_settings: WithSettings) -> typer.Typer:
    """Build the command group `adaptree drafter`."""
    app = typer.Typer(
        help="Inspect, export and adapt drafters.",
        no_args_is_help=True,
    )
    app.command("inspect")(with_settings(_inspect))
    app.command("export")(with_settings(_export))
    app.command("adapt")(_adapt)
    return app


def _drafter(
    options: FitOptions,
    out: _Folder,
    minutes: Annotated[float, typer.Option(min=0.1, help="Time for everything.")],
    prompts: Annotated[list[Path] | None, _PROMPTS] = None,
    target: _Target = "smollm2-135m",
    responses: Annotated[
        list[Path] | None,
        typer.Option("--responses", metavar="FILE", help="Existing answers of this target; repeatable."),
    ] = None,
    device: _Device = "auto",
    threads: _Threads = None,
    max_new_tokens: _MaxTokens = 256,
    concurrency: _Concurrency = 16,
) -> None:
    """Train a drafter from prompts in a given time: 40 % of it for answers if none are given, up to 30 % for features.

    Under torchrun, the first process prepares the data, and all processes train.
    """
    config = _config(target, device, threads, concurrency)
    from drafters.training.fit import Length
    from service.learning.features import FEATURE_SHARE, make_features, processes
    from service.learning.fit import STATE_FILE, fit_drafter, kept_length
    from service.learning.regenerate import Answering, answer_prompts
    from service.logging import say

    features = out / "work" / "features"
    ranks = processes(config)
    began = time.monotonic()
    # A resumed run keeps its texts.
    if ranks.rank == 0 and not (out / STATE_FILE).exists():
        if not responses:
            if not prompts:
                raise StartupError("no data: give --prompts to be answered, or --responses")
            responses = [out / "work" / "responses.jsonl"]
            how = Answering(max_new_tokens, concurrency, options.seed, _deadline(_ANSWER_SHARE * minutes))
            answer_prompts(config, prompts, responses[0], how)
        deadline = _deadline(FEATURE_SHARE * minutes)
        make_features(config, responses, features, deadline=deadline)
    ranks.wait()
    length = kept_length(out)  # a resumed run keeps its length
    if length is None:
        left = ranks.first(minutes * 60 - (time.monotonic() - began))
        say(f"{max(left, 0.0) / 60:.1f} minutes are left for training")
        if left <= 0:
            raise StartupError(
                "answers and features took all the time: run again (they are kept), or give more --minutes"
            )
        length = Length(seconds=left)
    fit_drafter(config, ranks, features, out, length, options)
    ranks.leave()


def _regenerate(
    prompts: _Prompts,
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="JSONL file of answers; missing ones are added.")],
    target: _Target = "smollm2-135m",
    minutes: Annotated[float | None, typer.Option(min=0, help="Begin no further prompt after this time.")] = None,
    device: _Device = "auto",
    threads: _Threads = None,
    max_new_tokens: _MaxTokens = 256,
    concurrency: _Concurrency = 16,
    seed: _Seed = 0,
) -> None:
    """Stage 1: the target answers the prompts, half greedily and half at temperature 0.7 or 1.0."""
    config = _config(target, device, threads, concurrency)
    from service.learning.regenerate import Answering, answer_prompts

    answer_prompts(config, prompts, out, Answering(max_new_tokens, concurrency, seed, _deadline(minutes)))


def _features(
    responses: Annotated[
        list[Path], typer.Option("--responses", metavar="FILE", help="JSONL file of this target's answers; repeatable.")
    ],
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder for the shards; missing ones are added.")],
    target: _Target = "smollm2-135m",
    minutes: Annotated[float | None, typer.Option(min=0, help="Begin no further shard after this time.")] = None,
    device: _Device = "auto",
    threads: _Threads = None,
) -> None:
    """Stage 2: run the target over its answers, and store its features and distributions."""
    config = _config(target, device, threads)
    from service.learning.features import make_features, processes

    processes(config)
    make_features(config, responses, out, deadline=_deadline(minutes))


def _fit(
    options: FitOptions,
    features: Annotated[Path, typer.Option("--features", metavar="DIR", help="Folder of shards.")],
    out: _Folder,
    minutes: Annotated[float | None, typer.Option(min=0, help="Time to train.")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Steps to train.")] = None,
    target: _Target = "smollm2-135m",
    device: _Device = "auto",
    threads: _Threads = None,
) -> None:
    """Stage 3: train on features, for a number of minutes or steps. Runs under torchrun too.

    A resumed run keeps its length, unless another one is given.
    """
    config = _config(target, device, threads)
    from drafters.training.fit import Length
    from service.learning.features import processes
    from service.learning.fit import fit_drafter, kept_length

    is_given = minutes is not None or steps is not None
    length = Length(steps, None if minutes is None else minutes * 60) if is_given else kept_length(out)
    if length is None:
        raise StartupError("the run has no length: give --minutes or --steps")
    ranks = processes(config)
    fit_drafter(config, ranks, features, out, length, options)
    ranks.leave()


def _inspect(
    loaded: LoadedConfig,
    folder: Annotated[
        Path | None,
        typer.Argument(
            metavar="[FOLDER]",
            help="A drafter folder, or a learning folder. Unset: what the configured server has learnt.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of lines.")] = False,
) -> None:
    """Describe a drafter folder or, without one, the versions learnt here and which of them is served.

    For a folder: shapes, size, hash, target, and facts (how it was trained, or its lineage). Damaged files,
    wrong shapes and weights that are not finite are refused.

    Without a folder: every version kept in state_dir for the configured model, with its scores in the gate.

    Loads no model and changes nothing; the server may keep running.

    adaptree drafter inspect my-drafter

    adaptree drafter inspect --model Qwen/Qwen3-0.6B --json
    """
    from adaptation.checkpoint import SNAPSHOTS
    from service.learning.learnt import described, learnt, look_at

    if folder is not None and not (folder / SNAPSHOTS).is_dir():
        content = described(folder)
        print(json.dumps(content, indent=2) if as_json else "\n".join(_lines(content)))
        return
    found = [one.as_json() for one in (learnt(loaded.config) if folder is None else [look_at(folder)])]
    if as_json:
        print(json.dumps({"learnt": found}, indent=2))
        return
    if not found:
        config = loaded.config
        print(f"nothing was learnt for {config.model} in {config.state_dir}: serve with --adaptation.enabled true")
    for one in found:
        print("\n".join(_lines({**one, "versions": {row["version"]: row for row in one["versions"]}})))


def _lines(values: Mapping[str, Any], name: str = "") -> Iterator[str]:
    """Yield one line for each nested value, under its dotted name."""
    for key, value in values.items():
        if isinstance(value, Mapping) and key not in _LONG:
            yield from _lines(value, f"{name}{key}.")
        elif not isinstance(value, Mapping):
            yield f"{name}{key}: {'' if value is None else value}"


def _export(
    loaded: LoadedConfig,
    out: Annotated[Path, typer.Option("--out", metavar="FOLDER", help="New folder for the drafter.")],
    version: Annotated[
        int | None, typer.Option("--version", min=1, help="One of the kept versions. Unset: the one that is served.")
    ] = None,
    source: Annotated[
        Path | None,
        typer.Option("--from", metavar="FOLDER", help="Learning folder, needed if several drafters have learnt."),
    ] = None,
) -> None:
    """Export a learnt version as a drafter folder, which any server of the same target can load.

    Copy it to another server, and set drafter_path there.

    Weights are stored in bf16; its config.json (facts.lineage) and README.md say what they were learnt from.

    Loads no model; the server may keep running.

    adaptree drafter export --out learnt

    adaptree drafter export --out before --version 3
    """
    from service.learning.learnt import export
    from service.logging import say

    written = export(loaded.config, out, version=version, source=source)
    say(f"version {written} is in {out}: serve with --drafter-path {out}")


def _adapt(
    drafter: Annotated[Path, typer.Option(metavar="FOLDER", help="The drafter in any form: a folder or hub id.")],
    model: Annotated[str, typer.Option(help="Its target, or a fine-tune of it: as for serve.")],
    texts: Annotated[Path, typer.Option(metavar="FILE", help="JSONL of chats that end in the target's answers.")],
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="New folder for the drafter, if it wins.")],
    minutes: Annotated[float, typer.Option(min=0.01, help="Time for features and training.")] = 20.0,
    device: _Device = "auto",
    threads: _Threads = None,
    seed: _Seed = 0,
) -> None:
    """Train a drafter on a log of texts, and write it in the same format if it beats the old one on held-out texts.

    If it does not, nothing is written, and the exit code is 3. The same command resumes an interrupted run.

    A line of the log has `messages`, the answer last, or `request` and `response`, or `prompt` (messages) and
    `completion` (text).

    adaptree drafter adapt --drafter eagle3 --model Qwen/Qwen3-8B --texts log.jsonl --out adapted
    """
    config = _config(model, device, threads)
    from service.learning import adapt

    if not adapt.adapt(config, drafter, texts, out, minutes=minutes, seed=seed):
        raise typer.Exit(KEPT_EXIT_CODE)


def _config(target: str, device: str, threads: int | None, concurrency: int | None = None) -> ServiceConfig:
    """Load the settings for generating with the target alone: without a drafter and with a fixed budget, so that no
    costs are measured. Configures logging. Raises StartupError."""
    from service.logging import configure_logging

    given = {"model": target, "device": device, "threads": threads, "max_sequences": concurrency}
    plain = {"drafter": "none", "budget_policy": "fixed"}
    config = load_config(plain | {name: str(value) for name, value in given.items() if value is not None}).config
    configure_logging(config.log_level, as_json=config.log_json)
    return config


def _deadline(minutes: float | None) -> float | None:
    return None if minutes is None else time.monotonic() + minutes * 60
