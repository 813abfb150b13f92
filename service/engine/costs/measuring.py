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
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from drafters.protocol import DraftContext, Drafter, HostMetadata, Noise, Read
from drafters.tree import MAX_DEPTH, MAX_NODES, ROOT, DraftTree
from service.engine.costs.model import Costs, CostTable, DraftCosts, FloatArray, along, rising, table_of
from service.engine.linear import chosen_isa
from service.engine.numerics import Trial
from service.engine.rows import ExtendRows, ForwardRows
from service.engine.target import Target

logger = logging.getLogger(__name__)

Progress = Callable[[int, int], None]
"""Hears how many points are done, of how many."""

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

    def measured() -> Costs:
        sizes = {"max_sequences": max_sequences, "max_model_len": max_model_len, "max_budget": max_budget}
        verify = measure_costs(target, **sizes, progress=progress)
        return Costs(verify, measure_drafts(make_drafter(), target, batches=sequence_points(max_sequences)))

    key = CostKey(
        machine=this_machine(),
        device=torch.cuda.get_device_name(target.device) if target.device.type == "cuda" else "cpu",
        model=model,
        drafter=drafter,
        threads=torch.get_num_threads(),
        rows=f"{target.fewest_rows} {target.row_multiple}",
        sizes=f"{SEQUENCES} {CONTEXTS} {ROWS} {max_sequences} {max_model_len} {max_budget} {target.pool.num_slots}",
        version=f"{version} {torch.__version__}",
    )
    return cached_or_measured(folder, key, measured, partial(_is_faster_now, target))


def sequence_points(max_sequences: int) -> list[int]:
    """Numbers of sequences to measure."""
    return sorted({min(count, max_sequences) for count in SEQUENCES})


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
    room = (target.pool.num_slots - 1 - ROWS[-1] - MAX_NODES) // sequences[-1] - MAX_DEPTH - 1
    longest = max(1, min(max_model_len - MAX_DEPTH - 1, room))
    contexts = sorted({min(context, longest) for context in CONTEXTS})
    stage = Stage(target, lines=sequences[-1], length=contexts[-1])
    return measure_grid(
        stage.run, sequences, contexts, ROWS, most_rows=lambda count: count * (1 + max_budget), progress=progress
    )


def _is_faster_now(target: Target, costs: Costs) -> bool:
    """Whether a step takes clearly less than it did then: what was measured beside other work would hold for ever."""
    sequences, context = int(costs.verify.sequences[-1]), int(costs.verify.contexts[0])
    stage = Stage(target, lines=sequences, length=context)
    now = measure_grid(stage.run, [sequences], [context], [sequences], most_rows=lambda count: count)
    then = costs.verify.verify_seconds(np.array([float(sequences)]), context, sequences)
    return bool(then[0] > _CLEARLY * now.seconds[0, 0, 0])


@dataclass(frozen=True, slots=True)
class Point:
    """A forward to be timed."""

    sequences: int
    context: int
    rows: int


class Stage:
    """Lines of text of the same length that were never read: what a key says changes no time."""

    def __init__(self, target: Target, *, lines: int, length: int) -> None:
        self._trial = Trial(target, lines=lines, max_length=length + MAX_DEPTH + 1)
        self.table = self._trial.table
        for line in range(lines):
            self._trial.place([ExtendRows(line, 0, [0] * length, completes=False)])

    def run(self, point: Point) -> None:
        """One forward, until its logits can be read."""
        rows = self.place(point)
        logits = self._trial.target.forward(rows, self.table).logits
        logits[0, 0].item()  # planned transfer: waits for the device, before serving
        self.free(rows)

    def place(self, point: Point) -> ForwardRows:
        """The rows of a forward."""
        extends = [ExtendRows(line, point.context, [0], completes=True) for line in range(point.sequences)]
        return self._trial.place(extends, trees_for(point, self._trial.target.device))

    def free(self, rows: ForwardRows) -> None:
        self._trial.free(rows)


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
    return replace(
        tree, parents=torch.where(valid, tree.parents, ROOT), depths=tree.depths * valid, num_nodes=counts
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
    lines = [_Line(count, [r for r in rows if count <= r <= most_rows(count)] or [count]) for count in sequences]
    points = [point for line in lines for point in line.points(contexts)]
    seconds: dict[Point, float] = {}
    for done, point in enumerate(points):
        progress(done, len(points))
        seconds[point] = _best_seconds(partial(run, point))
    progress(len(points), len(points))
    grid = np.array([[line.curve(seconds, context, contexts[0], rows) for context in contexts] for line in lines])
    return table_of(sequences, contexts, rows, grid)


@dataclass(frozen=True, slots=True)
class _Line:
    """The row counts timed for one number of sequences."""

    sequences: int
    rows: list[int]

    def points(self, contexts: Sequence[int]) -> list[Point]:
        few = sorted({self.rows[0], self.rows[-1]})
        return [
            Point(self.sequences, context, rows)
            for number, context in enumerate(contexts)
            for rows in (self.rows if number == 0 else few)
        ]

    def curve(self, seconds: dict[Point, float], context: int, first: int, rows: Sequence[int]) -> FloatArray:
        """Seconds at every row point: as measured, or as at the first context plus what this one adds; rows that
        this many sequences cannot have count as the nearest that they can. # -> [row points]"""
        base = np.array([seconds[Point(self.sequences, first, r)] for r in self.rows])
        ends = [self.rows[0], self.rows[-1]]
        more = [seconds[Point(self.sequences, context, r)] - seconds[Point(self.sequences, first, r)] for r in ends]
        curve = rising(base + np.interp(self.rows, ends, more))  # or noise would be extended below zero
        return along(np.array(self.rows, dtype=np.float64), curve, np.maximum(rows, self.rows[0]).astype(np.float64))


def _best_seconds(run: Callable[[], None]) -> float:
    """The fastest of a few runs: whatever else the machine does, and a first call's allocations, can only add."""
    seconds = [_seconds(run)]
    while len(seconds) < _REPEATS and sum(seconds) < _ENOUGH_SECONDS:
        seconds.append(_seconds(run))
    return min(seconds)


def _seconds(run: Callable[[], None]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def measure_drafts(drafter: Drafter, target: Target, *, batches: Sequence[int]) -> DraftCosts:
    """Time trees of a drafter that reads the same made-up text for every sequence."""
    device = target.device
    text = torch.randint(target.vocab_size, (_DRAFT_TOKENS,), generator=torch.Generator().manual_seed(0))
    drafter.start([DraftContext(row, text.tolist()) for row in range(max(batches))])
    if drafter.tap_layers:
        width = target.model.config.get_text_config().hidden_size * len(drafter.tap_layers)
        features = torch.zeros(_DRAFT_TOKENS - 1, width, dtype=target.model.dtype, device=device)
        tokens, slots = text[1:].to(device), torch.arange(1, _DRAFT_TOKENS, device=device)
        for row in range(max(batches)):
            drafter.read(Read(row=row, start=0, tokens=tokens, slots=slots, features=features))
    seconds = [min(_draft_seconds(drafter, batch, device) for _ in range(1 + _REPEATS)) for batch in batches]
    return DraftCosts(batches=np.array(batches, dtype=np.float64), seconds=rising(np.array(seconds)))


def _draft_seconds(drafter: Drafter, batch: int, device: torch.device) -> float:
    rows = torch.arange(batch, device=device)
    cold, roots = torch.zeros(batch, device=device), torch.full_like(rows, _DRAFT_TOKENS - 1)
    host = HostMetadata(tuple(range(batch)), (_DRAFT_TOKENS - 1,) * batch)
    noise = Noise(seeds=rows, temperatures=cold, positions=roots, warm=False, host=host)

    def grow() -> None:
        drafter.grow(rows, noise).survival.sum().item()  # planned transfer: waits for the device, before serving

    return _seconds(grow)


@dataclass(frozen=True, slots=True, kw_only=True)
class CostKey:
    """Everything that measured seconds depend on."""

    machine: str
    device: str
    model: str  # fingerprint of the weights, and their type in memory
    drafter: str
    threads: int
    rows: str  # how rows are padded
    sizes: str  # sequences, lengths and nodes that were measured
    version: str
    format: int = _FORMAT

    @property
    def file_name(self) -> str:
        text = json.dumps(asdict(self), sort_keys=True)
        return f"costs-{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"


def this_machine() -> str:
    """Processor, the instructions its products may use, and number of cores."""
    name = platform.processor() or platform.machine()
    if _CPU_INFO.is_file():
        models = (line.partition(":")[2].strip() for line in _CPU_INFO.read_text().splitlines() if "model name" in line)
        name = next(models, name)
    return f"{name} {chosen_isa()} x {os.cpu_count()}"


def cached_or_measured(
    folder: Path, key: CostKey, measure: Callable[[], Costs], is_out_of_date: Callable[[Costs], bool] = lambda _: False
) -> Costs:
    """The costs of this key from the folder, or else measured now and kept there."""
    file = folder / key.file_name
    costs = read(file, key)
    if costs is not None and is_out_of_date(costs):
        logger.warning("steps are faster than the costs in %s say: measuring again", file)
        costs = None
    if costs is None:
        costs = measure()
        write(file, key, costs)
    return costs


def read(file: Path, key: CostKey) -> Costs | None:
    """What the file holds, None (with one line in the log) if it is not a whole file of this very key."""
    if not file.is_file():
        return None
    try:
        content = json.loads(file.read_text())
        if content["key"] != asdict(key):
            logger.warning("costs in %s belong to something else: measuring again", file)
            return None
        verify = CostTable(**_axes(content["verify"], "sequences", "contexts", "rows"))
        return Costs(verify, DraftCosts(**_axes(content["drafts"], "batches")))
    except (OSError, ValueError, KeyError, TypeError) as error:
        logger.warning("costs in %s cannot be read (%s): measuring again", file, error)
        return None


def write(file: Path, key: CostKey, costs: Costs) -> None:
    """Put the costs there, all or nothing. A folder that cannot be written costs the next start a few seconds."""
    content = {"key": asdict(key), "verify": _lists(costs.verify), "drafts": _lists(costs.drafts)}
    beside = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with beside.open("w") as handle:
            json.dump(content, handle)
            handle.flush()
            os.fsync(handle.fileno())
        beside.replace(file)
    except OSError as error:
        logger.warning("measured costs cannot be kept in %s: %s", file.parent, error)


def _lists(table: CostTable | DraftCosts) -> dict[str, Any]:
    return {name: values.tolist() for name, values in asdict(table).items()}  # planned transfer: numpy, on the host


def _axes(content: dict[str, Any], *names: str) -> dict[str, FloatArray]:
    """A table's axes and its seconds, which must fit them. Raises ValueError, KeyError, TypeError."""
    table = {name: np.asarray(content[name], dtype=np.float64) for name in (*names, "seconds")}
    if table["seconds"].shape != tuple(table[name].size for name in names):
        raise ValueError(f"a table of {table['seconds'].shape} numbers does not fit its axes")
    if not all(values.size and np.isfinite(values).all() for values in table.values()):
        raise ValueError("numbers are missing")
    return table
