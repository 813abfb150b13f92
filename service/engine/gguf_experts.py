"""Loads the experts of a layer from GGUF tensors: quantised matrices keep their blocks, others become parameters.

Legend: experts = experts of a layer, in, out = widths of a product.
"""

from collections import Counter
from collections.abc import Collection
from math import prod

import torch
from torch import Tensor, nn

from kernels.experts import QuantisedStack
from kernels.layers import QuantisedWeight
from service.engine.gguf_blocks import PLAIN, dense, kept
from service.engine.gguf_reader import GGUFFile, GGUFTensor
from service.engine.modules import STACKS, QuantisedExperts
from service.errors import StartupError


def load_experts(
    experts: nn.Module, prefix: str, file: GGUFFile, dtype: torch.dtype, counts: Counter[str], *, in_blocks: bool
) -> tuple[nn.Module, set[str]]:
    """Load transformers' module of experts from the tensors that begin with `prefix`. Returns the module, or
    `QuantisedExperts` if matrices are kept in blocks, and the names of the tensors; adds the number of weights by
    format to `counts`. Raises StartupError for missing tensors and wrong shapes."""
    stacks, used = dict[str, QuantisedStack](), set[str]()
    for name, parameter in list(experts.named_parameters(recurse=False)):
        turned = name in STACKS and bool(experts.is_transposed)
        parts = _parts(name, tuple((parameter.mT if turned else parameter).shape), prefix, file)
        used |= parts.keys()
        if in_blocks and name in STACKS and not any(part.kind in PLAIN for part in parts.values()):
            by_expert = zip(*(_in_blocks(part, dtype, counts) for part in parts.values()), strict=True)
            stacks[name] = QuantisedStack([type(own[0]).joined(own) for own in by_expert])
        else:
            interleaved = not experts.is_concatenated and len(parts) > 1
            whole = _joined(parts.values(), torch.empty(parameter.shape, dtype=dtype), turned, interleaved)
            setattr(experts, name, nn.Parameter(whole, requires_grad=False))
            counts[str(dtype).removeprefix("torch.")] += whole.numel()
        file.give_back()
    return (QuantisedExperts(experts, stacks) if stacks else experts), used


def _parts(name: str, shape: tuple[int, ...], prefix: str, file: GGUFFile) -> dict[str, GGUFTensor]:
    """Find the tensors whose rows together are those of a parameter: gate and up rows may be in one or in two.
    # shape (experts, out, in), or (experts, out) of a bias"""
    kind = "bias" if name.endswith("_bias") else "weight"
    stem = name.removesuffix("_bias").removesuffix("_proj")
    whole = f"{prefix}{stem}_exps.{kind}"
    names = [whole] if whole in file.tensors else [f"{prefix}{part}_exps.{kind}" for part in stem.split("_")]
    expected = (shape[0], shape[1] // len(names), *shape[2:])
    for one in names:
        if one not in file.tensors:
            raise StartupError(f"{file.path.name}: weights are missing for {one}")
        if file.tensors[one].shape != expected:
            raise StartupError(
                f"{file.path.name}: tensor {one!r} cannot be used: its shape is {list(file.tensors[one].shape)}, but "
                f"the file's metadata requires {list(expected)}"
            )
    return {one: file.tensors[one] for one in names}


def _in_blocks(tensor: GGUFTensor, dtype: torch.dtype, counts: Counter[str]) -> list[QuantisedWeight]:
    weights, forms = zip(*(kept(data, tensor.kind, dtype) for data in tensor.data), strict=True)
    counts[forms[0]] += prod(tensor.shape)
    return list(weights)


def _joined(parts: Collection[GGUFTensor], whole: Tensor, turned: bool, interleaved: bool) -> Tensor:
    """Dequantise a parameter of all experts into `whole`, in transformers' layout: `turned` [experts, in, out] instead
    of [experts, out, in], `interleaved` with gate and up rows by turns."""
    for expert, place in enumerate(whole):
        rows = torch.cat(
            [dense(GGUFTensor(part.shape[1:], part.kind, part.data[expert]), whole.dtype) for part in parts]
        )
        if interleaved:
            rows = rows.unflatten(0, (2, -1)).transpose(0, 1).flatten(0, 1)
        place.copy_(rows.T if turned else rows)
    return whole
