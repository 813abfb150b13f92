"""How weights get into the ops of their device, to be read there or to be overwritten later."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from drafters.specblock.model import LayerShape
from kernels.decoder_layer import DecoderLayer
from kernels.linear import Product
from kernels.ops import Ops


@dataclass(slots=True)
class Hand:
    """Hands weights to ops; `kept` are the tensors that ops then read, in order, as copies, if they are to be
    overwritten later."""

    weights: Mapping[str, Tensor]
    table: Ops
    keeps: bool
    kept: list[Tensor] = field(default_factory=list)

    def tensor(self, value: Tensor) -> Tensor:
        value = value.detach()
        if self.keeps:
            value = value.clone()
            self.kept.append(value)
        return value

    def vector(self, name: str) -> Tensor:
        return self.tensor(self.weights[name])

    def product(self, weight: Tensor, bias: Tensor | None = None) -> Product:
        return self.table.plan_linear(self.tensor(weight), None if bias is None else self.tensor(bias))

    def layer(self, number: int, shape: LayerShape, window: int) -> DecoderLayer:
        prefix = f"decoder.layers.{number}."
        own = {name.removeprefix(prefix): value for name, value in self.weights.items() if name.startswith(prefix)}
        return DecoderLayer.of(
            {name: self.tensor(value) if "norm" in name else value.detach() for name, value in own.items()},
            Ops(**{**vars(self.table), "plan_linear": self.product}),
            query_heads=shape.query_heads,
            epsilon=shape.epsilon,
            scale=shape.head_dim**-0.5,
            window=window,
        )
