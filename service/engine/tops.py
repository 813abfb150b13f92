"""The target's likeliest tokens behind what a step made permanent, for drafters that learn from them.

Legend: batch = completing sequences, depth = longest accepted path, positions = those of them that count.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from drafters.protocol import TargetTops

_BLOCK = 32


def target_tops(logits: Tensor, lines: Tensor, counts: Tensor, top: int) -> TargetTops | None:
    """Ids and log-probabilities, unprocessed; None where nobody wants them.

    logits [logits, vocab]; lines [batch, depth + 1] which of them chose each committed token; counts [batch]
    """
    if top == 0:
        return None
    valid = torch.arange(lines.shape[1], device=lines.device) < counts[:, None]
    places = valid.flatten().nonzero()[:, 0]  # planned transfer: their number, of a step that is learnt from
    scores = logits.index_select(0, lines.flatten()[places]).float()
    best, ids = likeliest(scores, top)
    highest = best[:, :1]
    # Half the time of `log_softmax`, which writes what is not kept and converts bf16 number by number.
    logprobs = best - highest - scores.sub_(highest).exp_().sum(-1, keepdim=True).log_()
    return TargetTops(*(_spread(found, places, valid) for found in (ids, logprobs)))


def _spread(found: Tensor, places: Tensor, valid: Tensor) -> Tensor:
    """# found [positions, top] of the flat places -> [batch, depth + 1, top], 0 elsewhere"""
    spread = found.new_zeros(valid.numel(), found.shape[1]).index_copy_(0, places, found)
    return spread.view(*valid.shape, found.shape[1])


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
