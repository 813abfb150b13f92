"""Linear layers as devices like them: one product for layers that read the same input, on a CPU with bf16 arithmetic
weights reordered once, on other devices the table's product, whose rows do not depend on their company.

oneDNN otherwise reorders a bf16 weight at every call, which costs more than the product itself when there are few
rows. Fusing changes no sum: each output column is a product of its own.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
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


_ISA_VARIABLE = "ONEDNN_MAX_CPU_ISA"


def chosen_isa() -> str:
    """The most that oneDNN's products may use, by its own variable."""
    return os.environ.get(_ISA_VARIABLE, "all")


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

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.bias = bias
        self.packed = packed(weight)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in_features] bf16 -> [..., out_features] bf16"""
        rows = x.numel() // x.shape[-1]
        if has_tiles():
            return self._product(x) if rows <= _MOST_TILED_ROWS else self._products(x)
        missing = -rows % _ROW_STEP if rows > _FEW_ROWS else 0
        if missing:
            return self._product(functional.pad(x.flatten(0, -2), (0, 0, 0, missing)))[:rows].view(*x.shape[:-1], -1)
        return self._product(x)

    def _products(self, x: Tensor) -> Tensor:
        parts = [self._product(part) for part in x.flatten(0, -2).split(_MOST_TILED_ROWS)]
        return torch.cat(parts).view(*x.shape[:-1], -1)

    def _product(self, x: Tensor) -> Tensor:
        out: Tensor = torch.ops.mkldnn._linear_pointwise.default(x, self.packed, self.bias, "none", [], "")
        return out


class PlannedLinear(nn.Module):
    """`nn.Linear` around a weight that is there already, by the product of the weight's device."""

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


class FusedLinears:
    """Several linear layers of one input as one product, computed when the first of them is asked."""

    def __init__(self, linears: Sequence[nn.Linear], make: MakeProduct) -> None:
        has_bias = linears[0].bias is not None
        bias = torch.cat([linear.bias for linear in linears]) if has_bias else None
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


def pack_linears(model: nn.Module) -> int:
    """Replace every `nn.Linear` below `model` by its packed form, freeing the originals; returns how many.

    An output head tied to the embedding gets a packed copy; the embedding keeps its own storage.
    """
    return _replace(model, PackedLinear)


def plan_linears(model: nn.Module) -> int:
    """Replace every `nn.Linear` below `model` by the product of its device; returns how many.

    Layers of one input are copied into one; all others keep their storage.
    """
    return _replace(model, PlannedLinear)


@torch.no_grad()
def _replace(model: nn.Module, make: MakeProduct) -> int:
    replaced = 0
    for parent in list(model.modules()):
        for names in FUSED:
            replaced += _fuse(parent, names, make)
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                setattr(parent, name, make(child.weight, child.bias))
                replaced += 1
    return replaced


def _fuse(parent: nn.Module, names: Sequence[str], make: MakeProduct) -> int:
    """Replace the children of these names by parts of one product, if all are plain layers of one kind."""
    linears = [child for name in names if type(child := getattr(parent, name, None)) is nn.Linear]
    kinds = {(linear.in_features, linear.bias is None) for linear in linears}
    if len(linears) < len(names) or len(kinds) != 1:
        return 0
    fused = FusedLinears(linears, make)
    for index, name in enumerate(names):
        setattr(parent, name, LinearPart(fused, index))
    return len(names)


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
