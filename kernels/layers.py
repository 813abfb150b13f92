"""What a decoder layer computes beside products and attention, in the order in which transformers rounds.
Legend: hidden = size of what is normed, rows = positions of one forward, dim = head_dim or the part of it that is
rotated, places = slots of a layer's keys, then of its values; round: to the type of what comes in."""

import torch
from torch import Tensor
from torch.nn import functional


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Root-mean-square norm with a weight: y = w * round(x / sqrt(mean(x^2) + epsilon)).
    # x [..., hidden] any float type, weight [hidden] -> like x"""
    return weight * torch.rms_norm(x, weight.shape, None, epsilon)


def silu_mul(joined: Tensor) -> Tensor:
    """The gate of SwiGLU on the joined product of gate and up projection: y = round(silu(gate)) * up,
    silu(g) = g / (1 + exp(-g)). # joined [..., 2 * width], the gate first -> [..., width]"""
    gate, up = joined.chunk(2, dim=-1)
    return functional.silu(gate) * up


def rotary(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotary position embedding, halves against halves: y = round(x * cos) + round([-x_2; x_1] * sin), x = [x_1; x_2].
    # query [1, query heads, rows, dim], key [1, kv_heads, rows, dim] in any layout; cos, sin [1, rows, dim] -> both"""
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return _rotated(query, cos, sin), _rotated(key, cos, sin)


def store_kv(pool: Tensor, places: Tensor, keys: Tensor, values: Tensor) -> None:
    """Keys and values of a forward's rows into one layer of a pool, rounded to its type.
    # pool [places, kv_heads, dim]; places [2, rows] int64, of keys and of values;
    keys, values [rows, kv_heads, dim] in any layout"""
    pool.index_copy_(0, places.view(-1), torch.cat([keys, values]).to(pool.dtype))


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin
