"""Measurements at start-up, with the same forwards and drafts as in serving: whether a row's result depends on the
other rows of its forward, and the seconds of steps.

Measured costs are kept on disk, one file per `CostKey`; without a file for the current key they are measured again.
"""

import logging
import os
import platform
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from drafters.protocol import DraftContext, Drafter, HostMetadata, Noise, Read
from drafters.tree import MAX_DEPTH, MAX_NODES, ROOT, DraftTree
from kernels.cpu import library
from kernels.cpu.library import threads_in_use
from kernels.rows import ExtendRows, ForwardRows
from service.engine.captured import ROWS as CAPTURED_ROWS
from service.engine.costs import CostKey, Costs, CostTable, DraftCosts, FloatArray, along, cost_file, rising
from service.engine.engine import EngineLimits
from service.engine.kv_pool import PASSED_AT_ONCE
from service.engine.rows import RowLayout
from service.engine.target import Target

logger = logging.getLogger(__name__)

Numerics = Literal["exact", "tolerant"]

Progress = Callable[[int, int], None]
"""Called with the number of measured points and the number of all points."""

SEQUENCES = (1, 8, 32)
CONTEXTS = (128, 1024)
ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 128, 192)

_REPEATS = 3
_ENOUGH_SECONDS = 0.25
"""Total seconds after which a point is not timed again, as large models would take minutes."""
_CLEARLY = 1.25  # ratio of seconds that varying clock speeds do not explain
_COMPUTED = 4  # first positions of measured sequences that have keys and values
_LEVEL = 8  # number of nodes on a level of a measured tree
_DRAFT_TOKENS = 64  # length of the text for which drafting is measured
_CPU_INFO = Path("/proc/cpuinfo")
_FORMAT = 5
_CHECKED_CONTEXT = 150
_CHECKED_STEPS = 12
_BRANCHES = 12
_SHALLOW = 4  # branches start below the first nodes only, so that no tree gets too deep


class Trial:
    """Runs forwards outside of serving, for a few sequences in shuffled slots of the target's pool."""

    def __init__(self, target: Target, *, sequences: int, max_length: int) -> None:
        self.target = target
        self.generator = torch.Generator().manual_seed(0)
        self.table = target.pool.table(sequences, max_length)
        self._slots, self._passed = target.pool.allocator(), [0] * sequences
        self._slots.shuffle(self.generator)
        self._layout = RowLayout(self._slots, self.table)

    def random_tokens(self, count: int) -> list[int]:
        """Generate random tokens, the same ones in each trial."""
        tokens: list[int] = torch.randint(self.target.vocab_size, (count,), generator=self.generator).tolist()
        return tokens

    def place(self, extends: list[ExtendRows], tree: DraftTree | None = None) -> ForwardRows:
        """Lay out the rows of a forward in free slots; without `tree`, all trees are empty. Layers with a window forget
        what a sequence's rows from here on do not see."""
        for extend in extends if self._slots.windows is not None else ():
            assert self._slots.windows is not None
            row, passed = extend.table_row, self._passed[extend.table_row]
            self._passed[row] = max(passed, extend.start - self._slots.windows.size + 1)
            self._slots.windows.take(self.table.slots[row, passed : self._passed[row]])
        return self._layout(extends, tree or DraftTree.empty(len(extends), self.target.device))

    def free(self, rows: ForwardRows) -> None:
        """Free the slots of these rows."""
        self._slots.free(rows.slots)

    def pretend(self, extends: list[ExtendRows]) -> list[ExtendRows]:
        """Let recurrent layers take the texts before these rows as read, for timing; return the rows."""
        for extend in extends:
            self.table.begin(extend.table_row, position=extend.start)
        return extends

    def run(self, extends: list[ExtendRows], tree: DraftTree | None = None) -> tuple[ForwardRows, Tensor]:
        """Lay out rows and run a forward, after which `extends` are read. # -> rows, logits [logits, vocab]"""
        rows = self.place(extends, tree)
        logits = self.target.forward(rows, self.table).logits
        self.table.advance(extends)
        return rows, logits

    def prefill(self, row: int, tokens: list[int], *, chunk: int) -> None:
        """Compute the keys and values of a prompt in chunks; `row`: row of the slot table."""
        for first in range(0, len(tokens), chunk):
            self.run([ExtendRows(row, first, tokens[first : first + chunk], completes=False)])

    def decode(self, row: int, token: int, position: int) -> Tensor:
        """Run one token of a sequence, and return a copy of the logits after it. # -> [vocab]"""
        return self.run([ExtendRows(row, position, [token], completes=True)])[1][0].clone()

    def verify(self, roots: list[ExtendRows], tree: DraftTree) -> Tensor:
        """Compute the logits after each root and each node of its tree, and free their slots.
        # -> [batch, nodes + 1, vocab]"""
        rows, logits = self.run(roots, tree)
        self.free(rows)
        placed = logits.new_zeros(tree.batch, tree.width + 1, logits.shape[1])
        placed[rows.logit_sequence, rows.attention.node[rows.logit_rows] + 1] = logits
        return placed


def check(target: Target, *, context: int | None = None, steps: int = _CHECKED_STEPS) -> Numerics:
    """Check with random tokens whether the result of a row is independent of the other rows of its forward ("exact").
    If it is not ("tolerant"), the text may differ between runs in rare near-ties, as it does in other servers.

    Two ways to compute the same logits must agree bit for bit: plain decoding of one sequence, and trees of two
    sequences in one forward, whose prompts were computed in other chunks.
    `context`: length of the prompt; the default is reduced if three such prompts do not fit into the pool.
    """
    context = context or min(_CHECKED_CONTEXT, target.pool.longest(3, steps + 2 * (steps + _BRANCHES)))
    trial = Trial(target, sequences=3, max_length=context + 2 * steps + 2)
    tokens = trial.random_tokens(context + steps)
    trial.prefill(0, tokens[:context], chunk=context)
    alone = [trial.decode(0, tokens[context + step], context + step) for step in range(steps)]
    for row, chunk in ((1, 7), (2, 33)):
        trial.prefill(row, tokens[:context], chunk=chunk)
    together = _verified_paths(trial, tokens, context, steps)
    agree = all(torch.equal(a, b) for pair in together for a, b in zip(alone, pair, strict=True))
    return "exact" if agree else "tolerant"


def _verified_paths(trial: Trial, tokens: Sequence[int], context: int, steps: int) -> list[list[Tensor]]:
    """Verify the tokens after the prompt as one path among random branches, for two sequences in one forward. Returns
    the logits along this path, by sequence. # -> each [vocab]"""
    path = list(tokens[context + 1 : context + steps])
    trees = [_tree_around(path, trial), _tree_around(path, trial)]
    tree = DraftTree.concatenated([t for t, _ in trees])
    roots = [ExtendRows(row, context, [tokens[context]], completes=True) for row in (1, 2)]
    logits = trial.verify(roots, tree)
    return [[part[0], *part[1 + places]] for part, (_, places) in zip(logits, trees, strict=True)]


def _tree_around(path: Sequence[int], trial: Trial) -> tuple[DraftTree, Tensor]:
    """Build a tree of `path` and random branches, in random order but with parents first. Returns it, and the nodes of
    the path. # -> tree, [path] int64"""
    generator, nodes = trial.generator, len(path) + _BRANCHES
    places = torch.randperm(nodes, generator=generator)[: len(path)].sort().values
    tokens = torch.tensor(trial.random_tokens(nodes))
    tokens[places] = torch.tensor(path)
    earlier = torch.arange(nodes).clamp(max=_SHALLOW) + 1
    parents = (torch.rand(nodes, generator=generator) * earlier).long() + ROOT
    parents[places] = torch.cat([torch.tensor([ROOT]), places[:-1]])
    device = trial.target.device
    return DraftTree.of(tokens[None], parents[None]).to(device), places.to(device)


def costs_at_start(
    target: Target,
    make_drafter: Callable[[], Drafter],
    limits: EngineLimits,
    measured_for: Mapping[str, str],
    *,
    folder: Path,
    progress: Progress = lambda done, total: None,
) -> Costs:
    """Load the costs of verifying and drafting from `folder`, or measure and save them if there are none for the same
    key, or if steps have become clearly faster.

    `make_drafter`: builds a drafter for the measurement only; `measured_for`: entries of the key that name the model's
    weights and their type, the drafter and the server's version.
    """
    processes = target.peers.shard.size
    key: CostKey = {
        "machine": f"{processor_name()} {library.variant()} x {os.cpu_count()}",
        "device": torch.cuda.get_device_name(target.device) if target.device.type == "cuda" else "cpu",
        **measured_for,
        "threads": threads_in_use() if processes == 1 else f"{threads_in_use()} in each of {processes} processes",
        "sizes": f"{SEQUENCES} {CONTEXTS} {row_points(target)} {limits.max_sequences} {limits.max_model_len} "
        f"{limits.max_budget} {target.pool.num_slots}",
        "torch": torch.__version__,
        "format": _FORMAT,
    }
    costs = Costs.read(folder, key)
    if costs is not None and _is_faster_now(target, costs):
        logger.warning("steps are faster than the measured costs in %s; measuring again", cost_file(folder, key))
        costs = None
    elif costs is None and any(folder.glob("costs-*.json")):
        logger.info("costs in %s are for another version, model or machine, or other settings; measuring again", folder)
    if costs is None:
        verify = measure_costs(target, limits, progress=progress)
        drafts = measure_drafts(make_drafter(), target, batches=sequence_points(limits.max_sequences))
        costs = Costs(verify, drafts)
        costs.write(folder, key)
    return replace(costs, gains_file=cost_file(folder, key, "gains"))


def sequence_points(max_sequences: int) -> list[int]:
    """List the numbers of sequences to measure."""
    return sorted({min(count, max_sequences) for count in SEQUENCES})


def row_points(target: Target) -> tuple[int, ...]:
    """List the numbers of rows to measure; if forwards are captured, these are the captured numbers of rows, and two
    beyond, at which kernels are launched one by one."""
    most = CAPTURED_ROWS[-1]
    return ROWS if target.capture is None else (*CAPTURED_ROWS, most + most // 4, 4 * most)


def measure_costs(target: Target, limits: EngineLimits, *, progress: Progress = lambda done, total: None) -> CostTable:
    """Measure the seconds of one verify forward by numbers of sequences, context lengths and numbers of rows."""
    sequences, rows = sequence_points(limits.max_sequences), row_points(target)
    room = target.pool.longest(sequences[-1], rows[-1] + MAX_NODES) - MAX_DEPTH - 1
    longest = max(1, min(limits.max_model_len - MAX_DEPTH - 1, room))
    contexts = sorted({min(context, longest) for context in CONTEXTS})
    run = partial(run_point, dummy_texts(target, sequences=sequences[-1], length=contexts[-1]))
    return measure_grid(
        run, sequences, contexts, rows, most_rows=lambda n: n * (1 + limits.max_budget), progress=progress
    )


def _is_faster_now(target: Target, costs: Costs) -> bool:
    """Whether a step is clearly faster now than the stored costs say, so that these were measured under other load."""
    sequences, context = int(costs.verify.sequences[-1]), int(costs.verify.contexts[0])
    trial = dummy_texts(target, sequences=sequences, length=context)
    now = _best_seconds(partial(run_point, trial, Point(sequences, context, sequences)))
    then = costs.verify.verify_seconds(np.array([float(sequences)]), context, sequences)
    return bool(then[0] > _CLEARLY * now)


class Point(NamedTuple):
    """Size of a forward to be timed."""

    sequences: int
    context: int
    rows: int


def dummy_texts(target: Target, *, sequences: int, length: int) -> Trial:
    """Build a trial for timing whose sequences have computed keys at their first positions only, and slots without keys
    at all others. With no keys at all, rows would be as alike as first tokens are, and wake the same experts."""
    trial, computed = Trial(target, sequences=sequences, max_length=length + MAX_DEPTH + 1), min(_COMPUTED, length)
    trial.run([ExtendRows(row, 0, trial.random_tokens(computed), completes=False) for row in range(sequences)])
    for row in range(sequences):
        for first in range(computed, length, PASSED_AT_ONCE):
            count = min(PASSED_AT_ONCE, length - first)
            trial.place(trial.pretend([ExtendRows(row, first, [0] * count, completes=False)]))
    return trial


def place_point(trial: Trial, point: Point) -> ForwardRows:
    """Lay out the rows of a point after the dummy texts of the trial. Their tokens differ, because rows of one token
    would all wake the same experts."""
    roots, tree = trial.random_tokens(point.sequences), trees_for(point, trial.target.device)
    nodes = torch.tensor(trial.random_tokens(tree.tokens.numel()), dtype=torch.int64).view(tree.tokens.shape)
    extends = [ExtendRows(row, point.context, [token], completes=True) for row, token in enumerate(roots)]
    return trial.place(trial.pretend(extends), tree._replace(tokens=nodes.to(trial.target.device)))


def run_point(trial: Trial, point: Point) -> None:
    """Run the forward of a point, and wait until its logits can be read."""
    rows = place_point(trial, point)
    logits = trial.target.forward(rows, trial.table).logits
    logits[0, 0].item()  # planned transfer: waits for the device, before serving
    trial.free(rows)


def trees_for(point: Point, device: torch.device) -> DraftTree:
    """Build one tree per sequence, which together with the roots have the point's number of rows. Each level has eight
    nodes, all below the first node of the level above."""
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
    """Time `run` at every point that can occur: at least one row per sequence, at most `most_rows(sequences)`.

    Contexts after the first are timed only at the fewest and the most rows, as their additional time is linear in rows.
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
    """Compute the seconds at every row point: the first context's plus the interpolated difference to this context.
    Numbers of rows that cannot occur get the seconds of the nearest one that can. # -> [row points]"""
    timed, seconds = (np.array(list(values), dtype=np.float64) for values in (first.keys(), first.values()))
    more = np.interp(timed, list(here), [here[number] - first[number] for number in here])
    curve = np.maximum(rising(seconds + more), min(here.values()))  # never below the timed ones, whatever the noise
    return along(timed, curve, np.maximum(np.array(rows, dtype=np.float64), timed[0]))


def _best_seconds(run: Callable[[], object], before: Callable[[], None] = lambda: None) -> float:
    """Time a few runs, each after `before`, and return the seconds of the fastest, as other work only adds time."""
    seconds: list[float] = []
    while not seconds or (len(seconds) < _REPEATS and sum(seconds) < _ENOUGH_SECONDS):
        before()
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def measure_drafts(drafter: Drafter, target: Target, *, batches: Sequence[int]) -> DraftCosts:
    """Measure the seconds in which the drafter drafts one tree per sequence of a batch, directly after a step, which
    takes its weights out of the caches. All sequences have the same random text."""
    device = target.device
    text = torch.randint(target.vocab_size, (_DRAFT_TOKENS,), generator=torch.Generator().manual_seed(0))
    drafter.start([DraftContext(row, text.tolist()) for row in range(max(batches))])
    if drafter.reads_prompts:
        width = target.model.config.get_text_config().hidden_size * len(drafter.tap_layers)
        features = torch.zeros(_DRAFT_TOKENS - 1, width, dtype=target.model.dtype, device=device)
        tokens, slots = text[1:].to(device), torch.arange(1, _DRAFT_TOKENS, device=device)
        for row in range(max(batches)):
            drafter.read(Read(row=row, start=0, tokens=tokens, slots=slots, features=features))
    step = partial(run_point, dummy_texts(target, sequences=1, length=1), Point(1, 1, 1))
    seconds = [_draft_seconds(drafter, batch, device, step) for batch in batches]
    return DraftCosts(batches=np.array(batches, dtype=np.float64), seconds=rising(np.array(seconds)))


def _draft_seconds(drafter: Drafter, batch: int, device: torch.device, step: Callable[[], None]) -> float:
    rows = torch.arange(batch, device=device)
    cold, roots = torch.zeros(batch, device=device), torch.full_like(rows, _DRAFT_TOKENS - 1)
    host = HostMetadata(tuple(range(batch)), (_DRAFT_TOKENS - 1,) * batch)
    noise = Noise(seeds=rows, temperatures=cold, positions=roots, warm=False, host=host)

    return _best_seconds(lambda: drafter.grow(rows, noise).survival.sum().item(), step)  # planned transfer


def processor_name() -> str:
    """Model name of the processor."""
    lines = _CPU_INFO.read_text().splitlines() if _CPU_INFO.is_file() else []
    models = (line.partition(":")[2].strip() for line in lines if "model name" in line)
    return next(models, platform.processor() or platform.machine())
