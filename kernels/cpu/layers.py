"""Compiled ops of `kernels.layers`; one call runs all layers of a model whose products are packed."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kernels.cpu.library import CStruct, call, halves
from kernels.cpu.linear import PackedLinear
from kernels.cpu.tree_attention import CompiledAttention, layer_of
from kernels.layers import RunLayers, spans_projection
from kernels.layers import plan_layers as op_by_op
from kernels.tree_attention import LOG2_E

if TYPE_CHECKING:  # which imports the table of all ops
    from kernels.decoder_layer import DecoderLayer, RowPlaces


def add_rms_norm(hidden: Tensor, delta: Tensor | None, weight: Tensor, epsilon: float) -> Tensor:
    """As the reference; `hidden` without gaps. # [rows, hidden] -> [rows, hidden]"""
    assert hidden.is_contiguous(), "it is changed in place"
    y, width = torch.empty_like(hidden), hidden.shape[-1]
    call("add_rms_norm", hidden, delta, weight, epsilon, y, hidden.numel() // width, width, dtype=hidden.dtype)
    return y


def silu_mul(joined: Tensor) -> Tensor:
    """As the reference. # [..., 2 * width] -> [..., width]"""
    joined, width = joined.contiguous(), joined.shape[-1] // 2
    y = joined.new_empty(*joined.shape[:-1], width)
    call("silu_mul", joined, y, y.numel() // width, width, dtype=joined.dtype)
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
    """As the reference. # pool [2, slots, kv_heads, dim] float32 -> [rows, query heads, dim]"""
    rows, kv_heads, dim = slots.shape[0], *pool.shape[2:]
    query, norms = joined.new_empty(rows, query_heads, dim), head_norms or (None, None)
    written, sizes = (query, *halves(pool)), (rows, query_heads, kv_heads, dim)
    how = spans_projection(head_norms, dim), epsilon
    call("rotary_store", joined, cos, sin, slots, *norms, *how, *written, *sizes, dtype=joined.dtype)
    return query


class CompiledLayers:
    """Layers whose products are all packed."""

    def __init__(self, layers: "Sequence[DecoderLayer]", pools: Sequence[Tensor]) -> None:
        self._pools = pools
        self._structures = [_structure_of(layer, pool) for layer, pool in zip(layers, pools, strict=True)]
        self._joined = b"".join(self._structures)
        # Intermediate results of a row: the normed input, and then either queries, their attention and the joined
        # product that queries come from, or the gate's output and the joined product that the gate takes.
        self._scratch = max(
            output.out + max(2 * output.columns + query_key_value.out, down.columns + gate_up.out)
            for query_key_value, output, gate_up, down in map(_packed, layers)
        )

    def __call__(self, hidden: Tensor, delta: Tensor | None, places: "RowPlaces") -> Tensor:
        """Run all layers as `plan_layers` of the reference says. # [rows, hidden] -> [rows, hidden]"""
        attention = places.attention
        assert isinstance(attention, CompiledAttention), "attention was planned by other ops"
        assert hidden.is_contiguous(), "it is changed in place"
        result, rows = torch.empty_like(hidden), hidden.shape[0]
        scratch, where = hidden.new_empty(rows * self._scratch), (places.cos, places.sin, places.slots)
        at = CStruct(*where, *attention.rows.words, *attention.groups_and_table)
        call(
            "decode", self._joined, len(self._structures), at, hidden, delta, result, rows, scratch, dtype=hidden.dtype
        )
        return result


def plan_layers(layers: Sequence[Any], pools: Sequence[Tensor]) -> RunLayers:
    """As the reference; layers with an odd number of columns run op by op. # pools [2, slots, kv_heads, dim] each"""
    if all(len(_packed(layer)) == 4 for layer in layers):
        return CompiledLayers(layers, pools)
    return op_by_op(layers, pools)


def _packed(layer: "DecoderLayer") -> list[PackedLinear]:
    """Its packed products without odd columns."""
    products = layer.query_key_value, layer.output, layer.gate_up, layer.down
    return [one for one in products if isinstance(one, PackedLinear) and not one.missing]


def _structure_of(layer: "DecoderLayer", pool: Tensor) -> CStruct:
    """`DecoderLayer` of decoder_layers.cpp."""
    norms = *layer.norms, *(layer.head_norms or (None, None)), spans_projection(layer.head_norms, pool.shape[3])
    attention = layer_of(pool, layer.query_heads, layer.window)
    words = [word for product in _packed(layer) for word in product.structure.words]
    return CStruct(*words, *norms, *attention, floats=(layer.scale * LOG2_E, 0.0, layer.epsilon))
