"""Residual heads: entry k is h_k = c + silu(W_k c + b_k), with c made of the target's features alone."""

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from drafters.specblock.condition import condition_of


class ResidualHeads(nn.Module):
    """In the place of an input layer, of a drafter without layers. Legend: heads = entries of a block, hidden."""

    def __init__(self, *, hidden: int, taps: int, heads: int, epsilon: float, normalise: bool) -> None:
        super().__init__()
        self.condition_proj = nn.Linear(taps * hidden, hidden, bias=False)
        self.heads_weight = nn.Parameter(torch.zeros(heads, hidden, hidden))
        self.heads_bias = nn.Parameter(torch.zeros(heads, hidden))
        self.feature_norms = nn.ModuleList(nn.RMSNorm(hidden, eps=epsilon) for _ in range(taps if normalise else 0))

    def condition(self, features: Tensor) -> Tensor:
        """c of tapped target features. # [..., taps * hidden] -> [..., hidden]"""
        return condition_of(features, self.feature_norms, self.condition_proj)

    def blocks(self, context: Tensor, embedded: Tensor, entries: slice) -> Tensor:
        """States of some entries of each anchor, whose token no head sees. # [..., hidden] -> [..., entries, hidden]"""
        weight, bias = self.heads_weight[entries], self.heads_bias[entries]
        seen = context.to(weight.dtype)[..., None, :]
        return seen + silu(torch.einsum("...i,koi->...ko", context.to(weight.dtype), weight) + bias)

    @torch.no_grad()
    def start_from(self, tap: int) -> None:
        """Let all of them say what the target's head says of one tap."""
        hidden = self.heads_bias.shape[1]
        self.condition_proj.weight.zero_()
        self.condition_proj.weight[:, tap * hidden : (tap + 1) * hidden] = torch.eye(hidden)


class EntryHeads(nn.Module):
    """An output layer for each entry of a block, as published weights have them."""

    def __init__(self, entries: int, hidden: int, vocab: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(entries, vocab, hidden))

    def forward(self, states: Tensor) -> Tensor:
        """# [..., entries, hidden] -> [..., entries, vocab]"""
        return torch.einsum("...ki,kvi->...kv", states, self.weight)
