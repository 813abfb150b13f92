"""Forwards while serving: committed entries into the pool, and blocks for several sequences at once.

To attention a block's rows are nodes of a tree below the entries that are committed before its anchor: the anchor's own
block first, though the first of its entries stay in the pool, then blocks that start at nodes.
Legend: batch = drafting sequences, entries = pool entries of a position, block = K, starts = blocks begun at once in
one forward, count = entries that wait, nodes = of all forwards of a tree so far.
"""

from functools import lru_cache, partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from drafters.specblock.model import Embed
from drafters.specblock.network import ServingNetwork
from drafters.specblock.pool import EntryPool, EntryState, Waiting
from kernels.decoder_layer import RotaryTable, RowPlaces
from kernels.lattice import Picked
from kernels.tree_attention import AttentionRows


class Nodes(NamedTuple):
    """The rows of a tree's blocks so far, and what they hang below."""

    lines: Tensor  # [batch] int64, of the table of entries
    end: Tensor  # [batch] int64, place in its line of the last entry before the anchor's
    slots: Tensor  # [batch, nodes] int64, where keys and values are
    depths: Tensor  # [batch, nodes] int64, from 1
    ancestors: Tensor  # [batch, nodes, nodes] bool


class Path(NamedTuple):
    """What stands before blocks that begin at nodes, or at the root."""

    above: Tensor  # [batch, starts, nodes] bool
    depths: Tensor  # [batch, starts] int64, 0 for the root


class _Layout(NamedTuple):
    """What follows from the sizes of a forward alone."""

    sequence: Tensor  # [rows] int64
    node: Tensor  # [rows] int64, whose path a row sees
    previous: Tensor  # [rows] int64
    ahead: Tensor  # [block] int64
    depths: Tensor  # [batch, nodes begun] int64
    reach: Tensor  # [batch, nodes begun] int64, depth of the last node that each sees
    inside: Tensor  # [batch, nodes begun, nodes begun] bool, who is on whose path


class BlockForward:
    """Runs blocks on what is stored of their texts."""

    def __init__(self, network: ServingNetwork, embed: Embed, pool: EntryPool, state: EntryState) -> None:
        self._network, self._embed = network, embed
        self._pool, self._state = pool, state
        self._size, self._held = network.config.forward_size, network.config.held
        rotary = partial(network.shape.rotary, dtype=network.dtype)
        # Blocks go on behind the deepest node.
        self._rotary = RotaryTable(rotary, state.max_length + self._size, network.device)

    def ingest(self, rows: Tensor, waiting: Waiting) -> None:
        """Run waiting entries without drafting. # rows [batch]"""
        if not self._network.config.num_layers:  # nothing is kept of them
            return
        (batch, count), entries = waiting.tokens.shape, self._pool.entries
        layout = _layout(batch, count * entries, entries, 0, 0, 0, waiting.tokens.device)
        placed = self._state.placed(rows, waiting, 0)
        nodes = Nodes(rows, placed.end, placed.live, placed.live, placed.live[..., None].bool())
        inputs = self._inputs(waiting)[:, :, :entries].flatten(0, 2).contiguous()
        row_places = self._row_places(layout, nodes, placed.at, placed.positions, placed.slots)
        self._network.store(inputs, layout.previous, row_places, self._pool.storage)

    def first(self, rows: Tensor, waiting: Waiting) -> tuple[Tensor, Nodes]:
        """Run waiting entries and the block at the newest of them. # rows [batch] -> [batch, 1, block, hidden]"""
        (batch, count), entries, size = waiting.tokens.shape, self._pool.entries, self._size
        before = (count - 1) * entries
        layout = _layout(batch, before, entries, size, 1, 0, waiting.tokens.device)
        placed = self._state.placed(rows, waiting, size)
        nodes = Nodes(rows, placed.end, placed.live, layout.depths, layout.inside)
        row_places = self._row_places(layout, nodes, placed.at, placed.positions, placed.slots)
        blocks = self._inputs(waiting)
        inputs = torch.cat([blocks[:, :-1, :entries].flatten(1, 2), blocks[:, -1]], dim=1).flatten(0, 1)
        states = self._network.states(inputs, layout.previous, row_places, self._pool.storage)
        return states.view(batch, 1, before + size, -1)[:, :, before:], nodes

    def next(self, states: Tensor, picked: Picked, nodes: Nodes, roots: Tensor) -> tuple[Tensor, Nodes]:
        """Run a block at each picked node of the last forward. # states [batch, starts before, block, hidden] of that;
        roots [batch], the root's absolute position -> [batch, starts, block, hidden]"""
        size, known = self._size, nodes.slots.shape[1]
        place = picked.start * size + picked.position  # [batch, starts], among the last forward's rows
        context = states.flatten(1, 2).gather(1, place[:, :, None].expand(-1, -1, states.shape[-1]))
        begun = place + known - states.shape[1] * size  # among all nodes
        above = nodes.ancestors.gather(1, begun[:, :, None].expand(-1, -1, known))
        path = Path(above, nodes.depths.gather(1, begun))
        return self._begin(context, picked.tokens, path, roots[:, None] + picked.origin.depth, nodes)

    def _begin(
        self, context: Tensor, tokens: Tensor, path: Path, positions: Tensor, nodes: Nodes
    ) -> tuple[Tensor, Nodes]:
        """Run blocks behind such paths, whose entries are all a tree's own. # context [batch, starts, hidden]; tokens,
        and positions of first entries, both [batch, starts] -> [batch, starts, block, hidden]"""
        (batch, number), size, known = tokens.shape, self._size, nodes.slots.shape[1]
        layout = _layout(batch, 0, 1, size, number, known, tokens.device, two_way=self._network.config.traits.two_way)
        inputs = self._network.blocks(context.flatten(0, 1), self._embed(tokens.flatten()))
        own = torch.cat([path.above.repeat_interleave(size, dim=1), layout.inside], dim=2)
        before = nodes.end[:, None] + path.depths.repeat_interleave(size, dim=1)
        slots = self._pool.scratch(batch, known - self._held, number * size)
        grown = Nodes(
            nodes.lines,
            nodes.end,
            torch.cat([nodes.slots, slots], dim=1),
            torch.cat([nodes.depths, path.depths.repeat_interleave(size, dim=1) + layout.depths], dim=1),
            torch.cat([pad(nodes.ancestors, (0, number * size)), own], dim=1),
        )
        standing = (positions[:, :, None] + layout.ahead).flatten(1)
        row_places = self._row_places(layout, grown, before + layout.reach, standing, slots)
        states = self._network.states(inputs.flatten(0, 1), layout.previous, row_places, self._pool.storage)
        return states.view(batch, number, size, -1), grown

    def _inputs(self, waiting: Waiting) -> Tensor:
        """h0 of all entries of what waits. # -> [batch, count, block, hidden]"""
        context = self._network.condition(waiting.features.flatten(0, 1))
        blocks = self._network.blocks(context, self._embed(waiting.tokens.flatten()))
        return blocks.view(*waiting.tokens.shape, self._size, -1)

    def _row_places(self, layout: _Layout, nodes: Nodes, at: Tensor, positions: Tensor, slots: Tensor) -> RowPlaces:
        """at, positions, slots [batch, rows of a sequence]: places in the line of entries, rotary positions, and where
        keys and values go"""
        network = self._network
        rows = AttentionRows(
            layout.sequence,
            at.flatten(),
            layout.node,
            table_rows=nodes.lines,
            extend_end=nodes.end,
            node_slots=nodes.slots,
            node_depths=nodes.depths,
            ancestors=nodes.ancestors,
        )
        shape = network.shape
        plan = network.ops.plan_attention(
            rows, self._state.table, query_heads=shape.query_heads, kv_heads=shape.kv_heads
        )
        cos, sin = self._rotary(positions.flatten())
        return RowPlaces(cos, sin, slots.flatten().contiguous(), plan)  # of one row each it is a view


@lru_cache(maxsize=256)
def _layout(
    batch: int,
    committed: int,
    entries: int,
    size: int,
    starts: int,
    known: int,
    device: torch.device,
    *,
    two_way: bool = False,
) -> _Layout:
    """Of `starts` blocks of each sequence behind so many committed rows; `known` nodes are there before; `two_way`: all
    of a block see what its last one sees. Made once, for a capture cannot copy from the host."""
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
