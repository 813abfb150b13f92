"""A linear layer whose rows do not depend on their company: a row has the same bits alone and among any others.

    y = x W^T + b

Libraries pick their algorithm, and with it the order of a row's sum, by the number of rows; then a token that is
verified beside others can differ from one that is decoded alone. The device kernel sums every row in the order of its
columns. The idea, elsewhere called batch invariance, is that of "Defeating Nondeterminism in LLM Inference" (He et
al., 2025).

With 8 bits (`plan_linear_int8`) weights and activations have one scale for 32 columns, as in GGUF's Q8_0:

    y_o = b_o + sum_B s_oB a_B (sum_{i in B} q_oi p_i),   w_oi ~ s_oB q_oi,   x_i ~ a_B p_i,   B: 32 columns in order

Sums of integers are exact and blocks are added up in order. Scales of weights are kept in bf16, rounded up.

Legend: in, out = widths of the layer, blocks = ceil(in / 32).
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

Product = Callable[[Tensor], Tensor]
"""x [..., in] -> [..., out], in the type of both."""


def plan_linear(weight: Tensor, bias: Tensor | None) -> Product:
    """The product with one layer's weights: weight [out, in], bias [out] or none."""
    return partial(functional.linear, weight=weight, bias=bias)


COLUMNS = 32
"""That share a scale."""

_MOST = 127


def plan_linear_int8(weight: Tensor, bias: Tensor | None) -> Product:
    """As `plan_linear`, of what is left of the weights in 8 bits."""
    blocks = _blocks(weight.float())
    most = blocks.abs().amax(-1, keepdim=True)
    scales = ((most / _MOST).view(torch.int32) + 0xFFFF & ~0xFFFF).view(torch.float32)  # up to the next bf16
    counts = torch.where(most > 0, (blocks / scales).round(), 0.0)
    return partial(_product_int8, counts=counts, scales=scales[..., 0], bias=bias)


def _product_int8(x: Tensor, counts: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    """x [..., in], counts [out, blocks, 32], scales [out, blocks] -> [..., out]"""
    blocks = _blocks(x.float())  # [..., blocks, 32]
    most = blocks.abs().amax(-1, keepdim=True)
    inverse = torch.where(most > 0, _MOST / most, 0.0)
    whole = torch.einsum("...bi,obi->...ob", (blocks * inverse).round(), counts)  # integers below 2^24: exact
    y: Tensor = (whole * (scales * (most / _MOST).transpose(-1, -2))).sum(-1)
    return (y if bias is None else y + bias.float()).to(x.dtype)


def _blocks(x: Tensor) -> Tensor:
    """# [..., columns] -> [..., blocks, 32], the last one filled up with zeros"""
    whole: Tensor = functional.pad(x, (0, -x.shape[-1] % COLUMNS)).unflatten(-1, (-1, COLUMNS))
    return whole
