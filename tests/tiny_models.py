"""Tiny random checkpoints of the families that the target supports, saved as a user's own would be.

Random weights make a text that a single wrong key, position or mask changes at once. Knows nothing of engines.
"""

import copy
import math
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from service.engine.weights import LoadedModel, describe, load_model

FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "olmo2", "gemma", "gemma2", "gemma3")
VOCAB_SIZE = 320
EOS_ID = 319
WINDOW = 24
"""Positions that a sliding-window layer sees; shorter than any test's text."""

_LOGIT_SPREAD = 3.0
_TEMPLATE = (
    "{% for message in messages %}{{ '<|start|>' + message['role'] + '\\n' + message['content'] + '<|end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|start|>assistant\\n' }}{% endif %}"
)
_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "eos_token_id": EOS_ID,
    "bos_token_id": None,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 512,
}
"""Sizes of the fastest models in which a wrong key still changes the text."""
_ALTERNATING = ["sliding_attention", "full_attention", "sliding_attention"]
_SPECIAL: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 16},
    "mistral": {"sliding_window": WINDOW, "num_key_value_heads": 1},
    "olmo2": {},
    "gemma": {"head_dim": 8, "tie_word_embeddings": True, "hidden_activation": "gelu_pytorch_tanh"},
    "gemma2": {
        "head_dim": 16,
        "tie_word_embeddings": True,
        "sliding_window": WINDOW,
        "layer_types": _ALTERNATING,
        "query_pre_attn_scalar": 16,
        "attn_logit_softcapping": 4.0,
        "final_logit_softcapping": 8.0,
    },
    "gemma3": {
        "head_dim": 16,
        "tie_word_embeddings": True,
        "sliding_window": WINDOW,
        "layer_types": _ALTERNATING,
        "query_pre_attn_scalar": 16,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 100_000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1_000.0},
        },
    },
}
_MODEL_TYPES = {"gemma3": "gemma3_text"}


def tiny_model(
    family: str, folder: Path, *, seed: int = 0, dtype: torch.dtype = torch.float32, **changes: object
) -> Path:
    """Save a random checkpoint of this family with its tokenizer; returns the folder."""
    config = AutoConfig.for_model(_MODEL_TYPES.get(family, family), **(_COMMON | _SPECIAL.get(family, {}) | changes))
    save_model(AutoModelForCausalLM.from_config(config), folder, seed=seed, dtype=dtype)
    return folder


def save_model(
    model: PreTrainedModel, folder: Path, *, seed: int = 0, dtype: torch.dtype = torch.float32
) -> PreTrainedModel:
    """Give a model random weights and save it with a tokenizer."""
    randomise(model, seed)
    nn.Module.to(model, dtype)
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return model


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Bytes, merges of frequent pairs, and special tokens at the end of the vocabulary."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    specials = [*(f"<|extra_{number}|>" for number in range(5)), "<|start|>", "<|end|>"]
    merges = [(left, right) for left in "etaoinĠ" for right in "thnsrlda"]
    merges = [*merges, ("th", "e")][: VOCAB_SIZE - len(alphabet) - len(specials)]
    pieces = [*alphabet, *(left + right for left, right in merges)]
    backend = Tokenizer(BPE(vocab={piece: index for index, piece in enumerate(pieces)}, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(special, normalized=False) for special in specials])
    assert backend.get_vocab_size() == VOCAB_SIZE
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>")
    tokenizer.chat_template = _TEMPLATE
    return tokenizer


@torch.no_grad()
def randomise(model: PreTrainedModel, seed: int) -> None:
    """Random weights under which hidden states keep their size and logits spread widely."""
    generator = torch.Generator().manual_seed(seed)
    vocab = model.config.get_text_config().vocab_size
    for name, parameter in sorted(model.named_parameters()):
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.ndim == 1:
            middle = parameter.detach().clone() if "norm" in name else torch.zeros_like(parameter)
            parameter.copy_(middle + 0.2 * noise)
        else:
            spread = _LOGIT_SPREAD if parameter.shape[0] == vocab else 2.0 if "o_proj" in name else 1.0
            parameter.copy_(noise * spread / math.sqrt(parameter.shape[-1]))
    _scramble_signs(model, generator)


def _scramble_signs(model: PreTrainedModel, generator: torch.Generator) -> None:
    """Random signs in the last norm: with a tied head every token would otherwise be its own likeliest successor."""
    weight = model.get_decoder().norm.weight
    assert isinstance(weight, torch.Tensor)
    signs = torch.randint(2, weight.shape, generator=generator) * 2.0 - 1.0
    centred_at_zero = "gemma" in model.config.model_type  # the norm multiplies by 1 + weight
    weight.copy_((weight + 1) * signs - 1 if centred_at_zero else weight * signs)


def loaded_tiny(family: str, seed: int = 0) -> LoadedModel:
    """A tiny model as the server loads it; a target may take it over."""
    shared = _loaded_tiny(family, seed)
    return replace(shared, model=copy.deepcopy(shared.model))


@cache
def _loaded_tiny(family: str, seed: int) -> LoadedModel:
    with TemporaryDirectory() as folder:
        return load(tiny_model(family, Path(folder), seed=seed))


@cache
def stock_tiny(family: str, seed: int = 0) -> PreTrainedModel:
    """The same model with transformers' own attention: the oracle."""
    with TemporaryDirectory() as folder:
        return stock(tiny_model(family, Path(folder), seed=seed))


def served_by(model: Path, **more: object) -> dict[str, object]:
    """The configuration file of a server of this model, whatever else it says."""
    return {
        "model": str(model),
        "served_model_name": "tiny",
        "load_dtype": "float32",
        "device": "cpu",
        "threads": 1,
        "kv_cache": "10MiB",
        "max_budget": 8,
        "port": 0,
        **more,
    }


def load(folder: Path, dtype: torch.dtype = torch.float32, *, unverified: bool = False) -> LoadedModel:
    described = describe(str(folder), revision=None, unverified=unverified)
    return load_model(described, dtype=dtype, device=torch.device("cpu"))


def stock(folder: Path, dtype: torch.dtype = torch.float32, gguf_file: str | None = None) -> PreTrainedModel:
    whole = gguf_file is None and hasattr(AutoConfig.from_pretrained(folder), "vision_config")
    kind = AutoModelForImageTextToText if whole else AutoModelForCausalLM
    model = kind.from_pretrained(folder, attn_implementation="eager", dtype=dtype, gguf_file=gguf_file)
    assert isinstance(model, PreTrainedModel)
    model.eval().requires_grad_(False)
    return model


def random_prompts(count: int, length: int, *, seed: int = 0) -> Iterator[list[int]]:
    """Prompts of random ordinary tokens."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        yield torch.randint(300, (length,), generator=generator).tolist()
