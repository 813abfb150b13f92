"""The forwards of a training step: first the committed stream with blocks at some anchors, then further blocks, which
start at the drafter's own states.
The stream holds the entries that later positions may attend to, `entries` for each position, and is causal. A block's
rows attend to the stream up to their anchor, to earlier blocks on their path, and causally within the block (section
3.3). With injected context, the stream consists of the conditions' keys and values, and has no states that predict.
Legend: batch, length = tokens of the longest sequence, stream = (length - 1) * entries rows, anchors = positions whose
whole blocks are trained, block = K entries, own = rows of one block, hidden, width as in `SpecBlock`."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import pad, scaled_dot_product_attention

from drafters.network.layers import Embed, KeysValues
from drafters.network.model import BlockRows, SpecBlock
from drafters.training.corpus import Batch

_FOR_ANY_SHAPE = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""Attention backends without cuDNN, whose plan for each new batch shape takes 260 of 300 ms of a step on an H100."""


def attend(query: Tensor, key: Tensor, value: Tensor, seen: Tensor | None = None, scale: float | None = None) -> Tensor:
    """Compute softmax attention, causal if no mask `seen` [batch or 1, rows, all rows] bool is given.
    # query [batch, heads, rows, dim], key and value [batch, kv_heads, all rows, dim] -> like query"""
    group = query.shape[1] // key.shape[1]
    # No kernel supports grouped attention with masks.
    key, value = key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)
    mask = None if seen is None else seen[:, None]
    # On a CPU attention in bf16, to which autocast would round, takes over twice the time of fp32.
    with sdpa_kernel(_FOR_ANY_SHAPE), torch.autocast("cpu", enabled=False):
        return scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=seen is None, scale=scale)


class StreamAttention:
    """Masked attention over the rows of this and all earlier forwards, whose keys and values it keeps for the next."""

    def __init__(self, seen: Tensor, before: Sequence[KeysValues] = ()) -> None:
        """`before`: keys and values of all earlier forwards, by layer."""
        self._seen = seen  # [batch, rows, rows before + rows] bool
        self._before = before
        self.layers: list[KeysValues] = []  # keys and values of all forwards, this one included

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attend as `Attend` says. # query [batch, heads, rows, dim] -> the same"""
        query, key, value = query.float(), key.float(), value.float()
        if self._before:
            keys, values = self._before[layer]
            key, value = torch.cat([keys.float(), key], dim=2), torch.cat([values.float(), value], dim=2)
        self.layers.append((key, value))
        return attend(query, key, value, self._seen)


@dataclass(frozen=True, slots=True)
class TrainedBlocks:
    """The newest block of each anchor's path, with all that the next one needs."""

    anchors: Tensor  # [batch, anchors] int64; entry k of a block, from 1, stands k positions after it
    states: Tensor  # [batch, anchors, block, hidden]
    onward: Tensor  # [batch, anchors, block, hidden], context of a block that starts at each entry
    seen: Tensor  # [batch, anchors, block, rows] bool, rows of all forwards so far that each entry attends to
    held: Sequence[KeysValues]  # keys and values of these rows, by layer
    places: Tensor  # [batch, anchors] int64, rotary position of each block's first entry, minus one
    ahead: Tensor | None = None  # [batch, anchors, further blocks, hidden], if one forward serves all blocks

    def take(self, kept: Tensor) -> "TrainedBlocks":
        """Keep the blocks of some anchors. # kept [batch, kept] int64, indices of anchors"""
        fields = self.anchors, self.states, self.onward, self.seen, self.places
        anchors, states, onward, seen, places = (at(values, kept) for values in fields)
        ahead = None if self.ahead is None else at(self.ahead, kept)
        return TrainedBlocks(anchors, states, onward, seen, self.held, places, ahead)


class TrainingForward:
    """Training forward over whole answers at once, in which committed positions run through the layers."""

    streams = 1
    """Number of states per committed position that predict a token."""

    def __init__(self, model: SpecBlock, embed: Embed) -> None:
        self._model = model
        self._embed = embed
        self._size = model.config.forward_size
        self._entries = model.traits.entries
        self._own = self._size - self._entries  # entries of an anchor's block outside the stream

    def first(self, batch: Batch, anchors: Tensor) -> tuple[Tensor, TrainedBlocks]:
        """Run the committed stream and the blocks at `anchors`. Returns the states of all first entries, and the
        blocks. # anchors [batch, anchors] -> [batch, length - 1, hidden]"""
        layer, entries = self._model.input_layer, self._entries
        context = layer.condition(batch.features[:, :-1])
        embedded = self._embed(batch.tokens[:, 1:])
        stream = layer.blocks(context, embedded, slice(entries)).flatten(1, 2)
        num_stream = stream.shape[1]
        rest = layer.blocks(at(context, anchors), at(embedded, anchors), slice(entries, self._size))
        rest = rest.flatten(1, 2)
        device, (size, number) = anchors.device, anchors.shape
        place = torch.arange(num_stream // entries, device=device).repeat_interleave(entries).expand(size, -1)
        anchor = torch.cat([place, anchors.repeat_interleave(self._own, dim=1)], dim=1)  # [batch, rows]
        in_stream = torch.arange(entries, device=device).repeat(num_stream // entries)
        entry = torch.cat([in_stream, torch.arange(entries, self._size, device=device).repeat(number)])  # [rows]
        row, last = torch.arange(len(entry), device=device), anchor * entries + entries - 1
        ends = torch.where(row < num_stream, row, last)  # last row of the stream that each row attends to
        inside = pad(_blocks(number, self._own, device).tril(), (0, 0, num_stream, 0))
        seen = torch.cat([_up_to(num_stream, ends), inside.expand(size, -1, -1)], dim=2)
        attention = StreamAttention(seen)
        rows = BlockRows(
            inputs=torch.cat([stream, rest], dim=1),
            positions=anchor + 1 + entry,
            previous=torch.where(entry == entries, last, row - (entry > 0).long()),
        )
        states, onward = self._model.heads_and_context(self._model(rows, attention))
        held = anchors[:, :, None] * entries + torch.arange(entries, device=device)
        own = torch.arange(num_stream, len(entry), device=device).view(number, self._own).expand(size, -1, -1)
        of_blocks = torch.cat([held, own], dim=2).flatten(1)  # [batch, anchors * block], among the rows
        states_of, onward_of, seen_of = (
            at(values, of_blocks).unflatten(1, (number, self._size)) for values in (states, onward, seen)
        )
        blocks = TrainedBlocks(anchors, states_of, onward_of, seen_of, attention.layers, anchors)
        return states[:, :num_stream:entries], blocks

    def next(self, batch: Batch, before: TrainedBlocks, cuts: Tensor) -> TrainedBlocks:
        """Run blocks that start at entry `cuts` (1..K) of the previous ones, with the true token there.
        # cuts [batch, anchors]"""
        place = (cuts - 1)[:, :, None, None]
        context, path = (torch.take_along_dim(values, place, dim=2)[:, :, 0] for values in (before.onward, before.seen))
        anchors = before.anchors + cuts
        places = before.places if self._model.traits.restarts else anchors
        return replace(self._begin(context, after(batch, anchors), places, path, before.held), anchors=anchors)

    def _begin(
        self, context: Tensor, tokens: Tensor, anchors: Tensor, path: Tensor, held: Sequence[KeysValues]
    ) -> TrainedBlocks:
        """Run blocks outside the stream on the tokens after anchors. # context [batch, anchors, hidden], path
        [batch, anchors, rows before] bool"""
        size, number = anchors.shape
        inputs = self._model.input_layer.blocks(context, self._embed(tokens), slice(self._size))
        own = _blocks(number, self._size, anchors.device)
        own = own if self._model.traits.two_way else own.tril()
        seen = torch.cat([path.repeat_interleave(self._size, dim=1), own.expand(size, -1, -1)], dim=2)
        attention = StreamAttention(seen, held)
        row = torch.arange(number * self._size, device=anchors.device)
        rows = BlockRows(
            inputs=inputs.flatten(1, 2),
            positions=(anchors[:, :, None] + 1 + torch.arange(self._size, device=anchors.device)).flatten(1),
            previous=(row - (row % self._size > 0).long()).expand(size, -1),
        )
        found = *self._model.heads_and_context(self._model(rows, attention)), seen
        silent = self._model.traits.silent
        states, onward, seen = (values.unflatten(1, (number, self._size))[:, :, silent:] for values in found)
        return TrainedBlocks(anchors, states, onward, seen, attention.layers, anchors)


class InjectedTraining(TrainingForward):
    """Training forward with injected context: committed positions run through no layer, and have no states."""

    streams = 0

    def first(self, batch: Batch, anchors: Tensor) -> tuple[Tensor, TrainedBlocks]:
        """Compute keys and values of the stream from conditions, and run the blocks at `anchors`. # anchors [batch,
        anchors] -> [batch, 0, hidden]"""
        context = self._model.input_layer.condition(batch.features[:, :-1])
        positions = torch.arange(context.shape[1], device=anchors.device).expand(context.shape[:2])
        held = self._model.injected(context, positions)
        path = _up_to(context.shape[1], anchors)
        return context[:, :0], self._begin(at(context, anchors), after(batch, anchors), anchors, path, held)


def forward_of(model: SpecBlock, embed: Embed) -> TrainingForward:
    """Return the training forward of the model's kind."""
    found: TrainingForward = model.structure.training(model, embed)
    return found


def after(batch: Batch, anchors: Tensor) -> Tensor:
    """Return the true token after each anchor; arbitrary past the end. # [batch, anchors] -> same, int64"""
    return batch.tokens.gather(1, (anchors + 1).clamp(max=batch.tokens.shape[1] - 1))


def _up_to(num_stream: int, last: Tensor) -> Tensor:
    """Return which rows of the stream each row attends to. # last [batch, rows] -> [batch, rows, stream] bool"""
    return torch.arange(num_stream, device=last.device) <= last[:, :, None]


def _blocks(number: int, size: int, device: torch.device) -> Tensor:
    """Return which rows belong to the same block. # -> [number * size, number * size] bool"""
    blocks = torch.arange(number, device=device).repeat_interleave(size)
    return blocks[:, None] == blocks


def at(values: Tensor, places: Tensor) -> Tensor:
    """Gather values by position. # values [batch, length, ...], places [batch, anchors] -> [batch, anchors, ...]"""
    return torch.take_along_dim(values, places.view(*places.shape, *[1] * (values.dim() - 2)), dim=1)
