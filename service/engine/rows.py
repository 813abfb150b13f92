"""One forward's rows: extends (prompt chunks and roots) and draft trees of all scheduled sequences, flattened.

All extend rows come first, sequence by sequence and by position; then all tree nodes, parents before children.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cache
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from drafters.tree import MAX_NODES, ROOT, DraftTree, ancestor_matrix
from kernels.tree_attention import NULL_SLOT, AttentionRows


@dataclass(frozen=True, slots=True)
class ExtendRows:
    """Tokens of one sequence that are certain to be committed by this step."""

    table_row: int
    start: int  # absolute position of the first token
    tokens: Sequence[int]
    completes: bool  # the last token is the newest of the text, so the step chooses the next one


@dataclass(frozen=True, slots=True)
class ForwardRows:
    """The rows of one forward and what becomes of each."""

    tokens: Tensor  # [rows] int64
    attention: AttentionRows
    slots: Tensor  # [rows] int64, where each row's keys and values go
    num_extend_rows: int
    logit_rows: (
        Tensor  # [logits] int64, rows whose next token is chosen: last extend row and nodes of completing extends
    )
    logit_sequence: Tensor  # [logits] int64, which of the completing sequences
    completing: Tensor  # [completing sequences] int64, their lines among all sequences of the forward

    @property
    def num_rows(self) -> int:
        return self.tokens.shape[0]


def flatten(extends: Sequence[ExtendRows], tree: DraftTree, slots: Tensor, nodes: Sequence[int]) -> ForwardRows:
    """Lay out extends and trees (tree line i belongs to extend i) into rows that use the given slots.

    slots [rows] int64, one per extend token and tree node; `nodes` counts those of each line, as `tree` does.
    """
    host = _HostRows.of(extends, nodes)
    sequence, node, tokens, positions, extend_end, table_rows, completing, logit_rows, logit_sequence = host.on(
        slots.device
    )
    num_extend_rows = tokens.shape[0]
    if tree.width:
        lines, numbers = sequence[num_extend_rows:], node[num_extend_rows:]
        tokens = torch.cat([tokens, tree.tokens[lines, numbers]])
        positions = torch.cat([positions, extend_end[lines] + tree.depths[lines, numbers]])
        below = _nodes(tree, lines, numbers, slots[num_extend_rows:])
    else:
        below = _no_nodes(len(extends), slots.device)
    return ForwardRows(
        tokens=tokens,
        attention=AttentionRows(
            sequence=sequence,
            positions=positions,
            node=node,
            table_rows=table_rows,
            extend_end=extend_end,
            node_slots=below.slots,
            node_depths=below.depths,
            ancestors=below.ancestors,
        ),
        slots=slots,
        num_extend_rows=num_extend_rows,
        logit_rows=logit_rows,
        logit_sequence=logit_sequence,
        completing=completing,
    )


class _Nodes(NamedTuple):
    """All nodes of a step, tree by tree."""

    slots: Tensor  # [sequences, MAX_NODES] int64
    depths: Tensor  # [sequences, MAX_NODES] int64
    ancestors: Tensor  # [sequences, MAX_NODES, MAX_NODES] bool


def _nodes(tree: DraftTree, lines: Tensor, numbers: Tensor, slots: Tensor) -> _Nodes:
    """Nodes by line of the tree and number in it, each in its slot. # all [all nodes]"""
    node_slots = slots.new_full((tree.batch, MAX_NODES), NULL_SLOT)
    node_slots[lines, numbers] = slots
    missing = MAX_NODES - tree.width
    ancestors = pad(ancestor_matrix(tree.parents), (0, missing, 0, missing))
    return _Nodes(node_slots, pad(tree.depths, (0, missing)), ancestors)


def _no_nodes(sequences: int, device: torch.device) -> _Nodes:
    """Of plain steps, which are many: made once for every power of two of sequences."""
    return _Nodes(*(part[:sequences] for part in _no_nodes_of(1 << (sequences - 1).bit_length(), device)))


@cache
def _no_nodes_of(sequences: int, device: torch.device) -> _Nodes:
    zeros = torch.zeros(sequences, MAX_NODES, dtype=torch.int64, device=device)
    ancestors = torch.zeros(sequences, MAX_NODES, MAX_NODES, dtype=torch.bool, device=device)
    return _Nodes(torch.full_like(zeros, NULL_SLOT), zeros, ancestors)


@dataclass(frozen=True, slots=True)
class _HostRows:
    """All extends' rows, one after the other, and all trees' nodes, before they become tensors."""

    sequence: list[int]  # [rows], of extends and then of nodes
    node: list[int]  # [rows], number in its tree
    tokens: list[int]  # [extend rows]
    positions: list[int]  # [extend rows]
    end: list[int]  # [sequences], position of each extend's last row
    table_rows: list[int]  # [sequences]
    completing: list[int]  # [completing sequences]
    logit_rows: list[int]  # [logits], each completing sequence's last extend row, then all nodes
    logit_sequence: list[int]  # [logits]

    @staticmethod
    def of(extends: Sequence[ExtendRows], nodes: Sequence[int]) -> "_HostRows":
        lengths = [len(extend.tokens) for extend in extends]
        ends = list(accumulate(lengths))
        completing = [line for line, extend in enumerate(extends) if extend.completes]
        place = {line: number for number, line in enumerate(completing)}
        of_nodes = [line for line, count in enumerate(nodes) for _ in range(count)]
        return _HostRows(
            sequence=[line for line, length in enumerate(lengths) for _ in range(length)] + of_nodes,
            node=[ROOT] * ends[-1] + [number for count in nodes for number in range(count)],
            tokens=[token for extend in extends for token in extend.tokens],
            positions=[extend.start + offset for extend in extends for offset in range(len(extend.tokens))],
            end=[extend.start + length - 1 for extend, length in zip(extends, lengths, strict=True)],
            table_rows=[extend.table_row for extend in extends],
            completing=completing,
            logit_rows=[ends[line] - 1 for line in completing] + list(range(ends[-1], ends[-1] + len(of_nodes))),
            logit_sequence=[*range(len(completing)), *(place[line] for line in of_nodes)],
        )

    def on(self, device: torch.device) -> tuple[Tensor, ...]:
        """All of it as int64, in one transfer."""
        columns: list[list[int]] = [getattr(self, field.name) for field in fields(self)]
        together = torch.tensor([value for column in columns for value in column], dtype=torch.int64, device=device)
        return tuple(torch.split(together, list(map(len, columns))))
