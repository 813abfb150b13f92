"""Linear layers of modules as the product of their device."""

import torch
from torch import Tensor, nn

from kernels.linear import Product, QuantisedWeight, Weight
from kernels.ops import Ops


class PlannedLinear(nn.Module):
    """`nn.Linear` whose weights stand in a product, in a form of their own."""

    def __init__(self, product: Product) -> None:
        super().__init__()
        self.product = product

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in_features] -> [..., out_features]"""
        return self.product(x)

    __call__ = forward  # nobody hooks a product, and looking for hooks costs as much as some of them


class QuantisedLinear(nn.Module):
    """`nn.Linear` on weights in blocks, which it reads as they are worth: slow, and what a product is compared with."""

    def __init__(self, weight: QuantisedWeight, bias: nn.Parameter | None) -> None:
        super().__init__()
        self.weight: QuantisedWeight = weight
        self.bias: nn.Parameter | None = bias

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in_features] -> [..., out_features]"""
        return nn.functional.linear(x, self.weight.dense(), self.bias)

    def _save_to_state_dict(self, destination: dict[str, Tensor], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight"] = self.weight.dense()


class QuantisedEmbedding(nn.Module):
    """`nn.Embedding` on weights in blocks."""

    def __init__(self, weight: QuantisedWeight) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens [...] int64 -> [..., hidden]"""
        return self.weight.lookup(tokens)


def weights_of(module: nn.Module) -> dict[str, Weight]:
    """All weights below a module by name, those in blocks too."""
    found: dict[str, Weight] = dict(module.named_parameters())
    for name, child in module.named_modules():
        if isinstance(child, QuantisedLinear | QuantisedEmbedding):
            found[f"{name}.weight".removeprefix(".")] = child.weight
    return found


def num_bytes(weight: Weight) -> int:
    """Of memory."""
    return weight.nbytes if isinstance(weight, Tensor) else weight.num_bytes


@torch.no_grad()
def replace_linears(model: nn.Module, table: Ops) -> int:
    """Replace every linear layer below `model` by its product; returns how many. A tied embedding keeps its weight."""
    places = [
        (parent, name, child)
        for parent in list(model.modules())
        for name, child in parent.named_children()
        if isinstance(child, QuantisedLinear) or type(child) is nn.Linear
    ]
    for parent, name, linear in places:
        weights = weights_of(linear)
        bias = weights.get("bias")
        assert not isinstance(bias, QuantisedWeight), "only matrices are quantised"
        setattr(parent, name, PlannedLinear(table.plan_linear(weights["weight"], bias)))
    return len(places)
