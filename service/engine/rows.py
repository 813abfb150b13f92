"""One forward's rows: chains (prompt chunks and roots) and draft trees of all scheduled sequences, flattened.

All chain rows come first, sequence by sequence and by position; then all tree nodes, parents before children.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import accumulate

import torch
from torch import Tensor

from drafters.ancestors import ancestor_matrix
from drafters.tree import MAX_NODES, ROOT, DraftTree
from kernels.tree_attention import NULL_SLOT, AttentionRows


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
    num_chain_rows: int
    logit_rows: Tensor  # [logits] int64, rows whose next token is chosen: last chain row and nodes of completing chains
    logit_sequence: Tensor  # [logits] int64, which of the completing sequences
    completing: Tensor  # [completing sequences] int64, their lines among all sequences of the forward

    @property
    def num_rows(self) -> int:
        return self.tokens.shape[0]


def flatten(chains: Sequence[Chain], tree: DraftTree, slots: Tensor, nodes: Sequence[int]) -> ForwardRows:
    """Lay out chains and trees (tree line i belongs to chain i) into rows that use the given slots.

    slots [rows] int64, one per chain token and tree node; `nodes` counts those of each line, as `tree` does.
    """
    host = _HostRows.of(chains, nodes)
    chain_sequence, chain_positions, chain_tokens, chain_end, table_rows, completing, last_rows, node_sequence, node = (
        host.on(slots.device)
    )
    num_chain_rows = chain_tokens.shape[0]
    node_positions = chain_end[node_sequence] + tree.depths[node_sequence, node]
    node_slots = slots.new_full((len(chains), MAX_NODES), NULL_SLOT)
    node_slots[node_sequence, node] = slots[num_chain_rows:]
    logit_line = slots.new_zeros(len(chains))
    logit_line[completing] = torch.arange(completing.shape[0], device=slots.device)
    return ForwardRows(
        tokens=torch.cat([chain_tokens, tree.tokens[node_sequence, node]]),
        attention=AttentionRows(
            sequence=torch.cat([chain_sequence, node_sequence]),
            positions=torch.cat([chain_positions, node_positions]),
            node=torch.cat([node.new_full((num_chain_rows,), ROOT), node]),
            table_rows=table_rows,
            chain_end=chain_end,
            node_slots=node_slots,
            node_depths=_padded(tree.depths),
            ancestors=_padded_matrix(ancestor_matrix(tree.parents)),
        ),
        slots=slots,
        num_chain_rows=num_chain_rows,
        logit_rows=torch.cat([last_rows, torch.arange(num_chain_rows, slots.shape[0], device=slots.device)]),
        logit_sequence=logit_line[torch.cat([completing, node_sequence])],
        completing=completing,
    )


@dataclass(frozen=True, slots=True)
class _HostRows:
    """All chains' rows, one after the other, and all trees' nodes, before they become tensors."""

    sequence: list[int]  # [chain rows]
    positions: list[int]  # [chain rows]
    tokens: list[int]  # [chain rows]
    end: list[int]  # [sequences], position of each chain's last row
    table_rows: list[int]  # [sequences]
    completing: list[int]  # [completing sequences]
    last_rows: list[int]  # [completing sequences], each one's last chain row
    node_sequence: list[int]  # [all nodes]
    node: list[int]  # [all nodes], number in its tree

    @staticmethod
    def of(chains: Sequence[Chain], nodes: Sequence[int]) -> "_HostRows":
        lengths = [len(chain.tokens) for chain in chains]
        ends = list(accumulate(lengths))
        completing = [line for line, chain in enumerate(chains) if chain.completes]
        return _HostRows(
            sequence=[line for line, length in enumerate(lengths) for _ in range(length)],
            positions=[chain.start + offset for chain in chains for offset in range(len(chain.tokens))],
            tokens=[token for chain in chains for token in chain.tokens],
            end=[chain.start + length - 1 for chain, length in zip(chains, lengths, strict=True)],
            table_rows=[chain.table_row for chain in chains],
            completing=completing,
            last_rows=[ends[line] - 1 for line in completing],
            node_sequence=[line for line, count in enumerate(nodes) for _ in range(count)],
            node=[number for count in nodes for number in range(count)],
        )

    def on(self, device: torch.device) -> tuple[Tensor, ...]:
        """All of it as int64, in one transfer."""
        columns: list[list[int]] = [getattr(self, field.name) for field in fields(self)]
        together = torch.tensor([value for column in columns for value in column], dtype=torch.int64, device=device)
        return tuple(torch.split(together, list(map(len, columns))))


def _padded(values: Tensor) -> Tensor:
    """[sequences, nodes] -> [sequences, MAX_NODES]"""
    return torch.nn.functional.pad(values, (0, MAX_NODES - values.shape[1]))


def _padded_matrix(values: Tensor) -> Tensor:
    """[sequences, nodes, nodes] -> [sequences, MAX_NODES, MAX_NODES]"""
    missing = MAX_NODES - values.shape[1]
    return torch.nn.functional.pad(values, (0, missing, 0, missing))
