"""The compiled twin of a sequence of `kernels.decoder_layer` layers: one call runs them all.

Calling each op from Python (240 calls a forward) took 1.3 ms of a plain step of 12.7 ms.
"""

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.cpu.library import Layer, address, function, halves
from kernels.cpu.linear import PackedLinear
from kernels.cpu.tree_attention import CompiledAttention
from kernels.decoder_layer import DecoderLayer, RowPlaces
from kernels.linear import Product
from kernels.tree_attention import LOG2_E


class _Product(ctypes.Structure):
    """`Product` of decoder_layers.cpp."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("call", "packed", "bias")),
        *((name, ctypes.c_int64) for name in ("columns", "out")),
    ]


class _DecoderLayer(ctypes.Structure):
    """`DecoderLayer` of decoder_layers.cpp."""

    _fields_ = [
        *((name, _Product) for name in ("query_key_value", "output", "gate_up", "down")),
        *((name, ctypes.c_void_p) for name in ("input_norm", "post_norm", "query_norm", "key_norm")),
        ("epsilon", ctypes.c_float),
        ("attention", Layer),
    ]


class _Places(ctypes.Structure):
    """`Places` of decoder_layers.cpp."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("cos", "sin", "slots", "rows", "groups")),
        ("num_groups", ctypes.c_int64),
        ("tables", ctypes.c_void_p),
        ("table_width", ctypes.c_int64),
    ]


class CompiledLayers:
    """Layers whose products are all packed."""

    def __init__(self, layers: Sequence[DecoderLayer], pools: Sequence[Tensor]) -> None:
        self._kept = layers, pools
        records = [_record(layer, pool) for layer, pool in zip(layers, pools, strict=True)]
        self._layers = (_DecoderLayer * len(records))(*records)
        # Between two ops, per row: what is normed, and then either queries, what they attend to and the joined product
        # they come from, or the gate and the joined product it is made of.
        self._scratch = max(
            own.output.out + max(2 * own.output.columns + own.query_key_value.out, own.down.columns + own.gate_up.out)
            for own in records
        )

    def __call__(self, hidden: Tensor, delta: Tensor | None, places: RowPlaces) -> Tensor:
        attention = places.attention
        assert isinstance(attention, CompiledAttention), "attention was planned by other ops"
        result, rows = torch.empty_like(hidden), hidden.shape[0]
        scratch = hidden.new_empty(rows * self._scratch)
        at = _Places(
            *map(address, (places.cos, places.sin, places.slots)),
            ctypes.addressof(attention.rows),
            attention.groups.data_ptr(),
            attention.groups.shape[0],
            attention.slot_table.data_ptr(),
            attention.slot_table.shape[1],
        )
        tensors = hidden.data_ptr(), address(delta), result.data_ptr()
        call = function("decode", "pnppppnpi", hidden.dtype)
        given = self._layers, len(self._layers), ctypes.byref(at)
        call(*given, *tensors, rows, scratch.data_ptr(), torch.get_num_threads())
        return result


def can_compile(layers: Sequence[DecoderLayer]) -> bool:
    """Whether all products are packed, and none asks for columns of zeros."""
    return all(isinstance(one, PackedLinear) and not one.missing for layer in layers for one in _products(layer))


def _products(layer: DecoderLayer) -> tuple[Product, ...]:
    return layer.query_key_value, layer.output, layer.gate_up, layer.down


def _record(layer: DecoderLayer, pool: Tensor) -> _DecoderLayer:
    products = [_Product(*product.parts) for product in _products(layer) if isinstance(product, PackedLinear)]
    norms = layer.input_norm, layer.post_norm, *(layer.head_norms or (None, None))
    sizes = layer.query_heads, pool.shape[2], pool.shape[3], layer.window or 0
    attention = Layer(*halves(pool), *sizes, layer.scale * LOG2_E, 0.0)
    return _DecoderLayer(*products, *map(address, norms), layer.epsilon, attention)
