"""Measures at start-up what steps will cost, with the forwards and drafts that serving makes, and keeps it on disk.

One file per machine, model, threads and version. A file that is not exactly what was asked for is refused and measured
again; a broken one is never half believed, because files are written beside their place and then renamed.
"""

import hashlib
import json
import logging
import os
import platform
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from drafters.protocol import DraftContext, Drafter, HostMetadata, Noise, Read
from drafters.tree import MAX_DEPTH, MAX_NODES, ROOT, DraftTree
from kernels.cpu import library
from service.engine.captured import ROWS as CAPTURED_ROWS
from service.engine.costs.model import Costs, CostTable, DraftCosts, FloatArray, along, rising
from service.engine.numerics import Trial
from service.engine.rows import ExtendRows, ForwardRows
from service.engine.target import Target

logger = logging.getLogger(__name__)

Progress = Callable[[int, int], None]
"""Hears how many points are done, of how many."""
CostKey = Mapping[str, str | int]
"""Everything that measured seconds depend on."""

SEQUENCES = (1, 8, 32)
CONTEXTS = (128, 1024)
ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 128, 192)

_REPEATS = 3
_ENOUGH_SECONDS = 0.25
"""A point that has been timed for so long is not timed again: large models would take minutes."""
_CLEARLY = 1.25  # times as long as a step takes now: more than the machine's clocks explain
_LEVEL = 8  # nodes on a level of a measured tree
_DRAFT_TOKENS = 64  # of the text that is drafted for
_CPU_INFO = Path("/proc/cpuinfo")
_FORMAT = 2


def costs_at_start(
    target: Target,
    make_drafter: Callable[[], Drafter],
    *,
    folder: Path,
    model: str,
    drafter: str,
    version: str,
    max_sequences: int,
    max_model_len: int,
    max_budget: int,
    progress: Progress = lambda done, total: None,
) -> Costs:
    """What verifying and drafting cost on this machine, from `folder` if the very same was measured before.

    `make_drafter` builds a drafter to be thrown away; `model`, `drafter` and `version` tell apart what must not share
    measurements.
    """

    key: CostKey = {
        "machine": this_machine(),
        "device": torch.cuda.get_device_name(target.device) if target.device.type == "cuda" else "cpu",
        "model": model,  # fingerprint of the weights, and their type in memory
        "drafter": drafter,
        "threads": torch.get_num_threads(),
        "sizes": f"{SEQUENCES} {CONTEXTS} {row_points(target)} {max_sequences} {max_model_len} {max_budget} "
        f"{target.pool.num_slots}",
        "version": f"{version} {torch.__version__}",
        "format": _FORMAT,
    }
    costs = read(folder, key)
    if costs is not None and _is_faster_now(target, costs):
        logger.warning("steps are faster than the costs in %s say: measuring again", cost_file(folder, key))
        costs = None
    if costs is None:
        sizes = {"max_sequences": max_sequences, "max_model_len": max_model_len, "max_budget": max_budget}
        verify = measure_costs(target, **sizes, progress=progress)
        costs = Costs(verify, measure_drafts(make_drafter(), target, batches=sequence_points(max_sequences)))
        write(folder, key, costs)
    return replace(costs, gains_file=cost_file(folder, key, "gains"))


def sequence_points(max_sequences: int) -> list[int]:
    """Numbers of sequences to measure."""
    return sorted({min(count, max_sequences) for count in SEQUENCES})


def row_points(target: Target) -> tuple[int, ...]:
    """Numbers of rows to measure: where forwards are captured, the shapes that run."""
    return ROWS if target.capture is None else CAPTURED_ROWS


def measure_costs(
    target: Target,
    *,
    max_sequences: int,
    max_model_len: int,
    max_budget: int,
    progress: Progress = lambda done, total: None,
) -> CostTable:
    """Seconds of a verify by sequences, context length and rows, on this machine with this model."""
    sequences = sequence_points(max_sequences)
    rows = row_points(target)
    room = (target.pool.num_slots - 1 - rows[-1] - MAX_NODES) // sequences[-1] - MAX_DEPTH - 1
    longest = max(1, min(max_model_len - MAX_DEPTH - 1, room))
    contexts = sorted({min(context, longest) for context in CONTEXTS})
    run = partial(run_point, made_up_texts(target, lines=sequences[-1], length=contexts[-1]))
    return measure_grid(run, sequences, contexts, rows, most_rows=lambda n: n * (1 + max_budget), progress=progress)


def _is_faster_now(target: Target, costs: Costs) -> bool:
    """Whether a step takes clearly less than it did then: what was measured beside other work would hold for ever."""
    sequences, context = int(costs.verify.sequences[-1]), int(costs.verify.contexts[0])
    trial = made_up_texts(target, lines=sequences, length=context)
    now = _best_seconds(partial(run_point, trial, Point(sequences, context, sequences)))
    then = costs.verify.verify_seconds(np.array([float(sequences)]), context, sequences)
    return bool(then[0] > _CLEARLY * now)


class Point(NamedTuple):
    """A forward to be timed."""

    sequences: int
    context: int
    rows: int


def made_up_texts(target: Target, *, lines: int, length: int) -> Trial:
    """Lines of text of the same length that were never read: what a key says changes no time."""
    trial = Trial(target, lines=lines, max_length=length + MAX_DEPTH + 1)
    for line in range(lines):
        trial.place([ExtendRows(line, 0, [0] * length, completes=False)])
    return trial


def place_point(trial: Trial, point: Point) -> ForwardRows:
    """The rows of a forward behind made-up texts."""
    extends = [ExtendRows(line, point.context, [0], completes=True) for line in range(point.sequences)]
    return trial.place(extends, trees_for(point, trial.target.device))


def run_point(trial: Trial, point: Point) -> None:
    """One forward, until its logits can be read."""
    rows = place_point(trial, point)
    logits = trial.target.forward(rows, trial.table).logits
    logits[0, 0].item()  # planned transfer: waits for the device, before serving
    trial.free(rows)


def trees_for(point: Point, device: torch.device) -> DraftTree:
    """Trees for every sequence that make up the point's rows together, eight nodes to a level, all of a level below
    the first of the one above."""
    nodes = point.rows - point.sequences
    each, over = divmod(nodes, point.sequences)
    index = torch.arange(each + (over > 0))
    parents = torch.where(index < _LEVEL, ROOT, (index // _LEVEL - 1) * _LEVEL)
    counts = torch.full((point.sequences,), each)
    counts[:over] += 1
    tree = DraftTree.of(torch.zeros_like(index).repeat(point.sequences, 1), parents.repeat(point.sequences, 1))
    valid = index < counts[:, None]
    return tree._replace(
        parents=torch.where(valid, tree.parents, ROOT), depths=tree.depths * valid, num_nodes=counts
    ).to(device)


def measure_grid(
    run: Callable[[Point], None],
    sequences: Sequence[int],
    contexts: Sequence[int],
    rows: Sequence[int],
    *,
    most_rows: Callable[[int], int],
    progress: Progress = lambda done, total: None,
) -> CostTable:
    """Time `run` where so many sequences can have so many rows: at least one each, at most `most_rows(sequences)`.

    The longest context is timed at the fewest and the most rows only, for what a context adds is linear in rows.
    """
    timed = {count: [r for r in rows if count <= r <= most_rows(count)] or [count] for count in sequences}
    points = [
        Point(count, context, number)
        for count in sequences
        for context in contexts
        for number in (timed[count] if context == contexts[0] else sorted({timed[count][0], timed[count][-1]}))
    ]
    seconds: defaultdict[tuple[int, int], dict[int, float]] = defaultdict(dict)  # [sequences, context][rows]
    for done, point in enumerate(points):
        progress(done, len(points))
        seconds[point.sequences, point.context][point.rows] = _best_seconds(partial(run, point))
    progress(len(points), len(points))
    grid = np.array([[_curve(seconds[n, contexts[0]], seconds[n, c], rows) for c in contexts] for n in sequences])
    for dimension in range(3):
        grid = rising(grid, dimension)
    axis = partial(np.asarray, dtype=np.float64)
    return CostTable(sequences=axis(sequences), contexts=axis(contexts), rows=axis(rows), seconds=grid)


def _curve(first: Mapping[int, float], here: Mapping[int, float], rows: Sequence[int]) -> FloatArray:
    """Seconds at every row point: as measured at the first context plus what this one adds at some points; rows that
    so many sequences cannot have count as the nearest that they can. # -> [row points]"""
    timed, seconds = (np.array(list(values), dtype=np.float64) for values in (first.keys(), first.values()))
    more = np.interp(timed, list(here), [here[number] - first[number] for number in here])
    curve = np.maximum(rising(seconds + more), min(here.values()))  # or noise would end, or be extended, below zero
    return along(timed, curve, np.maximum(np.array(rows, dtype=np.float64), timed[0]))


def _best_seconds(run: Callable[[], None]) -> float:
    """The fastest of a few runs: whatever else the machine does, and a first call's allocations, can only add."""
    seconds: list[float] = []
    while not seconds or (len(seconds) < _REPEATS and sum(seconds) < _ENOUGH_SECONDS):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def measure_drafts(drafter: Drafter, target: Target, *, batches: Sequence[int]) -> DraftCosts:
    """Time trees of a drafter that reads the same made-up text for every sequence."""
    device = target.device
    text = torch.randint(target.vocab_size, (_DRAFT_TOKENS,), generator=torch.Generator().manual_seed(0))
    drafter.start([DraftContext(row, text.tolist()) for row in range(max(batches))])
    if drafter.reads_prompts:
        width = target.model.config.get_text_config().hidden_size * len(drafter.tap_layers)
        features = torch.zeros(_DRAFT_TOKENS - 1, width, dtype=target.model.dtype, device=device)
        tokens, slots = text[1:].to(device), torch.arange(1, _DRAFT_TOKENS, device=device)
        for row in range(max(batches)):
            drafter.read(Read(row=row, start=0, tokens=tokens, slots=slots, features=features))
    seconds = [_draft_seconds(drafter, batch, device) for batch in batches]
    return DraftCosts(batches=np.array(batches, dtype=np.float64), seconds=rising(np.array(seconds)))


def _draft_seconds(drafter: Drafter, batch: int, device: torch.device) -> float:
    rows = torch.arange(batch, device=device)
    cold, roots = torch.zeros(batch, device=device), torch.full_like(rows, _DRAFT_TOKENS - 1)
    host = HostMetadata(tuple(range(batch)), (_DRAFT_TOKENS - 1,) * batch)
    noise = Noise(seeds=rows, temperatures=cold, positions=roots, warm=False, host=host)

    def grow() -> None:
        drafter.grow(rows, noise).survival.sum().item()  # planned transfer: waits for the device, before serving

    return _best_seconds(grow)


def this_machine() -> str:
    """Processor, the instructions its products may use, and number of cores."""
    return f"{processor_name()} {library.variant()} x {os.cpu_count()}"


def processor_name() -> str:
    """What the processor calls itself."""
    lines = _CPU_INFO.read_text().splitlines() if _CPU_INFO.is_file() else []
    models = (line.partition(":")[2].strip() for line in lines if "model name" in line)
    return next(models, platform.processor() or platform.machine())


def cost_file(folder: Path, key: CostKey, what: str = "costs") -> Path:
    """Where costs of this key are kept, or something else that was measured under the same conditions."""
    text = json.dumps(key, sort_keys=True)
    return folder / f"{what}-{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"


def read(folder: Path, key: CostKey) -> Costs | None:
    """The costs of this key, None (with one line in the log) if what is there is not a whole file of this very key."""
    file = cost_file(folder, key)
    try:
        content = json.loads(file.read_text())
        if content["key"] != key:
            raise ValueError("they belong to something else")
        verify = CostTable(**_axes(content["verify"], "sequences", "contexts", "rows"))
        return Costs(verify, DraftCosts(**_axes(content["drafts"], "batches")))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        logger.warning("costs in %s cannot be read (%s): measuring again", file, error)
        return None


def write(folder: Path, key: CostKey, costs: Costs) -> None:
    """Put the costs there, all or nothing. A folder that cannot be written costs the next start a few seconds."""
    tables = {"verify": asdict(costs.verify), "drafts": asdict(costs.drafts)}
    # planned transfer: numpy, on the host
    lists = {name: {axis: values.tolist() for axis, values in table.items()} for name, table in tables.items()}
    write_whole(cost_file(folder, key), {"key": key, **lists})


def write_whole(file: Path, content: object) -> None:
    """Write JSON, all or nothing; where that is not possible, say so in the log and go on."""
    beside = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with beside.open("w") as handle:
            json.dump(content, handle)
            handle.flush()
            os.fsync(handle.fileno())
        beside.replace(file)
    except OSError as error:
        logger.warning("what was measured cannot be kept in %s: %s", file, error)


def _axes(content: dict[str, Any], *names: str) -> dict[str, FloatArray]:
    """A table's axes and its seconds, which must fit them. Raises ValueError, KeyError, TypeError."""
    table = {name: np.asarray(content[name], dtype=np.float64) for name in (*names, "seconds")}
    if table["seconds"].shape != tuple(table[name].size for name in names):
        raise ValueError(f"a table of {table['seconds'].shape} numbers does not fit its axes")
    if not all(values.size and np.isfinite(values).all() for values in table.values()):
        raise ValueError("numbers are missing")
    return table
