"""The input of EAGLE-3 as it is published: the token stands beside the state, which is what the layer adds to."""

import torch
from torch import Tensor, nn

from drafters.specblock.condition import condition_of


class TokenBeside(nn.Module):
    """In the place of an input layer, of a drafter whose layer reads both."""

    def __init__(self, *, hidden: int, taps: int, epsilon: float, normalise: bool) -> None:
        super().__init__()
        self.condition_proj = nn.Linear(taps * hidden, hidden, bias=False)
        self.token_norm = nn.RMSNorm(hidden, eps=epsilon)
        self.feature_norms = nn.ModuleList(nn.RMSNorm(hidden, eps=epsilon) for _ in range(taps if normalise else 0))

    def condition(self, features: Tensor) -> Tensor:
        """c of tapped target features. # [..., taps * hidden] -> [..., hidden]"""
        return condition_of(features, self.feature_norms, self.condition_proj)

    def blocks(self, context: Tensor, embedded: Tensor, entries: slice) -> Tensor:
        """State and token of the one entry of each anchor, if it is asked for.
        # [..., hidden] -> [..., entries, 2 * hidden]"""
        token = self.token_norm(embedded.to(self.token_norm.weight.dtype))
        return torch.cat([context.to(token.dtype), token], dim=-1)[..., None, :][..., entries, :]
