"""From one forward's logits to what is accepted: the target's choice at every row, then the walk down each tree."""

from collections.abc import Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass

import torch
from torch import Tensor

from drafters.tree import MAX_DEPTH, DraftTree, VerifyResult, path_tokens
from kernels import ops
from kernels.sample import Choice
from service.engine.grammar import paths_of
from service.engine.rows import ForwardRows
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


@dataclass(frozen=True, slots=True)
class Verified:
    """A verify result for the completing sequences (batch), and where its logits came from."""

    tree: DraftTree
    result: VerifyResult
    logit_index: Tensor  # [batch, nodes + 1] int64, line of the logits after the root and after each node
    failed: Tensor  # [batch] bool: a row of the sequence had no finite score to choose by

    @property
    def path_logits(self) -> Tensor:
        """Lines of the logits that chose the emitted tokens; beyond the bonus token they mean nothing.

        [batch, depth + 1] int64
        """
        if not self.tree.width:
            return self.logit_index
        places = torch.nn.functional.pad(self.result.path + 1, (1, 0))
        return self.logit_index.gather(1, places)


class VerifyStage:
    """Chooses the target's tokens and accepts; keeps the sampling parameters as tensors while the batch is the same."""

    def __init__(self) -> None:
        self._batch: list[Sequence] = []
        self._table = SamplingTable()

    def verify(
        self,
        completing: list[Sequence],
        rows: ForwardRows,
        tree: DraftTree,
        logits: Tensor,
        sampler: Sampler = EAGER_SAMPLER,
    ) -> Verified:
        """Verify the completing sequences; `tree` holds one line per sequence of the forward.

        logits [logits, vocab], one per entry of `rows.logit_rows`; `sampler` is the way to choose of them as they are
        """
        has_nodes = tree.width > 0
        tree = tree.take(rows.completing) if has_nodes else DraftTree.empty(len(completing), logits.device)
        choice = self._choose(completing, rows, tree, logits, sampler)
        return _walked(rows, tree, choice) if has_nodes else _plain(tree, choice)

    def _choose(
        self, completing: list[Sequence], rows: ForwardRows, tree: DraftTree, logits: Tensor, sampler: Sampler
    ) -> Choice:
        if self._batch != completing:
            self._batch, self._table = completing, SamplingTable.build([s.sampling for s in completing])
        table, scores = self._table, logits
        if table.transforms:
            scores, sampler = transformed(logits, _sampling_rows(completing, rows, tree, table)), EAGER_SAMPLER
        choice = _chosen(table, scores, rows, sampler)
        if table.grammars is None:
            return choice
        bound = _grammar_rows(table.grammars, rows, tree)
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
    sequences, places = rows.logit_sequence.tolist(), _places(rows).tolist()  # planned transfer
    for row, (line, place) in enumerate(zip(sequences, places, strict=True)):
        text = bound[line]
        if text is not None:
            yield GrammarRow(row, text, paths[line][place])


def _sampling_rows(
    completing: list[Sequence], rows: ForwardRows, tree: DraftTree, table: SamplingTable
) -> SamplingRows:
    sequence, place = rows.logit_sequence, _places(rows)
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


def _places(rows: ForwardRows) -> Tensor:
    """Where each line of the logits belongs among its sequence's choices. # -> [logits] int64, 0 = after the root"""
    return rows.attention.node[rows.logit_rows] + 1


def _plain(tree: DraftTree, choice: Choice) -> Verified:
    """The result for trees of zero nodes: each line of the logits is one sequence's root, in order."""
    target_tokens = choice.tokens[:, None]
    result = VerifyResult(target_tokens[:, :0], tree.num_nodes, choice.tokens, target_tokens)
    return Verified(tree, result, torch.arange(tree.batch, device=choice.tokens.device)[:, None], choice.bad_rows)


def _walked(rows: ForwardRows, tree: DraftTree, choice: Choice) -> Verified:
    """The result of walking down each tree as far as the target agrees."""
    device, lines = choice.tokens.device, (rows.logit_sequence, _places(rows))
    target_tokens = torch.full((tree.batch, tree.width + 1), -1, dtype=torch.int64, device=device)
    target_tokens[lines] = choice.tokens
    logit_index = torch.zeros_like(target_tokens)
    logit_index[lines] = torch.arange(choice.tokens.shape[0], device=device)
    bad = torch.zeros_like(target_tokens, dtype=torch.bool)
    bad[lines] = choice.bad_rows
    accepted = ops.on(device).accept(tree.tokens, tree.parents, tree.num_nodes, target_tokens)
    result = VerifyResult(accepted.path, accepted.num_accepted, accepted.bonus, target_tokens)
    on_path = torch.nn.functional.pad(result.path + 1, (1, 0))  # rejected nodes may be as bad as they like
    return Verified(tree, result, logit_index, bad.gather(1, on_path).any(1))
