"""A tiny random SpecBlock drafter and its borrowed embedding."""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import embedding

from drafters.specblock.model import SpecBlock, SpecBlockConfig
from tests.tiny_models import VOCAB_SIZE, stock_tiny

DRAFT_VOCAB = 64
TAPS = (0, 1, 2)


@cache
def target_config(family: str) -> dict[str, Any]:
    """transformers' description of a tiny target's decoder."""
    described: dict[str, Any] = stock_tiny(family).config.get_text_config().to_dict()
    return described


def tiny_drafter(family: str = "llama", seed: int = 0, **changes: Any) -> SpecBlock:
    """Random weights, spread wide enough that a wrong key or position changes every state."""
    torch.manual_seed(seed)
    config = SpecBlockConfig(target_config(family), TAPS, DRAFT_VOCAB, rank_hidden=16, **changes)
    model = SpecBlock(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=2.0 / parameter.shape[1] ** 0.5)
            elif "norm" in name:
                parameter.uniform_(0.5, 1.5)
    model.set_vocabulary(torch.randperm(VOCAB_SIZE)[:DRAFT_VOCAB].sort().values)
    return model.eval().requires_grad_(False)


def tiny_table(hidden: int, seed: int = 1) -> Tensor:
    return torch.randn(VOCAB_SIZE, hidden, generator=torch.Generator().manual_seed(seed))


def tiny_embedding(hidden: int, seed: int = 1) -> Callable[[Tensor], Tensor]:
    """A random embedding of the tiny vocabulary."""
    table = tiny_table(hidden, seed)

    def embed(tokens: Tensor) -> Tensor:
        return embedding(tokens, table)

    return embed
