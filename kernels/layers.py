"""The ops of a decoder layer except attention: products, norms, gates and rotary embedding.

    y = x W^T + b

The kernels are batch invariant: a row of a product has the same bits alone and in any batch. Libraries choose their
algorithm, and with it the order of a row's sum, by the number of rows, so that a token verified in a tree could differ
from one decoded alone; the kernels sum every row in the order of its columns (see "Defeating Nondeterminism in LLM
Inference", He et al., 2025).

With weights in blocks of 4, 6 or 8 bits, as in GGUF files,

    w_oi = scale_oB (code_oi - zero) + minimum_oB,   x_i ~ a_B p_i
    y_o = b_o + sum_B scale_oB a_B (sum_{i in B} (code_oi - zero) p_i) + minimum_oB a_B (sum_{i in B} p_i)

B is a block of 32 columns, or half of one; in K formats its scale and minimum are whole numbers times units that eight
blocks share. a_B = max |x_i| / 127 over 32 columns and p_i = round(x_i / a_B):
activations are quantised row by row as llama.cpp does. The sums within a block are whole numbers and exact, and blocks
are added up in the order of their columns.

The other ops round as transformers does; `round` in their formulas rounds to the type of the input.

Legend: in, out = widths of a product, blocks = ceil(in / 32), size = columns that share a scale; rows = positions of
one forward, hidden = the model's width, dim = head_dim.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, Literal, NamedTuple, Protocol, Self

import torch
from torch import Tensor
from torch.nn import functional

from kernels.pieces import Pieces, added, finished, multiply

Product = Callable[[Tensor], Tensor]
"""x [..., in] -> [..., out], in the type of both."""


class QuantisedWeight(ABC):
    """A weight matrix [out, in] stored as quantised blocks, in the layout of one implementation."""

    shape: tuple[int, int]
    dtype: torch.dtype  # type of activations and of looked-up rows

    @classmethod
    @abstractmethod
    def joined(cls, weights: Sequence[Self]) -> Self:
        """Concatenate weights [out, in] along `out`; their block formats may differ."""

    @property
    @abstractmethod
    def num_bytes(self) -> int:
        """Size of the weight in bytes."""

    @abstractmethod
    def lookup(self, outputs: Tensor) -> Tensor:
        """Dequantise rows of the weight. # outputs [...] int64, row indices -> [..., in]"""

    @abstractmethod
    def rows(self, chosen: Tensor) -> Self:
        """Copy the chosen rows, in their order, of a weight that was not joined. Raises ValueError unless they are
        whole groups of 32 rows. # chosen [rows] int64"""

    @property
    @abstractmethod
    def unit(self) -> int:
        """Number of columns that cannot be parted, because they share scales or units."""

    @abstractmethod
    def plan(self, bias: Tensor | None, pieces: Pieces | None = None) -> Product:
        """Plan the product with this weight, plus the bias [out]; see the op `plan_linear`."""

    def dense(self) -> Tensor:
        """Dequantise the whole weight. # -> [out, in]"""
        return self.lookup(torch.arange(self.shape[0]))


Weight = Tensor | QuantisedWeight


def rows_of(weight: Weight, chosen: Tensor) -> Weight:
    """Copy rows of a weight, in the order of `chosen`. Raises ValueError for rows of a quantised weight that are no
    whole groups of 32. # chosen [rows] int64 -> [rows, in]"""
    return weight.rows(chosen) if isinstance(weight, QuantisedWeight) else weight[chosen.to(weight.device)]


def groups_of(chosen: Tensor, rows: int) -> Tensor:
    """The numbers of the groups of 32 rows that rows of a quantised weight of so many rows are. Raises ValueError if
    they are no whole groups. # chosen [rows] int64 -> [groups] int64"""
    groups = chosen[::COLUMNS] // COLUMNS
    if rows % COLUMNS or not torch.equal(chosen, (groups[:, None] * COLUMNS + torch.arange(COLUMNS)).flatten()):
        raise ValueError("rows of quantised weights are sorted in groups of 32")
    return groups


def dense(weight: Weight) -> Tensor:
    """Dequantise a weight to a tensor. # -> [out, in]"""
    return weight.dense() if isinstance(weight, QuantisedWeight) else weight


def look_up(outputs: Tensor, weight: Weight) -> Tensor:
    """Look up rows of a weight, as an embedding does. # outputs [...] int64 -> [..., in]"""
    return weight.lookup(outputs) if isinstance(weight, QuantisedWeight) else functional.embedding(outputs, weight)


@dataclass(frozen=True, slots=True)
class Embedding:
    """Lookup in a table of embeddings."""

    weight: Weight  # [vocab, hidden]

    def __call__(self, tokens: Tensor) -> Tensor:
        """Look up tokens. # [...] int64 -> [..., hidden]"""
        return look_up(tokens, self.weight)


def join(weights: Sequence[Weight]) -> Weight:
    """Concatenate weights [out, in] along `out`. Unless all are quantised, the result is a dense tensor."""
    quantised = [weight for weight in weights if isinstance(weight, QuantisedWeight)]
    if len(quantised) == len(weights):
        return type(quantised[0]).joined(quantised)
    return torch.cat([dense(weight) for weight in weights])


def plan_linear(weight: Weight, bias: Tensor | None, pieces: Pieces | None = None) -> Product:
    """Plan the product y = x W^T + b, a sum of `pieces` where they are given. # weight [out, in], bias [out] or None"""
    if isinstance(weight, QuantisedWeight):
        return weight.plan(bias, pieces)
    if pieces is None:
        return partial(functional.linear, weight=weight, bias=bias)
    return partial(multiply, weight=weight, bias=bias, pieces=pieces)


COLUMNS = 32
"""Columns of a quantised block."""
SPAN = 8 * COLUMNS
"""Columns that share units, in formats that have them."""

_MOST = 127
_LARGEST_SCALE = torch.finfo(torch.float16).max


class BlockFormat(NamedTuple):
    """Format of a quantised weight's blocks: width of its codes, and how codes become weights."""

    bits: int  # bits of a code: 4, 6 or 8
    zero: int  # code of weight 0 in formats without minima
    has_minima: bool = False
    size: int = COLUMNS  # columns that share a scale; 16 only with 6 bits and no minima
    has_table: bool = False  # codes of 4 bits are floats: they stand for the numbers of a table, less `zero`
    has_units: bool = False  # scales and minima are whole numbers times units, with minima or 16 columns to a scale

    def numbers(self, codes: Tensor) -> Tensor:
        """Look up codes, or subtract `zero` from them. # [...] uint8 -> [...] float32, whole numbers"""
        return torch.tensor(_TWICE_E2M1)[codes.long()] if self.has_table else codes.float() - self.zero


_TWICE_E2M1 = [sign * size for sign in (1.0, -1.0) for size in (0, 1, 2, 3, 4, 6, 8, 12)]

EIGHT_BITS = BlockFormat(8, 128)
MXFP4 = BlockFormat(4, 12, has_table=True)


class QuantisedBlocks(NamedTuple):
    """Quantised blocks of some rows of a weight: codes, scales and minima."""

    codes: Tensor  # [rows, blocks, 32] uint8
    scales: Tensor  # [rows, blocks, 32 / size] float16; int8 with units
    minima: Tensor | None = None  # like scales
    units: Tensor | None = None  # [rows, ceil(blocks / 8), 1 or 2] float16: of scales and of minima

    def factors(self) -> Tensor:
        """Compute scales, and minima if there are any. # -> [1 or 2, rows, blocks, 32 / size] float32"""
        values = torch.stack([value.float() for value in (self.scales, self.minima) if value is not None])
        if self.units is None:
            return values
        return values * self.units.float().repeat_interleave(8, 1)[:, : values.shape[2]].movedim(2, 0)[..., None]

    def weights(self, form: BlockFormat) -> Tensor:
        """Dequantise: scale (code - zero) + minimum. # -> [rows, blocks, 32 / size, size] float32"""
        scales, *minima = self.factors()[..., None]
        steps: Tensor = form.numbers(self.codes).unflatten(2, (-1, form.size)) * scales
        return steps + minima[0] if minima else steps


class UnpackedWeight(QuantisedWeight):
    """Reference implementation of a quantised weight, with one byte per code."""

    def __init__(self, parts: Sequence[tuple[BlockFormat, QuantisedBlocks]], columns: int, dtype: torch.dtype) -> None:
        self._parts, self.dtype = parts, dtype
        self.shape = sum(blocks.codes.shape[0] for _, blocks in parts), columns

    @classmethod
    def joined(cls, weights: Sequence[Self]) -> Self:
        return cls([part for weight in weights for part in weight._parts], weights[0].shape[1], weights[0].dtype)

    @property
    def num_bytes(self) -> int:
        return sum(value.nbytes for _, blocks in self._parts for value in blocks if value is not None)

    def lookup(self, outputs: Tensor) -> Tensor:  # [...] int64 -> [..., in]
        whole = torch.cat([blocks.weights(form).flatten(1) for form, blocks in self._parts])[:, : self.shape[1]]
        return whole.to(self.dtype)[outputs]

    def rows(self, chosen: Tensor) -> Self:  # chosen [rows] int64
        ((form, blocks),) = self._parts
        groups_of(chosen, self.shape[0])
        taken = QuantisedBlocks._make(None if value is None else value[chosen] for value in blocks)
        return type(self)([(form, taken)], self.shape[1], self.dtype)

    @property
    def unit(self) -> int:
        return max(SPAN if form.has_units else COLUMNS for form, _ in self._parts)

    def plan(self, bias: Tensor | None, pieces: Pieces | None = None) -> Product:  # bias [out]
        cut = pieces or Pieces((0, self.shape[1]))
        return partial(_product, parts=self._parts, bias=bias, pieces=cut)


def keep_blocks(
    form: BlockFormat, shape: tuple[int, int], dtype: torch.dtype, pieces: Iterable[QuantisedBlocks]
) -> QuantisedWeight:
    """Build a quantised weight from consecutive chunks of its rows; all chunks but the last have a multiple of 32 rows.
    # shape [out, in]"""
    values = [None if one[0] is None else torch.cat(one) for one in zip(*pieces, strict=True)]
    return UnpackedWeight([(form, QuantisedBlocks._make(values))], shape[1], dtype)


def in_8_bits(weight: Tensor) -> QuantisedBlocks:
    """Quantise a weight to integers from -127 to 127 with one scale per 32 columns, in the format `EIGHT_BITS`.
    # weight [out, in]"""
    blocks = _blocks(weight.float())
    scales = (blocks.abs().amax(-1, keepdim=True) / _MOST).clamp(max=_LARGEST_SCALE).half()
    counts = torch.where(scales > 0, (blocks / scales.float()).round().clamp(-_MOST, _MOST), 0.0)
    return QuantisedBlocks((counts + EIGHT_BITS.zero).to(torch.uint8), scales)


def _product(
    x: Tensor, parts: Sequence[tuple[BlockFormat, QuantisedBlocks]], bias: Tensor | None, pieces: Pieces
) -> Tensor:
    """Quantise x and multiply it by a quantised weight. # x [..., in] -> [..., out]"""
    most = (activations := _blocks(x.float())).abs().amax(-1, keepdim=True)  # [..., blocks, 1]
    inverse = torch.where(most > 0, torch.full_like(most, _MOST) / most, 0.0)
    whole = (activations.double() * inverse.double()).round().float()  # the product is exact before it is rounded
    by_block = torch.cat([_part_of_product(whole, most / _MOST, *part) for part in parts], dim=-2)
    ends = [-(-end // COLUMNS) for end in pieces.ends]
    total = added([by_block[..., first:end].sum(-1) for first, end in pairwise(ends)])
    return finished(total, bias, x.dtype) if pieces.whole else total


def _part_of_product(whole: Tensor, scales: Tensor, form: BlockFormat, weight: QuantisedBlocks) -> Tensor:
    """Multiply quantised activations by one part of a weight.
    # whole [..., blocks, 32], scales [..., blocks, 1] -> [..., out, blocks]"""
    whole = whole.unflatten(-1, (-1, form.size))  # [..., blocks, scales, size]
    codes = form.numbers(weight.codes).unflatten(2, (-1, form.size))
    dots = torch.einsum("...bsi,obsi->...obs", whole, codes)  # whole numbers below 2^24: exact
    factors, *minima = weight.factors()
    y: Tensor = dots * factors * scales[..., None, :, :]
    if minima:
        y = y + minima[0] * (scales * whole.sum(-1))[..., None, :, :]
    return y.sum(-1)


def _blocks(x: Tensor) -> Tensor:
    """Split columns into blocks, zero-padding the last one. # [..., columns] -> [..., blocks, 32]"""
    whole: Tensor = functional.pad(x, (0, -x.shape[-1] % COLUMNS)).unflatten(-1, (-1, COLUMNS))
    return whole


class RunLayers(Protocol):
    """Runs planned layers."""

    def __call__(self, hidden: Tensor, delta: Tensor | None, places: Any, tapped: Tensor | None = None) -> Tensor:
        """Run the layers on `hidden`, in place; the first one adds `delta` to it. Returns the last feed-forward's
        output, which the caller adds to hidden. `places`: `RowPlaces`; `tapped` receives the sums of both after the
        tapped layers. # hidden, delta [rows, hidden]; tapped [rows, taps * hidden] -> [rows, hidden]"""


class GateForm(NamedTuple):
    """The nonlinearity of a feed-forward, which multiplies gate and up projections; `sigmoid` gates other outputs."""

    activation: Literal["silu", "gelu_tanh", "clamped_swiglu", "sigmoid"]
    limit: float = 0.0  # bound of both projections; only of `clamped_swiglu`


class RotaryRows(NamedTuple):
    """Rotary embedding of a forward's rows. The first columns of a head are rotated, as many as there are here."""

    cos: Tensor  # [rows, rotated], one angle for each half
    sin: Tensor  # [rows, rotated]
    query_scale: Tensor | None = None  # [rows], factor on rotated queries


class Heads(NamedTuple):
    """How a fused projection divides into heads, and how these are normed."""

    query_heads: int
    norms: tuple[Tensor, Tensor] | None = None  # weights for queries and for keys, see `rotary_store`
    epsilon: float = 0.0
    norm_offset: float | None = None  # see `add_rms_norm`
    value_norm: bool = False  # values are normed by head, without a weight
    projected: Literal["qkv", "qk", "q"] = "qkv"  # qk: keys are values too; q: keys and values are stored already


def add_rms_norm(
    hidden: Tensor, delta: Tensor | None, weight: Tensor, epsilon: float, offset: float | None = None
) -> Tensor:
    """y = w * round(h / sqrt(mean(h^2) + epsilon)) with h = hidden + delta, which is stored in `hidden`. With an
    `offset`, y = (offset + w) * h / sqrt(mean(h^2) + epsilon) is rounded once (Gemma).
    # hidden, delta [rows, hidden], weight [hidden] -> like hidden"""
    if delta is not None:
        hidden += delta
    if offset is None:
        return weight * torch.rms_norm(hidden, weight.shape, None, epsilon)
    normed = torch.rms_norm(hidden.float(), weight.shape, None, epsilon)
    weighted: Tensor = (offset + weight.float()) * normed
    return weighted.to(hidden.dtype)


def gate_mul(joined: Tensor, gate: GateForm) -> Tensor:
    """y = round(f(g)) * u on the concatenated gate and up projections g, u. f is silu(g) = g / (1 + exp(-g)), GELU by
    its tanh approximation, or 1 / (1 + exp(-g)). `clamped_swiglu` (gpt-oss): y = g / (1 + exp(-1.702 g)) * (u + 1),
    g <= limit and |u| <= limit, rounded once. # joined [..., 2 * width], gate first -> [..., width]"""
    first, up = joined.chunk(2, dim=-1)
    if gate.activation == "silu":
        return functional.silu(first) * up
    if gate.activation == "gelu_tanh":
        return functional.gelu(first, approximate="tanh") * up
    if gate.activation == "sigmoid":
        return torch.sigmoid(first) * up
    first, up = first.float().clamp(max=gate.limit), up.float().clamp(-gate.limit, gate.limit)
    return (first * torch.sigmoid(SWIGLU_ALPHA * first) * (up + 1)).to(joined.dtype)


SWIGLU_ALPHA = 1.702


def rotary_store(joined: Tensor, rotary: RotaryRows | None, slots: Tensor, pool: Tensor, heads: Heads) -> Tensor:
    """y = round(x * cos) + round([-x_2; x_1] * sin), x = [x_1; x_2]: split the fused projection into queries, keys and
    values, norm queries and keys if `heads` has norms, rotate both unless `rotary` is None, and store keys and values
    in the pool. A norm weight of width dim norms each head; a wider one norms all heads of a row together.
    # joined [rows, (query heads + 2 kv_heads) * dim], less what `heads.projected` lacks; slots [rows] int64; pool
    [2, slots, kv_heads, dim], in one type with joined; norms of queries and of keys, both [dim], or [query heads * dim]
    and [kv_heads * dim]
    -> queries [rows, query heads, dim]"""
    kv_heads, dim = pool.shape[2:]
    parts = [heads.query_heads, kv_heads, kv_heads][: len(heads.projected)]
    query, *others = joined.unflatten(1, (-1, dim)).split(parts, dim=1)
    if others:
        key, value = others[0], others[-1]
        key = key if heads.norms is None else _normed(key, heads.norms[1], heads)
        pool[0].index_copy_(0, slots, key if rotary is None else rotated(key, rotary.cos, rotary.sin))
        pool[1].index_copy_(0, slots, _normed(value, value.new_ones(dim), heads) if heads.value_norm else value)
    query = query if heads.norms is None else _normed(query, heads.norms[0], heads)
    if rotary is None:
        held: Tensor = query.contiguous()
        return held
    turned: Tensor = rotated(query, rotary.cos, rotary.sin)
    return turned if rotary.query_scale is None else turned * rotary.query_scale[:, None, None]


def _normed(x: Tensor, weight: Tensor, heads: Heads) -> Tensor:
    """# x [rows, heads, dim] -> like x"""
    spans = x.reshape(len(x), -1, len(weight))
    return add_rms_norm(spans, None, weight, heads.epsilon, heads.norm_offset).view(x.shape)


def spans_projection(head_norms: tuple[Tensor, Tensor] | None, dim: int) -> bool:
    """Whether query and key norms span all heads of a row together. # head_norms as in `Heads`, [width] each"""
    return head_norms is not None and len(head_norms[0]) > dim


def plan_layers(layers: Sequence[Any], pools: Sequence[Any], taps: Sequence[int] = ()) -> RunLayers:
    """Plan a function that runs `DecoderLayer`s in order, each with its own KV pool or states. `taps`: indices of the
    tapped layers, in the order of their columns. # pools [2, slots, kv_heads, dim] each"""

    def run(hidden: Tensor, delta: Tensor | None, places: Any, tapped: Tensor | None = None) -> Tensor:
        columns = {} if tapped is None else dict(zip(taps, tapped.chunk(len(taps), -1), strict=True))
        for index, (layer, pool) in enumerate(zip(layers, pools, strict=True)):
            delta = layer(hidden, delta, places, pool)
            if index in columns:
                torch.add(hidden, delta, out=columns[index])
        assert delta is not None, "no layers"
        return delta

    return run


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply the rotary embedding to the first columns x = [x_1; x_2] of each head, rotating the pairs of their halves;
    the other columns stay. # x [..., heads, dim], cos and sin [..., rotated] -> like x"""
    turned, kept = x.split([cos.shape[-1], x.shape[-1] - cos.shape[-1]], dim=-1)
    first, second = turned.chunk(2, dim=-1)
    turned = turned * cos[..., None, :] + torch.cat((-second, first), dim=-1) * sin[..., None, :]
    return torch.cat((turned, kept), dim=-1) if kept.shape[-1] else turned
