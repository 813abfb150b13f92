"""The compiled twins of what `kernels.layers` computes beside products and attention."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kernels.cpu.decoder_layers import CompiledLayers, can_compile
from kernels.cpu.library import address, function, halves
from kernels.layers import RunLayers
from kernels.layers import plan_layers as op_by_op


def add_rms_norm(hidden: Tensor, delta: Tensor | None, weight: Tensor, epsilon: float) -> Tensor:
    """As the reference; `hidden` and `delta` without gaps."""
    y, width = torch.empty_like(hidden), hidden.shape[-1]
    call = function("add_rms_norm", "pppfpnni", hidden.dtype)
    pointers, rows = (hidden.data_ptr(), address(delta), weight.data_ptr()), hidden.numel() // width
    call(*pointers, epsilon, y.data_ptr(), rows, width, torch.get_num_threads())
    return y


def silu_mul(joined: Tensor) -> Tensor:
    """As the reference."""
    joined, width = joined.contiguous(), joined.shape[-1] // 2
    y = joined.new_empty(*joined.shape[:-1], width)
    call = function("silu_mul", "ppnni", joined.dtype)
    call(joined.data_ptr(), y.data_ptr(), y.numel() // width, width, torch.get_num_threads())
    return y


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
    """As the reference; the pool must be float32."""
    rows, kv_heads, dim = slots.shape[0], pool.shape[2], pool.shape[3]
    query, (query_norm, key_norm) = joined.new_empty(rows, query_heads, dim), head_norms or (None, None)
    given = joined.data_ptr(), cos.data_ptr(), sin.data_ptr(), slots.data_ptr(), address(query_norm), address(key_norm)
    made = query.data_ptr(), *halves(pool)
    call = function("rotary_store", "ppppppfpppnnnni", joined.dtype)
    call(*given, epsilon, *made, rows, query_heads, kv_heads, dim, torch.get_num_threads())
    return query


def plan_layers(layers: Sequence[Any], pools: Sequence[Tensor]) -> RunLayers:
    """As the reference; layers with an odd number of columns run op by op."""
    return CompiledLayers(layers, pools) if can_compile(layers) else op_by_op(layers, pools)
