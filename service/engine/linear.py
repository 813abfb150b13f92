"""Linear layers as devices like them: one product for layers that read the same input, on a CPU with bf16 arithmetic
weights reordered once, on other devices the table's product, whose rows do not depend on their company.

oneDNN otherwise reorders a bf16 weight at every call, which costs more than the product itself when there are few
rows. Fusing changes no sum: each output column is a product of its own.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional

from kernels import ops

FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Names under which decoders keep layers that are applied to one and the same tensor, one after the other."""

FEWEST_ROWS = 4
"""oneDNN's bf16 products of one or two rows take up to a third longer than those of four to six."""

_FEW_ROWS = 64
_ROW_STEP = 16
"""oneDNN compiles a product anew for every number of rows, which takes as long as several such products, and remembers
about a thousand of them. Prompts come in all lengths: above a few rows, only multiples of this are asked for."""

_MOST_TILED_ROWS = 32
"""With AMX, how oneDNN sums a row depends on how many rows there are as soon as there are more than this: verified text
could differ from plain text in near-ties. More rows are several products."""


def chosen_isa() -> str:
    """The most that oneDNN's products may use, by its own variable."""
    return os.environ.get("ONEDNN_MAX_CPU_ISA", "all")


@cache
def has_tiles() -> bool:
    """Whether oneDNN may multiply bf16 by AMX: many times as fast for many rows."""
    limit = chosen_isa().upper()
    return torch.cpu._is_amx_tile_supported() and (limit in ("ALL", "DEFAULT") or "AMX" in limit)


def packed(weight: Tensor) -> Tensor:
    """A weight in oneDNN's blocked layout, opaque to everything but its products."""
    reordered: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), None)
    return reordered


class PackedLinear(nn.Module):
    """`nn.Linear` in bf16 on CPU whose weight is stored in oneDNN's blocked layout."""

    layers: tuple[str, ...] = ()  # names of the layers that it holds, in order

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.bias = None if bias is None else bias.detach()
        self.packed = packed(weight)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in_features] bf16 -> [..., out_features] bf16"""
        rows = x.numel() // x.shape[-1]
        if has_tiles() and rows > _MOST_TILED_ROWS:
            parts = [self._product(part) for part in x.flatten(0, -2).split(_MOST_TILED_ROWS)]
            return torch.cat(parts).view(*x.shape[:-1], -1)
        missing = -rows % _ROW_STEP if rows > _FEW_ROWS else 0
        if missing:
            return self._product(functional.pad(x.flatten(0, -2), (0, 0, 0, missing)))[:rows].view(*x.shape[:-1], -1)
        return self._product(x)

    def _product(self, x: Tensor) -> Tensor:
        out: Tensor = torch.ops.mkldnn._linear_pointwise.default(x, self.packed, self.bias, "none", [], "")
        return out


class PlannedLinear(nn.Module):
    """`nn.Linear` around a weight that is there already, by the product of the weight's device."""

    layers: tuple[str, ...] = ()

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.weight = weight.detach()
        self.bias = None if bias is None else bias.detach()
        self._product = ops.on(weight.device).plan_linear(self.weight, self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in_features] -> [..., out_features]"""
        return self._product(x)

    __call__ = forward  # nobody hooks a product, and looking for hooks costs as much as some of them


Product = PackedLinear | PlannedLinear
MakeProduct = Callable[[Tensor, Tensor | None], Product]


class FusedLinears(nn.Module):
    """Several linear layers of one input as one product, computed when the first of them is asked."""

    def __init__(self, linears: Sequence[nn.Linear], make: MakeProduct) -> None:
        super().__init__()
        bias = None if linears[0].bias is None else torch.cat([linear.bias for linear in linears])
        self.product = make(torch.cat([linear.weight for linear in linears]), bias)
        self._sizes = [linear.out_features for linear in linears]
        self._input: Tensor | None = None
        self._outputs: tuple[Tensor, ...] = ()

    def part(self, index: int, x: Tensor) -> Tensor:
        """One layer's output. The input is held until the last layer was asked, so that identity means equality."""
        if x is not self._input:
            self._input, self._outputs = x, tuple(self.product.forward(x).split_with_sizes(self._sizes, dim=-1))
        out = self._outputs[index]
        if index == len(self._sizes) - 1:
            self._input, self._outputs = None, ()
        return out


class LinearPart(nn.Module):
    """One of several fused layers, standing where the original stood."""

    def __init__(self, fused: FusedLinears, index: int) -> None:
        super().__init__()
        self.fused = fused
        self.index = index

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in_features] bf16 -> [..., out_features] bf16"""
        return self.fused.part(self.index, x)

    __call__ = forward  # nobody hooks a part, and looking for hooks costs as much as handing the output out


def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether packed products exist and pay here: bf16 on a CPU with native bf16 arithmetic."""
    if device.type != "cpu" or dtype != torch.bfloat16 or not torch.backends.mkldnn.is_available():
        return False
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def fewest_rows(model: nn.Module) -> int:
    """Rows to which a forward with fewer should be padded, because that makes its products faster."""
    return FEWEST_ROWS if any(isinstance(module, PackedLinear) for module in model.modules()) else 1


@torch.no_grad()
def replace_linears(model: nn.Module, make: MakeProduct) -> int:
    """Replace every `nn.Linear` below `model` by a product, packed or planned; returns how many.

    Layers of one input are copied into one. Packing frees the originals, but an output head that is tied to the
    embedding gets a copy; planned layers that stand alone keep their storage.
    """
    replaced = 0
    for path, parent in list(model.named_modules()):
        linears = {name: child for name, child in parent.named_children() if type(child) is nn.Linear}
        for names in (*FUSED, *((name,) for name in linears)):
            group = [linears[name] for name in names if name in linears]
            kinds = {(linear.in_features, linear.bias is None) for linear in group}
            if len(group) == len(names) and len(kinds) == 1:
                product = _join(parent, names, group, make)
                product.layers = tuple(f"{path}.{name}".lstrip(".") for name in names)
                linears = {name: linear for name, linear in linears.items() if name not in names}
                replaced += len(names)
    return replaced


def _join(parent: nn.Module, names: Sequence[str], linears: Sequence[nn.Linear], make: MakeProduct) -> Product:
    """Replace the children of these names by one product, or by parts of it."""
    if len(linears) == 1:
        product = make(linears[0].weight, linears[0].bias)
        setattr(parent, names[0], product)
        return product
    fused = FusedLinears(linears, make)
    for index, name in enumerate(names):
        setattr(parent, name, LinearPart(fused, index))
    return fused.product


def repacking(model: nn.Module) -> Callable[[Mapping[str, Tensor]], Callable[[], None]]:
    """How weights, by their names before anything was packed, reach this model.

    The first call makes them ready and may come from any thread; what it returns is for the thread that computes.
    """
    products = [module for module in model.modules() if isinstance(module, PackedLinear)]
    plain = dict(model.named_parameters())

    @torch.no_grad()
    def prepare(weights: Mapping[str, Tensor]) -> Callable[[], None]:
        def joined(product: PackedLinear, kind: str) -> Tensor:
            return torch.cat([weights[f"{name}.{kind}"] for name in product.layers])

        ready = [packed(joined(product, "weight")) for product in products]
        biases = [None if product.bias is None else joined(product, "bias") for product in products]

        @torch.no_grad()
        def write() -> None:
            for product, weight, bias in zip(products, ready, biases, strict=True):
                product.packed, product.bias = weight, bias
            for name, value in plain.items():
                value.copy_(weights[name])

        return write

    return prepare
