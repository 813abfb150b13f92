"""From one forward's logits to what is accepted: the target's choice at every row, then the walk down each tree."""

from collections.abc import Iterator
from collections.abc import Sequence as Items
from functools import partial
from typing import Any

import torch
from torch import Tensor

from drafters.tree import MAX_DEPTH, ROOT, DraftTree, path_tokens
from kernels import ops
from kernels.graph_runner import Capture, GraphRunner
from kernels.sample import ChosenTokens
from kernels.settle import Verified
from kernels.survival import SIZES
from service.engine.grammar import paths_of
from service.engine.kv_pool import SlotTable
from service.engine.rows import ForwardRows, fixed_shapes
from service.engine.sampler import EAGER_SAMPLER, Sampler
from service.engine.sampling import (
    BoundText,
    GrammarRow,
    SamplingRows,
    SamplingTable,
    transformed,
    within_grammars,
)
from service.engine.sequence import Sequence


class VerifyStage:
    """Chooses the target's tokens and accepts; keeps the sampling parameters as tensors while the batch is the same."""

    def __init__(
        self, table: SlotTable, capture: Capture | None = None, widths: Items[int] = (), *, max_sequences: int = 0
    ) -> None:
        """Accepted nodes go into the table. Captured, steps of up to `max_sequences` with trees of these widths."""
        self._batch: list[Sequence] = []
        self._table = SamplingTable()
        slots = table.slots
        self._no_sizes = slots.new_empty(0, SIZES)
        shapes = fixed_shapes(max_sequences, widths) if capture else []
        self._settle = GraphRunner(
            partial(ops.on(slots.device).settle, slots),
            capture,
            ((_padding(*shape, slots.device), ()) for shape in shapes),
        )

    def verify(
        self,
        completing: list[Sequence],
        rows: ForwardRows,
        tree: DraftTree,
        logits: Tensor,
        sampler: Sampler = EAGER_SAMPLER,
        sizes: Tensor | None = None,
    ) -> Verified:
        """Verify the completing sequences; `tree` holds one line per sequence of the forward. The next call may
        overwrite the result, except for what was committed.

        logits [logits, vocab], one per entry of `rows.logit_rows`; `sampler` is the way to choose of them as they are;
        sizes [drafting, SIZES] int64, of trees, for the host
        """
        choice = self._choose(completing, rows, tree, logits, sampler)
        attention = rows.attention
        settled = self._settle(
            (
                choice,
                (rows.logit_rows, rows.logit_sequence, rows.logit_places),
                (rows.completing, rows.num_nodes),
                (attention.table_rows, attention.extend_end, attention.node_slots),
                rows.slots,
                (tree.tokens, tree.parents, tree.num_nodes),
                self._no_sizes if sizes is None else sizes,
            )
        )
        return _leading(settled, len(completing), tree.width)

    def _choose(
        self, completing: list[Sequence], rows: ForwardRows, tree: DraftTree, logits: Tensor, sampler: Sampler
    ) -> ChosenTokens:
        if self._batch != completing:
            self._batch, self._table = completing, SamplingTable.build([s.sampling for s in completing])
        table, scores = self._table, logits
        if table.transforms:
            scores, sampler = (
                transformed(logits, _sampling_rows(completing, rows, tree.take(rows.completing), table)),
                EAGER_SAMPLER,
            )
        choice = _chosen(table, scores, rows, sampler)
        if table.grammars is None:
            return choice
        bound = _grammar_rows(table.grammars, rows, tree.take(rows.completing))
        return within_grammars(
            choice, bound, scores, lambda left, lines: _chosen(table, left, rows, EAGER_SAMPLER, lines)
        )


def _chosen(
    table: SamplingTable, scores: Tensor, rows: ForwardRows, sampler: Sampler, lines: Tensor | None = None
) -> ChosenTokens:
    """Tokens of all rows that choose one, or of some of them. # lines [any] int64"""
    if table.temperatures is None:
        return sampler.likeliest(scores)
    sequence, logit_rows = rows.logit_sequence, rows.logit_rows
    if lines is not None:
        sequence, logit_rows = sequence[lines], logit_rows[lines]
    return table.choose(scores, sequence, rows.attention.positions[logit_rows] + 1, sampler)


def _grammar_rows(bound: Items[BoundText | None], rows: ForwardRows, tree: DraftTree) -> Iterator[GrammarRow]:
    """Those of texts that a grammar binds."""
    if not tree.width:  # one row for each sequence
        yield from (GrammarRow(row, text, ()) for row, text in enumerate(bound) if text is not None)
        return
    shape = tree.tokens, tree.parents, tree.num_nodes
    trees = [values.tolist() for values in shape]  # planned transfer: of such texts
    paths = [[[], *paths_of(*line)] if text else [] for text, *line in zip(bound, *trees, strict=True)]
    sequences, places = rows.logit_sequence.tolist(), rows.logit_places.tolist()  # planned transfer
    for row, (line, place) in enumerate(zip(sequences, places, strict=True)):
        text = bound[line]
        if text is not None and place < len(paths[line]):  # what is behind is padding
            yield GrammarRow(row, text, paths[line][place])


def _sampling_rows(
    completing: list[Sequence], rows: ForwardRows, tree: DraftTree, table: SamplingTable
) -> SamplingRows:
    sequence, place = rows.logit_sequence, rows.logit_places
    ancestors = rows.attention.ancestors[rows.completing, : tree.width, : tree.width]
    positions = rows.attention.positions[rows.logit_rows]
    depth = positions - rows.attention.extend_end[rows.completing][sequence]
    generated = torch.tensor([s.num_generated for s in completing], dtype=torch.int64, device=place.device)
    return SamplingRows(
        table=table,
        sequence_idx=sequence,
        positions=positions + 1,
        num_generated=generated[sequence] + depth,
        path_tokens=path_tokens(tree.tokens, ancestors, min(tree.width, MAX_DEPTH))[sequence, place],
    )


def _leading(settled: Verified, batch: int, width: int) -> Verified:
    """Without the padding of a capture, where there is any."""
    if settled.target_tokens.shape == (batch, width + 1):
        return settled
    depth = min(width, MAX_DEPTH)
    by_width = {"path": depth, "target_tokens": width + 1, "emitted": 1 + SIZES + depth + 1}
    by_width |= dict.fromkeys(("tokens", "path_logits", "path_rows", "slots"), depth + 1)
    lines = {name: value[:batch] for name, value in settled._asdict().items() if name != "freed"}
    lines |= {name: lines[name][:, :count] for name, count in by_width.items()}
    return Verified(freed=settled.freed, **lines)


def _padding(batch: int, width: int, device: torch.device) -> tuple[Any, ...]:
    """Roots of sequences of nobody's, which accept nothing."""
    row = torch.zeros(batch * (1 + width), dtype=torch.int64, device=device)
    line, nodes = row[:batch], torch.zeros(batch, width, dtype=torch.int64, device=device)
    return (
        (row, row),
        (row, row + batch - 1, row + width + 1),
        (torch.arange(batch, device=device), line),
        (line, line, nodes),
        row,
        (nodes, nodes + ROOT, line),
        nodes.new_zeros(batch, SIZES),
    )
