"""Rotary position embedding of queries and keys, halves against halves, in the order in which transformers rounds.

    y = round(x * cos) + round([-x_2; x_1] * sin),    x = [x_1; x_2],    round: to the type of x

Legend: rows = positions of one forward, dim = head_dim or the part of it that is rotated.
"""

import torch
from torch import Tensor


def rotary(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """query [1, query heads, rows, dim], key [1, kv_heads, rows, dim], in any layout; cos, sin [1, rows, dim].

    -> like query, like key
    """
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return _rotated(query, cos, sin), _rotated(key, cos, sin)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin
