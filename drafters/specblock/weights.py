"""All that makes one drafter propose otherwise than another of its shapes: parameters, and which tokens it can propose.

By name, so that they can be stored, compared, sent and written back as a whole.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from drafters.specblock.model import SpecBlock

VOCABULARY = "d2t"
"""The name of the one that is no parameter: [draft_vocab] int64, target ids."""


def weights_of(model: SpecBlock) -> dict[str, Tensor]:
    """The tensors themselves, by name; to be asked before linear layers are packed."""
    return {name: value.detach() for name, value in model.named_parameters()} | {VOCABULARY: model.d2t}


def names_tokens(vocabulary: Tensor, target_vocab: int) -> bool:
    """Whether every entry is one of the target's tokens, and none is there twice."""
    inside = (vocabulary >= 0) & (vocabulary < target_vocab)
    return bool(inside.all()) and vocabulary.unique().shape == vocabulary.shape


@torch.no_grad()
def write_weights(model: SpecBlock, weights: Mapping[str, Tensor]) -> None:
    """In place, all of them, whatever type and device they come in."""
    for name, value in model.named_parameters():
        value.copy_(weights[name])
    model.set_vocabulary(weights[VOCABULARY].to(model.d2t.device))
