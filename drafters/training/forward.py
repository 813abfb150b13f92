"""The forwards of one training step: the committed stream with first blocks at some anchors, then one block more.

The stream holds the entries later positions may attend to, `entries` for each position: causal. A block's rows attend
to the stream up to their anchor, to earlier blocks on their path, and causally within the block (section 3.3).
Legend: batch, length = tokens of the longest sequence, stream = (length - 1) * entries rows, anchors = sequences'
positions whose whole blocks are trained, block = K entries, own = rows of one block, hidden.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from drafters.specblock.model import BlockRows, Embed, SpecBlock
from drafters.training.corpus import Batch


class StreamAttention:
    """The first forward: stream rows, then the rows of blocks in progress at the anchors.

    Keeps keys and values of each layer for the blocks that follow.
    """

    def __init__(self, num_stream: int, last: Tensor, own: int) -> None:
        self._num_stream = num_stream
        self._last = last  # [batch, anchors] int64, the stream row of each anchor, the last one it sees
        self._own = own
        self.keys: list[Tensor] = []  # per layer [batch, kv_heads, rows, head_dim]
        self.values: list[Tensor] = []

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        query, key, value = query.float(), key.float(), value.float()  # bf16 attention is pathological on CPU
        self.keys.append(key)
        self.values.append(value)
        stream = slice(self._num_stream)
        out = scaled_dot_product_attention(
            query[:, :, stream], key[:, :, stream], value[:, :, stream], is_causal=True, scale=scale, enable_gqa=True
        )
        if self._own == 0:
            return out
        past = _Past(key[:, :, stream], value[:, :, stream], _seen(self._num_stream, self._last))
        inner = slice(self._num_stream, None)
        blocks = _attend_blocks(query[:, :, inner], key[:, :, inner], value[:, :, inner], [], past, self._own, scale)
        return torch.cat([out, blocks], dim=2)


class NextBlockAttention:
    """A further block at each anchor: sees the stream up to `last` and, of the first block's rows outside the stream,
    the first `num_before` [batch, anchors]."""

    def __init__(
        self, first: StreamAttention, num_stream: int, last: Tensor, num_before: Tensor, own_before: int
    ) -> None:
        self._first = first
        self._num_stream = num_stream
        self._last = last  # [batch, anchors], the last stream row seen
        self._own_before = own_before  # rows of the first block that are not in the stream
        before = torch.arange(own_before, device=last.device)
        self._on_path = before < num_before[:, :, None]  # [batch, anchors, own_before]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        query, key, value = query.float(), key.float(), value.float()
        keys, values = self._first.keys[layer], self._first.values[layer]
        stream = slice(self._num_stream)
        past = _Past(keys[:, :, stream], values[:, :, stream], _seen(self._num_stream, self._last))
        earlier = []
        if self._own_before:
            inner = slice(self._num_stream, None)
            earlier = [_Earlier(keys[:, :, inner], values[:, :, inner], self._on_path)]
        own = query.shape[2] // self._last.shape[1]
        return _attend_blocks(query, key, value, earlier, past, own, scale)


@dataclass(frozen=True, slots=True)
class _Past:
    """Entries shared by all anchors of a sequence."""

    keys: Tensor  # [batch, kv_heads, stream, head_dim]
    values: Tensor
    seen: Tensor  # [batch, anchors, stream] bool


@dataclass(frozen=True, slots=True)
class _Earlier:
    """Entries of the anchors' own earlier block."""

    keys: Tensor  # [batch, kv_heads, anchors * own_before, head_dim]
    values: Tensor
    seen: Tensor  # [batch, anchors, own_before] bool


def _seen(num_stream: int, last: Tensor) -> Tensor:
    return torch.arange(num_stream, device=last.device) <= last[:, :, None]


def _attend_blocks(
    query: Tensor, key: Tensor, value: Tensor, earlier: list[_Earlier], past: _Past, own: int, scale: float
) -> Tensor:
    """Softmax over past, earlier block and own block together. # query [batch, heads, anchors * own, dim]"""
    batch, heads, rows, dim = query.shape
    kv_heads, anchors = key.shape[1], rows // own
    grouped = query.unflatten(1, (kv_heads, -1)) * scale  # [batch, kv, group, anchors * own, dim]
    group = grouped.shape[2]
    wide = grouped.reshape(batch, kv_heads, group * rows, dim)
    scores = (wide @ past.keys.transpose(2, 3)).view(batch, kv_heads, group, anchors, own, -1)
    parts = [scores.masked_fill(~past.seen[:, None, None, :, None], -torch.inf)]
    per_anchor = grouped.view(batch, kv_heads, group, anchors, own, dim).permute(0, 1, 3, 2, 4, 5)
    per_anchor = per_anchor.reshape(batch, kv_heads, anchors, group * own, dim)
    values = []
    causal = torch.ones(own, own, dtype=torch.bool, device=query.device).tril()
    blocks = [(e.keys, e.values, e.seen[:, None, None, :, None]) for e in earlier]
    for keys, block_values, seen in [*blocks, (key, value, causal)]:
        apart = keys.unflatten(2, (anchors, -1))  # [batch, kv, anchors, own', dim]
        block = (per_anchor @ apart.transpose(3, 4)).view(batch, kv_heads, anchors, group, own, -1)
        parts.append(block.permute(0, 1, 3, 2, 4, 5).masked_fill(~seen, -torch.inf))
        values.append(block_values.unflatten(2, (anchors, -1)))
    weights = torch.cat(parts, dim=-1).softmax(-1)
    num_stream = past.keys.shape[2]
    out = (weights[..., :num_stream].reshape(batch, kv_heads, group * rows, -1) @ past.values).view(
        batch, kv_heads, group, anchors, own, dim
    )
    start = num_stream
    for block_values in values:
        width = block_values.shape[3]
        block = weights[..., start : start + width].permute(0, 1, 3, 2, 4, 5)
        block = block.reshape(batch, kv_heads, anchors, group * own, width) @ block_values
        out = out + block.view(batch, kv_heads, anchors, group, own, dim).permute(0, 1, 3, 2, 4, 5)
        start += width
    return out.reshape(batch, heads, rows, dim)


@dataclass(frozen=True, slots=True)
class FirstBlocks:
    """The stream and the anchors' blocks after the first forward."""

    stream: Tensor  # [batch, length - 1, hidden], states of the first entry of every position
    states: Tensor  # [batch, anchors, block, hidden]
    attention: StreamAttention


class TrainingForward:
    """Runs a drafter over whole answers at once."""

    def __init__(self, model: SpecBlock, embed: Embed) -> None:
        self._model = model
        self._embed = embed
        self._size = model.config.block_size
        self._entries = model.config.entries
        self._own = self._size - self._entries  # entries of an anchor's block outside the stream

    def first(self, batch: Batch, anchors: Tensor) -> FirstBlocks:
        """The stream of all positions and, for `anchors` [batch, anchors], the rest of their blocks."""
        layer, entries = self._model.input_layer, self._entries
        context = layer.condition(batch.features[:, :-1])
        embedded = self._embed(batch.tokens[:, 1:])
        stream = layer.blocks(context, embedded, slice(entries)).flatten(1, 2)
        num_stream = stream.shape[1]
        last = anchors * entries + entries - 1
        attention = StreamAttention(num_stream, last, self._own)
        rest = layer.blocks(_at(context, anchors), _at(embedded, anchors), slice(entries, self._size)).flatten(1, 2)
        rows = BlockRows(
            inputs=torch.cat([stream, rest], dim=1),
            positions=self._first_positions(num_stream, anchors),
            previous=self._first_previous(num_stream, last),
        )
        states: Tensor = self._model(rows, attention)
        by_position = states[:, :num_stream].unflatten(1, (-1, entries))
        rest_states = states[:, num_stream:].unflatten(1, (anchors.shape[1], self._own))
        in_stream = _at(by_position.flatten(2), anchors).unflatten(2, (entries, -1))
        return FirstBlocks(by_position[:, :, 0], torch.cat([in_stream, rest_states], dim=2), attention)

    def next(self, batch: Batch, anchors: Tensor, cuts: Tensor, first: FirstBlocks) -> Tensor:
        """Blocks that start at entry `cuts` (1..K) of the anchors' first blocks, on the true token there.

        anchors, cuts [batch, anchors] -> states [batch, anchors, block, hidden]
        """
        context = torch.take_along_dim(first.states, (cuts - 1)[:, :, None, None], dim=2)[:, :, 0]
        start = anchors + 1 + cuts  # position of the token the new block stands on
        tokens = batch.tokens.gather(1, start.clamp(max=batch.tokens.shape[1] - 1))
        inputs = self._model.input_layer.blocks(context, self._embed(tokens), slice(self._size))
        ahead = torch.arange(self._size, device=anchors.device)
        numbers = torch.arange(anchors.shape[1] * self._size, device=anchors.device)
        num_stream = (batch.tokens.shape[1] - 1) * self._entries
        in_stream = torch.minimum(cuts, torch.tensor(self._entries))  # entries on the path that the stream holds
        attention = NextBlockAttention(
            first.attention, num_stream, anchors * self._entries + in_stream - 1, cuts - self._entries, self._own
        )
        rows = BlockRows(
            inputs=inputs.flatten(1, 2),
            positions=(start[:, :, None] + ahead).flatten(1),
            previous=(numbers - (numbers % self._size > 0).long()).expand(anchors.shape[0], -1),
        )
        states: Tensor = self._model(rows, attention)
        return states.view(*anchors.shape, self._size, -1)

    def _first_positions(self, num_stream: int, anchors: Tensor) -> Tensor:
        stream = torch.arange(num_stream, device=anchors.device)
        positions = stream // self._entries + 1 + stream % self._entries
        ahead = torch.arange(self._entries, self._size, device=anchors.device) + 1
        rest = (anchors[:, :, None] + ahead).flatten(1)
        return torch.cat([positions.expand(anchors.shape[0], -1), rest], dim=1)

    def _first_previous(self, num_stream: int, last: Tensor) -> Tensor:
        stream = torch.arange(num_stream, device=last.device)
        within = (stream - (stream % self._entries > 0).long()).expand(last.shape[0], -1)
        rest = (
            num_stream + torch.arange(last.shape[1] * self._own, device=last.device).view(last.shape[1], self._own) - 1
        )
        rest = rest.expand(last.shape[0], -1, -1).clone()
        rest[:, :, :1] = last[:, :, None]  # the second entry follows the one in the stream
        return torch.cat([within, rest.flatten(1)], dim=1)


def _at(values: Tensor, places: Tensor) -> Tensor:
    """values [batch, length, width], places [batch, anchors] -> [batch, anchors, width]"""
    return torch.take_along_dim(values, places[:, :, None], dim=1)
