# ruff: noqa: N803 - sizes that a kernel is compiled for are written in capitals
# mypy: allow-untyped-decorators
"""The norm of `kernels/rms_norm.py`, one program per line: a line's sums are the same alone and in company.

A line is what is normed at once, a row or a head of a row; lines may stand apart, as the heads of a joined product do.
"""

import triton
import triton.language as tl
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """As the reference's `rms_norm`. # the numbers of a line stand side by side"""
    hidden = weight.shape[0]
    out = x.new_empty(x.shape)
    if x.numel():
        lines = x.reshape(-1, x.shape[-2] if x.dim() > 1 else 1, hidden)
        assert lines.stride(2) == 1, "the numbers of a line stand side by side"
        _norm[lines.shape[:2]](
            lines,
            weight,
            out,
            lines.stride(0),
            lines.stride(1),
            epsilon,
            HIDDEN=hidden,
            BLOCK=triton.next_power_of_2(hidden),
            enable_fp_fusion=True,
        )
    return out


@triton.jit
def _norm(
    x: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    outer_stride: tl.tensor,
    inner_stride: tl.tensor,
    epsilon: tl.tensor,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    outer, inner = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    place = tl.arange(0, BLOCK)
    held = place < HIDDEN
    value = tl.load(x + outer * outer_stride + inner * inner_stride + place, mask=held, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, 0) / HIDDEN + epsilon)
    rounded = (value * scale).to(out.dtype.element_ty).to(tl.float32)
    weighted = rounded * tl.load(weight + place, mask=held, other=0.0).to(tl.float32)
    tl.store(out + (outer * tl.num_programs(1) + inner) * HIDDEN + place, weighted, mask=held)
