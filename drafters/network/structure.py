"""The parts of a block network (input, decoder layers, output norm), each in its form for training and for serving. The
`Structure` of a kind defines the input, and replaces other parts if they differ.
Legend: rows = entries of all sequences of a forward, hidden, block = entries of one forward's block."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from drafters.network.config import DrafterConfig
from drafters.network.layers import DrafterDecoder, Input, LayerShape
from kernels.decoder_layer import DecoderLayer, RowPlaces
from kernels.experts import Experts, StackedWeight
from kernels.layers import Product, Weight
from kernels.ops import Ops
from kernels.pieces import Pieces

ServedInput = Callable[[Tensor, Tensor], Tensor]
"""Serving form of `Input.blocks`, for all entries: context and embedded [rows, hidden] -> [rows, block, width]."""

ServedOutput = Callable[[Tensor, Tensor | None], Tensor]
"""Serving form of the output norm: the last layer's input and its residual update, both [rows, hidden] -> states
[rows, width]."""

PathHeadOp = Callable[[Tensor, Tensor], Tensor]
"""Conditions states on the token before their position: states, embedded [..., hidden] -> [..., hidden]."""


class ServedLayer(Protocol):
    """Serving form of a decoder layer."""

    def __call__(self, hidden: Tensor, delta: Tensor | None, places: RowPlaces, pool: Tensor, /) -> Tensor:
        """Run the layer on hidden + delta, and return its residual update. # both [rows, hidden] -> [rows, hidden]"""

    def store(self, hidden: Tensor, delta: Tensor | None, places: RowPlaces, pool: Tensor, /) -> Tensor:
        """Write the rows' keys and values to the pool, and compute nothing further. # hidden [rows, hidden]"""


@dataclass(frozen=True, slots=True)
class ServedNorm:
    """Serving form of an RMS norm."""

    weight: Tensor  # [width]
    epsilon: float
    ops: Ops

    def __call__(self, x: Tensor) -> Tensor:
        """Norm the last dimension. # x [..., width] -> like x"""
        return self.ops.add_rms_norm(x.contiguous(), None, self.weight, self.epsilon)


@dataclass(frozen=True, slots=True)
class ServedFusedInput:
    """Serving form of the input layer of fused condition, token and position query (`FusedInput` of SpecBlock)."""

    condition_norm: ServedNorm
    token_norm: ServedNorm
    known: Product  # of condition and token
    queries: Tensor  # [block, hidden], the queries' part of all inputs
    broadcast: bool

    def __call__(self, context: Tensor, embedded: Tensor) -> Tensor:
        """Compute the inputs of all entries; see `ServedInput`. # context, embedded [rows, hidden or more]"""
        state = context[:, -self.queries.shape[1] :]  # of a wider context the state at which the block starts
        normed = [self.condition_norm(state), self.token_norm(embedded.to(context.dtype))]
        seen = self.known(torch.cat(normed, dim=-1))[:, None]
        if self.broadcast:
            return seen + self.queries
        fused = self.queries.expand(len(seen), -1, -1).clone()
        fused[:, :1] += seen
        return fused


@dataclass(slots=True)
class WeightPlanner:
    """Binds weights to the ops of their device. `kept` lists the tensors that the ops read, in order, if `copies` is
    set: copies that later weights overwrite in place."""

    weights: Mapping[str, Any]  # tensors, or `QuantisedWeight` and `QuantisedStack`
    ops: Ops
    copies: bool
    kept: list[Tensor] = field(default_factory=list)

    def tensor(self, value: Any) -> Any:
        """Return the tensor, or the quantised weight, that the ops will read. # value [...] -> [...]"""
        if not isinstance(value, Tensor):
            return value
        value = value.detach()
        if self.copies:
            value = value.clone()
            self.kept.append(value)
        return value

    def norm(self, name: str, epsilon: float) -> "ServedNorm":
        """Return the RMS norm with the weight of that name."""
        return ServedNorm(self.tensor(self.weights[name]), epsilon, self.ops)

    def product(self, weight: Weight, bias: Tensor | None = None, pieces: Pieces | None = None) -> Product:
        """Return the matrix product with a weight. # weight [out, in], bias [out]"""
        return self.ops.plan_linear(self.tensor(weight), None if bias is None else self.tensor(bias), pieces)

    def _experts(self, gate_up: StackedWeight, down: StackedWeight, *others: Any) -> Experts:
        """Plan the op of that name. # gate_up [experts, 2 * width, in], down [experts, out, width]"""
        return self.ops.plan_experts(self.tensor(gate_up), self.tensor(down), *others)

    def layer(self, number: int, shape: LayerShape, window: int) -> DecoderLayer:
        """Return decoder layer `number`. `window`: number of previous entries to which it attends."""
        prefix = f"decoder.layers.{number}."
        own = {name.removeprefix(prefix): value for name, value in self.weights.items() if name.startswith(prefix)}
        vectors = {name for name, value in own.items() if len(value.shape) == 1 and not name.endswith(".bias")}
        plain = replace(self, copies=False)
        return DecoderLayer.of(
            {name: (self if name in vectors else plain).tensor(value) for name, value in own.items()},
            Ops(**{**vars(self.ops), "plan_linear": self.product, "plan_experts": self._experts}),
            replace(shape.spec, mixer=replace(shape.spec.attention, window=window)),
            epsilon=shape.epsilon,
        )


class Structure(ABC):
    """Builds the parts of a kind's network for training and serving, and names its forwards."""

    serving: ClassVar[Any]  # class of its `Forward` (serving.py)
    training: ClassVar[Any]  # class of its `TrainingForward` (training/forward.py)

    def __init__(self, config: DrafterConfig) -> None:
        self.config, self.shape = config, LayerShape.of(config.target)

    @abstractmethod
    def input_layer(self) -> Input:
        """Build the input layer, which computes the first layer's input of blocks."""

    @abstractmethod
    def served_input(self, planner: WeightPlanner) -> ServedInput:
        """Build the serving form of `input_layer`, with its weights bound to the planner's ops."""

    def decoder(self) -> DrafterDecoder:
        """Build the decoder layers and the output norm."""
        return DrafterDecoder(self.shape, self.config.num_layers)

    def path_head(self) -> nn.Module | None:
        """Build the module that conditions states on the token before their position. Returns None if there is none."""
        return None

    def injection_norm(self, layer: Input) -> nn.Module | None:
        """Return the norm of conditions before the projections to keys and values. Returns None if each layer uses its
        own."""
        return None

    def output(self, states: Tensor, hidden: Tensor) -> Tensor:
        """Return the network's output from the states after and before the output norm.
        # both [batch, rows, hidden] -> [batch, rows, width]"""
        return torch.cat([states, hidden], dim=-1) if self.config.traits.continues_raw else states

    def served_layers(self, planner: WeightPlanner) -> Sequence[ServedLayer]:
        """Build the serving form of the decoder layers."""
        window = self.config.trained_length * self.config.traits.entries
        return [planner.layer(number, self.shape, window) for number in range(self.config.num_layers)]

    def injected_into(self, layers: Sequence[ServedLayer], planner: WeightPlanner) -> Sequence[ServedLayer]:
        """Return the layers that store the keys and values of conditions, by default `layers`."""
        return layers

    def served_output(self, planner: WeightPlanner) -> ServedOutput:
        """Build the serving form of the output norm."""
        norm, ops, epsilon = planner.tensor(planner.weights["decoder.norm.weight"]), planner.ops, self.shape.epsilon
        if not self.config.traits.continues_raw:
            return lambda hidden, delta: ops.add_rms_norm(hidden, delta, norm, epsilon)
        # The op adds `delta` to `hidden` in place, so that it holds the state before the norm.
        return lambda hidden, delta: torch.cat([ops.add_rms_norm(hidden, delta, norm, epsilon), hidden], dim=-1)

    def served_path_head(self, planner: WeightPlanner) -> PathHeadOp | None:
        """Build the serving form of `path_head`. Returns None if there is none."""
        return None


def feature_norms(config: DrafterConfig, epsilon: float) -> nn.ModuleList:
    """Build the norms of tapped features, one per normed part; empty without norms."""
    parts = config.traits.normed_parts
    return nn.ModuleList(nn.RMSNorm(config.features_size // parts, eps=epsilon) for _ in range(parts))
