"""GGUF files of known shapes with random weights, to measure costs: their texts mean nothing.

The `gguf` package writes files but cannot quantise K types: blocks are random bytes whose scales are finite and small.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFReader, GGUFWriter
from numpy.typing import NDArray

Mix = Literal["q4_k_m", "q8_0"]

_ROWS = 1024  # of a matrix that are written at once
_SCALES: Mapping[GGMLQuantizationType, tuple[int, ...]] = {
    GGMLQuantizationType.Q4_0: (0,),
    GGMLQuantizationType.Q4_1: (0, 2),
    GGMLQuantizationType.Q5_0: (0,),
    GGMLQuantizationType.Q5_1: (0, 2),
    GGMLQuantizationType.Q8_0: (0,),
    GGMLQuantizationType.Q4_K: (0, 2),
    GGMLQuantizationType.Q5_K: (0, 2),
    GGMLQuantizationType.Q6_K: (208,),
}
"""Offsets of float16 scales in a block, in bytes."""
_TOKENIZER = ("model", "pre", "tokens", "token_type", "merges", "bos_token_id", "eos_token_id")


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a Llama model."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    dim: int
    feed_forward: int
    vocab: int
    tied: bool = True

    def matrices(self, mix: Mix) -> Iterator[tuple[str, int, int, GGMLQuantizationType]]:
        """Yield name, outputs, columns and type of each matrix, as llama.cpp's quantiser chooses them."""
        kinds = GGMLQuantizationType
        high = {"q4_k_m": kinds.Q6_K, "q8_0": kinds.Q8_0}[mix]
        low = {"q4_k_m": kinds.Q4_K, "q8_0": kinds.Q8_0}[mix]
        yield "token_embd.weight", self.vocab, self.hidden, high if self.tied else low
        if not self.tied:
            yield "output.weight", self.vocab, self.hidden, high
        eighth = self.layers // 8
        for layer in range(self.layers):
            more = layer < eighth or layer >= 7 * eighth or (layer - eighth) % 3 == 2
            some = high if more else low
            yield f"blk.{layer}.attn_q.weight", self.heads * self.dim, self.hidden, low
            yield f"blk.{layer}.attn_k.weight", self.kv_heads * self.dim, self.hidden, low
            yield f"blk.{layer}.attn_v.weight", self.kv_heads * self.dim, self.hidden, some
            yield f"blk.{layer}.attn_output.weight", self.hidden, self.heads * self.dim, low
            yield f"blk.{layer}.ffn_gate.weight", self.feed_forward, self.hidden, low
            yield f"blk.{layer}.ffn_up.weight", self.feed_forward, self.hidden, low
            yield f"blk.{layer}.ffn_down.weight", self.hidden, self.feed_forward, some


SHAPES: Mapping[str, Shape] = {
    "llama-1b": Shape(2048, 16, 32, 8, 64, 8192, 128256),
    "llama-3b": Shape(3072, 28, 24, 8, 128, 8192, 128256),
    "llama-8b": Shape(4096, 32, 32, 8, 128, 14336, 128256, tied=False),
}


def write_shape(path: Path, shape: Shape, mix: Mix, vocabulary: Path) -> None:
    """Write a file with the tokenizer of another file, extended by unused tokens."""
    matrices = list(shape.matrices(mix))
    norms = [f"blk.{layer}.{name}_norm.weight" for layer in range(shape.layers) for name in ("attn", "ffn")]
    write_file(path, shape, matrices, [*norms, "output_norm.weight"], GGUFReader(vocabulary))


def write_file(
    path: Path,
    shape: Shape,
    matrices: list[tuple[str, int, int, GGMLQuantizationType]],
    norms: list[str],
    vocabulary: GGUFReader | None = None,
) -> None:
    """Write matrices, given by name, outputs, columns and type, and norms of ones."""
    writer = GGUFWriter(path, "llama")
    writer.add_context_length(4096)
    writer.add_embedding_length(shape.hidden)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.feed_forward)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.dim)
    writer.add_rope_dimension_count(shape.dim)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(shape.vocab)
    if vocabulary is not None:
        _copy_tokenizer(writer, vocabulary, shape.vocab)
    for name, outputs, columns, kind in matrices:
        block, size = GGML_QUANT_SIZES[kind]
        row = columns // block * size
        writer.add_tensor_info(name, [outputs, row], np.dtype(np.uint8), outputs * row, raw_dtype=kind)
    for name in norms:
        writer.add_tensor_info(name, [shape.hidden], np.dtype(np.float32), 4 * shape.hidden)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    generator = np.random.default_rng(0)
    for _, outputs, columns, kind in matrices:
        writer.write_tensor_data(random_blocks(generator, outputs, columns, kind))
    for _ in norms:
        writer.write_tensor_data(np.ones(shape.hidden, dtype=np.float32))
    writer.close()


def random_blocks(
    generator: np.random.Generator, outputs: int, columns: int, kind: GGMLQuantizationType
) -> NDArray[np.uint8]:
    """Return random blocks with small finite scales. -> [outputs, bytes]"""
    block, size = GGML_QUANT_SIZES[kind]
    data = np.empty((outputs, columns // block, size), dtype=np.uint8)
    for first in range(0, outputs, _ROWS):
        piece = data[first : first + _ROWS]
        piece[:] = np.frombuffer(generator.bytes(piece.nbytes), dtype=np.uint8).reshape(piece.shape)
        for place in _SCALES[kind]:
            spread = 0.1 / columns**0.5 / (32 if block == 256 else 1)  # K types multiply it by whole numbers
            scales = generator.normal(0, spread, piece.shape[:2]).astype(np.float16)
            piece[..., place : place + 2] = scales[..., None].view(np.uint8)
    return data.reshape(outputs, -1)


def _copy_tokenizer(writer: GGUFWriter, source: GGUFReader, vocab: int) -> None:
    found = {name: field.contents() for name in _TOKENIZER if (field := source.get_field(f"tokenizer.ggml.{name}"))}
    more = vocab - len(found["tokens"])
    writer.add_tokenizer_model(found["model"])
    writer.add_tokenizer_pre(found.get("pre", "default"))
    writer.add_token_list(found["tokens"] + [f"<unused-{number}>" for number in range(more)])
    writer.add_token_types(found["token_type"] + [5] * more)
    writer.add_token_merges(found["merges"])
    writer.add_bos_token_id(found["bos_token_id"])
    writer.add_eos_token_id(found["eos_token_id"])
    template = source.get_field("tokenizer.chat_template")
    if template is not None:
        writer.add_chat_template(template.contents())
