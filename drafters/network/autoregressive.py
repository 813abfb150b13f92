"""The network of published EAGLE-3 weights: the first layer's attention reads the token's embedding beside the state.
Legend: rows, hidden; pair = [token or normed state; state], [rows, 2 * hidden]."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from drafters.network.config import SpecBlockConfig
from drafters.network.layers import DrafterDecoder, Input, LayerShape
from drafters.network.structure import ServedInput, ServedLayer, Structure, WeightPlanner, feature_norms
from kernels.decoder_layer import DecoderLayer, RowPlaces
from kernels.layers import RunLayers, plan_layers
from kernels.ops import Ops


class TokenAndState(Input):
    """Puts the condition and the normed token side by side: [state; token]."""

    def __init__(self, config: SpecBlockConfig, shape: LayerShape) -> None:
        super().__init__()
        self.condition_proj = nn.Linear(config.features_size, shape.hidden, bias=False)
        self.token_norm = nn.RMSNorm(shape.hidden, eps=shape.epsilon)
        self.feature_norms = feature_norms(config, shape.epsilon)

    def blocks(self, context: Tensor, embedded: Tensor, entries: slice) -> Tensor:
        """Return [state; token] of each entry. # context, embedded [..., hidden] -> [..., entries, 2 * hidden]"""
        token = self.token_norm(embedded.to(self.token_norm.weight.dtype))
        return torch.cat([context.to(token.dtype), token], dim=-1)[..., None, :][..., entries, :]


@dataclass(frozen=True, slots=True)
class TokenAndStateLayer:
    """The first layer, whose attention reads the token before the state."""

    layer: DecoderLayer
    normed_residual: bool

    def __call__(self, pair: Tensor, delta: Tensor | None, places: RowPlaces, pool: Tensor) -> Tensor:
        """Run the layer; the result holds the state, not only what is added to it.
        # pair [rows, 2 * hidden] -> [rows, hidden]"""
        normed, state = self._normed(pair), _state(pair)
        residual = normed.clone() if self.normed_residual else state
        query = self._keep(pair, normed, places, pool)
        return residual + self.layer.rest(query, residual, places, pool)

    def store(self, pair: Tensor, delta: Tensor | None, places: RowPlaces, pool: Tensor) -> Tensor:
        """Write keys and values to the pool and return the queries. # pair [rows, 2 * hidden] -> [rows, heads, dim]"""
        return self._keep(pair, self._normed(pair), places, pool)

    def _normed(self, pair: Tensor) -> Tensor:
        """# pair [rows, 2 * hidden] -> [rows, hidden]"""
        return self.layer.add_norm(_state(pair), None, self.layer.norms.attention_input)

    def _keep(self, pair: Tensor, normed: Tensor, places: RowPlaces, pool: Tensor) -> Tensor:
        """# pair [rows, 2 * hidden], normed [rows, hidden] -> queries [rows, heads, dim]"""
        return self.layer.keep(torch.cat([pair[:, normed.shape[1] :], normed], dim=-1), places, pool)


@dataclass(frozen=True, slots=True)
class StateLayer:
    """A further layer; what it gets beside the pair is the whole state, and so is what it returns."""

    layer: DecoderLayer

    def __call__(self, pair: Tensor, state: Tensor | None, places: RowPlaces, pool: Tensor) -> Tensor:
        """Run the layer. # state [rows, hidden] -> like state"""
        assert state is not None, "a layer comes before"
        return state + self.layer(state, None, places, pool)

    def store(self, pair: Tensor, state: Tensor | None, places: RowPlaces, pool: Tensor) -> Tensor:
        """Write keys and values to the pool and return the queries. # state [rows, hidden] -> [rows, heads, dim]"""
        assert state is not None, "a layer comes before"
        return self.layer.store(state, None, places, pool)


class AutoregressiveStructure(Structure):
    """EAGLE-3 and EAGLE-3.1 as their authors publish them."""

    def input_layer(self) -> Input:
        return TokenAndState(self.config, self.shape)

    def decoder(self) -> DrafterDecoder:
        config = self.config
        return DrafterDecoder(self.shape, config.num_layers, config.hidden_size, normed_residual=config.normed_residual)

    def served_input(self, planner: WeightPlanner) -> ServedInput:
        token_norm = planner.norm("input_layer.token_norm.weight", self.shape.epsilon)

        def blocks(context: Tensor, embedded: Tensor) -> Tensor:
            state = context[:, -embedded.shape[1] :]  # of a wider context its end is the state to continue from
            return torch.cat([state, token_norm(embedded.to(state.dtype))], dim=-1)[:, None]

        return blocks

    def served_layers(self, planner: WeightPlanner) -> Sequence[ServedLayer]:
        first, *others = [layer for layer in super().served_layers(planner) if isinstance(layer, DecoderLayer)]
        return [TokenAndStateLayer(first, self.config.normed_residual), *map(StateLayer, others)]

    def layer_planner(self, ops: Ops) -> Callable[[Sequence[ServedLayer], Sequence[Tensor]], RunLayers]:
        """Return the plan of layers one by one, on pools [2, places, kv_heads, dim]."""
        return plan_layers

    def served_output(self, planner: WeightPlanner) -> Callable[[Tensor, Tensor | None], Tensor]:
        end = super().served_output(planner)

        def of_state(pair: Tensor, state: Tensor | None) -> Tensor:
            assert state is not None, "there is a layer"
            return end(state, None)

        return of_state


def _state(pair: Tensor) -> Tensor:
    """# pair [rows, 2 * hidden] -> [rows, hidden]"""
    return pair[:, : pair.shape[1] // 2].contiguous()
