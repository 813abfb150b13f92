"""Compiled op of `kernels.rank_features`."""

import torch
from torch import Tensor

from kernels.cpu.library import call
from kernels.rank_features import NUM_FEATURES, TOP


def rank_features(scores: Tensor) -> tuple[Tensor, Tensor]:
    """As the reference; of equal scores the lower id ranks first. # [..., vocab] -> [..., NUM_FEATURES], [..., TOP]"""
    scores, (*shape, vocab) = scores.contiguous(), scores.shape
    features, ids = torch.empty(*shape, NUM_FEATURES), torch.empty(*shape, TOP, dtype=torch.int64)
    call("rank_features", scores, ids.numel() // TOP, vocab, features, ids, dtype=scores.dtype)
    return features, ids
