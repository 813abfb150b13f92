"""What the rank head sees of a distribution, and the classes it predicts (SpecBlock appendix B).

Legend: scores [..., draft_vocab] are log-probabilities, or at a temperature T > 0 log-probabilities / T plus the
sampling noise of the position: then ranks are those of the tokens the noise will favour.
"""

import torch
from torch import Tensor

from kernels import ops
from kernels.rank_features import NUM_FEATURES, TOP

__all__ = ["CLASS_NAMES", "CLASS_OF_RANK", "NUM_FEATURES", "TOP", "rank_class", "rank_features"]

CLASS_OF_RANK = (0, 1, 1, 1, 2, 2, 2, 2, 2, 2)
"""Class of ranks 1..10; the last class, beyond, is 3."""

CLASS_NAMES = ("1", "2-4", "5-10")
"""Ranks of the classes that hold candidates."""


def rank_features(scores: Tensor) -> tuple[Tensor, Tensor]:
    """The 15 features and the draft ids of ranks 1..10.

    Top-10 log-probabilities, the gaps of rank 1 to ranks 2, 3 and 5, the top probability and the entropy.
    scores [..., draft_vocab] -> [..., 15] float32, [..., 10] int64
    """
    return ops.on(scores.device).rank_features(scores)


def rank_class(ids: Tensor, token: Tensor) -> Tensor:
    """Class of a token by its rank. # ids [..., 10] draft ids by rank, token [...] draft id or -1 -> [...] int64"""
    found = ids == token[..., None]
    classes = torch.tensor(CLASS_OF_RANK, device=ids.device)
    return torch.where(found.any(-1), (found * classes).sum(-1), 3)
