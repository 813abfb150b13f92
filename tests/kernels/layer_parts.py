"""What the ops of a decoder layer may give: the same as the reference where sums are not concerned, and between two
bounds where they are."""

import math
from typing import Any

import torch
from torch import Tensor

from kernels.layers import SWIGLU_ALPHA, GateForm, RotaryRows

_WIDTH = 2**-20  # relative; what some roundings of float32 move


def norm_bounds(hidden: Tensor, weight: Tensor, epsilon: float, offset: float | None = None) -> tuple[Tensor, Tensor]:
    """Between which a norm lies: another order of the sum moves the factor by some roundings of float32, and what is
    rounded then keeps the order of what was not."""
    precise = hidden.double()
    factor = (precise.square().mean(-1, keepdim=True) + epsilon).rsqrt()
    normed = [precise * factor * (1 + side * _WIDTH) for side in (-1, 1)]
    if offset is None:
        ends = [weight * end.to(hidden.dtype) for end in normed]
    else:
        ends = [((offset + weight.double()) * end).to(hidden.dtype) for end in normed]
    return torch.minimum(*ends), torch.maximum(*ends)


def gate_bounds(joined: Tensor, gate: GateForm) -> tuple[Tensor, Tensor]:
    """The same of a gate, whose exponential in powers of two keeps fewer digits the larger its argument."""
    first, up = (part.double() for part in joined.chunk(2, dim=-1))
    if gate.activation == "clamped_swiglu":
        first, up = first.clamp(max=gate.limit), up.clamp(-gate.limit, gate.limit) + 1
        angle = SWIGLU_ALPHA * first
    else:
        angle = (
            first
            if gate.activation in ("silu", "sigmoid")
            else 2 * (2 / math.pi) ** 0.5 * (first + 0.044715 * first**3)
        )
    precise = angle.sigmoid() * (1.0 if gate.activation == "sigmoid" else first)
    width = precise.abs() * _WIDTH * (1 + angle.abs()) + 1e-36
    if gate.activation == "clamped_swiglu":  # rounded once
        ends = [((precise + side * width) * up).to(joined.dtype) for side in (-1, 1)]
    else:
        ends = [(precise + side * width).to(joined.dtype) * up.to(joined.dtype) for side in (-1, 1)]
    return torch.minimum(*ends), torch.maximum(*ends)


def within(found: Tensor, bounds: tuple[Tensor, Tensor]) -> bool:
    low, high = bounds
    return bool(((low <= found) & (found <= high)).all())


def rotary_parts(rows: int, heads: tuple[int, int], dim: int, dtype: torch.dtype) -> dict[str, Any]:
    """A joined product with query heads and key/value heads, angles of positions, slots, and a pool."""
    generator = torch.Generator().manual_seed(rows + dim)
    query_heads, kv_heads = heads
    joined = torch.randn(rows, (query_heads + 2 * kv_heads) * dim, generator=generator).to(dtype)
    angles = torch.outer(torch.arange(rows) + 5.0, 10_000 ** -(torch.arange(0, dim, 2) / dim)).repeat(1, 2)
    return {
        "joined": joined,
        "rotary": RotaryRows(angles.cos().to(dtype), angles.sin().to(dtype)),
        "slots": torch.randperm(rows + 10, generator=generator)[:rows],
        "pool": torch.randn(2, rows + 10, kv_heads, dim, generator=generator).to(dtype),
    }
