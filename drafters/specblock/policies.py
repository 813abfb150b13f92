"""Growth policies: which ranks of a block's distributions become candidates, and how likely each is given its parent.

    best_first  every rank the rank head believes in, by survival (the default)
    rank        the paper's maps: the rank head's class at a position sets how many ranks are kept (appendix B)
    uniform     the same number of ranks at every position, likelihood from draft probabilities
    beam        draft probabilities alone, the likeliest few of every depth (EAGLE-2)
    salf        best_first that stops a block where a further position promises too little (SALF)

Legend: ... = any leading shape, block = K positions, rank = features.TOP ranks.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from drafters.specblock.config import RANK_CLASSES
from drafters.specblock.features import CLASS_OF_RANK, TOP

_CEILING = 0.98
"""Below 1, so that survival falls strictly along every path."""


@dataclass(frozen=True, slots=True)
class BlockOdds:
    """What the heads say of each position of a block."""

    draft: Tensor  # [..., block, rank] draft probability of ranks 1..10
    classes: Tensor  # [..., block, 4] probability of each rank class


Policy = Callable[[BlockOdds], Tensor]
"""Conditional probability of each rank given its parent; 0 = not a candidate. # -> [..., block, rank]"""

RANK_MAPS = {"rank": (2, 4, 10, 0), "rank_narrow": (2, 4, 6, 4)}
_UNIFORM_WIDTH = 4
_BEAM_WIDTH = 10
_LEAST_GAIN = 0.05


def best_first(odds: BlockOdds) -> Tensor:
    """Class probabilities spread over the ranks of each class by draft probability (design: candidates)."""
    members = _members(odds.draft.device)
    mass = (odds.draft @ members).clamp(min=1e-9)  # [..., block, 4]
    spread: Tensor = odds.draft * ((odds.classes / mass) @ members.T)
    return spread.clamp(max=_CEILING)


@cache
def _members(device: torch.device) -> Tensor:
    """Which ranks are of which class; made once, for a capture cannot copy from the host. # -> [rank, 4] float32"""
    return torch.nn.functional.one_hot(torch.tensor(CLASS_OF_RANK, device=device), RANK_CLASSES).float()


def ranked(widths: tuple[int, ...]) -> Policy:
    """Keep as many ranks as the likeliest class says; a width of 0 ends the block there."""

    @cache
    def table(device: torch.device) -> Tensor:
        return torch.tensor(widths, device=device)

    def policy(odds: BlockOdds) -> Tensor:
        width = table(odds.draft.device)[odds.classes.argmax(-1)]
        return best_first(odds) * (torch.arange(TOP, device=odds.draft.device) < width[..., None])

    return policy


def uniform(odds: BlockOdds) -> Tensor:
    """The first few ranks everywhere."""
    return odds.draft.clamp(max=_CEILING) * (torch.arange(TOP, device=odds.draft.device) < _UNIFORM_WIDTH)


def beam(odds: BlockOdds) -> Tensor:
    """Of every position the likeliest by path probability: along one spine these are the first ranks."""
    return odds.draft.clamp(max=_CEILING) * (torch.arange(TOP, device=odds.draft.device) < _BEAM_WIDTH)


def salf(odds: BlockOdds) -> Tensor:
    """End the block at the first position whose likeliest node would survive too seldom."""
    conditional = best_first(odds)
    reached = conditional[..., 0].cumprod(-1)  # [..., block]
    return conditional * (reached >= _LEAST_GAIN)[..., None]


POLICIES: dict[str, Policy] = {
    "best_first": best_first,
    "rank": ranked(RANK_MAPS["rank"]),
    "rank_narrow": ranked(RANK_MAPS["rank_narrow"]),
    "uniform": uniform,
    "beam": beam,
    "salf": salf,
}
