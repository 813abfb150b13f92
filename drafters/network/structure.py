"""The parts of a block network, each as it is trained and as it serves: input, decoder layers, output norm. A kind
brings its input and replaces other parts where it differs.
Legend: rows = entries of all sequences of a forward, hidden, block = entries of one forward's block."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from drafters.network.config import DrafterConfig
from drafters.network.layers import DrafterDecoder, Input, LayerShape
from kernels.decoder_layer import DecoderLayer, RowPlaces
from kernels.layers import Product, RunLayers
from kernels.ops import Ops

ServedInput = Callable[[Tensor, Tensor], Tensor]
"""`Input.blocks` of all entries while serving: context and embedded [rows, hidden] -> [rows, block, width]."""

ServedOutput = Callable[[Tensor, Tensor | None], Tensor]
"""States from the last layer's input [rows, width] and its residual update [rows, hidden]."""

PathHeadOp = Callable[[Tensor, Tensor], Tensor]
"""States conditioned on the token before their position: states, embedded [..., hidden] -> [..., hidden]."""


class ServedLayer(Protocol):
    """A decoder layer while serving."""

    def __call__(self, hidden: Tensor, delta: Tensor | None, places: RowPlaces, pool: Tensor, /) -> Tensor:
        """Run the layer. # hidden [rows, width], delta [rows, hidden] -> [rows, hidden]"""

    def store(self, hidden: Tensor, delta: Tensor | None, places: RowPlaces, pool: Tensor, /) -> Tensor:
        """Write the rows' keys and values to the pool and compute nothing else. # hidden [rows, width]"""


@dataclass(slots=True)
class WeightPlanner:
    """Gives weights to the ops of their device. `kept` lists the tensors that the ops read, in order; they are copies
    if they are to be overwritten in place later."""

    weights: Mapping[str, Tensor]
    ops: Ops
    copies: bool
    kept: list[Tensor] = field(default_factory=list)

    def tensor(self, value: Tensor) -> Tensor:
        """Return the tensor that ops read. # value [...] -> [...]"""
        value = value.detach()
        if self.copies:
            value = value.clone()
            self.kept.append(value)
        return value

    def norm(self, name: str, epsilon: float) -> Callable[[Tensor], Tensor]:
        """Plan the RMS norm with a weight. # -> rows [..., width] to the same shape"""
        add_rms_norm, weight = self.ops.add_rms_norm, self.tensor(self.weights[name])
        return lambda x: add_rms_norm(x.contiguous(), None, weight, epsilon)

    def product(self, weight: Tensor, bias: Tensor | None = None) -> Product:
        """Plan the product with a weight. # weight [out, in], bias [out]"""
        return self.ops.plan_linear(self.tensor(weight), None if bias is None else self.tensor(bias))

    def layer(self, number: int, shape: LayerShape, window: int) -> DecoderLayer:
        """Plan a decoder layer; `window`: entries back that its attention sees."""
        prefix = f"decoder.layers.{number}."
        own = {name.removeprefix(prefix): value for name, value in self.weights.items() if name.startswith(prefix)}
        return DecoderLayer.of(
            {name: self.tensor(value) if "norm" in name else value.detach() for name, value in own.items()},
            Ops(**{**vars(self.ops), "plan_linear": self.product}),
            shape.family,
            query_heads=shape.query_heads,
            epsilon=shape.epsilon,
            scale=shape.head_dim**-0.5,
            window=window,
        )


class Structure(ABC):
    """Makes the parts of a kind's network, and names the forwards that run it."""

    serving: ClassVar[Any]  # a `Forward` of serving.py
    training: ClassVar[Any]  # a `TrainingForward` of training/forward.py

    def __init__(self, config: DrafterConfig) -> None:
        self.config, self.shape = config, LayerShape.of(config.target)

    @abstractmethod
    def input_layer(self) -> Input:
        """Make the input layer, which computes the first inputs of blocks."""

    @abstractmethod
    def served_input(self, planner: WeightPlanner) -> ServedInput:
        """Plan `input_layer` for serving."""

    def decoder(self) -> DrafterDecoder:
        """Make the layers and the output norm."""
        return DrafterDecoder(self.shape, self.config.num_layers)

    def path_head(self) -> nn.Module | None:
        """Make the module that conditions states on the token before their position; None: the network has none."""
        return None

    def injection_norm(self, layer: Input) -> nn.Module | None:
        """Return the norm of conditions before keys and values are made of them; None: each layer's own."""
        return None

    def output(self, states: Tensor, hidden: Tensor) -> Tensor:
        """Return the network's output, of states after the output norm and before it.
        # both [batch, rows, hidden] -> [batch, rows, width]"""
        return torch.cat([states, hidden], dim=-1) if self.config.traits.continues_raw else states

    def served_layers(self, planner: WeightPlanner) -> Sequence[ServedLayer]:
        """Plan the decoder layers for serving."""
        window = self.config.trained_length * self.config.traits.entries
        return [planner.layer(number, self.shape, window) for number in range(self.config.num_layers)]

    def injected_into(self, layers: Sequence[ServedLayer], planner: WeightPlanner) -> Sequence[ServedLayer]:
        """Plan how layers store keys and values of conditions."""
        return layers

    def layer_planner(self, ops: Ops) -> Callable[[Sequence[ServedLayer], Sequence[Tensor]], RunLayers]:
        """Return the planner that joins layers and their pools, [2, places, kv_heads, dim] each, in one call."""
        return ops.plan_layers

    def served_output(self, planner: WeightPlanner) -> ServedOutput:
        """Plan the output norm for serving."""
        norm, ops, epsilon = planner.tensor(planner.weights["decoder.norm.weight"]), planner.ops, self.shape.epsilon
        if not self.config.traits.continues_raw:
            return lambda hidden, delta: ops.add_rms_norm(hidden, delta, norm, epsilon)
        # The op adds `delta` to `hidden` in place, so that it holds the state before the norm.
        return lambda hidden, delta: torch.cat([ops.add_rms_norm(hidden, delta, norm, epsilon), hidden], dim=-1)

    def served_path_head(self, planner: WeightPlanner) -> PathHeadOp | None:
        """Plan `path_head` for serving."""
        return None


def feature_norms(config: DrafterConfig, epsilon: float) -> nn.ModuleList:
    """Make the norms of tapped features."""
    parts = config.traits.normed_parts
    return nn.ModuleList(nn.RMSNorm(config.features_size // parts, eps=epsilon) for _ in range(parts))
