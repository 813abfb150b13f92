"""New weights for a model whose linear layers are packed: reordered beside the engine, exchanged in no time.

What is exchanged has the bits that packing the same weights at load would have given. Knows no drafter.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from service.engine.linear import FusedLinears, LinearPart, PackedLinear, packed


@dataclass(frozen=True, slots=True)
class _Place:
    """One packed product and the names of the layers that it holds, in order."""

    product: PackedLinear
    names: tuple[str, ...]

    def joined(self, weights: Mapping[str, Tensor], kind: str) -> Tensor:
        parts = [weights[f"{name}.{kind}"] for name in self.names]
        return torch.cat(parts) if len(parts) > 1 else parts[0]


def repacking(model: nn.Module) -> Callable[[Mapping[str, Tensor]], Callable[[], None]]:
    """How weights, by their names before anything was packed, reach this model.

    The first call makes them ready and may come from any thread; what it returns is for the thread that computes.
    """
    places = _places(model)
    biased = {name for place in places for name in place.names if place.product.bias is not None}
    plain = {name: value for name, value in model.named_parameters() if name.removesuffix(".bias") not in biased}

    @torch.no_grad()
    def prepare(weights: Mapping[str, Tensor]) -> Callable[[], None]:
        ready = [packed(place.joined(weights, "weight")) for place in places]
        biases = [None if place.product.bias is None else place.joined(weights, "bias") for place in places]

        @torch.no_grad()
        def write() -> None:
            for place, weight, bias in zip(places, ready, biases, strict=True):
                place.product.packed = weight
                if place.product.bias is not None and bias is not None:
                    place.product.bias.copy_(bias)
            for name, value in plain.items():
                value.copy_(weights[name])

        return write

    return prepare


def _places(model: nn.Module) -> list[_Place]:
    single = [_Place(module, (name,)) for name, module in model.named_modules() if isinstance(module, PackedLinear)]
    together: dict[FusedLinears, dict[int, str]] = {}
    for name, module in model.named_modules():
        if isinstance(module, LinearPart):
            together.setdefault(module.fused, {})[module.index] = name
    return single + [_joined(group, names) for group, names in together.items()]


def _joined(group: FusedLinears, names: Mapping[int, str]) -> _Place:
    assert isinstance(group.product, PackedLinear), "drafters are fused only where they are packed"
    return _Place(group.product, tuple(names[index] for index in sorted(names)))
