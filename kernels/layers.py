"""What a decoder layer computes beside products and attention, in the order in which transformers rounds.
Legend: rows = positions of one forward, hidden = the model's width, dim = head_dim; round: to the type of what comes
in."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

RunLayers = Callable[[Tensor, Tensor | None, Any], Tensor]
"""hidden [rows, hidden], which changes in place, what the first layer adds to it, `RowPlaces` -> what the last adds"""


def add_rms_norm(hidden: Tensor, delta: Tensor | None, weight: Tensor, epsilon: float) -> Tensor:
    """Adds `delta` to `hidden`, in place, and norms what is there then: y = w * round(h / sqrt(mean(h^2) + epsilon)).
    # hidden, delta [rows, hidden], weight [hidden] -> like hidden"""
    if delta is not None:
        hidden += delta
    return weight * torch.rms_norm(hidden, weight.shape, None, epsilon)


def silu_mul(joined: Tensor) -> Tensor:
    """The gate of SwiGLU on the joined product of gate and up projection: y = round(silu(gate)) * up,
    silu(g) = g / (1 + exp(-g)). # joined [..., 2 * width], the gate first -> [..., width]"""
    gate, up = joined.chunk(2, dim=-1)
    return functional.silu(gate) * up


def rotary_store(
    joined: Tensor,
    cos: Tensor,
    sin: Tensor,
    slots: Tensor,
    pool: Tensor,
    query_heads: int,
    head_norms: tuple[Tensor, Tensor] | None,
    epsilon: float,
) -> Tensor:
    """Splits the joined product of an attention, norms heads of queries and keys where there are weights for it, embeds
    positions, halves against halves: y = round(x * cos) + round([-x_2; x_1] * sin), x = [x_1; x_2], and stores keys and
    values in one layer of a pool.
    # joined [rows, (query heads + 2 kv_heads) * dim]; cos, sin [rows, dim]; slots [rows] int64;
    # pool [2, slots, kv_heads, dim]; head_norms of queries and of keys, both [dim] -> queries [rows, query heads, dim]
    """
    kv_heads, dim = pool.shape[2:]
    query, key, value = joined.unflatten(1, (-1, dim)).split([query_heads, kv_heads, kv_heads], dim=1)
    if head_norms is not None:
        query, key = (add_rms_norm(x, None, w, epsilon) for x, w in zip((query, key), head_norms, strict=True))
    pool[0].index_copy_(0, slots, _rotated(key, cos, sin).to(pool.dtype))
    pool[1].index_copy_(0, slots, value.to(pool.dtype))
    return _rotated(query, cos, sin)


def plan_layers(layers: Sequence[Any], pools: Sequence[Tensor]) -> RunLayers:
    """Runs one `DecoderLayer` after the other, each on its layer of the pool."""

    def run(hidden: Tensor, delta: Tensor | None, places: Any) -> Tensor:
        for layer, pool in zip(layers, pools, strict=True):
            delta = layer(hidden, delta, places, pool)
        assert delta is not None, "no layers"
        return delta

    return run


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """# x [rows, heads, dim], cos and sin [rows, dim]"""
    first, second = x.chunk(2, dim=-1)
    return x * cos[:, None] + torch.cat((-second, first), dim=-1) * sin[:, None]
