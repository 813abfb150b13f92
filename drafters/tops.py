"""The target's likeliest tokens, for drafters that learn from them.

Legend: positions = those that steps made permanent, vocab = token ids, top = likeliest tokens that are kept.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

_BLOCK = 32


@dataclass(frozen=True, slots=True)
class TargetTops:
    """The target's likeliest tokens behind each position."""

    ids: Tensor  # [positions, top] int64
    logprobs: Tensor  # [positions, top] float32, unprocessed


def target_tops(scores: Tensor, top: int) -> TargetTops:
    """Ids and log-probabilities, likeliest first. # scores [positions, vocab], any float type"""
    scores = scores.to(torch.float32, copy=True)
    best, ids = likeliest(scores, top)
    highest = best[:, :1]
    # Half the time of `log_softmax`, which writes what is not kept and converts bf16 number by number.
    return TargetTops(ids, best - highest - scores.sub_(highest).exp_().sum(-1, keepdim=True).log_())


def likeliest(scores: Tensor, top: int) -> tuple[Tensor, Tensor]:
    """The highest scores of each row, highest first, and their places.

    Sought only in the `top` blocks with the highest maxima, which hold them all: half the time of looking at each.
    scores [positions, vocab] -> two [positions, top]
    """
    if scores.shape[1] < 2 * top * _BLOCK:
        found = scores.topk(top, dim=-1)
        return found.values, found.indices
    missing = -scores.shape[1] % _BLOCK
    blocks = (pad(scores, (0, missing), value=-torch.inf) if missing else scores).unflatten(1, (-1, _BLOCK))
    best = blocks.amax(-1).topk(top, dim=-1, sorted=False).indices  # [positions, top]
    line = torch.arange(scores.shape[0], device=scores.device)[:, None]
    within = blocks[line, best].flatten(1).topk(top, dim=-1)
    place = best.gather(1, within.indices // _BLOCK) * _BLOCK + within.indices % _BLOCK
    return within.values, place
