"""What a drafter makes of the target's tapped features before anything of its own."""

import torch
from torch import Tensor, nn


def condition_of(features: Tensor, norms: nn.ModuleList, projection: nn.Linear) -> Tensor:
    """One vector from all taps, each normed first where there are norms. # [..., taps * hidden] -> [..., hidden]"""
    features = features.to(projection.weight.dtype)
    if norms:
        taps = features.chunk(len(norms), dim=-1)
        features = torch.cat([norm(tap) for norm, tap in zip(norms, taps, strict=True)], dim=-1)
    projected: Tensor = projection(features)
    return projected
