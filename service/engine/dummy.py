"""Models of known shapes with random weights, for measuring what steps cost where the real weights cannot be had.

What such a model says means nothing, and how well its text can be drafted means nothing either: results are costs
only. Configurations are written here, so nothing is downloaded.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import AutoConfig, PreTrainedConfig, PreTrainedTokenizerFast

from service.errors import StartupError

_PLAIN_TEMPLATE = "{% for message in messages %}{{ message['content'] + '\\n' }}{% endfor %}"

_LLAMA_3_1_8B = {
    "model_type": "llama",
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 500_000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}
_QWEN3_8B = {
    "model_type": "qwen3",
    "vocab_size": 151_936,
    "hidden_size": 4096,
    "intermediate_size": 12_288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40_960,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
}
_TINY = {
    "model_type": "llama",
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
}
SHAPES: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {"llama-3.1-8b": _LLAMA_3_1_8B, "qwen3-8b": _QWEN3_8B, "tiny": _TINY}
)


def dummy_config(name: str) -> PreTrainedConfig:
    """The configuration of that name. Raises StartupError for an unknown one."""
    if name.lower() not in SHAPES:
        raise StartupError(
            f"model dummy({name}): there are random weights for {', '.join(SHAPES)} only; choose one of these"
        )
    shape = SHAPES[name.lower()]
    config = AutoConfig.for_model(
        **shape, eos_token_id=shape["vocab_size"] - 1, bos_token_id=None, pad_token_id=None, tie_word_embeddings=False
    )
    assert isinstance(config, PreTrainedConfig)
    return config


@contextmanager
def seeded(device: torch.device) -> Iterator[None]:
    """Random weights made in here are the same ones each time, and are made where they will be used."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []), device:
        torch.manual_seed(0)
        yield


def dummy_tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    """Bytes, a made-up word for every other id, and an end at the last one."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = (f"Ġ{number}" for number in range(len(alphabet), vocab_size - 1))
    vocabulary = {piece: index for index, piece in enumerate([*alphabet, *words])}
    backend = Tokenizer(BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<|end|>", normalized=False)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>")
    tokenizer.chat_template = _PLAIN_TEMPLATE
    return tokenizer
