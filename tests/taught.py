"""Tiny targets that were taught a language: each token is followed by one of a few, mostly the same one. What such a
target says can be predicted, as a real one's can, and not by copying alone."""

from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from tests.tiny_models import _COMMON, _MODEL_TYPES, _SPECIAL, tiny_tokenizer

_FIRST, _WORDS = 32, 200  # tokens of the language
_STEPS, _BATCH, _LENGTH = 150, 16, 48
_LAYERS = 6


def speech(count: int, length: int, generator: torch.Generator) -> Tensor:
    """Texts of the language. # -> [count, length] int64"""
    order = torch.Generator().manual_seed(5)
    followers = torch.stack([torch.randperm(_WORDS, generator=order) for _ in range(3)], dim=1)
    odds = torch.tensor([0.8, 0.15, 0.05])
    words = torch.empty(count, length, dtype=torch.int64)
    words[:, 0] = torch.randint(_WORDS, (count,), generator=generator)
    for place in range(1, length):
        drawn = torch.multinomial(odds, count, replacement=True, generator=generator)
        words[:, place] = followers[words[:, place - 1], drawn]
    return words + _FIRST


def taught_model(family: str, folder: Path) -> Path:
    """Save a checkpoint of this family that has learnt to speak; returns the folder."""
    torch.manual_seed(0)
    special = {name: value for name, value in _SPECIAL[family].items() if "softcapping" not in name}
    if "layer_types" in special:
        special["layer_types"] = ["sliding_attention", "full_attention"] * (_LAYERS // 2)
    config = AutoConfig.for_model(
        _MODEL_TYPES.get(family, family), **(_COMMON | special | {"num_hidden_layers": _LAYERS})
    )
    model = AutoModelForCausalLM.from_config(config)
    generator = torch.Generator().manual_seed(1)
    return saved_taught(model, (speech(_BATCH, _LENGTH, generator) for _ in range(_STEPS)), folder)


def saved_taught(model: PreTrainedModel, batches: Iterable[Tensor], folder: Path) -> Path:
    """Teach a model a batch of texts per step, and save it with the tiny tokenizer. # batches [batch, length] int64"""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    for texts in batches:
        model(input_ids=texts, labels=texts).loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder
