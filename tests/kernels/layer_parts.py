"""What the ops of a decoder layer may give: the same as the reference where sums are not concerned, and between two
bounds where they are."""

import torch
from torch import Tensor

_WIDTH = 2**-20  # relative; what some roundings of float32 move


def norm_bounds(hidden: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """Between which a norm lies: another order of the sum moves the factor by some roundings of float32, and what is
    rounded then keeps the order of what was not."""
    precise = hidden.double()
    factor = (precise.square().mean(-1, keepdim=True) + epsilon).rsqrt()
    ends = [weight * (precise * factor * (1 + side * _WIDTH)).to(hidden.dtype) for side in (-1, 1)]
    return torch.minimum(*ends), torch.maximum(*ends)


def gate_bounds(joined: Tensor) -> tuple[Tensor, Tensor]:
    """The same of a gate, whose exponential in powers of two keeps fewer digits the larger its argument."""
    gate, up = joined.chunk(2, dim=-1)
    precise = gate.double() * gate.double().sigmoid()
    width = _WIDTH * (1 + gate.double().abs())
    ends = [((precise * (1 + side * width)) + side * 1e-36).to(joined.dtype) * up for side in (-1, 1)]
    return torch.minimum(*ends), torch.maximum(*ends)


def within(found: Tensor, bounds: tuple[Tensor, Tensor]) -> bool:
    low, high = bounds
    return bool(((low <= found) & (found <= high)).all())


def rotary_parts(rows: int, heads: tuple[int, int], dim: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """A joined product with query heads and key/value heads, angles of positions, slots, and a pool."""
    generator = torch.Generator().manual_seed(rows + dim)
    query_heads, kv_heads = heads
    joined = torch.randn(rows, (query_heads + 2 * kv_heads) * dim, generator=generator).to(dtype)
    angles = torch.outer(torch.arange(rows) + 5.0, 10_000 ** -(torch.arange(0, dim, 2) / dim)).repeat(1, 2)
    return {
        "joined": joined,
        "cos": angles.cos().to(dtype),
        "sin": angles.sin().to(dtype),
        "slots": torch.randperm(rows + 10, generator=generator)[:rows],
        "pool": torch.randn(2, rows + 10, kv_heads, dim, generator=generator).to(dtype),
    }
