"""One forward's rows: chains (prompt chunks and roots) and draft trees of all scheduled sequences, flattened.

Rows of a sequence are adjacent: its chain rows by position, then its tree nodes.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from drafters.ancestors import ancestor_matrix
from drafters.tree import MAX_NODES, DraftTree
from kernels.tree_attention import AttentionRows


@dataclass(frozen=True, slots=True)
class Chain:
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
    logit_rows: Tensor  # [logits] int64, rows whose next token is chosen: last chain row and nodes of completing chains
    logit_sequence: Tensor  # [logits] int64, which of the completing sequences
    completing: Tensor  # [completing sequences] int64, their lines among all sequences of the forward

    @property
    def num_rows(self) -> int:
        return self.tokens.shape[0]


def flatten(chains: Sequence[Chain], tree: DraftTree, slots: Tensor) -> ForwardRows:
    """Lay out chains and trees (tree line i belongs to chain i) into rows that use the given slots.

    slots [rows] int64, one per chain token and tree node.
    """
    device = slots.device
    lengths = torch.tensor([len(chain.tokens) for chain in chains], device=device)  # [sequences]
    starts = torch.tensor([chain.start for chain in chains], device=device)
    completes = torch.tensor([chain.completes for chain in chains], device=device)
    counts = lengths + tree.num_nodes
    sequence = torch.repeat_interleave(counts)  # [rows]
    offset = torch.arange(sequence.shape[0], device=device) - (counts.cumsum(0) - counts)[sequence]
    node = torch.where(offset >= lengths[sequence], offset - lengths[sequence], -1)
    is_node = node >= 0

    tokens = torch.empty_like(sequence)
    tokens[~is_node] = torch.tensor([token for chain in chains for token in chain.tokens], device=device)
    tokens[is_node] = tree.tokens[sequence[is_node], node[is_node]]
    depths = _padded(tree.depths)
    chain_end = starts + lengths - 1
    node_positions = chain_end[sequence] + depths[sequence, node.clamp(min=0)]
    node_slots = torch.zeros(len(chains), MAX_NODES, dtype=torch.int64, device=device)
    node_slots[sequence[is_node], node[is_node]] = slots[is_node]
    chooses = completes[sequence] & (offset >= lengths[sequence] - 1)
    return ForwardRows(
        tokens=tokens,
        attention=AttentionRows(
            sequence=sequence,
            positions=torch.where(is_node, node_positions, starts[sequence] + offset),
            node=node,
            table_rows=torch.tensor([chain.table_row for chain in chains], device=device),
            chain_end=chain_end,
            node_slots=node_slots,
            node_depths=depths,
            ancestors=_padded_matrix(ancestor_matrix(tree.parents)),
        ),
        slots=slots,
        logit_rows=chooses.nonzero()[:, 0],
        logit_sequence=(completes.cumsum(0) - 1)[sequence[chooses]],
        completing=completes.nonzero()[:, 0],
    )


def _padded(values: Tensor) -> Tensor:
    """[sequences, nodes] -> [sequences, MAX_NODES]"""
    return torch.nn.functional.pad(values, (0, MAX_NODES - values.shape[1]))


def _padded_matrix(values: Tensor) -> Tensor:
    """[sequences, nodes, nodes] -> [sequences, MAX_NODES, MAX_NODES]"""
    missing = MAX_NODES - values.shape[1]
    return torch.nn.functional.pad(values, (0, missing, 0, missing))
