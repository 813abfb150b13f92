"""The ops of a decoder layer other than products and attention, with the roundings of transformers.
Legend: rows = positions of one forward, hidden = the model's width, dim = head_dim; round: to the type of the
input."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

RunLayers = Callable[[Tensor, Tensor | None, Any], Tensor]
"""Runs layers on (hidden [rows, hidden], changed in place; delta, which the first layer adds to it; `RowPlaces`) and
returns the output of the last feed-forward, which is still to be added to hidden."""


def add_rms_norm(hidden: Tensor, delta: Tensor | None, weight: Tensor, epsilon: float) -> Tensor:
    """y = w * round(h / sqrt(mean(h^2) + epsilon)) with h = hidden + delta, which is stored in `hidden`.
    # hidden, delta [rows, hidden], weight [hidden] -> like hidden"""
    if delta is not None:
        hidden += delta
    return weight * torch.rms_norm(hidden, weight.shape, None, epsilon)


def silu_mul(joined: Tensor) -> Tensor:
    """y = round(silu(gate)) * up, silu(g) = g / (1 + exp(-g)): SwiGLU on the joined product of both projections.
    # joined [..., 2 * width], the gate first -> [..., width]"""
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
    """y = round(x * cos) + round([-x_2; x_1] * sin), x = [x_1; x_2]: split the joined product of queries, keys and
    values, norm queries and keys where there are weights for it, rotate both, store keys and values in the pool. A norm
    of width dim is of each head, a wider one is of a row's heads together.
    # joined [rows, (query heads + 2 kv_heads) * dim]; cos, sin [rows, dim]; slots [rows] int64; pool [2, slots,
    kv_heads, dim]; head_norms of queries and of keys, both [dim], or [query heads * dim] and [kv_heads * dim]
    -> queries [rows, query heads, dim]"""
    kv_heads, dim = pool.shape[2:]
    query, key, value = joined.unflatten(1, (-1, dim)).split([query_heads, kv_heads, kv_heads], dim=1)
    if head_norms is not None:
        parts = zip((query, key), head_norms, strict=True)
        query, key = (add_rms_norm(x.reshape(len(x), -1, len(w)), None, w, epsilon).view(x.shape) for x, w in parts)
    pool[0].index_copy_(0, slots, rotated(key, cos, sin).to(pool.dtype))
    pool[1].index_copy_(0, slots, value.to(pool.dtype))
    return rotated(query, cos, sin)


def spans_projection(head_norms: tuple[Tensor, Tensor] | None, dim: int) -> bool:
    """Whether norms of queries and keys are over a row's heads together. # head_norms [width] both, as `rotary_store`
    takes them"""
    return head_norms is not None and len(head_norms[0]) > dim


def plan_layers(layers: Sequence[Any], pools: Sequence[Tensor]) -> RunLayers:
    """A function that runs `DecoderLayer`s in order, each on its layer of the pool. # pools [2, slots, kv_heads, dim]
    each"""

    def run(hidden: Tensor, delta: Tensor | None, places: Any) -> Tensor:
        for layer, pool in zip(layers, pools, strict=True):
            delta = layer(hidden, delta, places, pool)
        assert delta is not None, "no layers"
        return delta

    return run


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The rotary embedding: halves against halves. # x [..., heads, dim], cos and sin [..., dim] -> like x"""
    first, second = x.chunk(2, dim=-1)
    return x * cos[..., None, :] + torch.cat((-second, first), dim=-1) * sin[..., None, :]
