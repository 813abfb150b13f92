"""Forwards while serving, for several sequences at once: they run committed entries, whose keys and values stay in the
pool, and blocks of entries that draft.

For attention, the entries of a tree's blocks count as nodes of a tree below the committed entries before the anchor:
first the anchor's own block (although its first entries stay in the pool), then the blocks that start at nodes.
Legend: batch = drafting sequences, entries = pool entries of a position, block = K, starts = blocks begun in one
forward, count = waiting entries, nodes = of all forwards of a tree so far, width as in `model.py`.
"""

from functools import lru_cache, partial
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from drafters.network.layers import Embed
from drafters.network.pool import EntryPool, EntryState, Waiting
from drafters.network.served import ServingNetwork
from kernels.decoder_layer import RotaryTable, RowPlaces
from kernels.lattice import Picked
from kernels.tree_attention import AttentionForm, AttentionRows, KVRows


class BlockNodes(NamedTuple):
    """The entries of each tree's blocks so far, as nodes for attention below the committed entries."""

    table_rows: Tensor  # [batch] int64, rows of `EntryState.table`
    end: Tensor  # [batch] int64, index in the table row of the last entry before the anchor's
    slots: Tensor  # [batch, nodes] int64, pool indices of keys and values
    depths: Tensor  # [batch, nodes] int64, from 1
    ancestors: Tensor  # [batch, nodes, nodes] bool


Live = BlockNodes | Tensor
"""State of a growing tree that its further blocks need, besides the states of its entries."""

Own = TypeVar("Own", bound=Live)


class Forward(Protocol[Own]):
    """Interface of a kind's forward while serving: blocks at committed positions, and further blocks at tree nodes."""

    def ingest(self, rows: Tensor, waiting: Waiting) -> None:
        """Run waiting entries without drafting, so that later blocks attend to them. # rows [batch]"""

    def first(self, rows: Tensor, waiting: Waiting) -> tuple[Tensor, Own]:
        """Run waiting entries as `ingest` does, and in the same forward the block at the newest one.
        # rows [batch] -> states [batch, 1, block, width]"""

    def next(self, states: Tensor, picked: Picked, live: Own, roots: Tensor) -> tuple[Tensor, Own]:
        """Run a block at each picked node of the last forward. # states [batch, starts before, block, width] of
        that forward; roots [batch], absolute positions of the trees' roots -> [batch, starts, block, width]"""


class Path(NamedTuple):
    """The ancestors of new blocks, which start at nodes or at the root."""

    above: Tensor  # [batch, starts, nodes] bool
    depths: Tensor  # [batch, starts] int64, 0 for the root


class _Layout(NamedTuple):
    """Index tensors of a forward that depend only on its sizes."""

    sequence: Tensor  # [rows] int64, index in the batch
    node: Tensor  # [rows] int64, node whose path a row attends to; -1 for committed rows
    previous: Tensor  # [rows] int64, row of the previous entry of the block
    ahead: Tensor  # [block] int64, distance from the block's first entry
    depths: Tensor  # [batch, nodes begun] int64
    reach: Tensor  # [batch, nodes begun] int64, depth of the last node that each attends to
    inside: Tensor  # [batch, nodes begun, nodes begun] bool, ancestors within the forward


class BlockForward:
    """Forward that runs committed positions through the layers as entries, to whose keys and values blocks attend."""

    def __init__(self, network: ServingNetwork, embed: Embed, pool: EntryPool, state: EntryState) -> None:
        self._network, self._embed = network, embed
        self._pool, self._state = pool, state
        self._size, self._cached = network.config.forward_size, network.config.cached_entries
        self._silent = network.traits.silent
        rotary = partial(network.shape.rotary, dtype=network.dtype)
        # A block may start at the deepest node.
        self.rotary = RotaryTable(rotary, state.max_length + self._size, network.device)

    def ingest(self, rows: Tensor, waiting: Waiting) -> None:
        """Run waiting entries without drafting. # rows [batch]"""
        (batch, count), entries = waiting.tokens.shape, self._pool.entries
        layout = _layout(_Sizes(batch, count * entries, entries, 0, 0), waiting.tokens.device)
        placed = self._state.placed(rows, waiting, 0)
        nodes = BlockNodes(rows, placed.end, placed.live, placed.live, placed.live[..., None].bool())
        inputs = self._inputs(waiting)[:, :, :entries].flatten(0, 2).contiguous()
        row_places = self._row_places(layout, nodes, placed.at, placed.positions, placed.slots)
        self._network.store(inputs, layout.previous, row_places, self._pool.storage)

    def first(self, rows: Tensor, waiting: Waiting) -> tuple[Tensor, BlockNodes]:
        """Run waiting entries and the block at the newest of them. # rows [batch] -> [batch, 1, block, width]"""
        (batch, count), entries, size = waiting.tokens.shape, self._pool.entries, self._size
        before = (count - 1) * entries
        layout = _layout(_Sizes(batch, before, entries, size, 1), waiting.tokens.device)
        placed = self._state.placed(rows, waiting, size)
        nodes = BlockNodes(rows, placed.end, placed.live, layout.depths, layout.inside)
        row_places = self._row_places(layout, nodes, placed.at, placed.positions, placed.slots)
        blocks = self._inputs(waiting)
        inputs = torch.cat([blocks[:, :-1, :entries].flatten(1, 2), blocks[:, -1]], dim=1).flatten(0, 1)
        states = self._network.states(inputs, layout.previous, row_places, self._pool.storage)
        return states.view(batch, 1, before + size, -1)[:, :, before:], nodes

    def next(self, states: Tensor, picked: Picked, nodes: BlockNodes, roots: Tensor) -> tuple[Tensor, BlockNodes]:
        """Run a block at each picked node of the last forward. # states [batch, starts before, block, width] of it,
        roots [batch] -> [batch, starts, block, width]"""
        size, known = self._size, nodes.slots.shape[1]
        index = picked.start * size + picked.position  # [batch, starts], among the last forward's rows
        context = states.flatten(1, 2).gather(1, index[:, :, None].expand(-1, -1, states.shape[-1]))
        begun = index + known - states.shape[1] * size  # among all nodes
        above = nodes.ancestors.gather(1, begun[:, :, None].expand(-1, -1, known))
        path = Path(above, nodes.depths.gather(1, begun))
        positions = roots[:, None] + picked.origin.depth * int(not self._network.traits.restarts)
        return self._begin(context, picked.tokens, path, positions, nodes)

    def _begin(
        self, context: Tensor, tokens: Tensor, path: Path, positions: Tensor, nodes: BlockNodes
    ) -> tuple[Tensor, BlockNodes]:
        """Run blocks below these paths, of which no entry is a committed one. # context [batch, starts, width]; tokens,
        and positions of first entries, both [batch, starts] -> [batch, starts, block, width]"""
        (batch, number), size, known = tokens.shape, self._size, nodes.slots.shape[1]
        sizes = _Sizes(batch, 0, 1, size, number, known, self._network.traits.two_way)
        layout = _layout(sizes, tokens.device)
        inputs = self._network.blocks(context.flatten(0, 1), self._embed(tokens.flatten()))
        own = torch.cat([path.above.repeat_interleave(size, dim=1), layout.inside], dim=2)
        before = nodes.end[:, None] + path.depths.repeat_interleave(size, dim=1)
        slots = self._pool.scratch(batch, known - self._cached, number * size)
        grown = BlockNodes(
            nodes.table_rows,
            nodes.end,
            torch.cat([nodes.slots, slots], dim=1),
            torch.cat([nodes.depths, path.depths.repeat_interleave(size, dim=1) + layout.depths], dim=1),
            torch.cat([pad(nodes.ancestors, (0, number * size)), own], dim=1),
        )
        rotary = (positions[:, :, None] + layout.ahead).flatten(1)
        row_places = self._row_places(layout, grown, before + layout.reach, rotary, slots)
        states = self._network.states(inputs.flatten(0, 1), layout.previous, row_places, self._pool.storage)
        return states.view(batch, number, size, -1)[:, :, self._silent :], grown

    def _inputs(self, waiting: Waiting) -> Tensor:
        """Return the inputs of all entries of waiting positions' blocks. # -> [batch, count, block, width]"""
        context = self._network.condition(waiting.features.flatten(0, 1))
        blocks = self._network.blocks(context, self._embed(waiting.tokens.flatten()))
        return blocks.view(*waiting.tokens.shape, self._size, -1)

    def _row_places(
        self, layout: _Layout, nodes: BlockNodes, at: Tensor, positions: Tensor, slots: Tensor
    ) -> RowPlaces:
        """Plan attention for a forward's rows. # at, positions, slots [batch, rows of a sequence]: indices in the table
        row, rotary positions, and where keys and values go"""
        network = self._network
        rows = AttentionRows(
            layout.sequence,
            at.flatten(),
            layout.node,
            table_rows=nodes.table_rows,
            extend_end=nodes.end,
            node_slots=nodes.slots,
            node_depths=nodes.depths,
            ancestors=nodes.ancestors,
        )
        attention = network.shape.attention
        plan = network.ops.plan_attention(
            rows, self._state.table, query_heads=attention.query_heads, kv_heads=attention.kv_heads
        )
        own = slots.flatten().contiguous()  # a view if each sequence has one row
        return RowPlaces({"": self.rotary(positions.flatten())}, (KVRows(own, plan),))


class _StoreOnly:
    """Attention plan for rows that only write keys and values, and must not attend."""

    def attend(self, query: Tensor, pool: Tensor, form: AttentionForm) -> Tensor:
        raise AssertionError("rows that are only stored do not attend")


class InjectedForward(BlockForward):
    """Forward with injected context: each layer computes keys and values of committed positions from their conditions,
    and only blocks run through the layers. A condition has its own position; a block's first entry that of the next
    token."""

    def ingest(self, rows: Tensor, waiting: Waiting) -> None:
        """Write keys and values of waiting positions to the pool. # rows [batch]"""
        self._inject(waiting)

    def first(self, rows: Tensor, waiting: Waiting) -> tuple[Tensor, BlockNodes]:
        """Write keys and values as `ingest` does, and run the block at the newest position.
        # rows [batch] -> [batch, 1, block, width]"""
        context = self._inject(waiting)
        batch = len(rows)
        above = torch.zeros(batch, 1, 0, dtype=torch.bool, device=rows.device)
        none = torch.zeros(batch, 0, dtype=torch.int64, device=rows.device)
        nodes = BlockNodes(rows, self._state.known(rows) - 1, none, none, above[:, :0])
        root = torch.zeros(batch, 1, dtype=torch.int64, device=rows.device)
        positions = waiting.positions[:, -1:].clamp(min=0) + 1
        return self._begin(context[:, -1:], waiting.tokens[:, -1:], Path(above, root), positions, nodes)

    def _inject(self, waiting: Waiting) -> Tensor:
        """Write keys and values of waiting positions, and return their conditions. # -> [batch, count, hidden]"""
        context = self._network.condition(waiting.features.flatten(0, 1))
        rotary = self.rotary(waiting.positions.clamp(min=0).flatten())
        slots = self._pool.places(waiting.slots).flatten().contiguous()
        places = RowPlaces({"": rotary}, (KVRows(slots, _StoreOnly()),))
        self._network.inject(context, places, self._pool.storage)
        return context.view(*waiting.tokens.shape, -1)


def forward_of(network: ServingNetwork, embed: Embed, pool: EntryPool, state: EntryState) -> Forward[Any]:
    """Return the serving forward of the network's kind."""
    found: Forward[Any] = network.structure.serving(network, embed, pool, state)
    return found


class _Sizes(NamedTuple):
    """Sizes of a forward, the cache key of its layout."""

    batch: int
    committed: int  # rows of committed entries per sequence
    entries: int  # rows of each committed position
    size: int  # rows of a block
    starts: int  # blocks begun per sequence
    known: int = 0  # nodes of earlier forwards
    two_way: bool = False  # all rows of a block attend to the whole block


@lru_cache(maxsize=256)
def _layout(sizes: _Sizes, device: torch.device) -> _Layout:
    """Lay out the rows of a forward: for each sequence committed rows, then blocks. Cached, because a captured graph
    cannot copy from the host."""
    batch, committed, entries, size, starts, known, two_way = sizes
    begun = torch.arange(starts * size, device=device)
    committed_rows = torch.arange(committed, device=device)
    block = begun // max(size, 1)
    last = (block + 1) * size - 1 if two_way else begun
    node = torch.cat([torch.full_like(committed_rows, -1), last + known])
    first = torch.cat([committed_rows % entries == 0, begun % max(size, 1) == 0])
    previous = torch.arange(len(node), device=device) - (~first).long()
    offsets = torch.arange(batch, device=device)[:, None] * len(node)
    return _Layout(
        sequence=torch.arange(batch, device=device).repeat_interleave(len(node)),
        node=node.repeat(batch),
        previous=(offsets + previous).flatten(),
        ahead=torch.arange(size, device=device),
        depths=(begun % max(size, 1) + 1).expand(batch, -1).contiguous(),
        reach=(last % max(size, 1) + 1).expand(batch, -1),
        inside=((block[:, None] == block) & (begun <= begun[:, None])).expand(batch, -1, -1).contiguous(),
    )
