"""Verifies drafts: chooses the target's token at every row of one forward, then accepts the path of each draft tree
that agrees with these tokens.

Legend: batch = sequences that choose a token, sequences = all sequences of the forward, nodes = padded node count.
"""

import math
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Items
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from drafters.tree import MAX_DEPTH, ROOT, DraftTree, path_tokens
from kernels import ops
from kernels.graph_runner import Capture, GraphRunner, send
from kernels.rows import ForwardRows
from kernels.sample import ChosenTokens
from kernels.settle import Verified
from kernels.survival import SIZES
from service.engine.grammar import forbidden_tokens, paths_of
from service.engine.kv_pool import SlotTable
from service.engine.rows import DecodingShape
from service.engine.sampling import EAGER_SAMPLER, Sampler, SamplingRows, SamplingState, SamplingTable, drops_tokens
from service.engine.sequence import Sequence
from service.text.grammars import GrammarState


class VerifyStage:
    """Chooses the target's tokens and accepts drafted ones. Keeps the sampling parameters as tensors for as long as the
    batch stays the same."""

    def __init__(self, table: SlotTable, capture: Capture | None = None, shapes: Items[DecodingShape] = ()) -> None:
        """`table` receives the slots of accepted nodes. With `capture`, steps of these shapes run as CUDA graphs."""
        self._states: list[SamplingState] = []
        self._table = SamplingTable()
        slots = table.slots
        self._no_sizes = slots.new_empty(0, SIZES)
        self._settle = GraphRunner(
            partial(ops.on(slots.device).settle, slots),
            capture,
            ((_SettleInputs.padding(*shape, slots.device), ()) for shape in shapes),
        )

    def verify(
        self,
        completing: list[Sequence],
        rows: ForwardRows,
        trees: DraftTree,
        logits: Tensor,
        sampler: Sampler = EAGER_SAMPLER,
        tree_sizes: Tensor | None = None,
    ) -> Verified:
        """Choose each row's token, and accept the longest path of every tree on which all tokens agree.

        `trees` has one tree per sequence of the forward; logits [logits, vocab] has one row per entry of
        `rows.logit_rows`; `sampler` is used unless a transform changes the logits; tree_sizes [decoding, SIZES] int64
        is copied into `Verified.emitted`, which the host reads. The next call may overwrite the result.
        """
        choice = self._choose(completing, rows, trees, logits, sampler)
        attention = rows.attention
        settled = self._settle(
            _SettleInputs(
                choice=choice,
                logits=(rows.logit_rows, rows.logit_sequence, rows.logit_places),
                completing=(rows.completing, rows.num_nodes),
                sequences=(attention.table_rows, attention.extend_end, attention.node_slots),
                slots=rows.slots,
                trees=(trees.tokens, trees.parents, trees.num_nodes),
                tree_sizes=self._no_sizes if tree_sizes is None else tree_sizes,
            )
        )
        return _without_padding(settled, len(completing), trees.width)

    def _choose(
        self, completing: list[Sequence], rows: ForwardRows, trees: DraftTree, logits: Tensor, sampler: Sampler
    ) -> ChosenTokens:
        states = [sequence.sampling for sequence in completing]  # a sequence that starts again has a new state
        if self._states != states:
            self._states, self._table = states, SamplingTable.build(states)
        table, scores = self._table, logits
        if table.transforms:
            sampling_rows = _sampling_rows(completing, rows, trees.take(rows.completing), table)
            scores, sampler = sampling_rows.transformed(logits), EAGER_SAMPLER
        choice = _chosen(table, scores, rows, sampler)
        if table.states is None:
            return choice
        constrained = _grammar_rows(table.states, rows, trees.take(rows.completing))
        return _within_grammars(choice, constrained, scores, rows, table)


def _chosen(
    table: SamplingTable, scores: Tensor, rows: ForwardRows, sampler: Sampler, index: Tensor | None = None
) -> ChosenTokens:
    """Choose the token of every row, or only of the rows in `index`.
    # scores [logits, vocab], or [chosen, vocab] with index [chosen] int64"""
    if table.temperatures is None:
        return sampler.likeliest(scores)
    sequence, logit_rows = rows.logit_sequence, rows.logit_rows
    if index is not None:
        sequence, logit_rows = sequence[index], logit_rows[index]
    return table.choose(scores, sequence, rows.attention.positions[logit_rows] + 1, sampler)


class _GrammarRow(NamedTuple):
    """A row whose chosen token must be allowed by a grammar."""

    row: int  # index of the row of logits
    grammar: GrammarState
    is_filtered: bool  # whether top-p, top-k or min-p may drop tokens
    path: Items[int]  # drafted tokens from the root's child to this row's node

    def allows(self, token: int) -> bool:
        """Whether a token chosen without the grammar's mask can be kept. Choosing with the mask would give the same
        token if the grammar allows it, but not with filters, because the mask changes which tokens they drop."""
        return not self.is_filtered and self.grammar.allows(self.path, token)


def _within_grammars(
    choice: ChosenTokens, constrained: Iterable[_GrammarRow], scores: Tensor, rows: ForwardRows, table: SamplingTable
) -> ChosenTokens:
    """Replace choices that a grammar forbids (or that filters may change) by a choice among the tokens it allows.
    # scores [logits, vocab]"""
    chosen = choice.tokens.tolist()  # planned transfer: only for constrained sequences
    again = [row for row in constrained if not row.allows(chosen[row.row])]
    if not again:
        return choice
    grammars, paths = [row.grammar for row in again], [row.path for row in again]
    forbidden = forbidden_tokens(grammars, paths, scores.shape[1]).to(scores.device)
    index = torch.tensor([row.row for row in again], device=scores.device)
    left = scores[index].to(torch.float32).masked_fill_(forbidden, -math.inf)
    other = _chosen(table, left, rows, EAGER_SAMPLER, index)
    return ChosenTokens(*(first.index_copy(0, index, second) for first, second in zip(choice, other, strict=True)))


def _grammar_rows(states: Items[SamplingState], rows: ForwardRows, trees: DraftTree) -> Iterator[_GrammarRow]:
    """Iterate over the rows of sequences with a grammar. `states` and `trees` have one entry per completing
    sequence."""
    if not trees.width:  # each sequence has one row
        for row, state in enumerate(states):
            if state.grammar is not None:
                yield _GrammarRow(row, state.grammar, drops_tokens(state.params), ())
        return
    shape = trees.tokens, trees.parents, trees.num_nodes
    lists = [values.tolist() for values in shape]  # planned transfer: only for constrained sequences
    paths = [[[], *paths_of(*tree)] if state.grammar else [] for state, *tree in zip(states, *lists, strict=True)]
    sequences, places = rows.logit_sequence.tolist(), rows.logit_places.tolist()  # planned transfer
    for row, (index, place) in enumerate(zip(sequences, places, strict=True)):
        state = states[index]
        if state.grammar is not None and place < len(paths[index]):  # places after the nodes are padding
            yield _GrammarRow(row, state.grammar, drops_tokens(state.params), paths[index][place])


def _sampling_rows(
    completing: list[Sequence], rows: ForwardRows, trees: DraftTree, table: SamplingTable
) -> SamplingRows:
    sequence, place = rows.logit_sequence, rows.logit_places
    ancestors = rows.attention.ancestors[rows.completing, : trees.width, : trees.width]
    positions = rows.attention.positions[rows.logit_rows]
    depth = positions - rows.attention.extend_end[rows.completing][sequence]
    (generated,) = send(place.device, [s.num_generated for s in completing])
    return SamplingRows(
        table=table,
        sequence_idx=sequence,
        positions=positions + 1,
        num_generated=generated[sequence] + depth,
        path_tokens=path_tokens(trees.tokens, ancestors, min(trees.width, MAX_DEPTH))[sequence, place],
    )


def _without_padding(settled: Verified, batch: int, width: int) -> Verified:
    """Cut off the padding of a capture."""
    if settled.target_tokens.shape == (batch, width + 1):
        return settled
    depth = min(width, MAX_DEPTH)
    by_width = {"path": depth, "target_tokens": width + 1, "emitted": 1 + SIZES + depth + 1}
    by_width |= dict.fromkeys(("tokens", "path_logits", "path_rows", "slots"), depth + 1)
    fields = {name: value[:batch] for name, value in settled._asdict().items() if name != "freed"}
    fields |= {name: fields[name][:, :count] for name, count in by_width.items()}
    return Verified(freed=settled.freed, **fields)


class _SettleInputs(NamedTuple):
    """Arguments of `kernels.settle.settle` after the slot table; all int64 except `bad`."""

    choice: tuple[Tensor, Tensor]  # tokens [logits]; bad [logits], whether a row had no finite logit
    logits: tuple[Tensor, Tensor, Tensor]  # rows, sequence within the batch, place in its tree; each [logits]
    completing: tuple[Tensor, Tensor]  # index of each sequence in the forward, number of node rows; both [batch]
    sequences: tuple[Tensor, Tensor, Tensor]  # rows of the slot table, roots [sequences]; node slots [sequences, nodes]
    slots: Tensor  # [rows], slot of each row
    trees: tuple[Tensor, Tensor, Tensor]  # tokens, parents [sequences, nodes]; numbers of nodes [sequences]
    tree_sizes: Tensor  # [decoding, SIZES]

    @staticmethod
    def padding(batch: int, width: int, device: torch.device) -> "_SettleInputs":
        """Arguments for the roots of dummy sequences, which accept no nodes."""
        row = torch.zeros(batch * (1 + width), dtype=torch.int64, device=device)
        root, nodes = row[:batch], torch.zeros(batch, width, dtype=torch.int64, device=device)
        return _SettleInputs(
            choice=(row, row),
            logits=(row, row + batch - 1, row + width + 1),
            completing=(torch.arange(batch, device=device), root),
            sequences=(root, root, nodes),
            slots=row,
            trees=(nodes, nodes + ROOT, root),
            tree_sizes=nodes.new_zeros(batch, SIZES),
        )
