"""From one forward's logits to what is accepted: the target's choice at every row, then the walk down each tree."""

from collections.abc import Iterator
from collections.abc import Sequence as Items
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from drafters.tree import MAX_DEPTH, ROOT, DraftTree, VerifyResult, path_tokens
from kernels import ops
from kernels.graph_runner import Capture, GraphRunner
from kernels.sample import Choice
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


class Verified(NamedTuple):
    """What the target said of a step, by completing sequence (batch), and what becomes permanent of it."""

    path: Tensor  # [batch, depth] int64; this and the next three as of `VerifyResult`
    num_accepted: Tensor  # [batch] int64
    bonus: Tensor  # [batch] int64
    target_tokens: Tensor  # [batch, nodes + 1] int64
    emitted: Tensor  # [batch, depth + 2] int64: whether a row of the path had no finite score to choose by; the tokens
    counts: Tensor  # [batch] int64: valid entries of `tokens`
    path_logits: Tensor  # [batch, depth + 1] int64, lines of the logits that chose them; behind the bonus token any
    path_rows: Tensor  # [batch, depth + 1] int64, rows of root and accepted nodes; behind them the root's
    slots: Tensor  # [batch, depth + 1] int64, of those rows
    table_rows: Tensor  # [batch] int64
    roots: Tensor  # [batch] int64, absolute positions
    freed: Tensor  # [nodes of all sequences] int64, slots that nobody needs any more: as many as were not accepted

    @property
    def tokens(self) -> Tensor:
        """Accepted tokens, then the bonus token, then -1. # [batch, depth + 1] int64"""
        return self.emitted[:, 1:]

    @property
    def result(self) -> VerifyResult:
        return VerifyResult(self.path, self.num_accepted, self.bonus, self.target_tokens)


class VerifyStage:
    """Chooses the target's tokens and accepts; keeps the sampling parameters as tensors while the batch is the same."""

    def __init__(
        self, table: SlotTable, capture: Capture | None = None, widths: Items[int] = (), *, max_sequences: int = 0
    ) -> None:
        """Accepted nodes go into the table. Captured, steps of up to `max_sequences` with trees of these widths."""
        self._batch: list[Sequence] = []
        self._table = SamplingTable()
        slots = table.slots
        shapes = fixed_shapes(max_sequences, widths) if capture else []
        self._settle = GraphRunner(
            partial(_settled, slots), capture, ((_padding(*shape, slots.device), ()) for shape in shapes)
        )

    def verify(
        self,
        completing: list[Sequence],
        rows: ForwardRows,
        tree: DraftTree,
        logits: Tensor,
        sampler: Sampler = EAGER_SAMPLER,
    ) -> Verified:
        """Verify the completing sequences; `tree` holds one line per sequence of the forward. The next call may
        overwrite the result, except for what was committed.

        logits [logits, vocab], one per entry of `rows.logit_rows`; `sampler` is the way to choose of them as they are
        """
        choice = self._choose(completing, rows, tree, logits, sampler)
        attention = rows.attention
        settled = self._settle(
            (
                (choice.tokens, choice.bad_rows),
                (rows.logit_rows, rows.logit_sequence, rows.logit_places),
                (rows.completing, rows.num_nodes),
                (attention.table_rows, attention.extend_end, attention.node_slots),
                rows.slots,
                (tree.tokens, tree.parents, tree.num_nodes),
            )
        )
        return _leading(settled, len(completing), tree.width)

    def _choose(
        self, completing: list[Sequence], rows: ForwardRows, tree: DraftTree, logits: Tensor, sampler: Sampler
    ) -> Choice:
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
) -> Choice:
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


def _settled(
    table: Tensor,
    choice: tuple[Tensor, Tensor],
    logits: tuple[Tensor, Tensor, Tensor],
    completing: tuple[Tensor, Tensor],
    lines: tuple[Tensor, Tensor, Tensor],
    slots: Tensor,
    trees: tuple[Tensor, Tensor, Tensor],
) -> Verified:
    """Walks down each tree as far as the target agrees, and writes the accepted nodes' slots into the table. Arguments
    in the order of `VerifyStage.verify`."""
    (chosen, bad), (logit_rows, logit_sequence, logit_places) = choice, logits
    of, num_nodes = completing
    table_rows, roots, node_slots = (values[of] for values in lines)
    tokens, parents, tree_nodes = (values[of] for values in trees)
    batch, width = tokens.shape
    on_device = ops.on(table.device)
    places = chosen.new_full((2, batch, width + 2), -1)  # behind the nodes' places one that takes padding
    numbered = torch.stack([chosen, torch.arange(chosen.shape[0], device=chosen.device)])
    places[:, logit_sequence, logit_places] = numbered
    target_tokens, logit_index = places[:, :, : width + 1]
    path, num_accepted, bonus = target_tokens[:, :0], torch.zeros_like(of), target_tokens[:, 0]
    freed = path.flatten()
    if width:
        path, num_accepted, bonus = on_device.accept(tokens, parents, tree_nodes, target_tokens)
        freed = on_device.commit_slots(path, num_accepted, num_nodes, node_slots, table_rows, roots, table).freed
    path_logits = logit_index.gather(1, pad(path + 1, (1, 0))).clamp(min=0)
    path_rows = logit_rows[path_logits]
    return Verified(
        path=path,
        num_accepted=num_accepted,
        bonus=bonus,
        target_tokens=target_tokens,
        emitted=torch.cat(
            [bad[path_logits].amax(1, keepdim=True), _emitted(tokens, path, num_accepted, bonus)], dim=1
        ),  # rejected nodes may be as bad as they like
        counts=num_accepted + 1,
        path_logits=path_logits,
        path_rows=path_rows,
        slots=slots[path_rows],
        table_rows=table_rows,
        roots=roots,
        freed=freed,
    )


def _emitted(tokens: Tensor, path: Tensor, num_accepted: Tensor, bonus: Tensor) -> Tensor:
    """Accepted tokens, then the bonus token, then -1. # tokens [batch, nodes] -> [batch, depth + 1] int64"""
    if not tokens.shape[1]:
        return bonus[:, None]
    accepted = tokens.gather(1, path.clamp(min=0)).masked_fill(path < 0, -1)
    return pad(accepted, (0, 1), value=-1).scatter(1, num_accepted[:, None], bonus[:, None])


def _leading(settled: Verified, batch: int, width: int) -> Verified:
    """Without the padding of a capture."""
    depth = min(width, MAX_DEPTH)
    by_width = {"path": depth, "target_tokens": width + 1, "emitted": depth + 2}
    by_width |= dict.fromkeys(("path_logits", "path_rows", "slots"), depth + 1)
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
    )
