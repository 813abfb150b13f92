"""The gate of a gated feed-forward layer (SwiGLU), on the joined product of gate and up projection.

y = round(silu(gate)) * up,    silu(g) = g / (1 + exp(-g)),    round: to the type of the products
"""

from torch import Tensor
from torch.nn import functional


def silu_mul(joined: Tensor) -> Tensor:
    """joined [..., 2 * width], the gate's half first -> [..., width]"""
    gate, up = joined.chunk(2, dim=-1)
    return functional.silu(gate) * up
