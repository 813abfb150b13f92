"""Forwards while serving: committed entries into the pool, and blocks for several sequences at once. Legend: batch =
drafting sequences, entries = pool entries of a position, block = K, starts = blocks begun at once in one forward, live
= rows of this tree's blocks that are in no pool, order = position * entries + entry - 1: what a pool entry must not
exceed to be seen."""

import contextlib
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from drafters.specblock.growth import Picked
from drafters.specblock.model import BlockRows, Embed, SpecBlock
from drafters.specblock.pool import EntryPool, Waiting


class _AllStored(Exception):
    """Every layer has stored its keys and values; what would follow in the last one is read by nobody."""


_HIDDEN = -1e30  # finite: a padding row that sees nothing must not become NaN, for its keys land in the null slot


class Window(NamedTuple):
    """Pool entries that a batch's rows may see."""

    places: Tensor  # [batch, seen] int64
    order: Tensor  # [batch, seen] int64, -1 where there is nothing

    @staticmethod
    def of(positions: Tensor, slots: Tensor, pool: EntryPool) -> "Window":
        """positions [batch, width], -1 padded; slots [batch, width]"""
        entry = torch.arange(pool.entries, device=slots.device)
        order = torch.where(positions[..., None] < 0, -1, positions[..., None] * pool.entries + entry)
        return Window(pool.places(slots).flatten(1), order.flatten(1))


class Reach(NamedTuple):
    """What blocks of one forward can see, from which follows what blocks that start at their nodes can see."""

    path: Tensor  # [batch, starts, live] bool, live rows seen from before the block
    limits: Tensor  # [batch, starts] int64, highest order seen
    offset: int  # entries of each block that lie in the pool and not among the live rows

    @staticmethod
    def of_first(anchors: Tensor, entries: int) -> "Reach":
        """Of blocks at the anchors' positions. # anchors [batch]"""
        return Reach(anchors.new_zeros(anchors.shape[0], 1, 0, dtype=torch.bool), anchors[:, None] * entries, entries)

    def onward(self, picked: Picked, block: int) -> "Reach":
        """Of blocks that start at nodes of these ones."""
        starts, width = self.path.shape[1], block - self.offset
        inherited = torch.take_along_dim(self.path, picked.start[:, :, None], dim=1)
        start = torch.arange(starts, device=self.path.device)[:, None]
        entry = torch.arange(width, device=self.path.device) + self.offset
        own = (start == picked.start[:, :, None, None]) & (entry <= picked.position[:, :, None, None])
        # Of the anchor's entries in the pool those up to the start's are on the path.
        stored = picked.position.clamp(max=max(self.offset - 1, 0)) if self.offset else 0
        return Reach(
            path=torch.cat([inherited, own.flatten(2)], dim=2),
            limits=self.limits.gather(1, picked.start) + stored,
            offset=0,
        )


class BlockForward:
    """The forwards of one draft tree. Rows attend to the pool up to each one's order, and to live rows by mask."""

    def __init__(
        self, model: SpecBlock, embed: Embed, pool: EntryPool, window: Window, live: Sequence[Tensor] = ()
    ) -> None:
        self._model = model
        self._embed = embed
        self._pool = pool
        self._window = window
        self._size = model.config.block_size
        self.live = live  # keys, values, layer by layer, all [batch, kv_heads, live rows, head_dim] float32
        self._before: Sequence[Tensor] = ()  # as `live`, of the forwards before

    def first(self, waiting: Waiting) -> Tensor:
        """Run waiting entries and the block at the newest of them. # -> states [batch, block, hidden]"""
        return self._run(waiting, own=self._size - self._pool.entries)[:, -self._size :]

    def ingest(self, waiting: Waiting) -> None:
        """Run entries only, without drafting."""
        with contextlib.suppress(_AllStored):
            self._run(waiting, own=0, stores_only=True)

    def next(self, states: Tensor, picked: Picked, reach: Reach, roots: Tensor) -> Tensor:
        """Run a block at each picked node of the last forward. # states [batch, starts before, block, hidden] of that;
        roots [batch], the root's absolute position -> [batch, starts, block, hidden]"""
        batch, number = picked.tokens.shape
        lines = torch.arange(batch, device=roots.device)[:, None]
        context = states[lines, picked.start, picked.position]
        inputs = self._model.input_layer.blocks(context, self._embed(picked.tokens), slice(self._size))
        ahead = torch.arange(self._size, device=roots.device)
        numbers = torch.arange(number * self._size, device=roots.device)
        same_block = numbers[:, None] // self._size == numbers // self._size
        own = (same_block & (numbers <= numbers[:, None])).expand(batch, -1, -1)
        tokens_at = roots[:, None] + picked.origin.depth
        rows = BlockRows(
            inputs=inputs.flatten(1, 2),
            positions=(tokens_at[:, :, None] + ahead).flatten(1),
            previous=(numbers - (numbers % self._size > 0).long()).expand(batch, -1),
        )
        limits = reach.limits.repeat_interleave(self._size, dim=1)
        live_mask = torch.cat([reach.path.repeat_interleave(self._size, dim=1), own], dim=2)
        onward = self._forward(rows, roots.new_zeros(batch, 0), limits, live_mask)
        return onward.view(batch, number, self._size, -1)

    def _run(self, waiting: Waiting, own: int, *, stores_only: bool = False) -> Tensor:
        entries, count = self._pool.entries, waiting.tokens.shape[1]
        layer = self._model.input_layer
        context, embedded = layer.condition(waiting.features), self._embed(waiting.tokens)
        inputs = layer.blocks(context, embedded, slice(entries)).flatten(1, 2)
        entry = torch.arange(entries, device=waiting.positions.device)
        positions = (waiting.positions.clamp(min=0)[:, :, None] + 1 + entry).flatten(1)  # [batch, count * entries]
        order = (waiting.positions[:, :, None] * entries + entry).flatten(1)
        committed = count * entries
        numbers = torch.arange(committed + own, device=positions.device)
        previous = numbers - (numbers % entries > 0).long()
        previous[committed:] = numbers[committed:] - 1
        if own:
            rest = layer.blocks(context[:, -1], embedded[:, -1], slice(entries, self._size))
            inputs = torch.cat([inputs, rest], dim=1)
            ahead = positions[:, -1:] + 1 + torch.arange(own, device=positions.device)
            newest = order[:, -1:].expand(-1, own)
            positions, order = torch.cat([positions, ahead], dim=1), torch.cat([order, newest], dim=1)
        live_mask = (numbers[committed:] <= numbers[:, None]).expand(inputs.shape[0], -1, -1)
        stored = self._pool.places(waiting.slots).flatten(1)
        rows = BlockRows(inputs, positions, previous.expand(inputs.shape[0], -1))
        return self._forward(rows, stored, order, live_mask, stores_only=stores_only)

    def _forward(
        self, rows: BlockRows, stored: Tensor, limits: Tensor, live_mask: Tensor, *, stores_only: bool = False
    ) -> Tensor:
        """stored [batch, committed rows] int64, pool places of the first rows; live_mask [..., rows, live rows]"""
        order = self._window.order
        self._stored, self._stores_only = stored, stores_only
        self._unseen = (order[:, None] > limits[:, :, None]) | (order < 0)[:, None]
        self._live_unseen = ~live_mask
        self._before, self.live = self.live, []
        states: Tensor = self._model(rows, self)
        return states

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        stored = self._stored.shape[1]
        if stored:
            keys, values = (rows[:, :, :stored].transpose(1, 2).flatten(0, 1) for rows in (key, value))
            self._pool.write(layer, self._stored.flatten(), keys, values)
        if self._stores_only and layer == self._pool.num_layers - 1:
            raise _AllStored
        for rows in (key, value):
            before = self._before[len(self.live) :][:1]
            self.live = [*self.live, torch.cat([*before, rows[:, :, stored:].float()], dim=2)]
        live_keys, live_values = self.live[-2:]
        keys, values = self._pool.read(layer, self._window.places)
        seen = keys.shape[2]
        keys = torch.cat([keys.float(), live_keys], dim=2)
        values = torch.cat([values.float(), live_values], dim=2)
        grouped = query.float().unflatten(1, (keys.shape[1], -1)) * scale  # [batch, kv_heads, group, rows, dim]
        scores = grouped @ keys[:, :, None].transpose(3, 4)
        scores[..., :seen].masked_fill_(self._unseen[:, None, None], _HIDDEN)
        scores[..., seen:].masked_fill_(self._live_unseen[:, None, None], _HIDDEN)
        out: Tensor = scores.softmax(-1) @ values[:, :, None]
        return out.flatten(1, 2).to(query.dtype)
