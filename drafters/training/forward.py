"""The forwards of one training step: the committed stream with first blocks at some anchors, then blocks behind those,
on the drafter's own states, as many in a row as are asked for.
The stream holds the entries later positions may attend to, `entries` for each position: causal. A block's rows attend
to the stream up to their anchor, to earlier blocks on their path, and causally within the block (section 3.3). Where
committed positions are not run the stream is their conditions' keys and values, and says nothing itself.
Legend: batch, length = tokens of the longest sequence, stream = (length - 1) * entries rows, anchors = sequences'
positions whose whole blocks are trained, block = K entries, own = rows of one block, hidden."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from drafters.specblock.model import BlockRows, Embed, InputLayer, KeysValues, SpecBlock
from drafters.training.attention import attend
from drafters.training.corpus import Batch


class MaskedAttention:
    """Rows see what a mask says of all forwards before and of their own; keeps keys and values for the next forward."""

    def __init__(self, seen: Tensor, before: Sequence[KeysValues] = ()) -> None:
        """`before`: keys and values of all forwards before, by layer; none where there was no forward."""
        self._seen = seen  # [batch, rows, rows before + rows] bool
        self._before = before
        self.layers: list[KeysValues] = []  # of these forwards and this one

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """As `Attend`."""
        query, key, value = query.float(), key.float(), value.float()  # bf16 attention is pathological on CPU
        if self._before:
            keys, values = self._before[layer]
            key, value = torch.cat([keys.float(), key], dim=2), torch.cat([values.float(), value], dim=2)
        self.layers.append((key, value))
        return attend(query, key, value, self._seen)


@dataclass(frozen=True, slots=True)
class Blocks:
    """The newest block of each anchor's path."""

    anchors: Tensor  # [batch, anchors] int64; entry k of a block, from 1, stands k positions further
    states: Tensor  # [batch, anchors, block, hidden]
    onward: Tensor  # like them, on which the next block goes on
    seen: Tensor  # [batch, anchors, block, rows] bool, the rows of all forwards so far that each entry sees
    held: Sequence[KeysValues]  # of these rows, by layer
    ahead: Tensor | None = (
        None  # [batch, anchors, further blocks, hidden], states of these where they are there already
    )


class TrainingForward:
    """Runs a drafter over whole answers at once."""

    def __init__(self, model: SpecBlock, embed: Embed) -> None:
        self._model = model
        self._embed = embed
        self._size = model.config.forward_size
        self._entries = model.config.entries
        self._own = self._size - self._entries  # entries of an anchor's block outside the stream

    def first(self, batch: Batch, anchors: Tensor, told: Tensor | None = None) -> tuple[Tensor, Blocks]:
        """The states of the first entry of every position, and the blocks of some, `anchors` [batch, anchors]; `told`
        [batch, anchors, block] bool, entries that see the true token they stand on. # -> [batch, length - 1, hidden]"""
        layer, entries = self._model.input_layer, self._entries
        context = layer.condition(batch.features[:, :-1])
        embedded = self._embed(batch.tokens[:, 1:])
        stream = layer.blocks(context, embedded, slice(entries)).flatten(1, 2)
        num_stream = stream.shape[1]
        rest = layer.blocks(at(context, anchors), at(embedded, anchors), slice(entries, self._size))
        if told is not None:
            rest = rest + self._truth(batch, anchors) * told[:, :, entries:, None]
        rest = rest.flatten(1, 2)
        device, (size, number) = anchors.device, anchors.shape
        place = torch.arange(num_stream // entries, device=device).repeat_interleave(entries).expand(size, -1)
        anchor = torch.cat([place, anchors.repeat_interleave(self._own, dim=1)], dim=1)  # [batch, rows]
        in_stream = torch.arange(entries, device=device).repeat(num_stream // entries)
        entry = torch.cat([in_stream, torch.arange(entries, self._size, device=device).repeat(number)])  # [rows]
        row, last = torch.arange(len(entry), device=device), anchor * entries + entries - 1
        ends = torch.where(row < num_stream, row, last)  # of what a row sees of the stream
        inside = pad(_blocks(number, self._own, device).tril(), (0, 0, num_stream, 0))
        seen = torch.cat([_up_to(num_stream, ends), inside.expand(size, -1, -1)], dim=2)
        attention = MaskedAttention(seen)
        rows = BlockRows(
            inputs=torch.cat([stream, rest], dim=1),
            positions=anchor + 1 + entry,
            previous=torch.where(entry == entries, last, row - (entry > 0).long()),
        )
        states, onward = self._model.parted(self._model(rows, attention))
        held = anchors[:, :, None] * entries + torch.arange(entries, device=device)
        own = torch.arange(num_stream, len(entry), device=device).view(number, self._own).expand(size, -1, -1)
        of_blocks = torch.cat([held, own], dim=2).flatten(1)  # [batch, anchors * block], among the rows
        states_of, onward_of, seen_of = (
            at(values, of_blocks).unflatten(1, (number, self._size)) for values in (states, onward, seen)
        )
        return states[:, :num_stream:entries], Blocks(anchors, states_of, onward_of, seen_of, attention.layers)

    def _truth(self, batch: Batch, anchors: Tensor) -> Tensor:
        """What the true tokens add to the entries behind an anchor's first. # -> [batch, anchors, own, hidden]"""
        layer = self._model.input_layer
        assert isinstance(layer, InputLayer), "only entries of a fused input can be told a token"
        places = anchors[:, :, None] + 1 + torch.arange(self._entries, self._size, device=anchors.device)
        tokens = batch.tokens.gather(1, places.flatten(1).clamp(max=batch.tokens.shape[1] - 1))
        return layer.token(self._embed(tokens).unflatten(1, places.shape[1:]))

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
        states = self._model(rows, MaskedAttention(torch.cat([seen, own], dim=2), first.held))
        return self._model.parted(states)[0]

    def next(self, batch: Batch, before: Blocks, cuts: Tensor) -> Blocks:
        """Blocks that start at entry `cuts` (1..K) of the ones before, on the true token there.
        # cuts [batch, anchors]"""
        place = (cuts - 1)[:, :, None, None]
        context, path = (torch.take_along_dim(values, place, dim=2)[:, :, 0] for values in (before.onward, before.seen))
        anchors = before.anchors + cuts
        return self._begin(context, _behind(batch, anchors), anchors, path, before.held)

    def _begin(
        self, context: Tensor, tokens: Tensor, anchors: Tensor, path: Tensor, held: Sequence[KeysValues]
    ) -> Blocks:
        """Blocks on the tokens behind anchors, all of whose rows are their own. # context [batch, anchors, hidden],
        path [batch, anchors, rows before] bool"""
        size, number = anchors.shape
        inputs = self._model.input_layer.blocks(context, self._embed(tokens), slice(self._size))
        own = _blocks(number, self._size, anchors.device)
        own = own if self._model.config.traits.two_way else own.tril()
        seen = torch.cat([path.repeat_interleave(self._size, dim=1), own.expand(size, -1, -1)], dim=2)
        attention = MaskedAttention(seen, held)
        row = torch.arange(number * self._size, device=anchors.device)
        rows = BlockRows(
            inputs=inputs.flatten(1, 2),
            positions=(anchors[:, :, None] + 1 + torch.arange(self._size, device=anchors.device)).flatten(1),
            previous=(row - (row % self._size > 0).long()).expand(size, -1),
        )
        found = *self._model.parted(self._model(rows, attention)), seen
        states, onward, seen = (values.unflatten(1, (number, self._size)) for values in found)
        return Blocks(anchors, states, onward, seen, attention.layers)


class InjectedForward(TrainingForward):
    """Of kinds whose committed positions run no layer."""

    def first(self, batch: Batch, anchors: Tensor, told: Tensor | None = None) -> tuple[Tensor, Blocks]:
        """As of `TrainingForward`; no position has a state of its own. # -> [batch, 0, hidden]"""
        assert told is None, "entries behind the first see no token"
        context = self._model.input_layer.condition(batch.features[:, :-1])
        positions = torch.arange(context.shape[1], device=anchors.device).expand(context.shape[:2])
        held = self._model.injected(context, positions)
        path = _up_to(context.shape[1], anchors)
        return context[:, :0], self._begin(at(context, anchors), _behind(batch, anchors), anchors, path, held)

    def beside(self, batch: Batch, anchors: Tensor, tokens: Tensor, first: Blocks) -> Tensor:
        """As of `TrainingForward`."""
        context = self._model.input_layer.condition(at(batch.features, anchors))
        positions, known = batch.tokens.shape[1] - 1, first.seen.shape[3]
        path = pad(_up_to(positions, anchors), (0, known - positions))
        return self._begin(context, tokens, anchors, path, first.held).states[:, :, 0]


class ConditionedForward(InjectedForward):
    """Of kinds whose layers run once in a tree: each further block is the next state, told the true token before it."""

    def first(self, batch: Batch, anchors: Tensor, told: Tensor | None = None) -> tuple[Tensor, Blocks]:
        """As of `InjectedForward`."""
        none, layers = super().first(batch, anchors, told)
        behind = anchors[:, :, None] + torch.arange(self._size, device=anchors.device)
        embedded = self._embed(_behind(batch, behind.flatten(1))).view_as(layers.states)
        assert self._model.path_head is not None
        told = self._model.path_head(layers.states, embedded)
        return none, replace(layers, states=told[:, :, :1], onward=told[:, :, :1], ahead=told[:, :, 1:])

    def beside(self, batch: Batch, anchors: Tensor, tokens: Tensor, first: Blocks) -> Tensor:
        """As of `TrainingForward`."""
        assert self._model.path_head is not None
        states: Tensor = self._model.path_head(super().beside(batch, anchors, tokens, first), self._embed(tokens))
        return states

    def next(self, batch: Batch, before: Blocks, cuts: Tensor) -> Blocks:
        """As of `TrainingForward`; cuts are 1."""
        assert before.ahead is not None
        states, ahead = before.ahead[:, :, :1], before.ahead[:, :, 1:]
        return replace(before, anchors=before.anchors + cuts, states=states, onward=states, ahead=ahead)


def forward_of(model: SpecBlock, embed: Embed) -> TrainingForward:
    """That of the model's kind."""
    if model.config.traits.conditioned:
        return ConditionedForward(model, embed)
    return (TrainingForward if model.config.runs_context else InjectedForward)(model, embed)


def _behind(batch: Batch, anchors: Tensor) -> Tensor:
    """The true token behind each anchor, any where the text ends. # [batch, anchors] -> same, int64"""
    return batch.tokens.gather(1, (anchors + 1).clamp(max=batch.tokens.shape[1] - 1))


def _up_to(num_stream: int, last: Tensor) -> Tensor:
    """Who sees which row of the stream. # last [batch, rows] -> [batch, rows, stream] bool"""
    return torch.arange(num_stream, device=last.device) <= last[:, :, None]


def _blocks(number: int, size: int, device: torch.device) -> Tensor:
    """Which rows are of the same block. # -> [number * size, number * size] bool"""
    blocks = torch.arange(number, device=device).repeat_interleave(size)
    return blocks[:, None] == blocks


def at(values: Tensor, places: Tensor) -> Tensor:
    """The values there. # values [batch, length, width], places [batch, anchors] -> [batch, anchors, width]"""
    return torch.take_along_dim(values, places[:, :, None], dim=1)
