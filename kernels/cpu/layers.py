"""Compiled ops of `kernels.layers`. Weights are packed once, into tiles of outputs that a product reads front to back.
If all products of a model are packed, one native call runs all its layers."""

import ctypes
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Self, cast

import torch
from torch import Tensor
from torch.nn import functional

from kernels.cpu.library import CStruct, call, function, halves, weight_memory
from kernels.cpu.tree_attention import CompiledAttention, layer_of
from kernels.layers import (
    COLUMNS,
    SPAN,
    BlockFormat,
    GateForm,
    Heads,
    Product,
    QuantisedBlocks,
    QuantisedWeight,
    RotaryRows,
    RunLayers,
    Weight,
    groups_of,
    spans_projection,
)
from kernels.layers import plan_layers as op_by_op
from kernels.pieces import NUM_PIECES, Pieces
from kernels.tree_attention import Attention

if TYPE_CHECKING:  # an import at run time would be circular
    from kernels.decoder_layer import DecoderLayer, RowPlaces
    from kernels.feed_forward import DenseFeedForward


OUTPUTS = 32
"""Outputs of the largest tile in any build; smaller tiles divide it."""


class PackedLinear:
    """A product with a packed weight, called through its C function."""

    def __init__(
        self,
        kernel: str,
        weights: Tensor,
        sizes: tuple[int, int],
        bias: Tensor | None,
        dtype: torch.dtype,
        pieces: Pieces | None,
        kept: object = None,
    ) -> None:
        """`kernel`: name of the C function without pieces; `sizes`: input and output columns of the weight; `kept`:
        objects that `weights` points to, kept alive.
        # weights: packed weight, or a C structure as bytes; bias [out]"""
        self.columns, self.out = sizes
        self.missing = 0 if kernel == QUANTISED else self.columns % 2  # the kernel reads columns in pairs
        self.columns += self.missing
        self._of_parts = torch.float32 if pieces is not None and not pieces.whole else None
        if pieces is not None:
            ends = [end + self.missing * (end == sizes[0]) for end in pieces.ends]
            weights, kept = as_tensor(CStruct(weights, *cut_words(ends, whole=pieces.whole))), (weights, kept)
            kernel = f"{kernel}_pieces"
        self._call = function(kernel, dtype)
        padding = 0, -self.out % OUTPUTS
        padded = None if bias is None else functional.pad(bias.detach().float(), padding)
        self._kept = weights, padded, kept
        self._addresses = weights.data_ptr(), None if padded is None else padded.data_ptr()

    @property
    def structure(self) -> CStruct:
        """This product as the C structure `Product` of decoder.h."""
        return CStruct(ctypes.cast(self._call, ctypes.c_void_p).value, *self._addresses, self.columns, self.out)

    def __call__(self, x: Tensor) -> Tensor:
        """Compute x W^T + b. # [..., in] -> [..., out]"""
        x = functional.pad(x, (0, self.missing)) if self.missing else x.contiguous()
        columns, out = self.columns, self.out
        y = x.new_empty(*x.shape[:-1], out, dtype=self._of_parts)
        self._call(x.data_ptr(), *self._addresses, y.data_ptr(), x.numel() // columns, columns, out)
        return y


def cut_words(ends: Sequence[int], *, whole: bool) -> tuple[int, ...]:
    """The fields of the C structure `Cut` (pieces.h) for the ends of up to 8 pieces; see `kernels.pieces.Pieces`."""
    return len(ends) - 1, not whole, *ends, *[0] * (NUM_PIECES + 1 - len(ends))


QUANTISED = "linear_quantised"


def plan_linear(weight: Weight, bias: Tensor | None, pieces: Pieces | None = None) -> Product:
    """Same as the reference op, but batch invariant. # weight [out, in], bias [out]"""
    if isinstance(weight, QuantisedWeight):
        return weight.plan(bias, pieces)
    sizes = weight.shape[1], weight.shape[0]
    whole = functional.pad(weight.detach(), (0, weight.shape[1] % 2)).contiguous()
    out, columns = whole.shape
    packed = weight_memory(-(-out // OUTPUTS) * OUTPUTS * columns * whole.itemsize)
    call("pack", whole, packed, columns, out, dtype=weight.dtype)
    return PackedLinear("linear", packed, sizes, bias, weight.dtype, pieces)


class PackedPart(NamedTuple):
    """Consecutive outputs of a matrix that have one format."""

    tiles: Tensor  # [bytes] uint8
    structure: CStruct  # `Part` of linear_quantised.cpp

    @property
    def outputs(self) -> int:
        """Number of outputs."""
        return cast("int", self.structure.words[1])

    def rows(self, groups: Tensor) -> "PackedPart":
        """Copy groups of 32 outputs. # groups [groups] int64"""
        by_group = self.tiles.view(self.outputs // OUTPUTS, -1)
        tiles = weight_memory(groups.shape[0] * by_group.shape[1])
        torch.index_select(by_group, 0, groups, out=tiles.view(-1, by_group.shape[1]))
        return PackedPart(tiles, CStruct(tiles, groups.shape[0] * OUTPUTS, *self.structure.words[2:]))


class PackedWeight(QuantisedWeight):
    """A quantised weight in the kernels' layout: tiles of packed 4, 6 or 8-bit codes."""

    def __init__(self, parts: Sequence[PackedPart], columns: int, dtype: torch.dtype) -> None:
        self.dtype, self.parts = dtype, parts
        self.shape = sum(part.outputs for part in parts), columns

    @classmethod
    def joined(cls, weights: Sequence[Self]) -> Self:
        return cls([part for weight in weights for part in weight.parts], weights[0].shape[1], weights[0].dtype)

    @property
    def num_bytes(self) -> int:
        return sum(part.tiles.nbytes for part in self.parts)

    def lookup(self, outputs: Tensor) -> Tensor:  # [...] int64 -> [..., in]
        y, first = torch.empty(*outputs.shape, self.shape[1], dtype=self.dtype), 0
        if len(self.parts) == 1:
            wanted = self.only_part, outputs.contiguous(), outputs.numel(), self.shape[1]
            call("lookup_quantised", *wanted, y, dtype=self.dtype)
            return y
        for part in self.parts:
            own = (outputs >= first) & (outputs < first + part.outputs)
            y[own] = PackedWeight([part], self.shape[1], self.dtype).lookup(outputs[own] - first)
            first += part.outputs
        return y

    @property
    def only_part(self) -> CStruct:
        """The C structure of the weight, if it was not joined."""
        assert len(self.parts) == 1, "a joined matrix is not looked up"
        return self.parts[0].structure

    def rows(self, chosen: Tensor) -> Self:  # chosen [rows] int64
        (part,), groups = self.parts, groups_of(chosen, self.shape[0])
        return type(self)([part.rows(groups)], self.shape[1], self.dtype)

    @property
    def unit(self) -> int:
        return max(SPAN if part.structure.words[-1] else COLUMNS for part in self.parts)

    def plan(self, bias: Tensor | None, pieces: Pieces | None = None) -> PackedLinear:  # bias [out]
        parts = as_tensor(b"".join(part.structure for part in self.parts))
        matrix = as_tensor(CStruct(parts, len(self.parts)))
        return PackedLinear(QUANTISED, matrix, self.shape[::-1], bias, self.dtype, pieces, kept=(parts, self.parts))


def keep_blocks(
    form: BlockFormat, shape: tuple[int, int], dtype: torch.dtype, pieces: Iterable[QuantisedBlocks]
) -> PackedWeight:
    """Same as the reference op. # shape [out, in]"""
    (out, columns), numbers = shape, (form.bits, form.size, form.zero, form.has_minima, form.has_table, form.has_units)
    num_bytes = call("quantised_bytes", CStruct(None, out, *numbers), columns)
    tiles, first = weight_memory(num_bytes), 0
    structure = CStruct(tiles, out, *numbers)
    for piece in pieces:
        rows, values = len(piece.codes), [None if value is None else value.contiguous() for value in piece]
        call("pack_quantised", structure, tiles, columns, first, rows, *values)
        first += rows
    assert first == out, f"{first} rows of {out}"
    return PackedWeight([PackedPart(tiles, structure)], columns, dtype)


def as_tensor(structure: bytes) -> Tensor:
    """Copy a structure to a tensor, which has an address. # -> [bytes] uint8"""
    return torch.frombuffer(bytearray(structure), dtype=torch.uint8)


def add_rms_norm(
    hidden: Tensor, delta: Tensor | None, weight: Tensor, epsilon: float, offset: float | None = None
) -> Tensor:
    """Same as the reference op; `hidden` must be contiguous. # [rows, hidden] -> [rows, hidden]"""
    assert hidden.is_contiguous(), "it is changed in place"
    y, width = torch.empty_like(hidden), hidden.shape[-1]
    how = epsilon, _offset(offset)
    call("add_rms_norm", hidden, delta, weight, *how, y, hidden.numel() // width, width, dtype=hidden.dtype)
    return y


def _offset(offset: float | None) -> float:
    """Return the offset of norm weights as the C functions take it."""
    return -1.0 if offset is None else offset


ACTIVATIONS = ("silu", "gelu_tanh", "clamped_swiglu", "sigmoid")
"""Activations of a gate, in the order of ops.h."""


def gate_mul(joined: Tensor, gate: GateForm) -> Tensor:
    """Same as the reference op. # [..., 2 * width] -> [..., width]"""
    joined, width = joined.contiguous(), joined.shape[-1] // 2
    y = joined.new_empty(*joined.shape[:-1], width)
    how = ACTIVATIONS.index(gate.activation), gate.limit
    call("gate_mul", joined, y, y.numel() // width, width, *how, dtype=joined.dtype)
    return y


def rotary_store(joined: Tensor, rotary: RotaryRows | None, slots: Tensor, pool: Tensor, heads: Heads) -> Tensor:
    """Same as the reference op; the pool must have the type of `joined`.
    # pool [2, slots, kv_heads, dim] -> [rows, query heads, dim]"""
    assert pool.dtype == joined.dtype, f"{pool.dtype} keeps no {joined.dtype}"
    rows, kv_heads, dim = slots.shape[0], *pool.shape[2:]
    query = joined.new_empty(rows, heads.query_heads, dim)
    how = CStruct(*_rotary(rotary)), slots, _heads(heads, kv_heads, dim)
    call("rotary_store", joined, *how, query, *halves(pool), rows, dtype=joined.dtype)
    return query


def _rotary(rotary: RotaryRows | None) -> tuple[Tensor | int | None, ...]:
    """Return the fields of the C structure `Rotary` (ops.h)."""
    if rotary is None:
        return None, None, None, 0
    return rotary.cos, rotary.sin, rotary.query_scale, rotary.cos.shape[1]


def _heads(heads: Heads, kv_heads: int, dim: int) -> CStruct:
    """Build the C structure `Heads` of ops.h."""
    norms, whole = heads.norms or (None, None), spans_projection(heads.norms, dim)
    floats = heads.epsilon, _offset(heads.norm_offset)
    numbers = heads.query_heads, kv_heads, dim, len(heads.projected), heads.value_norm
    return CStruct(*norms, whole, *numbers, floats=floats)


_MOST_ROTARY = 3  # as in decoder.h


class CompiledLayers:
    """Decoder layers whose products are all packed, run by one native call."""

    def __init__(self, layers: "Sequence[DecoderLayer]", pools: Sequence[Tensor], taps: Sequence[int] = ()) -> None:
        self._pools, self._taps, self._kept = pools, len(taps), list[CStruct]()
        self._rotary = list(dict.fromkeys(layer.attention.rope for layer in layers))
        assert len(self._rotary) <= _MOST_ROTARY, f"rotary embeddings: {self._rotary}"
        columns = [taps.index(number) if number in taps else -1 for number in range(len(layers))]
        for layer, pool, column in zip(layers, pools, columns, strict=True):
            self._kept += _structures_of(layer, pool, self._rotary.index(layer.attention.rope), column)
        self._number = len(layers)
        self.joined = as_tensor(b"".join(self._kept))
        # Intermediate results of a row: the normed input, then either queries, attention output and fused QKV product,
        # or the gates' output and fused gate-up product.
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
        rotary = [word for name in self._rotary for word in _rotary(None if name is None else places.rotary[name])]
        rotary += [None] * (4 * (_MOST_ROTARY - len(self._rotary)))
        at = CStruct(*first, *last, tapped, self._taps, *rotary)
        call("decode", self.joined, self._number, at, hidden, delta, result, rows, scratch, dtype=hidden.dtype)
        return result


def _attended(attention: Attention) -> tuple[Tensor | int | None, ...]:
    """Return the fields of the C structure `KVRows` (decoder.h) that follow its slots."""
    assert isinstance(attention, CompiledAttention), "attention was planned by other ops"
    return *attention.rows.words, *attention.groups_and_table


def plan_layers(layers: Sequence[Any], pools: Sequence[Any], taps: Sequence[int] = ()) -> RunLayers:
    """Same as the reference op, in one native call for all layers. If a layer has experts, a product that is not packed
    or an odd number of input columns, all layers run op by op. # pools [2, slots, kv_heads, dim] each"""
    if all(len(_packed(layer)) == 4 for layer in layers):
        return CompiledLayers(layers, pools, taps)
    return op_by_op(layers, pools, taps)


def _packed(layer: "DecoderLayer") -> list[PackedLinear]:
    """List the layer's packed products that have an even number of input columns; none if it is recurrent or gated,
    or if more follows attention than a dense feed-forward."""
    forward, mixer = layer.feed_forward, layer.mixer
    if layer.scalar is not None or layer.per_layer is not None or getattr(mixer, "gated", True):
        return []
    around = layer.attention.query_key_value, mixer.output
    products = *around, getattr(forward, "gate_up", None), getattr(forward, "down", None)
    return [one for one in products if isinstance(one, PackedLinear) and not one.missing]


def _structures_of(layer: "DecoderLayer", pool: Tensor, rotary: int, tap: int) -> list[CStruct]:
    """Build the C structure `DecoderLayer` of decoder.h, as consecutive parts."""
    words = [word for product in _packed(layer) for word in product.structure.words]
    gate = cast("DenseFeedForward", layer.feed_forward).gate
    floats = gate.limit, layer.residual
    return [
        CStruct(*words, *layer.norms, ACTIVATIONS.index(gate.activation), rotary, tap, floats=floats),
        _heads(layer.attention.heads, *pool.shape[2:]),
        layer_of(pool, layer.attention.heads.query_heads, layer.attention.form),
    ]
