"""Lays out the rows of one forward in fresh slots, and collects the tokens that became permanent by it for the drafter.

Legend: rows = tokens of one forward, batch = sequences that choose a token, sequences = all sequences of the forward,
nodes = padded node count of a tree, depth = length of the longest path of a tree.
"""

from collections.abc import Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass, replace
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from drafters.protocol import Committed, HostMetadata, Read
from drafters.tree import ROOT, DraftTree, VerifyResult
from kernels import ops
from kernels.graph_runner import Capture, GraphRunner, batches_up_to, send
from kernels.rows import Ahead, ExtendRows, ForwardRows
from kernels.settle import Verified
from kernels.tree_attention import NULL_SLOT
from service.engine.kv_pool import SlotPool, SlotTable
from service.engine.sequence import Sequence
from service.engine.target import TargetOutput

DecodingShape = tuple[int, int]
"""Number of sequences and tree width of a captured decoding step."""


_UNKNOWN = 0
"""Stands for a token that a launched step chooses; its position is the lowest possible one."""


@dataclass(frozen=True, slots=True)
class Scheduled(ExtendRows):
    """A sequence's rows in a step: its next pending tokens."""

    sequence: Sequence

    @staticmethod
    def of(sequence: Sequence, num_rows: int) -> "Scheduled":
        """Schedule the sequence's next `num_rows` pending tokens."""
        first = sequence.num_computed
        tokens = [_UNKNOWN] if sequence.awaits_token else sequence.tokens[first : first + num_rows]
        return Scheduled(sequence.table_row, first, tokens, num_rows >= sequence.num_pending, sequence)

    @property
    def decodes(self) -> bool:
        """Whether the sequence decodes: its only row is its last pending token, the root of a draft tree."""
        return self.num_rows == 1 and self.completes


class RowLayout:
    """Flattens prompt chunks, roots and draft trees into the rows of one forward, each in a slot of its own."""

    def __init__(
        self, slots: SlotPool, table: SlotTable, capture: Capture | None = None, shapes: Items[DecodingShape] = ()
    ) -> None:
        """With `capture`, decoding steps of these shapes are laid out by CUDA graphs."""
        self._slots, self._table = slots, table
        padding = ((_RowsToPlace.padding(*shape, table.slots.device), ()) for shape in shapes if shape[1])
        self._place = GraphRunner(place_rows, capture, padding)

    def __call__(
        self,
        extends: Items[ExtendRows],
        trees: DraftTree,
        node_rows: Items[int] | None = None,
        ahead: Ahead | None = None,
    ) -> ForwardRows:
        """Allocate a slot for each row, and write the slots of extend rows into the slot table.

        `extends` and `trees` have one entry per sequence. `node_rows`: number of rows of each tree; if None, it is read
        from the device. `ahead`: newest tokens that only the device knows. The next call may overwrite the result.
        """
        if node_rows is None:
            node_rows = trees.num_nodes.tolist()  # planned transfer: not while serving
        num_rows = sum(extend.num_rows for extend in extends) + sum(node_rows)
        slots, table, states = self._slots.allocate(num_rows), self._table.slots, self._table.states
        rows = ops.on(table.device).lay_out_rows(extends, node_rows, trees, slots, table, self._place, ahead)
        return rows if states is None else replace(rows, states=states.rows(extends, node_rows, trees.parents))


def decoding_shapes(max_sequences: int, tree_widths: Items[int]) -> list[DecodingShape]:
    """List the shapes of all captured decoding steps, the one with the most rows first."""
    shapes = product(batches_up_to(max_sequences), (*tree_widths, 0))
    return sorted(shapes, key=lambda shape: (shape[0] * (1 + shape[1]), shape), reverse=True)


class _RowsToPlace(NamedTuple):
    """Arguments of `kernels.rows.Place`, all int64."""

    tokens: Tensor  # [rows], like the next four
    positions: Tensor
    sequence: Tensor
    node: Tensor  # ROOT for extend rows
    slots: Tensor
    extend_end: Tensor  # [sequences], positions of roots
    tree_tokens: Tensor  # [sequences, nodes], like the next two
    parents: Tensor
    depths: Tensor

    @staticmethod
    def padding(sequences: int, width: int, device: torch.device) -> "_RowsToPlace":
        """Arguments for rows that are all roots of the last sequence, a dummy."""
        row = torch.zeros(sequences * (1 + width), dtype=torch.int64, device=device)
        root, nodes = row[:sequences], torch.zeros(sequences, width, dtype=torch.int64, device=device)
        return _RowsToPlace(row, row, row + sequences - 1, row + ROOT, row, root, nodes, nodes + ROOT, nodes)


def place_rows(*tensors: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute the layout of tree nodes: tokens and positions of node rows, slots of nodes, ancestor matrices.

    Arguments as in `_RowsToPlace` -> tokens [rows], positions [rows], node slots [sequences, nodes],
    ancestors [sequences, nodes, nodes] bool
    """
    rows = _RowsToPlace(*tensors)
    sequences, width = rows.parents.shape
    is_node = rows.node >= 0
    at = rows.sequence, rows.node.clamp(min=0)
    tokens = torch.where(is_node, rows.tree_tokens[at], rows.tokens)
    positions = torch.where(is_node, rows.extend_end[rows.sequence] + rows.depths[at], rows.positions)
    # The last column receives the rows that are not nodes.
    node_slots = rows.slots.new_full((sequences, width + 1), NULL_SLOT)
    node_slots[rows.sequence, torch.where(is_node, rows.node, width)] = rows.slots
    return tokens, positions, node_slots[:, :width], ops.on(rows.slots.device).ancestor_matrix(rows.parents)


def committed_of(
    verified: Verified,
    trees: DraftTree,
    output: TargetOutput,
    *,
    wants_scores: bool,
    host: HostMetadata | None = None,
    follow: bool = True,
) -> Committed:
    """Collect a step's permanent tokens for the drafter.

    `host`: rows and roots of the completing sequences on the host; `follow`: whether the drafter must read these
    tokens. Features are left out if the drafter neither follows nor wants scores.
    """
    features = output.features if follow or wants_scores else None
    return Committed(
        rows=verified.table_rows,
        positions=verified.roots,
        slots=verified.slots,
        tokens=verified.tokens,
        counts=verified.counts,
        tree=trees.first(verified.tokens.shape[0]),
        result=VerifyResult(verified.path, verified.num_accepted, verified.target_tokens),
        features=None if features is None else features[verified.path_rows],
        follow=follow,
        host=host,
        logits=output.logits if wants_scores else None,
        chosen_by=verified.path_logits if wants_scores else None,
    )


def of_sequences(committed: Committed, kept: Items[int]) -> Committed:
    """Take the permanent tokens of some sequences, given by their index."""
    (index,) = send(committed.rows.device, kept)
    alike = ("rows", "tokens", "counts", "features", "positions", "slots", "chosen_by")
    by_sequence = {name: value[index] for name in alike if (value := getattr(committed, name)) is not None}
    whole, host = committed.result, committed.host
    result = VerifyResult(whole.path[index], whole.num_accepted[index], whole.target_tokens[index])
    known = host and HostMetadata(*(tuple(values[one] for one in kept) for values in (host.rows, host.roots)))
    return replace(committed, tree=committed.tree.take(index), result=result, host=known, **by_sequence)


def prompt_reads(
    items: Items[Scheduled], rows: ForwardRows, features: Tensor | None, *, follow: bool = True
) -> Iterator[Read]:
    """Iterate over the prompt chunks that the step computed, as inputs of the drafter. # features [rows, taps * hidden]

    The last token of a completing sequence is left out, because the drafter gets it with `Committed`.
    """
    first = 0
    features = rows.slots.new_empty(rows.num_extend_rows, 0) if features is None else features
    for item in items:
        count = item.num_rows - item.completes
        part = slice(first, first + count)
        first += item.num_rows
        if count:
            start = item.start
            next_tokens = item.sequence.tokens[start + 1 : start + 1 + count]
            yield Read(
                row=item.table_row,
                start=start,
                tokens=send(features.device, next_tokens)[0],
                slots=rows.slots[part].clone(),  # the next layout overwrites them
                features=features[part],
                follow=follow,
            )
