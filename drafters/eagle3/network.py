"""EAGLE-3's published layer as it serves."""

from dataclasses import dataclass

import torch
from torch import Tensor

from drafters.specblock.hand import Hand
from kernels.decoder_layer import DecoderLayer, RowPlaces
from kernels.ops import Ops


class ServedBeside:
    """As `TokenBeside.blocks`."""

    def __init__(self, hand: Hand, epsilon: float) -> None:
        self._ops, self._epsilon = hand.table, epsilon
        self._token_norm = hand.vector("input_layer.token_norm.weight")

    def __call__(self, context: Tensor, embedded: Tensor) -> Tensor:
        """# context [rows, hidden], or more before it, embedded [rows, hidden] -> [rows, 1, 2 * hidden]"""
        context = context[:, -embedded.shape[1] :]
        token = self._ops.add_rms_norm(embedded.to(context.dtype).contiguous(), None, self._token_norm, self._epsilon)
        return torch.cat([context, token], dim=-1)[:, None]


@dataclass(frozen=True, slots=True)
class LayerBeside:
    """A layer whose attention reads the token before the state, and before which no other stands.
    Legend: both = state and token, [rows, 2 * hidden]."""

    layer: DecoderLayer

    def __call__(self, both: Tensor, delta: Tensor | None, places: RowPlaces, pool: Tensor) -> Tensor:
        """All that stands behind it, for the state alone would not be what it began with. # -> [rows, hidden]"""
        query, state = self.store(both, delta, places, pool), _state(both)
        return state + self.layer.rest(query, state, places, pool)

    def store(self, both: Tensor, delta: Tensor | None, places: RowPlaces, pool: Tensor) -> Tensor:
        """As `DecoderLayer`."""
        layer, state = self.layer, _state(both)
        normed = layer.ops.add_rms_norm(state, None, layer.input_norm, layer.epsilon)
        return layer.keep(torch.cat([both[:, state.shape[1] :], normed], dim=-1), places, pool)


@dataclass(frozen=True, slots=True)
class EndBeside:
    """What the heads read, and behind it the state before the norm, on which blocks go on."""

    ops: Ops
    norm: Tensor  # [hidden]
    epsilon: float

    def __call__(self, both: Tensor, state: Tensor | None) -> Tensor:
        """# what went into `LayerBeside` and what came out of it -> [rows, 2 * hidden]"""
        assert state is not None, "there is a layer"
        return torch.cat([self.ops.add_rms_norm(state, None, self.norm, self.epsilon), state], dim=-1)


def _state(both: Tensor) -> Tensor:
    return both[:, : both.shape[1] // 2].contiguous()
