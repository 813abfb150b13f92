"""Loads models from GGUF files. Quantised matrices keep their blocks or are dequantised to the model's dtype.

A quantised matrix is stored as [rows, blocks, bytes], in formats defined by ggml (ggml-common.h, ggml-quants.c). If
blocks are kept, matrices in a format without a kernel are quantised anew to 8 bits.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from math import prod
from typing import Any

import numpy as np
import torch
from accelerate import init_empty_weights  # type: ignore[import-untyped]
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from kernels import ops
from kernels.layers import COLUMNS, EIGHT_BITS, BlockFormat, QuantisedBlocks, QuantisedWeight, in_8_bits
from service.engine.gguf_config import ROPE_FACTORS, Architecture, architecture_of
from service.engine.gguf_reader import GGUFFile, GGUFTensor
from service.engine.modules import QuantisedEmbedding, QuantisedLinear
from service.errors import StartupError

logger = logging.getLogger(__name__)

_PIECE = 1 << 23  # number of weights that are converted at once
_PLAIN = {GGMLQuantizationType.F32, GGMLQuantizationType.F16, GGMLQuantizationType.BF16, GGMLQuantizationType.F64}


def load_gguf(
    file: GGUFFile, config: PreTrainedConfig, dtype: torch.dtype, attention: str, *, in_blocks: bool
) -> PreTrainedModel:
    """Load a model to the CPU in `dtype`. `in_blocks`: keep quantised matrices as `QuantisedWeight`, and all other
    weights in float32, as llama.cpp does. Raises StartupError for missing or unknown tensors and wrong shapes."""
    if in_blocks:
        dtype = torch.float32
    with no_init_weights(), init_empty_weights(include_buffers=False):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)
    architecture, kept = architecture_of(file), Counter[str]()
    places = _places(architecture, model)
    for name, tensor in file.tensors.items():
        try:
            ordered = _as_transformers_has_it(tensor, name, config, architecture)
            kept[_take(model, name, places.get(name), ordered, in_blocks)] += prod(tensor.shape)
        except (NotImplementedError, ValueError, RuntimeError) as error:
            raise StartupError(f"{file.path.name}: tensor {name!r} cannot be used: {error}") from error
        file.give_back()
    if config.tie_word_embeddings:
        _tie(model)
    named = {ours: theirs for theirs, ours in places.items()}
    missing = [named.get(name, name) for name, value in model.named_parameters() if value.is_meta]
    if missing:
        raise StartupError(
            f"{file.path.name}: weights are missing for {', '.join(missing[:3])} ({len(missing)} in all)"
        )
    shares = ", ".join(f"{name} {count / 1e6:.0f} M" for name, count in kept.most_common())
    logger.info("%s: number of weights by type: %s", file.path.name, shares)
    return model


def _places(architecture: Architecture, model: PreTrainedModel) -> dict[str, str]:
    """Map tensor names to parameter names of the model."""
    names = architecture.names(model.config.num_hidden_layers)
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    both = {f"{theirs}.{kind}": f"{ours}.{kind}" for theirs, ours in names.items() for kind in ("weight", "bias")}
    return {theirs: ours for theirs, ours in both.items() if ours in parameters}


def _take(model: PreTrainedModel, name: str, place: str | None, tensor: GGUFTensor, in_blocks: bool) -> str:
    """Load a tensor into the model. Returns the name of the format in which it is kept. Raises ValueError for a tensor
    that does not fit the model."""
    if name == ROPE_FACTORS:
        return _scale_frequencies(model, tensor)
    if place is None:
        raise ValueError("this model has no such weight, so it would be ignored")
    expected = tuple(model.get_parameter(place).shape)
    if tensor.shape != expected:
        raise ValueError(f"its shape is {list(tensor.shape)}, but the file's metadata requires {list(expected)}")
    return _put(model, place, tensor, in_blocks)


def _as_transformers_has_it(
    tensor: GGUFTensor, name: str, config: PreTrainedConfig, architecture: Architecture
) -> GGUFTensor:
    """Convert a tensor to transformers' layout: norm weights without the added 1, rotary pairs as two halves of each
    head."""
    module = name.split(".")[-2] if "." in name else name
    if architecture.norms_plus_one and module.endswith("_norm"):
        return GGUFTensor(tensor.shape, GGMLQuantizationType.F32, dequantize(tensor.data, tensor.kind) - 1)
    if architecture.pairs_adjacent and module in ("attn_q", "attn_k"):
        heads = config.num_attention_heads if module == "attn_q" else config.num_key_value_heads
        pairs = tensor.data.reshape(heads, tensor.shape[0] // heads // 2, 2, *tensor.data.shape[1:])
        return tensor._replace(data=pairs.swapaxes(1, 2).reshape(tensor.data.shape))
    return tensor


def _scale_frequencies(model: PreTrainedModel, factors: GGUFTensor) -> str:
    """Divide the model's rotary frequencies by the file's factors. Returns the name of their dtype.
    # factors [rotary_dim / 2]"""
    frequencies = dict(model.get_decoder().named_buffers()).get("rotary_emb.inv_freq")
    if frequencies is None:
        raise ValueError("this model has separate rotary frequencies for each layer type")
    frequencies /= _numbers(factors).view_as(frequencies)
    return str(frequencies.dtype).removeprefix("torch.")


def _numbers(tensor: GGUFTensor) -> Tensor:
    return torch.from_numpy(dequantize(tensor.data, tensor.kind).astype(np.float32))


def _put(model: PreTrainedModel, name: str, tensor: GGUFTensor, in_blocks: bool) -> str:
    """Set a parameter of the model. Returns the name of the format in which it is kept."""
    place, _, parameter = name.rpartition(".")
    parent_name, _, own_name = place.rpartition(".")
    parent, module, dtype = model.get_submodule(parent_name), model.get_submodule(place), model.dtype
    is_matrix = parameter == "weight" and isinstance(module, nn.Linear | nn.Embedding)
    if not (in_blocks and is_matrix) or tensor.kind in _PLAIN:
        setattr(module, parameter, nn.Parameter(_dense(tensor, dtype), requires_grad=False))
        return str(dtype).removeprefix("torch.")
    weight, kept = _kept(tensor.data, tensor.kind, dtype)
    if isinstance(module, nn.Linear):
        held: nn.Module = QuantisedLinear(weight, dict(module.named_parameters()).get("bias"))
    else:
        held = QuantisedEmbedding(weight, float(getattr(module, "scalar_embed_scale", 1)))
    setattr(parent, own_name, held)
    return kept


def _dense(tensor: GGUFTensor, dtype: torch.dtype) -> Tensor:
    """Dequantise a tensor piece by piece. # -> [*shape]"""
    if len(tensor.shape) < 2:
        return _numbers(tensor).to(dtype)
    dense, first = torch.empty(tensor.shape, dtype=dtype), 0
    for piece in _pieces(tensor.data, tensor.shape[1]):
        dense[first : first + len(piece)] = torch.from_numpy(np.array(dequantize(piece, tensor.kind)))
        first += len(piece)
    return dense


def _tie(model: PreTrainedModel) -> None:
    embedding = model.get_input_embeddings()
    if isinstance(embedding, QuantisedEmbedding):
        model.set_output_embeddings(QuantisedLinear(embedding.weight, None))
    else:
        model.tie_weights()


def _kept(data: NDArray[Any], kind: GGMLQuantizationType, dtype: torch.dtype) -> tuple[QuantisedWeight, str]:
    """Convert a quantised matrix to the kernels' block format. Returns it, and the name of the format.
    # data [out, bytes]"""
    columns, size = GGML_QUANT_SIZES[kind]
    shape = data.shape[0], data.shape[1] // size * columns
    keep = ops.on(torch.device("cpu")).keep_blocks
    if kind not in _FORMATS:
        pieces = (in_8_bits(torch.from_numpy(dequantize(piece, kind))) for piece in _pieces(data, shape[1]))
        return keep(EIGHT_BITS, shape, dtype, pieces), f"{kind.name} in 8 bits"
    form, unpack = _FORMATS[kind]
    by_block = (torch.from_numpy(piece.copy()).unflatten(1, (-1, size)) for piece in _pieces(data, shape[1]))
    return keep(form, shape, dtype, (unpack(block, form) for block in by_block)), kind.name


def _pieces(data: NDArray[Any], columns: int) -> Iterator[NDArray[Any]]:
    rows = max(COLUMNS, _PIECE // columns // COLUMNS * COLUMNS)
    for first in range(0, data.shape[0], rows):
        yield data[first : first + rows]


def _halves(raw: Tensor) -> Tensor:
    """Reinterpret bytes as float16. # [..., 2 n] uint8 -> [..., n] float16"""
    return raw.contiguous().view(torch.float16)


def _nibbles(raw: Tensor) -> Tensor:
    """Lower four bits of all bytes, then upper four bits. # [..., n] -> [..., 2 n]"""
    return torch.cat([raw & 15, raw >> 4], dim=-1)


def _bits(raw: Tensor, *shifts: int, mask: int = 1) -> Tensor:
    """Shift all bytes right by each of `shifts`, mask them, and concatenate the results.
    # [..., n] -> [..., shifts * n]"""
    return torch.cat([raw >> shift & mask for shift in shifts], dim=-1)


def _of_32(raw: Tensor, form: BlockFormat) -> QuantisedBlocks:
    """Unpack Q4_0, Q4_1, Q5_0 and Q5_1. A block holds scale, minimum, fifth bits, and codes, with four bits of columns
    j and j + 16 in byte j. # [rows, blocks, bytes]"""
    halves = 2 * (1 + form.has_minima)
    head, rest = _halves(raw[..., :halves]), raw[..., halves:]
    codes = _nibbles(rest[..., -16:])
    if form.bits > 4:  # bit i of 32 is the fifth bit of column i
        spread = rest[..., :4, None] >> torch.arange(8, dtype=torch.uint8) & 1
        codes = codes | spread.flatten(-2) << 4
    return QuantisedBlocks(codes, head[..., :1], head[..., 1:] if form.has_minima else None)


def _q8_0(raw: Tensor, form: BlockFormat) -> QuantisedBlocks:
    """Unpack Q8_0. A block holds a scale, and codes as signed bytes. # [rows, blocks, bytes]"""
    return QuantisedBlocks(raw[..., 2:] ^ 128, _halves(raw[..., :2]))


def _scaled(blocks: Tensor, scales: Tensor) -> Tensor:
    """Compute the sub-block scales of K formats: integer scales times the block's scale.
    # blocks [rows, blocks, 1], scales [rows, blocks, parts] -> [rows, blocks * parts]"""
    return (blocks.float() * scales.float()).half().flatten(1)


def _of_k(raw: Tensor, form: BlockFormat) -> QuantisedBlocks:
    """Unpack Q4_K and Q5_K. A block holds its scale and minimum, eight 6-bit scales and minima, fifth bits, and codes
    in groups of 64 columns. # [rows, blocks, bytes]"""
    heads, packed, rest = _halves(raw[..., :4]), raw[..., 4:16], raw[..., 16:]
    first, second, third = packed.split(4, dim=-1)
    scales = torch.cat([first & 63, third & 15 | first >> 6 << 4], dim=-1)
    minima = torch.cat([second & 63, third >> 4 | second >> 6 << 4], dim=-1)
    codes = _nibbles(rest[..., -128:].unflatten(-1, (4, 32))).flatten(-2)  # [rows, blocks, 256]
    if form.bits > 4:
        codes = codes | _bits(rest[..., :32], *range(8)) << 4
    rows = raw.shape[0]
    return QuantisedBlocks(
        codes.view(rows, -1, COLUMNS),
        _scaled(heads[..., :1], scales)[..., None],
        _scaled(-heads[..., 1:], minima)[..., None],
    )


def _q6_k(raw: Tensor, form: BlockFormat) -> QuantisedBlocks:
    """Unpack Q6_K. A block holds the lower four bits and the upper two bits of codes in groups of 128 columns, 16
    scales, and its own scale. # [rows, blocks, bytes]"""
    low, high = raw[..., :128].unflatten(-1, (2, 64)), raw[..., 128:192].unflatten(-1, (2, 32))
    codes = _nibbles(low) | _bits(high, 0, 2, 4, 6, mask=3) << 4
    scales = _scaled(_halves(raw[..., 208:]), raw[..., 192:208].view(torch.int8))
    rows = raw.shape[0]
    return QuantisedBlocks(codes.view(rows, -1, COLUMNS), scales.view(rows, -1, 2))


_FORMATS: Mapping[GGMLQuantizationType, tuple[BlockFormat, Callable[[Tensor, BlockFormat], QuantisedBlocks]]] = {
    GGMLQuantizationType.Q4_0: (BlockFormat(4, 8), _of_32),
    GGMLQuantizationType.Q4_1: (BlockFormat(4, 0, has_minima=True), _of_32),
    GGMLQuantizationType.Q5_0: (BlockFormat(6, 16), _of_32),
    GGMLQuantizationType.Q5_1: (BlockFormat(6, 0, has_minima=True), _of_32),
    GGMLQuantizationType.Q8_0: (EIGHT_BITS, _q8_0),
    GGMLQuantizationType.Q4_K: (BlockFormat(4, 0, has_minima=True), _of_k),
    GGMLQuantizationType.Q5_K: (BlockFormat(6, 0, has_minima=True), _of_k),
    GGMLQuantizationType.Q6_K: (BlockFormat(6, 32, size=16), _q6_k),
}
"""File formats whose blocks can be kept, with the kernels' block format and the function that unpacks the bytes."""
