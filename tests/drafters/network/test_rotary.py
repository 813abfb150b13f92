"""Rotary positions of a drafter are those of transformers, whatever the config scales them by."""

from typing import Any

import pytest
import torch
from transformers import AutoConfig, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from drafters.network.layers import LayerShape
from drafters.network.rotary import Rotary
from kernels.families import OF_DRAFTERS

SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "max_position_embeddings": 4096,
}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 256}
YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0] * 32,
    "long_factor": [1.5] * 16 + [4.0] * 16,
}
SCALINGS: list[dict[str, Any]] = [
    {},
    {"rope_theta": 5e5},
    {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 3.0}},
    {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
    {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    {"rope_parameters": {"rope_type": "linear", "factor": 2.5, "rope_theta": 1e6}},
    {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e6, **LLAMA3}},
    {"rope_parameters": {**YARN, "original_max_position_embeddings": 1024}},
    {"rope_parameters": {**YARN, "factor": 1.0}},
    {"rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.3, "truncate": False}},
    {"rope_parameters": {**YARN, "attention_factor": 0.8, "beta_fast": 16, "beta_slow": 2}},
    {"rope_parameters": {**YARN}, "original_max_position_embeddings": 512},
    {"rope_parameters": {**LONGROPE, "original_max_position_embeddings": 256}},
    {"rope_parameters": {**LONGROPE, "original_max_position_embeddings": 256, "attention_factor": 1.2}},
    {"rope_parameters": {**LONGROPE, "original_max_position_embeddings": 4096}},
]


@pytest.mark.parametrize("scaling", SCALINGS, ids=str)
def test_positions_are_embedded_as_transformers_does(scaling: dict[str, Any]) -> None:
    positions = torch.arange(0, 4096, 7)[None]
    config = LlamaConfig(**SIZES, **scaling)
    expected = LlamaRotaryEmbedding(config)(torch.empty(0), positions)
    for target in (SIZES | scaling, config.to_dict()):
        found = Rotary(target, 64)(positions, torch.float32)
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True))


def test_a_scaling_by_the_length_of_the_text_is_refused() -> None:
    with pytest.raises(ValueError, match="'dynamic'"):
        Rotary({**SIZES, "rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, 64)


@pytest.mark.parametrize("family", OF_DRAFTERS)
def test_sizes_are_read_as_transformers_reads_them(family: str) -> None:
    config = AutoConfig.for_model(family, **SIZES)
    shape, heads = LayerShape.of(config.to_dict()), (config.num_attention_heads, config.num_key_value_heads)
    assert (shape.attention.query_heads, shape.attention.kv_heads) == heads
    assert shape.attention.dim == getattr(config, "head_dim", 64)
    assert shape.epsilon == config.rms_norm_eps
