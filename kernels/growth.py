"""The growth of a draft as one op, for networks that draft one block per sequence: waiting entries, the block at the
newest of them, its heads, and the tree of its likeliest nodes.

The reference is the composition of the other ops in drafters/network/blocks.py, which also runs whatever a kernel does
not support. Legend: batch, hidden, block, entries, rank as there; width = of the tapped features."""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from kernels.entries import EntryTables
from kernels.layers import Product, Weight
from kernels.sample import Filters
from kernels.survival import Proposed
from kernels.trees import DraftTree


class BlockNetwork(NamedTuple):
    """One version of a network's weights, bound to the ops of their device."""

    condition: Product  # [width] -> [hidden]
    known: Product  # [2 * hidden] -> [hidden], of the normed condition and token
    head: Product  # [hidden] -> [draft_vocab]
    rank_hidden: Product
    rank_classes: Product
    layers: Sequence[Any]  # `DecoderLayer`s
    shifts: Sequence[Product]  # between the layers, or none; [2 * hidden] -> [hidden]
    feature_norms: Tensor | None  # [width], of the parts of the features that are normed separately
    condition_norm: Tensor  # [hidden], as the next two and the last
    token_norm: Tensor
    output_norm: Tensor
    queries: Tensor  # [block, hidden], what is added to the known part of each entry's input
    rank_norm: Tensor
    parts: int  # of the features
    broadcast: bool  # whether all entries of a block get the known part, not only the first
    epsilon: float  # of all norms but the rank head's
    rank_epsilon: float
    feature_scale: float  # of the rank head's features


class BlockTables(NamedTuple):
    """Tables that the growth reads and writes; their addresses never change."""

    entries: EntryTables
    pool: Tensor  # [layers, 2, places, kv_heads, dim]
    scratch: Tensor  # [sequences, live] int64, places in the pool of a growing block's entries
    rotary: Tensor  # [2, positions, dim]
    embedding: Weight  # [vocab, hidden]
    d2t: Tensor  # [draft_vocab] int64
    proposed: Proposed  # trees that are kept for the calibration
    buckets: Tensor  # [block, rank] int64, of `rates`
    rates: Tensor  # [buckets] float32, correction factors of conditional probabilities
    least: float  # survival below which a node is dropped


class GrownTree(NamedTuple):
    """The trees of a batch, and what was computed for them; valid until the next call."""

    tree: DraftTree  # [batch, nodes]
    states: Tensor  # [batch, block, hidden]
    logits: Tensor  # [batch, block, draft_vocab]


class GrowBlock(Protocol):
    """Grows one block per sequence."""

    def __call__(
        self,
        rows: Tensor,
        seeds: Tensor,
        temperatures: Tensor | None,
        roots: Tensor,
        filters: Filters | None,
        *,
        waiting: int,
    ) -> GrownTree:
        """Run at most `waiting` entries of each sequence, and the block at the newest. Without `temperatures` all are
        0; `filters` lower scores as in drafters/coupling.py.
        # rows, seeds, roots [batch] int64; temperatures [batch] float32"""


def plan_growth(network: BlockNetwork, tables: BlockTables, max_nodes: int) -> GrowBlock | None:
    """Plan the growth of trees of at most `max_nodes` nodes. Returns None where no kernel supports it."""
    return None
