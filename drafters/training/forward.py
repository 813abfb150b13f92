"""The forwards of one training step: the committed stream with first blocks at some anchors, then one block more.
The stream holds the entries later positions may attend to, `entries` for each position: causal. A block's rows attend
to the stream up to their anchor, to earlier blocks on their path, and causally within the block (section 3.3).
Legend: batch, length = tokens of the longest sequence, stream = (length - 1) * entries rows, anchors = sequences'
positions whose whole blocks are trained, block = K entries, own = rows of one block, hidden."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from drafters.specblock.model import BlockRows, Embed, SpecBlock
from drafters.training.corpus import Batch


class MaskedAttention:
    """Rows see what a mask says of the forward before and of their own; keeps keys and values for the next forward."""

    def __init__(self, seen: Tensor, before: "MaskedAttention | None" = None) -> None:
        self._seen = seen  # [batch, rows, rows before + rows] bool
        self._before = before
        self._layers: list[tuple[Tensor, Tensor]] = []  # keys and values, both [batch, kv_heads, rows, head_dim]

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """As `Attend`."""
        query, key, value = query.float(), key.float(), value.float()  # bf16 attention is pathological on CPU
        self._layers.append((key, value))
        if self._before is not None:
            keys, values = self._before._layers[layer]
            key, value = torch.cat([keys, key], dim=2), torch.cat([values, value], dim=2)
        return scaled_dot_product_attention(query, key, value, attn_mask=self._seen[:, None], enable_gqa=True)


@dataclass(frozen=True, slots=True)
class FirstBlocks:
    """The stream and the anchors' blocks after the first forward."""

    stream: Tensor  # [batch, length - 1, hidden], states of the first entry of every position
    states: Tensor  # [batch, anchors, block, hidden]
    attention: MaskedAttention


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
        rest = layer.blocks(_at(context, anchors), _at(embedded, anchors), slice(entries, self._size)).flatten(1, 2)
        device, (size, number) = anchors.device, anchors.shape
        place = torch.arange(num_stream // entries, device=device).repeat_interleave(entries).expand(size, -1)
        anchor = torch.cat([place, anchors.repeat_interleave(self._own, dim=1)], dim=1)  # [batch, rows]
        in_stream = torch.arange(entries, device=device).repeat(num_stream // entries)
        entry = torch.cat([in_stream, torch.arange(entries, self._size, device=device).repeat(number)])  # [rows]
        row, last = torch.arange(len(entry), device=device), anchor * entries + entries - 1
        ends = torch.where(row < num_stream, row, last)  # of what a row sees of the stream
        inside = pad(_causal_blocks(number, self._own, device), (0, 0, num_stream, 0))
        attention = MaskedAttention(torch.cat([_up_to(num_stream, ends), inside.expand(size, -1, -1)], dim=2))
        rows = BlockRows(
            inputs=torch.cat([stream, rest], dim=1),
            positions=anchor + 1 + entry,
            previous=torch.where(entry == entries, last, row - (entry > 0).long()),
        )
        states: Tensor = self._model(rows, attention)
        by_position = states[:, :num_stream].unflatten(1, (-1, entries))
        rest_states = states[:, num_stream:].unflatten(1, (anchors.shape[1], self._own))
        first_states = _at(by_position.flatten(2), anchors).unflatten(2, (entries, -1))
        return FirstBlocks(by_position[:, :, 0], torch.cat([first_states, rest_states], dim=2), attention)

    def next(self, batch: Batch, anchors: Tensor, cuts: Tensor, first: FirstBlocks) -> Tensor:
        """Blocks that start at entry `cuts` (1..K) of the anchors' first blocks, on the true token there.
        anchors, cuts [batch, anchors] -> states [batch, anchors, block, hidden]"""
        context = torch.take_along_dim(first.states, (cuts - 1)[:, :, None, None], dim=2)[:, :, 0]
        start = anchors + 1 + cuts  # position of the token the new block stands on
        tokens = batch.tokens.gather(1, start.clamp(max=batch.tokens.shape[1] - 1))
        inputs = self._model.input_layer.blocks(context, self._embed(tokens), slice(self._size))
        ahead = torch.arange(self._size, device=anchors.device)
        numbers = torch.arange(anchors.shape[1] * self._size, device=anchors.device)
        num_stream = (batch.tokens.shape[1] - 1) * self._entries
        in_stream = torch.minimum(cuts, torch.tensor(self._entries))  # entries on the path that the stream holds
        last = anchors * self._entries + in_stream - 1
        own = torch.arange(self._own, device=anchors.device)
        in_block = (own < (cuts - self._entries)[:, :, None]).flatten(1)  # [batch, anchors * own], on the path
        same = _blocks(anchors.shape[1], anchors.device, self._size, self._own)
        seen = [
            _up_to(num_stream, last.repeat_interleave(self._size, dim=1)),
            same & in_block[:, None],
            _causal_blocks(anchors.shape[1], self._size, anchors.device).expand(anchors.shape[0], -1, -1),
        ]
        attention = MaskedAttention(torch.cat(seen, dim=2), first.attention)
        rows = BlockRows(
            inputs=inputs.flatten(1, 2),
            positions=(start[:, :, None] + ahead).flatten(1),
            previous=(numbers - (numbers % self._size > 0).long()).expand(anchors.shape[0], -1),
        )
        states: Tensor = self._model(rows, attention)
        return states.view(*anchors.shape, self._size, -1)


def _up_to(num_stream: int, last: Tensor) -> Tensor:
    """Who sees which row of the stream. # last [batch, rows] -> [batch, rows, stream] bool"""
    return torch.arange(num_stream, device=last.device) <= last[:, :, None]


def _blocks(number: int, device: torch.device, rows: int, columns: int) -> Tensor:
    """Whether a row and a column are of the same block. # -> [number * rows, number * columns] bool"""
    blocks = torch.arange(number, device=device)
    return blocks.repeat_interleave(rows)[:, None] == blocks.repeat_interleave(columns)


def _causal_blocks(number: int, size: int, device: torch.device) -> Tensor:
    """Rows see those of their own block up to themselves. # -> [number * size, number * size] bool"""
    return _blocks(number, device, size, size).tril()


def _at(values: Tensor, places: Tensor) -> Tensor:
    """values [batch, length, width], places [batch, anchors] -> [batch, anchors, width]"""
    return torch.take_along_dim(values, places[:, :, None], dim=1)
