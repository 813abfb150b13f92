"""Loads experts from safetensors files in MXFP4, as gpt-oss ships them, and keeps their blocks.

The files hold `NAME_blocks` [experts, out, blocks, 16] and `NAME_scales` [experts, out, blocks], both uint8: a byte of
a block has two codes of 4 bits, the lower one of the earlier column, and a scale is an exponent of 2. Gate and up rows
take turns.
"""

from itertools import product

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from kernels import ops
from kernels.experts import QuantisedStack
from kernels.layers import COLUMNS, MXFP4, QuantisedWeight
from service.engine.gguf_blocks import mxfp4_blocks
from service.engine.modules import STACKS, QuantisedExperts, is_experts

_BLOCKS, _SCALES = "_blocks", "_scales"


def with_blocks(kind: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """Build a subclass whose experts have the tensors of the files as parameters, for transformers to load them."""

    def init(self: PreTrainedModel, config: PreTrainedConfig) -> None:
        kind.__init__(self, config)
        for experts in filter(is_experts, list(self.modules())):
            experts._is_hf_initialized = True  # type: ignore[assignment]  # what the files do not hold is refused
            for name in STACKS:
                count, out, columns = getattr(experts, name).mT.shape
                delattr(experts, name)
                sizes = {
                    _BLOCKS: (count, out, columns // COLUMNS, COLUMNS // 2),
                    _SCALES: (count, out, columns // COLUMNS),
                }
                for ending, size in sizes.items():
                    held = nn.Parameter(torch.empty(size, dtype=torch.uint8), requires_grad=False)
                    setattr(experts, name + ending, held)

    return type(kind.__name__, (kind,), {"__init__": init, "__module__": kind.__module__})


def keep_experts(model: PreTrainedModel) -> None:
    """Replace the experts of a loaded model of such a class by `QuantisedExperts`, layer by layer."""
    for place, experts in list(model.named_modules()):
        if hasattr(experts, STACKS[0] + _BLOCKS):
            parent, _, name = place.rpartition(".")
            stacks = {stack: _stack(experts, stack, model.dtype) for stack in STACKS}
            for held in map("".join, product(STACKS, (_BLOCKS, _SCALES))):
                delattr(experts, held)
            setattr(model.get_submodule(parent), name, QuantisedExperts(experts, stacks))


def _stack(experts: nn.Module, name: str, dtype: torch.dtype) -> QuantisedStack:
    blocks, scales = experts.get_parameter(name + _BLOCKS), experts.get_parameter(name + _SCALES)
    order = torch.arange(blocks.shape[1])
    if name.startswith("gate"):
        order = order.view(-1, 2).T.flatten()  # gate rows, then up rows
    return QuantisedStack(
        [_weight(own[order], exponents[order], dtype) for own, exponents in zip(blocks, scales, strict=True)]
    )


def _weight(blocks: Tensor, scales: Tensor, dtype: torch.dtype) -> QuantisedWeight:
    """Keep one matrix in the kernels' layout. # blocks [out, blocks, 16], scales [out, blocks]"""
    codes = torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(-2)
    shape = scales.shape[0], COLUMNS * scales.shape[1]
    return ops.on(torch.device("cpu")).keep_blocks(MXFP4, shape, dtype, [mxfp4_blocks(codes, scales)])
