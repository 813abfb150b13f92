"""Loads GGUF files without dequantising: matrices stay in the file's blocks of a few bits.

A quantised matrix is [rows, blocks, bytes] in the file. Formats as ggml defines them (ggml-common.h, ggml-quants.c);
those without a kernel are dequantised and kept in 8 bits.
"""

import logging
import mmap
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np
import torch
from accelerate import init_empty_weights  # type: ignore[import-untyped]
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFReader, dequantize
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map

from kernels import ops
from kernels.linear import COLUMNS, EIGHT_BITS, BlockFormat, QuantisedBlocks, QuantisedWeight, in_8_bits
from service.engine.modules import QuantisedEmbedding, QuantisedLinear
from service.errors import StartupError

logger = logging.getLogger(__name__)

_PIECE = 1 << 23  # weights unpacked at once
_BY_ROWS = (
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma",
    "gemma2",
    "gemma3",
    "phi3",
    "smollm3",
    "stablelm",
    "starcoder2",
)
"""Architectures whose matrices transformers takes over unchanged, or with their rows in another order."""
_PLAIN = {GGMLQuantizationType.F32, GGMLQuantizationType.F16, GGMLQuantizationType.BF16, GGMLQuantizationType.F64}


def open_gguf(file: Path) -> GGUFReader | None:
    """Open the file, its tensors memory-mapped; None for an architecture whose blocks cannot be kept. Raises
    StartupError for a damaged file."""
    try:
        reader = _GGUFReader(file)
    except (ValueError, IndexError, KeyError, UnicodeDecodeError, OverflowError) as error:
        raise StartupError(
            f"{file}: this GGUF file is damaged or incomplete; copy or download it again ({error})"
        ) from error
    return reader if _architecture(reader) in _BY_ROWS else None


def load_as_it_is(reader: GGUFReader, config: PreTrainedConfig, dtype: torch.dtype, attention: str) -> PreTrainedModel:
    """Load the model on the CPU, its matrices as `QuantisedWeight`s, all else in `dtype`. Raises StartupError."""
    file = Path(str(reader.data.filename))
    with init_empty_weights(include_buffers=False):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)
    processors: type[TensorProcessor] = TENSOR_PROCESSORS.get(_architecture(reader), TensorProcessor)
    processor = processors(config=config.to_dict())
    names = get_gguf_hf_weights_map(model, processor)
    kept = Counter[str]()
    for tensor in reader.tensors:
        if tensor.name not in names:
            continue
        try:
            data = processor.process(weights=tensor.data, name=tensor.name).weights
            kept[_put(model, names[tensor.name], data, tensor.tensor_type, dtype)] += int(tensor.n_elements)
        except (NotImplementedError, ValueError, RuntimeError) as error:
            raise StartupError(f"{file.name}: tensor {tensor.name!r} cannot be read: {error}") from error
        reader.data._mmap.madvise(mmap.MADV_DONTNEED)  # type: ignore[attr-defined]  # pages are read once
    if config.tie_word_embeddings:
        _tie(model)
    missing = [name for name, value in model.named_parameters() if value.is_meta]
    if missing:
        raise StartupError(f"{file.name}: there are no weights for {', '.join(missing[:3])} ({len(missing)} in all)")
    shares = ", ".join(f"{name} {count / 1e6:.0f} M" for name, count in kept.most_common())
    logger.info("%s: weights stay quantised as in the file: %s", file.name, shares)
    return model


class _GGUFReader(GGUFReader):
    """Names the tensor in the error of a file that ends early."""

    def _build_tensors(self, start_offs, fields) -> None:  # type: ignore[no-untyped-def]  # as declared there
        tensors = []
        for field in fields:
            try:
                super()._build_tensors(start_offs, [field])
            except ValueError as error:
                raise ValueError(f"tensor {field.name!r}: {error}") from error
            tensors += self.tensors
        self.tensors = tensors


def _architecture(reader: GGUFReader) -> str:
    field = reader.get_field("general.architecture")
    return "" if field is None else str(field.contents())


def _put(model: PreTrainedModel, name: str, data: np.ndarray, kind: GGMLQuantizationType, dtype: torch.dtype) -> str:
    """Set the module of the model that a tensor of the file belongs to; returns the name of the format it is kept
    in."""
    place, _, parameter = name.rpartition(".")
    parent_name, _, own_name = place.rpartition(".")
    parent, module = model.get_submodule(parent_name), model.get_submodule(place)
    if kind in _PLAIN or parameter != "weight" or not isinstance(module, nn.Linear | nn.Embedding):
        value = torch.from_numpy(dequantize(data, kind).copy()).to(dtype)
        setattr(module, parameter, nn.Parameter(value, requires_grad=False))
        return str(dtype).removeprefix("torch.")
    weight, kept = _kept(data, kind, dtype)
    is_linear, bias = isinstance(module, nn.Linear), dict(module.named_parameters()).get("bias")
    setattr(parent, own_name, QuantisedLinear(weight, bias) if is_linear else QuantisedEmbedding(weight))
    return kept


def _tie(model: PreTrainedModel) -> None:
    embedding = model.get_input_embeddings()
    if isinstance(embedding, QuantisedEmbedding):
        model.set_output_embeddings(QuantisedLinear(embedding.weight, None))
    else:
        model.tie_weights()


def _kept(data: np.ndarray, kind: GGMLQuantizationType, dtype: torch.dtype) -> tuple[QuantisedWeight, str]:
    """The weight in blocks, and the name of its format. # data [out, bytes]"""
    columns, size = GGML_QUANT_SIZES[kind]
    shape = data.shape[0], data.shape[1] // size * columns
    keep = ops.on(torch.device("cpu")).keep_blocks
    if kind not in _FORMATS:
        pieces = (in_8_bits(torch.from_numpy(dequantize(piece, kind))) for piece in _pieces(data, shape[1]))
        return keep(EIGHT_BITS, shape, dtype, pieces), f"{kind.name} in 8 bits"
    form, unpack = _FORMATS[kind]
    by_block = (torch.from_numpy(piece.copy()).unflatten(1, (-1, size)) for piece in _pieces(data, shape[1]))
    return keep(form, shape, dtype, (unpack(block, form) for block in by_block)), kind.name


def _pieces(data: np.ndarray, columns: int) -> Iterator[np.ndarray]:
    rows = max(COLUMNS, _PIECE // columns // COLUMNS * COLUMNS)
    for first in range(0, data.shape[0], rows):
        yield data[first : first + rows]


def _halves(raw: Tensor) -> Tensor:
    """Reinterpret bytes as halves. # [..., 2 n] uint8 -> [..., n] float16"""
    return raw.contiguous().view(torch.float16)


def _nibbles(raw: Tensor) -> Tensor:
    """The lower four bits of all bytes, then the upper ones. # [..., n] -> [..., 2 n]"""
    return torch.cat([raw & 15, raw >> 4], dim=-1)


def _bits(raw: Tensor, *shifts: int, mask: int = 1) -> Tensor:
    """The masked bits of all bytes at each shift. # [..., n] -> [..., shifts * n]"""
    return torch.cat([raw >> shift & mask for shift in shifts], dim=-1)


def _of_32(raw: Tensor, form: BlockFormat) -> QuantisedBlocks:
    """Q4_0, Q4_1, Q5_0, Q5_1: scale, minimum, fifth bits; byte j holds four bits of columns j and j + 16.
    # [rows, blocks, bytes]"""
    halves = 2 * (1 + form.has_minima)
    head, rest = _halves(raw[..., :halves]), raw[..., halves:]
    codes = _nibbles(rest[..., -16:])
    if form.bits > 4:  # bit i of 32 belongs to column i
        spread = rest[..., :4, None] >> torch.arange(8, dtype=torch.uint8) & 1
        codes = codes | spread.flatten(-2) << 4
    return QuantisedBlocks(codes, head[..., :1], head[..., 1:] if form.has_minima else None)


def _q8_0(raw: Tensor, form: BlockFormat) -> QuantisedBlocks:
    """Q8_0: scale, and signed bytes. # [rows, blocks, bytes]"""
    return QuantisedBlocks(raw[..., 2:] ^ 128, _halves(raw[..., :2]))


def _scaled(blocks: Tensor, scales: Tensor) -> Tensor:
    """Scales of a K block's parts: integers times one scale. # blocks [rows, blocks, 1], scales [rows, blocks,
    parts] -> [rows, parts of the row]"""
    return (blocks.float() * scales.float()).half().flatten(1)


def _of_k(raw: Tensor, form: BlockFormat) -> QuantisedBlocks:
    """Q4_K and Q5_K: scales of scales and of minima; eight of each in 6 bits; fifth bits; codes by 64 columns."""
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
    """Q6_K: lower four bits, upper two, 16 scales, and the scale of these; codes by 128 columns. # [rows, blocks,
    bytes]"""
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
"""Formats that stay in the file's blocks: the kernels' form of each, and how its bytes become that."""
