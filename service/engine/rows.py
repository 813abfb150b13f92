"""One forward's rows: extends (prompt chunks and roots) and draft trees of all scheduled sequences, flattened.

All extend rows come first, sequence by sequence and by position; then all tree nodes, parents before children.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from drafters.tree import ROOT, DraftTree
from kernels import ops
from kernels.staging import send
from kernels.tree_attention import NULL_SLOT, AttentionRows


@dataclass(frozen=True, slots=True)
class ExtendRows:
    """Tokens of one sequence that are certain to be committed by this step."""

    table_row: int
    start: int  # absolute position of the first token
    tokens: Sequence[int]
    completes: bool  # the last token is the newest of the text, so the step chooses the next one

    @property
    def num_rows(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True, slots=True)
class ForwardRows:
    """The rows of one forward and what becomes of each."""

    tokens: Tensor  # [rows] int64
    attention: AttentionRows
    slots: Tensor  # [rows] int64, where each row's keys and values go
    num_extend_rows: int
    logit_rows: Tensor  # [logits] int64, whose next token is chosen: each completing extend's last row, then all nodes
    logit_sequence: Tensor  # [logits] int64, which of the completing sequences
    completing: Tensor  # [completing sequences] int64, their lines among all sequences of the forward
    num_nodes: Tensor  # [completing sequences] int64, rows of nodes, those of padding included

    @property
    def num_rows(self) -> int:
        return self.tokens.shape[0]


def flatten(extends: Sequence[ExtendRows], tree: DraftTree, slots: Tensor, nodes: Sequence[int]) -> ForwardRows:
    """Lay out extends and trees (tree line i belongs to extend i) into rows that use the given slots.

    slots [rows] int64, one per extend token and tree node; `nodes` counts those of each line, at least as many as its
    tree has: rows of padding stand where the root does, and nobody sees them.
    """
    lengths = [extend.num_rows for extend in extends]
    ends = list(accumulate(lengths))
    completes = [line for line, extend in enumerate(extends) if extend.completes]
    place = {line: number for number, line in enumerate(completes)}
    of_nodes = [line for line, count in enumerate(nodes) for _ in range(count)]
    sequence, node, tokens, positions, extend_end, table_rows, completing, num_nodes, logit_rows, logit_sequence = send(
        slots.device,
        [line for line, length in enumerate(lengths) for _ in range(length)] + of_nodes,
        [ROOT] * ends[-1] + [number for count in nodes for number in range(count)],
        [token for extend in extends for token in extend.tokens],
        [extend.start + offset for extend in extends for offset in range(extend.num_rows)],
        [extend.start + length - 1 for extend, length in zip(extends, lengths, strict=True)],
        [extend.table_row for extend in extends],
        completes,
        [nodes[line] for line in completes],
        [ends[line] - 1 for line in completes] + list(range(ends[-1], ends[-1] + len(of_nodes))),
        [*range(len(completes)), *(place[line] for line in of_nodes)],
    )
    num_extend_rows = tokens.shape[0]
    lines, numbers = sequence[num_extend_rows:], node[num_extend_rows:]
    node_slots = slots.new_full((tree.batch, tree.width), NULL_SLOT)
    if tree.width:
        tokens = torch.cat([tokens, tree.tokens[lines, numbers]])
        positions = torch.cat([positions, extend_end[lines] + tree.depths[lines, numbers]])
        node_slots[lines, numbers] = slots[num_extend_rows:]
    attention = AttentionRows(
        sequence=sequence,
        positions=positions,
        node=node,
        table_rows=table_rows,
        extend_end=extend_end,
        node_slots=node_slots,
        node_depths=tree.depths,
        ancestors=ops.on(slots.device).ancestor_matrix(tree.parents),
    )
    return ForwardRows(tokens, attention, slots, num_extend_rows, logit_rows, logit_sequence, completing, num_nodes)
