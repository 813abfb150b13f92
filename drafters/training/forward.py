"""The forwards of one training step: the committed stream with first blocks at some anchors, then blocks behind those,
on the drafter's own states, as many in a row as are asked for.
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
    """Rows see what a mask says of all forwards before and of their own; keeps keys and values for the next forward."""

    def __init__(self, seen: Tensor, before: "MaskedAttention | None" = None) -> None:
        self._seen = seen  # [batch, rows, rows before + rows] bool
        self._before = before
        # Keys and values of all forwards so far, both [batch, kv_heads, rows before + rows, head_dim].
        self._layers: list[tuple[Tensor, Tensor]] = []

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """As `Attend`."""
        query, key, value = query.float(), key.float(), value.float()  # bf16 attention is pathological on CPU
        if self._before is not None:
            keys, values = self._before._layers[layer]
            key, value = torch.cat([keys, key], dim=2), torch.cat([values, value], dim=2)
        self._layers.append((key, value))
        return scaled_dot_product_attention(query, key, value, attn_mask=self._seen[:, None], enable_gqa=True)


@dataclass(frozen=True, slots=True)
class Blocks:
    """The newest block of each anchor's path."""

    anchors: Tensor  # [batch, anchors] int64; entry k of a block, from 1, stands k positions further
    states: Tensor  # [batch, anchors, block, hidden]
    seen: Tensor  # [batch, anchors, block, rows] bool, the rows of all forwards so far that each entry sees
    attention: MaskedAttention


class TrainingForward:
    """Runs a drafter over whole answers at once."""

    def __init__(self, model: SpecBlock, embed: Embed) -> None:
        self._model = model
        self._embed = embed
        self._size = model.config.block_size
        self._entries = model.config.entries
        self._own = self._size - self._entries  # entries of an anchor's block outside the stream

    def first(self, batch: Batch, anchors: Tensor) -> tuple[Tensor, Blocks]:
        """The states of the first entry of every position, and the blocks of some, `anchors` [batch, anchors].
        # -> [batch, length - 1, hidden]"""
        layer, entries = self._model.input_layer, self._entries
        context = layer.condition(batch.features[:, :-1])
        embedded = self._embed(batch.tokens[:, 1:])
        stream = layer.blocks(context, embedded, slice(entries)).flatten(1, 2)
        num_stream = stream.shape[1]
        rest = layer.blocks(at(context, anchors), at(embedded, anchors), slice(entries, self._size)).flatten(1, 2)
        device, (size, number) = anchors.device, anchors.shape
        place = torch.arange(num_stream // entries, device=device).repeat_interleave(entries).expand(size, -1)
        anchor = torch.cat([place, anchors.repeat_interleave(self._own, dim=1)], dim=1)  # [batch, rows]
        in_stream = torch.arange(entries, device=device).repeat(num_stream // entries)
        entry = torch.cat([in_stream, torch.arange(entries, self._size, device=device).repeat(number)])  # [rows]
        row, last = torch.arange(len(entry), device=device), anchor * entries + entries - 1
        ends = torch.where(row < num_stream, row, last)  # of what a row sees of the stream
        inside = pad(_causal_blocks(number, self._own, device), (0, 0, num_stream, 0))
        seen = torch.cat([_up_to(num_stream, ends), inside.expand(size, -1, -1)], dim=2)
        attention = MaskedAttention(seen)
        rows = BlockRows(
            inputs=torch.cat([stream, rest], dim=1),
            positions=anchor + 1 + entry,
            previous=torch.where(entry == entries, last, row - (entry > 0).long()),
        )
        states: Tensor = self._model(rows, attention)
        held = anchors[:, :, None] * entries + torch.arange(entries, device=device)
        own = torch.arange(num_stream, len(entry), device=device).view(number, self._own).expand(size, -1, -1)
        of_blocks = torch.cat([held, own], dim=2).flatten(1)  # [batch, anchors * block], among the rows
        states_of, seen_of = (at(values, of_blocks).unflatten(1, (number, self._size)) for values in (states, seen))
        return states[:, :num_stream:entries], Blocks(anchors, states_of, seen_of, attention)

    def beside(self, batch: Batch, anchors: Tensor, tokens: Tensor, first: Blocks) -> Tensor:
        """The states of first entries at these anchors, on these tokens in place of the text's, behind the `first`
        blocks' stream. # anchors, tokens [batch, rows] -> [batch, rows, hidden]"""
        layer, number = self._model.input_layer, anchors.shape[1]
        context = layer.condition(at(batch.features, anchors))
        row = torch.arange(number, device=anchors.device)
        num_stream, known = (batch.tokens.shape[1] - 1) * self._entries, first.seen.shape[3]
        seen = pad(_up_to(num_stream, anchors * self._entries - 1), (0, known - num_stream))
        own = (row[:, None] == row).expand(len(anchors), -1, -1)
        rows = BlockRows(
            inputs=layer.blocks(context, self._embed(tokens), slice(1)).flatten(1, 2),
            positions=anchors + 1,
            previous=row.expand_as(anchors),
        )
        states: Tensor = self._model(rows, MaskedAttention(torch.cat([seen, own], dim=2), first.attention))
        return states

    def next(self, batch: Batch, before: Blocks, cuts: Tensor) -> Blocks:
        """Blocks that start at entry `cuts` (1..K) of the ones before, on the true token there.
        # cuts [batch, anchors]"""
        place, (size, number) = (cuts - 1)[:, :, None, None], cuts.shape
        context, path = (torch.take_along_dim(values, place, dim=2)[:, :, 0] for values in (before.states, before.seen))
        anchors = before.anchors + cuts
        start = anchors + 1  # position of the token the new block stands on
        tokens = batch.tokens.gather(1, start.clamp(max=batch.tokens.shape[1] - 1))
        inputs = self._model.input_layer.blocks(context, self._embed(tokens), slice(self._size))
        own = _causal_blocks(number, self._size, cuts.device).expand(size, -1, -1)
        seen = torch.cat([path.repeat_interleave(self._size, dim=1), own], dim=2)
        attention = MaskedAttention(seen, before.attention)
        row = torch.arange(number * self._size, device=cuts.device)
        rows = BlockRows(
            inputs=inputs.flatten(1, 2),
            positions=(start[:, :, None] + torch.arange(self._size, device=cuts.device)).flatten(1),
            previous=(row - (row % self._size > 0).long()).expand(size, -1),
        )
        states: Tensor = self._model(rows, attention)
        by_block = (number, self._size)
        return Blocks(anchors, states.unflatten(1, by_block), seen.unflatten(1, by_block), attention)


def _up_to(num_stream: int, last: Tensor) -> Tensor:
    """Who sees which row of the stream. # last [batch, rows] -> [batch, rows, stream] bool"""
    return torch.arange(num_stream, device=last.device) <= last[:, :, None]


def _causal_blocks(number: int, size: int, device: torch.device) -> Tensor:
    """Rows see those of their own block up to themselves. # -> [number * size, number * size] bool"""
    blocks = torch.arange(number, device=device).repeat_interleave(size)
    return (blocks[:, None] == blocks).tril()


def at(values: Tensor, places: Tensor) -> Tensor:
    """The values there. # values [batch, length, width], places [batch, anchors] -> [batch, anchors, width]"""
    return torch.take_along_dim(values, places[:, :, None], dim=1)
