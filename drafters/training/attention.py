"""Attention of training: a context stream of committed entries, and blocks that start at some of its anchors.

The stream holds the entries later positions may attend to, `entries` for each position: causal. A block's rows attend
to the stream up to their anchor, to earlier blocks on their path, and causally within the block (section 3.3).
Legend: batch, stream = positions * entries, anchors, own = rows of one block.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


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
