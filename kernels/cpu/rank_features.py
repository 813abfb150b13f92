"""The compiled twin of `kernels.rank_features`."""

import torch
from torch import Tensor

from kernels.cpu.library import function
from kernels.rank_features import NUM_FEATURES, TOP


def rank_features(scores: Tensor) -> tuple[Tensor, Tensor]:
    """As the reference; of equal scores the lower id comes first."""
    scores, (*shape, vocab) = scores.contiguous(), scores.shape
    features = torch.empty(*shape, NUM_FEATURES)
    ids = torch.empty(*shape, TOP, dtype=torch.int64)
    rows = ids.numel() // TOP
    call = function("rank_features", "pnnppi", scores.dtype)
    call(scores.data_ptr(), rows, vocab, features.data_ptr(), ids.data_ptr(), torch.get_num_threads())
    return features, ids
