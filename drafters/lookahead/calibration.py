"""How often what the pool and the guesses say comes true, by evidence: how long the context is, how much of what was
seen behind it agrees, how often and how lately, whether the guess for the position agrees, how deep the node.
Legend: batch, contexts, orders, ways as in pool.py."""

import torch
from torch import Tensor

from drafters.calibration import HitTable
from drafters.lookahead.pool import NOTHING, ORDERS, Successors

LEVELS = 8
"""Depth of a tree."""

_GUESS = len(ORDERS) ** 2
"""The kind of a guess that nothing else says; the others are the order of a context and the longest that is known."""

_SHARE_EDGES = (0.3, 0.6, 0.95)  # of what was seen behind the context
_COUNT_EDGES = (0.99, 1.99)
_DEPTH_EDGES = (0.5, 2.5)  # nodes above

# Log-odds of the prior, summed over the kinds of evidence.
_KIND_LOGITS = (0.5, 0.0, 0.0, -1.0, 0.0, 0.0, -1.5, -1.0, -0.5, -1.5)
_SHARE_LOGITS = (-1.0, -0.5, 0.0, 0.5)
_COUNT_LOGITS = (-0.5, 0.0, 0.5)
_LATEST_LOGITS = (-0.3, 0.3)
_AGREES_LOGITS = (0.0, 1.0)
_DEPTH_LOGITS = (-0.3, 0.0, 0.2)
_SAMPLED_LOGITS = (0.0, -0.6)

# Outermost first.
_ALL_LOGITS = (
    _SAMPLED_LOGITS,
    _KIND_LOGITS,
    _SHARE_LOGITS,
    _COUNT_LOGITS,
    _LATEST_LOGITS,
    _AGREES_LOGITS,
    _DEPTH_LOGITS,
)

_PRIOR_WEIGHT = 20.0  # labels
_DECAY = 0.998  # per step: memory of about 500 steps
_LIMITS = (0.01, 0.98)  # below 1: survival falls strictly along a path


def _strides() -> tuple[int, ...]:
    strides = [1]
    for logits in reversed(_ALL_LOGITS[1:]):
        strides.insert(0, strides[0] * len(logits))
    return tuple(strides)


_SAMPLED, _KIND, _SHARE, _COUNT, _LATEST, _AGREES, _DEPTH = _strides()

ABSENT = _SAMPLED * len(_SAMPLED_LOGITS)
"""The last bucket, of what is no node; what it learns means nothing."""


class LookaheadCalibration(HitTable):
    """Acceptance rates of proposed successors, given that their contexts are accepted."""

    def __init__(self, device: torch.device | str) -> None:
        logits = _prior_logits()
        tried = torch.full_like(logits, _PRIOR_WEIGHT)
        super().__init__((logits.sigmoid() * tried).to(device), tried.to(device), decay=_DECAY, limits=_LIMITS)
        self._share_edges = torch.tensor(_SHARE_EDGES, device=device)
        self._count_edges = torch.tensor(_COUNT_EDGES, device=device)
        self._orders = torch.arange(len(ORDERS), device=device)[:, None] * len(ORDERS)
        depths = torch.bucketize(torch.arange(float(LEVELS)), torch.tensor(_DEPTH_EDGES))
        self._of_depth: list[int] = (depths * _DEPTH).tolist()  # planned transfer: at the start

    def buckets(self, found: Successors, guesses: Tensor, stable: Tensor, temperatures: Tensor, above: int) -> Tensor:
        """Of all successors by order and way, then of each context's guess. # guesses [batch, contexts] int64, NOTHING
        where there is none; stable like them, guessed before as well; temperatures [batch]; `above`: nodes above
        -> [batch, contexts, orders * ways + 1] int64"""
        total = found.counts.sum(3, keepdim=True)  # [batch, contexts, orders, 1]
        longest = (total > 0).view(torch.uint8).argmax(2, keepdim=True)  # [batch, contexts, 1, 1]
        buckets = (longest + self._orders) * _KIND
        buckets = buckets + torch.bucketize(found.counts / total, self._share_edges) * _SHARE
        buckets.add_(torch.bucketize(found.counts, self._count_edges), alpha=_COUNT)
        buckets.add_(found.times == found.times.amax(3, keepdim=True), alpha=_LATEST)
        buckets.add_(found.tokens == guesses[:, :, None, None], alpha=_AGREES)
        guessed = _GUESS * _KIND + stable * _LATEST
        both = torch.cat([buckets.flatten(2), guessed[:, :, None]], dim=2)
        return both + ((temperatures > 0) * _SAMPLED + self._of_depth[above])[:, None, None]


def is_repeated(tokens: Tensor) -> Tensor:
    """Whether a token stands before among its siblings, or is none. # tokens, result [batch, contexts, siblings]"""
    same = tokens[..., :, None] == tokens[..., None, :]
    return same.tril_(-1).any(3) | (tokens == NOTHING)


def _prior_logits() -> Tensor:
    logits = torch.zeros(1)
    for weights in _ALL_LOGITS:
        logits = (logits[:, None] + torch.tensor(weights)).flatten()
    return torch.cat([logits, torch.zeros(1)])  # the last one is ABSENT's
