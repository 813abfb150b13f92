"""The network of published EAGLE-3 weights: one layer whose attention reads the token's embedding beside the state.
Each block is one position and continues from the state before the output norm.
Legend: rows, hidden; pair = [token or normed state; state], [rows, 2 * hidden]."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from drafters.specblock.config import SpecBlockConfig
from drafters.specblock.layers import DrafterDecoder, Input, LayerShape
from drafters.specblock.structure import ServedInput, ServedLayer, ServedOutput, Structure, WeightPlanner, normed_taps
from kernels.decoder_layer import DecoderLayer, RowPlaces
from kernels.layers import RunLayers, plan_layers
from kernels.ops import Ops


class TokenAndState(Input):
    """Puts the condition and the normed token side by side: [state; token]."""

    def __init__(self, config: SpecBlockConfig, shape: LayerShape) -> None:
        super().__init__()
        self.condition_proj = nn.Linear(config.features_size, shape.hidden, bias=False)
        self.token_norm = nn.RMSNorm(shape.hidden, eps=shape.epsilon)
        self.feature_norms = nn.ModuleList(nn.RMSNorm(shape.hidden, eps=shape.epsilon) for _ in normed_taps(config))

    def blocks(self, context: Tensor, embedded: Tensor, entries: slice) -> Tensor:
        """Return [state; token] of the one entry. # context, embedded [..., hidden] -> [..., entries, 2 * hidden]"""
        token = self.token_norm(embedded.to(self.token_norm.weight.dtype))
        return torch.cat([context.to(token.dtype), token], dim=-1)[..., None, :][..., entries, :]


@dataclass(frozen=True, slots=True)
class TokenAndStateLayer:
    """A decoder layer whose attention reads the token before the state; the only one of its network."""

    layer: DecoderLayer

    def __call__(self, pair: Tensor, delta: Tensor | None, places: RowPlaces, pool: Tensor) -> Tensor:
        """Run the layer; the result holds the state, not only what is added to it.
        # pair [rows, 2 * hidden] -> [rows, hidden]"""
        query, state = self.store(pair, delta, places, pool), _state(pair)
        return state + self.layer.rest(query, state, places, pool)

    def store(self, pair: Tensor, delta: Tensor | None, places: RowPlaces, pool: Tensor) -> Tensor:
        """Write keys and values to the pool and return the queries. # pair [rows, 2 * hidden] -> [rows, heads, dim]"""
        layer, state = self.layer, _state(pair)
        normed = layer.add_norm(state, None, layer.norms.attention_input)
        return layer.keep(torch.cat([pair[:, state.shape[1] :], normed], dim=-1), places, pool)


class AutoregressiveStructure(Structure):
    """EAGLE-3 as its authors publish it."""

    def input_layer(self) -> Input:
        return TokenAndState(self.config, self.shape)

    def decoder(self) -> DrafterDecoder:
        return DrafterDecoder(self.shape, self.config.num_layers, self.config.hidden_size)

    def output(self, states: Tensor, hidden: Tensor) -> Tensor:
        """Append the state before the output norm. # both [batch, rows, hidden] -> [batch, rows, 2 * hidden]"""
        return torch.cat([states, hidden], dim=-1)

    def served_input(self, planner: WeightPlanner) -> ServedInput:
        token_norm = planner.norm("input_layer.token_norm.weight", self.shape.epsilon)

        def blocks(context: Tensor, embedded: Tensor) -> Tensor:
            state = context[:, -embedded.shape[1] :]  # of a wider context its end is the state to continue from
            return torch.cat([state, token_norm(embedded.to(state.dtype))], dim=-1)[:, None]

        return blocks

    def served_layers(self, planner: WeightPlanner) -> Sequence[ServedLayer]:
        layers = super().served_layers(planner)
        return [TokenAndStateLayer(layer) for layer in layers if isinstance(layer, DecoderLayer)]

    def layer_planner(self, ops: Ops) -> Callable[[Sequence[ServedLayer], Sequence[Tensor]], RunLayers]:
        """Return the plan of layers one by one, on pools [2, places, kv_heads, dim]."""
        return plan_layers

    def served_output(self, planner: WeightPlanner) -> ServedOutput:
        norm = planner.norm("decoder.norm.weight", self.shape.epsilon)

        def end(pair: Tensor, state: Tensor | None) -> Tensor:
            assert state is not None, "there is a layer"
            return torch.cat([norm(state), state], dim=-1)

        return end


def _state(pair: Tensor) -> Tensor:
    """# pair [rows, 2 * hidden] -> [rows, hidden]"""
    return pair[:, : pair.shape[1] // 2].contiguous()
