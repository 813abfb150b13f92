"""Measures at start-up what steps will cost, with the forwards that serving makes: chains and trees in scattered slots.
Only slots are laid out and not a key is computed, for what a key says changes no time.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

from drafters.protocol import Drafter
from drafters.tree import MAX_DEPTH, MAX_NODES, ROOT, DraftTree
from service.engine.commit import lay_out
from service.engine.cost import CostTable, Point, measure_grid
from service.engine.cost_cache import CostKey, Costs, cached_or_measured, this_machine
from service.engine.draft_cost import measure_drafts
from service.engine.rows import Chain, ForwardRows
from service.engine.slots import SlotPool, SlotTable
from service.engine.target import Target

SEQUENCES = (1, 8, 32)
CONTEXTS = (128, 1024)
ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 128, 192)

_CLEARLY = 1.25  # times as long as a step takes now: more than the machine's clocks explain
_LEVEL = 8  # nodes on a level of a measured tree


def costs_at_start(
    target: Target,
    make_drafter: Callable[[int], Drafter],
    *,
    folder: Path,
    model: str,
    drafter: str,
    version: str,
    max_blocks: int,
    max_sequences: int,
    max_model_len: int,
    max_budget: int,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Costs:
    """What verifying and drafting cost on this machine, from `folder` if the very same was measured before.

    `make_drafter` builds a drafter of so many blocks, to be thrown away; `model`, `drafter` and `version` tell apart
    what must not share measurements.
    """

    def measured() -> Costs:
        verify = measure_costs(
            target,
            max_sequences=max_sequences,
            max_model_len=max_model_len,
            max_budget=max_budget,
            progress=progress,
        )
        return Costs(
            verify,
            measure_drafts(
                make_drafter,
                blocks=range(1, max_blocks + 1),
                batches=sequence_points(max_sequences),
                vocab_size=target.vocab_size,
                hidden_size=target.model.config.get_text_config().hidden_size,
                dtype=target.model.dtype,
                device=target.device,
            ),
        )

    key = CostKey(
        machine=this_machine(),
        device=torch.cuda.get_device_name(target.device) if target.device.type == "cuda" else "cpu",
        model=model,
        drafter=f"{drafter} {max_blocks}",
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
    progress: Callable[[int, int], None] = lambda done, total: None,
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


class Stage:
    """Lines of text that were never read, all of the same length."""

    def __init__(self, target: Target, *, lines: int, length: int) -> None:
        self._target = target
        self.table = SlotTable(lines, length + MAX_DEPTH + 1, target.device)
        self._slots = SlotPool(target.pool.num_slots, target.device)
        self._scatter()
        for line in range(lines):
            chain = Chain(line, 0, [0] * length, completes=False)
            lay_out([chain], DraftTree.empty(1, target.device), self._slots, self.table)

    def run(self, point: Point) -> None:
        """One forward, until its logits can be read."""
        rows = self.place(point)
        logits = self._target.forward(rows, self.table).logits
        logits[0, 0].item()  # planned transfer: waits for the device, before serving
        self.take_away(rows)

    def place(self, point: Point) -> ForwardRows:
        """The rows of a forward."""
        chains = [Chain(line, point.context, [0], completes=True) for line in range(point.sequences)]
        return lay_out(chains, trees_for(point, self._target.device), self._slots, self.table)

    def take_away(self, rows: ForwardRows) -> None:
        """Free what rows were placed in."""
        self._slots.free(rows.slots)

    def _scatter(self) -> None:
        everything = self._slots.allocate(self._slots.num_free)
        order = torch.randperm(everything.shape[0], generator=torch.Generator().manual_seed(0))
        self._slots.free(everything[order.to(everything.device)])


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
