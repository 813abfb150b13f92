"""Root-mean-square norm with a weight, in the order in which transformers rounds.

    y = w * round(x / sqrt(mean(x^2) + epsilon)),    round: to the type of x

Legend: hidden = size of what is normed.
"""

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """x [..., hidden] any float type, weight [hidden] -> like x"""
    return weight * torch.rms_norm(x, weight.shape, None, epsilon)
