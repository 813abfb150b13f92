"""The compiled twins of what `kernels.layers` computes beside products and attention."""

from ctypes import c_float, c_int, c_int64

import torch
from torch import Tensor

from kernels.cpu.library import address, function


def add_rms_norm(hidden: Tensor, delta: Tensor | None, weight: Tensor, epsilon: float) -> Tensor:
    """As the reference; `hidden` and `delta` without gaps."""
    y, width = torch.empty_like(hidden), hidden.shape[-1]
    sizes = c_int64(hidden.numel() // width), c_int64(width), c_int(torch.get_num_threads())
    pointers = address(hidden), address(delta), address(weight)
    function("add_rms_norm", hidden.dtype)(*pointers, c_float(epsilon), address(y), *sizes)
    return y


def silu_mul(joined: Tensor) -> Tensor:
    """As the reference."""
    joined, width = joined.contiguous(), joined.shape[-1] // 2
    y = joined.new_empty(*joined.shape[:-1], width)
    sizes = c_int64(y.numel() // width), c_int64(width), c_int(torch.get_num_threads())
    function("silu_mul", joined.dtype)(address(joined), address(y), *sizes)
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
    given = [address(tensor) for tensor in (joined, cos, sin, slots, query_norm, key_norm)]
    made = [address(tensor) for tensor in (query, pool[0], pool[1])]
    sizes = [c_int64(size) for size in (rows, query_heads, kv_heads, dim)]
    function("rotary_store", joined.dtype)(*given, c_float(epsilon), *made, *sizes, c_int(torch.get_num_threads()))
    return query
