"""Compiled ops of `kernels.layers`. Weights are packed once, into tiles of outputs that a product reads front to back.
If all products of a model are packed, one native call runs all its layers."""

from collections.abc import Iterable, Sequence
from ctypes import c_void_p, cast
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import torch
from torch import Tensor
from torch.nn import functional

from kernels.cpu.library import CStruct, call, function, halves, weight_memory
from kernels.cpu.tree_attention import CompiledAttention, layer_of
from kernels.layers import (
    BlockFormat,
    Gate,
    Product,
    QuantisedBlocks,
    QuantisedWeight,
    RunLayers,
    Weight,
    spans_projection,
)
from kernels.layers import plan_layers as op_by_op
from kernels.tree_attention import LOG2_E, Attention

if TYPE_CHECKING:  # an import at run time would be circular
    from kernels.decoder_layer import DecoderLayer, RowPlaces


OUTPUTS = 32
"""Outputs of the largest tile in any build; smaller tiles divide it."""

ACTIVATIONS = ("silu", "gelu_tanh", "clamped_swiglu")
"""Activations of a gate, in the order of layers.cpp."""


class PackedLinear:
    """A product with a packed weight, called through its C function."""

    def __init__(
        self,
        kernel: str,
        weights: Tensor,
        sizes: tuple[int, int],
        bias: Tensor | None,
        dtype: torch.dtype,
        missing: int = 0,
        kept: object = None,
    ) -> None:
        """`kernel`: name of the C function; `sizes`: input and output columns of the packed weight, of which the last
        `missing` input columns are padding; `kept`: objects that `weights` points to, kept alive.
        # weights: packed weight, or a C structure as bytes; bias [out]"""
        self._call, self.missing = function(kernel, dtype), missing
        self.columns, self.out = sizes
        padding = 0, -self.out % OUTPUTS
        padded = None if bias is None else functional.pad(bias.detach().float(), padding)
        self._kept = weights, padded, kept
        self._addresses = weights.data_ptr(), None if padded is None else padded.data_ptr()

    @property
    def structure(self) -> CStruct:
        """This product as the C structure `Product` of decoder.h."""
        return CStruct(cast(self._call, c_void_p).value, *self._addresses, self.columns, self.out)

    def __call__(self, x: Tensor) -> Tensor:
        """Compute x W^T + b. # [..., in] -> [..., out]"""
        x = functional.pad(x, (0, self.missing)) if self.missing else x.contiguous()
        columns, out = self.columns, self.out
        y = x.new_empty(*x.shape[:-1], out)
        self._call(x.data_ptr(), *self._addresses, y.data_ptr(), x.numel() // columns, columns, out)
        return y


def plan_linear(weight: Weight, bias: Tensor | None) -> Product:
    """Same as the reference op, but batch invariant. # weight [out, in], bias [out]"""
    if isinstance(weight, QuantisedWeight):
        return weight.plan(bias)
    missing = weight.shape[1] % 2  # the kernel reads columns in pairs
    whole = functional.pad(weight.detach(), (0, missing)).contiguous()
    out, columns = whole.shape
    packed = weight_memory(-(-out // OUTPUTS) * OUTPUTS * columns * whole.itemsize)
    call("pack", whole, packed, columns, out, dtype=weight.dtype)
    return PackedLinear("linear", packed, (columns, out), bias, weight.dtype, missing)


class Part(NamedTuple):
    """Consecutive outputs of a matrix that have one format."""

    outputs: int
    tiles: Tensor  # [bytes] uint8
    structure: CStruct  # `Part` of linear_quantised.cpp


class PackedWeight(QuantisedWeight):
    """A quantised weight in the kernels' layout: tiles of packed 4, 6 or 8-bit codes."""

    def __init__(self, parts: Sequence[Part], columns: int, dtype: torch.dtype) -> None:
        self.dtype, self.parts = dtype, parts
        self.shape = sum(part.outputs for part in parts), columns

    @classmethod
    def joined(cls, weights: Sequence[Self]) -> Self:
        return cls([part for weight in weights for part in weight.parts], weights[0].shape[1], weights[0].dtype)

    @property
    def num_bytes(self) -> int:
        return sum(part.tiles.nbytes for part in self.parts)

    def lookup(self, outputs: Tensor) -> Tensor:  # [...] int64 -> [..., in]
        y = torch.empty(*outputs.shape, self.shape[1], dtype=self.dtype)
        wanted = self.only_part, outputs.contiguous(), outputs.numel(), self.shape[1]
        call("lookup_quantised", *wanted, y, dtype=self.dtype)
        return y

    @property
    def only_part(self) -> CStruct:
        """The C structure of the weight, if it was not joined."""
        assert len(self.parts) == 1, "a joined matrix is not looked up"
        return self.parts[0].structure

    def plan(self, bias: Tensor | None) -> PackedLinear:  # bias [out]
        parts = as_tensor(b"".join(part.structure for part in self.parts))
        matrix = as_tensor(CStruct(parts, len(self.parts)))
        return PackedLinear("linear_quantised", matrix, self.shape[::-1], bias, self.dtype, kept=(parts, self.parts))


def keep_blocks(
    form: BlockFormat, shape: tuple[int, int], dtype: torch.dtype, pieces: Iterable[QuantisedBlocks]
) -> PackedWeight:
    """Same as the reference op. # shape [out, in]"""
    (out, columns), numbers = shape, (form.bits, form.size, form.zero, form.has_minima)
    num_bytes = call("quantised_bytes", CStruct(None, out, *numbers), columns)
    tiles, first = weight_memory(num_bytes), 0
    structure = CStruct(tiles, out, *numbers)
    for piece in pieces:
        codes, scales, minima = (None if value is None else value.contiguous() for value in piece)
        rows = len(piece.codes)
        call("pack_quantised", structure, tiles, columns, first, rows, codes, scales, minima)
        first += rows
    assert first == out, f"{first} rows of {out}"
    return PackedWeight([Part(out, tiles, structure)], columns, dtype)


def as_tensor(structure: bytes) -> Tensor:
    """Copy a structure to a tensor, which has an address. # -> [bytes] uint8"""
    return torch.frombuffer(bytearray(structure), dtype=torch.uint8)


def add_rms_norm(hidden: Tensor, delta: Tensor | None, weight: Tensor, epsilon: float) -> Tensor:
    """Same as the reference op; `hidden` must be contiguous. # [rows, hidden] -> [rows, hidden]"""
    assert hidden.is_contiguous(), "it is changed in place"
    y, width = torch.empty_like(hidden), hidden.shape[-1]
    call("add_rms_norm", hidden, delta, weight, epsilon, y, hidden.numel() // width, width, dtype=hidden.dtype)
    return y


def silu_mul(joined: Tensor) -> Tensor:
    """Same as the reference op. # [..., 2 * width] -> [..., width]"""
    return gate_mul(joined, Gate("silu"))


def gate_mul(joined: Tensor, gate: Gate) -> Tensor:
    """Same as the reference op. # [..., 2 * width] -> [..., width]"""
    joined, width = joined.contiguous(), joined.shape[-1] // 2
    y, how = joined.new_empty(*joined.shape[:-1], width), (ACTIVATIONS.index(gate.activation), gate.limit)
    call("gate_mul", joined, y, y.numel() // width, width, *how, dtype=joined.dtype)
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
    """Same as the reference op; the pool must have the type of `joined`.
    # pool [2, slots, kv_heads, dim] -> [rows, query heads, dim]"""
    assert pool.dtype == joined.dtype, f"{pool.dtype} keeps no {joined.dtype}"
    rows, kv_heads, dim = slots.shape[0], *pool.shape[2:]
    query, norms = joined.new_empty(rows, query_heads, dim), head_norms or (None, None)
    written, sizes = (query, *halves(pool)), (rows, query_heads, kv_heads, dim)
    how = spans_projection(head_norms, dim), epsilon
    call("rotary_store", joined, cos, sin, slots, *norms, *how, *written, *sizes, dtype=joined.dtype)
    return query


class CompiledLayers:
    """Decoder layers whose products are all packed, run by one native call."""

    def __init__(self, layers: "Sequence[DecoderLayer]", pools: Sequence[Tensor], taps: Sequence[int] = ()) -> None:
        self._pools, self._taps = pools, len(taps)
        columns = [taps.index(number) if number in taps else -1 for number in range(len(layers))]
        self._structures = [*map(_structure_of, layers, pools, columns)]
        self.joined = as_tensor(b"".join(self._structures))
        # Intermediate results of a row: the normed input, then either queries, attention output and fused QKV product,
        # or SwiGLU output and fused gate-up product.
        self.scratch = max(
            output.out + max(2 * output.columns + query_key_value.out, down.columns + gate_up.out)
            for query_key_value, output, gate_up, down in map(_packed, layers)
        )

    def __call__(
        self, hidden: Tensor, delta: Tensor | None, places: "RowPlaces", tapped: Tensor | None = None
    ) -> Tensor:
        """Run all layers; see `RunLayers`. # [rows, hidden] -> [rows, hidden]"""
        first, last = ((of.slots, *_attended(of.attention)) for of in (places.groups[0], places.groups[-1]))
        assert hidden.is_contiguous(), "it is changed in place"
        assert hidden.dtype == self._pools[0].dtype, f"{self._pools[0].dtype} keeps no {hidden.dtype}"
        result, rows = torch.empty_like(hidden), hidden.shape[0]
        scratch = hidden.new_empty(rows * self.scratch)
        at = CStruct(places.cos, places.sin, *first, *last, tapped, self._taps)
        call("decode", self.joined, len(self._structures), at, hidden, delta, result, rows, scratch, dtype=hidden.dtype)
        return result


def _attended(attention: Attention) -> tuple[Tensor | int | None, ...]:
    """Return the fields of the C structure `KVRows` (decoder.h) that follow its slots."""
    assert isinstance(attention, CompiledAttention), "attention was planned by other ops"
    return *attention.rows.words, *attention.groups_and_table


def plan_layers(layers: Sequence[Any], pools: Sequence[Tensor], taps: Sequence[int] = ()) -> RunLayers:
    """Same as the reference op, in one native call for all layers. If any product is not packed or has an odd number of
    input columns, all layers run op by op. # pools [2, slots, kv_heads, dim] each"""
    if all(len(_packed(layer)) == 4 for layer in layers):
        return CompiledLayers(layers, pools, taps)
    return op_by_op(layers, pools, taps)


def _packed(layer: "DecoderLayer") -> list[PackedLinear]:
    """List the layer's packed products that have an even number of input columns."""
    products = layer.query_key_value, layer.output, layer.gate_up, layer.down
    return [one for one in products if isinstance(one, PackedLinear) and not one.missing]


def _structure_of(layer: "DecoderLayer", pool: Tensor, tap: int) -> CStruct:
    """Build the C structure `DecoderLayer` of decoder.h."""
    norms = *layer.norms, *(layer.head_norms or (None, None)), spans_projection(layer.head_norms, pool.shape[3]), tap
    attention = layer_of(pool, layer.query_heads, layer.window)
    words = [word for product in _packed(layer) for word in product.structure.words]
    return CStruct(*words, *norms, *attention, floats=(layer.scale * LOG2_E, 0.0, layer.epsilon))
