"""`python -m benchmarks step-costs`: times of forwards by their rows, here and in llama.cpp on the same file."""

import importlib.util
import resource
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import psutil
import torch
import typer
from rich.table import Table
from torch import Tensor

from benchmarks.anatomy import anatomy, table_of_parts
from benchmarks.gguf_shapes import SHAPES, Mix, write_shape
from benchmarks.shared import percentile
from drafters.files import replacing
from kernels.cpu.library import threads_in_use
from kernels.feed_forward import SparseFeedForward
from kernels.ops import REFERENCE, Ops
from kernels.rows import ExtendRows
from service.assembly import Assembly
from service.bench.commands import Out
from service.bench.experiment import Measure, conclude, counted, prepare, read_sets
from service.bench.lossless import BUILT_IN
from service.config import LoadedConfig
from service.engine.decoder import FusedDecoder
from service.engine.measuring import Trial
from service.engine.target import Target
from service.engine.weights import EMBEDDED_NAME, gguf_file
from service.errors import StartupError

_ROWS = (1, 2, 3, 4, 5, 8, 9, 16, 17)
_CONTEXT = 200
_ANSWER = 128  # tokens of an answer whose steps are taken apart


@dataclass(frozen=True, slots=True)
class StepRow:
    """Times of a forward of so many rows, all with logits."""

    rows: int
    milliseconds: float  # median, in turn with llama.cpp
    llama_cpp_milliseconds: float | None
    over_one_row: float
    over_llama_cpp: float | None  # its time over ours
    experts: float | None  # distinct experts of the rows, mean over layers; None without experts


def run(
    loaded: LoadedConfig,
    rounds: Annotated[int, typer.Option(min=3, help="Forwards of each number of rows.")] = 30,
    peer: Annotated[bool, typer.Option("--peer", help="Also measure llama.cpp (llama-cpp-python).")] = False,
    shape: Annotated[str | None, typer.Option(help=f"Write and use random weights: {', '.join(SHAPES)}.")] = None,
    mix: Annotated[Mix, typer.Option(help="Types of the matrices of --shape.")] = "q4_k_m",
    layers: Annotated[int | None, typer.Option(min=1, help="Write only the first layers of --shape.")] = None,
    parts: Annotated[bool, typer.Option("--anatomy", help="Time the parts of whole steps instead.")] = False,
    out: Out = None,
) -> bool:
    """Measure milliseconds of forwards by their number of rows, and memory; or the parts of whole steps."""
    if parts:
        return _anatomy(loaded, rounds, out)
    config = loaded.config.model_copy(update={"budget_policy": "fixed", "drafter": "none"})
    if shape is not None:
        path = written(shape, mix, layers, config.state_dir)
        config = config.model_copy(update={"model": str(path), "served_model_name": path.stem})
    file = gguf_file(config.model_source)
    if file is None:
        raise StartupError(f"model {config.model!r} is no GGUF file: give --model FILE.gguf or --shape")
    process = psutil.Process()
    before = process.memory_info().rss
    assembly = prepare(config, out)
    weights = assembly.loaded.read_bytes
    resident = process.memory_info().rss - before
    peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    ways: dict[str, Callable[[int], object]] = {"here": TextForward(assembly)}
    if peer:
        ways["llama.cpp"] = _Theirs(file)
    times = {(name, rows): list[float]() for name in ways for rows in _ROWS}
    with counted(rounds, "rounds") as advance:
        for _ in range(rounds):
            for rows in _ROWS:
                for name, forward in ways.items():
                    start = time.perf_counter()
                    forward(rows)
                    times[name, rows].append(1e3 * (time.perf_counter() - start))
            advance(1)
    middle = {key: percentile(values, 50) for key, values in times.items()}
    rows_of = [_row(rows, middle, experts_of(assembly.target, partial(ways["here"], rows))) for rows in _ROWS]
    summary = {
        "file_bytes": file.stat().st_size,
        "weights_over_file": weights / file.stat().st_size,
        "resident_over_file": resident / file.stat().st_size,
        "peak_over_file": peak / file.stat().st_size,
        "context": _CONTEXT,
    }
    return conclude(
        assembly, out, rows_of, summary, _table(rows_of), *(f"{key}: {value}" for key, value in summary.items())
    )


def _anatomy(loaded: LoadedConfig, prompts: int, out: Path | None) -> bool:
    """Measure where the time of steps goes, with the prompts of `check lossless`."""
    assembly = prepare(loaded.config, out)
    (chosen,) = read_sets(assembly, [BUILT_IN], prompts, _ANSWER)
    rows, named = anatomy(assembly, chosen.prompts, Measure(0.0, _ANSWER, 1, seed=5))
    return conclude(
        assembly, out, rows, {f"named_{kind}": share for kind, share in named.items()}, table_of_parts(rows)
    )


def experts_of(target: Target, run_forward: Callable[[], object]) -> float | None:
    """Count the distinct experts of a forward, as the mean over layers that have some. Returns None if none has."""
    decoder, found = target._layers, list[int]()
    if not isinstance(decoder, FusedDecoder):
        return None

    def choose(*args: Any) -> tuple[Tensor, Tensor]:
        chosen, weights = decoder._ops.choose_experts(*args)
        found.append(chosen.unique().numel())
        return chosen, weights

    ops = Ops(**{**vars(decoder._ops), "choose_experts": choose})
    parts = ((layer, layer.feed_forward) for layer in decoder._layers)
    layers = [
        replace(layer, feed_forward=replace(part, ops=ops)) if isinstance(part, SparseFeedForward) else layer
        for layer, part in parts
    ]
    kept, storage = decoder._planned, target.pool.layers
    decoder._planned = storage, REFERENCE.plan_layers(layers, storage, decoder._tapped)
    run_forward()
    decoder._planned = kept
    return fmean(found) if found else None


def _row(rows: int, middle: dict[tuple[str, int], float], experts: float | None) -> StepRow:
    ours, theirs = middle["here", rows], middle.get(("llama.cpp", rows))
    return StepRow(rows, ours, theirs, ours / middle["here", 1], None if theirs is None else theirs / ours, experts)


def _table(rows: Sequence[StepRow]) -> Table:
    table = Table("rows", "ms", "llama.cpp, ms", "over one row", "over llama.cpp", "experts")
    for row in rows:
        theirs = (
            ("", "")
            if row.llama_cpp_milliseconds is None
            else (f"{row.llama_cpp_milliseconds:.2f}", f"{row.over_llama_cpp:.2f}")
        )
        experts = "" if row.experts is None else f"{row.experts:.2f}"
        table.add_row(
            str(row.rows), f"{row.milliseconds:.2f}", theirs[0], f"{row.over_one_row:.2f}", theirs[1], experts
        )
    return table


def written(shape: str, mix: Mix, layers: int | None, folder: Path) -> Path:
    """Write a file of random weights, unless it is there. Raises StartupError for an unknown shape."""
    if shape not in SHAPES:
        raise StartupError(f"there is no shape {shape!r}; those there are: {', '.join(SHAPES)}")
    named = f"{shape}-{mix}.gguf" if layers is None else f"{shape}-{layers}-{mix}.gguf"
    vocabulary, path = gguf_file(EMBEDDED_NAME), folder / "shapes" / named
    assert vocabulary is not None, "the embedded model is a GGUF file"
    if not path.exists():
        with replacing(path) as unfinished:
            write_shape(unfinished, SHAPES[shape], mix, vocabulary, layers)
    return path


class TextForward:
    """Forwards of the target after one text."""

    def __init__(self, assembly: Assembly) -> None:
        self._trial = Trial(assembly.target, sequences=1, max_length=_CONTEXT + max(_ROWS) + 1)
        self._trial.prefill(0, self._trial.random_tokens(_CONTEXT), chunk=_CONTEXT)

    def __call__(self, rows: int) -> object:
        tokens = self._trial.random_tokens(rows)
        placed = self._trial.place([ExtendRows(0, _CONTEXT, tokens, completes=True)])
        try:
            return self._trial.target.forward(replace(placed, logit_rows=torch.arange(rows)), self._trial.table).logits
        finally:
            self._trial.free(placed)


class _Theirs:
    """Forwards of llama.cpp after one text."""

    def __init__(self, file: Path) -> None:
        if importlib.util.find_spec("llama_cpp") is None:
            raise StartupError("--peer needs a package that is not here: pip install llama-cpp-python")
        import llama_cpp

        threads = threads_in_use()
        options = {"n_threads": threads, "n_threads_batch": threads, "n_gpu_layers": 0, "verbose": False}
        self._library, self._llama = llama_cpp, llama_cpp.Llama(str(file), n_ctx=1024, **options)
        self._batch = self._library.llama_batch_init(_CONTEXT, 0, 1)
        self._decode(0, _CONTEXT, all_logits=False)

    def __call__(self, rows: int) -> None:
        self._decode(_CONTEXT, rows, all_logits=True)
        memory = self._library.llama_get_memory(self._llama.ctx)
        self._library.llama_memory_seq_rm(memory, 0, _CONTEXT, -1)

    def _decode(self, first: int, count: int, *, all_logits: bool) -> None:
        batch = self._batch
        batch.n_tokens = count
        for i in range(count):
            batch.token[i], batch.pos[i] = 100 + i, first + i
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
            batch.logits[i] = all_logits or i == count - 1
        if self._library.llama_decode(self._llama.ctx, batch):
            raise RuntimeError("llama.cpp could not decode")
        self._library.llama_synchronize(self._llama.ctx)
