"""The forwards of one training step: the committed stream with first blocks at some anchors, then one block more.

Legend: batch, length = tokens of the longest sequence, stream = (length - 1) * entries rows, anchors = sequences'
positions whose whole blocks are trained, block = K entries, hidden.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from drafters.specblock.model import BlockRows, Embed, SpecBlock
from drafters.training.attention import NextBlockAttention, StreamAttention
from drafters.training.corpus import Batch


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
