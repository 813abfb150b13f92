"""Linear layers of modules as the product of their device."""

import torch
from torch import Tensor, nn

from kernels.linear import Product
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


@torch.no_grad()
def replace_linears(model: nn.Module, table: Ops) -> int:
    """Replace every `nn.Linear` below `model` by its product; returns how many. A tied embedding keeps its weight."""
    places = [
        (parent, name, child)
        for parent in list(model.modules())
        for name, child in parent.named_children()
        if type(child) is nn.Linear
    ]
    for parent, name, linear in places:
        setattr(parent, name, PlannedLinear(table.plan_linear(linear.weight, linear.bias)))
    return len(places)
