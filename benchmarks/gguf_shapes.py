"""GGUF files of known shapes with random weights, to measure costs: their texts mean nothing.

The `gguf` package writes files but cannot quantise K types: blocks are random bytes whose scales are finite and small.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFReader, GGUFWriter
from numpy.typing import NDArray

Mix = Literal["q4_k_m", "q8_0", "mxfp4"]

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
    GGMLQuantizationType.MXFP4: (),  # has exponents
}
"""Offsets of float16 scales in a block, in bytes."""
_GATES, _POST = ("alpha", "beta"), ("gpt-oss", "qwen35")
_TOKENIZER = ("model", "pre", "tokens", "token_type", "merges", "bos_token_id", "eos_token_id")


class Matrix(NamedTuple):
    """A quantised tensor."""

    name: str
    outputs: int
    columns: int
    kind: GGMLQuantizationType
    experts: int = 0  # number of matrices; 0: there is one, of two dimensions

    @property
    def row_bytes(self) -> int:
        """Size of a row in bytes."""
        block, size = GGML_QUANT_SIZES[self.kind]
        return self.columns // block * size


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a model, of Llama unless `arch` names another architecture."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    dim: int
    feed_forward: int
    vocab: int
    tied: bool = True
    arch: str = "llama"
    experts: int = 0
    chosen: int = 0  # experts of a token
    delta_heads: int = 0  # of 128 by 128, in three of four layers; 0: none is recurrent

    def is_recurrent(self, layer: int) -> bool:
        return self.delta_heads > 0 and (layer + 1) % 4 != 0

    def matrices(self, mix: Mix) -> Iterator[Matrix]:
        """Yield the matrices with their types, as llama.cpp's quantiser chooses them; `mxfp4` is that of experts."""
        kinds = GGMLQuantizationType
        high = kinds.Q6_K if mix == "q4_k_m" else kinds.Q8_0
        low = kinds.Q4_K if mix == "q4_k_m" else kinds.Q8_0
        yield Matrix("token_embd.weight", self.vocab, self.hidden, high if self.tied else low)
        if not self.tied:
            yield Matrix("output.weight", self.vocab, self.hidden, high)
        eighth, own = self.layers // 8, {"mxfp4": kinds.MXFP4}
        for layer in range(self.layers):
            more = layer < eighth or layer >= 7 * eighth or (layer - eighth) % 3 == 2
            some, block = high if more else low, f"blk.{layer}"
            if self.is_recurrent(layer):
                width = 128 * self.delta_heads
                yield Matrix(f"{block}.attn_qkv.weight", 3 * width, self.hidden, low)
                yield Matrix(f"{block}.attn_gate.weight", width, self.hidden, low)
                yield Matrix(f"{block}.ssm_out.weight", self.hidden, width, low)
                yield from (Matrix(f"{block}.ssm_{one}.weight", self.delta_heads, self.hidden, low) for one in _GATES)
            else:
                gated = 2 if self.delta_heads else 1
                yield Matrix(f"{block}.attn_q.weight", gated * self.heads * self.dim, self.hidden, low)
                yield Matrix(f"{block}.attn_k.weight", self.kv_heads * self.dim, self.hidden, low)
                yield Matrix(f"{block}.attn_v.weight", self.kv_heads * self.dim, self.hidden, some)
                yield Matrix(f"{block}.attn_output.weight", self.hidden, self.heads * self.dim, low)
            of, width = "_exps" if self.experts else "", self.feed_forward
            for name, out, columns, kind in (
                ("gate", width, self.hidden, low),
                ("up", width, self.hidden, low),
                ("down", self.hidden, width, some),
            ):
                yield Matrix(f"{block}.ffn_{name}{of}.weight", out, columns, own.get(mix, kind), self.experts)

    def vectors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield names and shapes of the tensors in float32."""
        yield "output_norm.weight", (self.hidden,)
        for layer in range(self.layers):
            block = f"blk.{layer}"
            yield f"{block}.attn_norm.weight", (self.hidden,)
            yield f"{block}.{'post_attention' if self.arch in _POST else 'ffn'}_norm.weight", (self.hidden,)
            if self.is_recurrent(layer):
                yield f"{block}.ssm_conv1d.weight", (3 * 128 * self.delta_heads, 4)
                yield f"{block}.ssm_norm.weight", (128,)
                yield from ((f"{block}.ssm_{one}", (self.delta_heads,)) for one in ("a", "dt.bias"))
            if self.experts:
                yield f"{block}.ffn_gate_inp.weight", (self.experts, self.hidden)
            if self.arch == "qwen3moe" or (self.delta_heads and not self.is_recurrent(layer)):
                yield from ((f"{block}.attn_{name}_norm.weight", (self.dim,)) for name in "qk")
            if self.arch == "gpt-oss":
                yield f"{block}.attn_sinks.weight", (self.heads,)
                outputs = {"attn_q": self.heads * self.dim, "attn_output": self.hidden, "ffn_gate_inp": self.experts}
                outputs |= dict.fromkeys(("attn_k", "attn_v"), self.kv_heads * self.dim)
                yield from ((f"{block}.{name}.bias", (out,)) for name, out in outputs.items())
                for name, out in {"gate": self.feed_forward, "up": self.feed_forward, "down": self.hidden}.items():
                    yield f"{block}.ffn_{name}_exps.bias", (self.experts, out)


SHAPES: Mapping[str, Shape] = {
    "llama-1b": Shape(2048, 16, 32, 8, 64, 8192, 128256),
    "llama-3b": Shape(3072, 28, 24, 8, 128, 8192, 128256),
    "llama-8b": Shape(4096, 32, 32, 8, 128, 14336, 128256, tied=False),
    "qwen3-30b-a3b": Shape(2048, 48, 32, 4, 128, 768, 151936, False, "qwen3moe", experts=128, chosen=8),
    "qwen3.5-2b": Shape(2048, 24, 8, 2, 256, 6144, 248320, arch="qwen35", delta_heads=16),
    "gpt-oss-20b": Shape(2880, 24, 64, 8, 64, 2880, 201088, False, "gpt-oss", experts=32, chosen=4),
}


def write_shape(path: Path, shape: Shape, mix: Mix, vocabulary: Path, layers: int | None = None) -> None:
    """Write a file with the tokenizer of another file, extended by unused tokens. `layers`: only the first ones."""
    shape = shape if layers is None else replace(shape, layers=layers)
    write_file(path, shape, list(shape.matrices(mix)), GGUFReader(vocabulary))


def write_file(path: Path, shape: Shape, matrices: list[Matrix], vocabulary: GGUFReader | None = None) -> None:
    """Write matrices, and float32 tensors: norms of ones, small random routers, zeros for biases and sinks."""
    writer = GGUFWriter(path, shape.arch)
    _add_keys(writer, shape)
    if vocabulary is not None:
        _copy_tokenizer(writer, vocabulary, shape.vocab)
    for one in matrices:
        rows = one.outputs * max(1, one.experts)
        sizes = [one.experts, one.outputs, one.row_bytes] if one.experts else [one.outputs, one.row_bytes]
        writer.add_tensor_info(one.name, sizes, np.dtype(np.uint8), rows * one.row_bytes, raw_dtype=one.kind)
    vectors = dict(shape.vectors())
    for name, size in vectors.items():
        writer.add_tensor_info(name, list(size), np.dtype(np.float32), 4 * prod(size))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    generator = np.random.default_rng(0)
    for one in matrices:
        writer.write_tensor_data(random_blocks(generator, one.outputs * max(1, one.experts), one.columns, one.kind))
    for name, size in vectors.items():
        is_random = name.endswith(("ffn_gate_inp.weight", "conv1d.weight"))
        numbers = np.full(size, _values_of(name), dtype=np.float32)
        numbers += np.float32(generator.normal(0, size[-1] ** -0.5, size) if is_random else 0.0)
        writer.write_tensor_data(numbers)
    writer.close()


def _values_of(name: str) -> float:
    """Value of all numbers of a float32 tensor: norms are ones, and decays, with a step of ln 2, are half."""
    return -1.0 if name.endswith("ssm_a") else float("norm" in name)


def _add_keys(writer: GGUFWriter, shape: Shape) -> None:
    writer.add_context_length(4096)
    writer.add_embedding_length(shape.hidden)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.feed_forward)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.dim)
    writer.add_value_length(shape.dim)
    writer.add_rope_dimension_count(shape.dim // 4 if shape.delta_heads else shape.dim)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(shape.vocab)
    if shape.experts:
        writer.add_expert_count(shape.experts)
        writer.add_expert_used_count(shape.chosen)
        writer.add_expert_feed_forward_length(shape.feed_forward)
    if shape.arch == "gpt-oss":
        writer.add_sliding_window(128)
    if shape.delta_heads:
        writer.add_rope_dimension_sections([11, 11, 10, 0])
        writer.add_full_attention_interval(4)
        writer.add_ssm_conv_kernel(4)
        writer.add_ssm_state_size(128)
        writer.add_ssm_group_count(shape.delta_heads)
        writer.add_ssm_time_step_rank(shape.delta_heads)
        writer.add_ssm_inner_size(128 * shape.delta_heads)


def random_blocks(
    generator: np.random.Generator, outputs: int, columns: int, kind: GGMLQuantizationType
) -> NDArray[np.uint8]:
    """Return random blocks with small finite scales. -> [outputs, bytes]"""
    block, size = GGML_QUANT_SIZES[kind]
    data = np.empty((outputs, columns // block, size), dtype=np.uint8)
    for first in range(0, outputs, _ROWS):
        piece = data[first : first + _ROWS]
        piece[:] = np.frombuffer(generator.bytes(piece.nbytes), dtype=np.uint8).reshape(piece.shape)
        spread = 0.1 / columns**0.5 / (32 if block == 256 else 1)  # K types multiply it by whole numbers
        if kind == GGMLQuantizationType.MXFP4:
            piece[..., 0] = 127 + round(math.log2(spread))
        for place in _SCALES[kind]:
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
