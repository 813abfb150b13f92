"""Policies of growth: which ranks of a block become candidates, and how likely each is given its parent.
Legend: block = K, rank = TOP."""

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from drafters.specblock.heads import BlockChances
from kernels import ops
from kernels.rank_features import TOP
from kernels.survival import CEILING

Policy = Callable[[BlockChances], Tensor]
"""Conditional probability of each rank given its parent; 0 = not a candidate. # -> [..., block, rank]"""

_UNIFORM_WIDTH = 4


def best_first(chances: BlockChances) -> Tensor:
    """Every rank that the rank head believes in: class probabilities spread over their ranks by draft probability."""
    return ops.on(chances.classes.device).spread_classes(chances.classes, chances.features)


def ranked(widths: tuple[int, ...]) -> Policy:
    """As many ranks as the likeliest class says (the paper's maps, appendix B); a width of 0 ends the block there."""

    @cache
    def table(device: torch.device) -> Tensor:
        return torch.tensor(widths, device=device)

    def policy(chances: BlockChances) -> Tensor:
        width = table(chances.classes.device)[chances.classes.argmax(-1)]
        return best_first(chances) * (torch.arange(TOP, device=chances.classes.device) < width[..., None])

    return policy


def uniform(chances: BlockChances) -> Tensor:
    """The first few ranks everywhere."""
    return chances.draft.clamp(max=CEILING) * (torch.arange(TOP, device=chances.classes.device) < _UNIFORM_WIDTH)


POLICIES: dict[str, Policy] = {
    "best_first": best_first,
    "rank": ranked((2, 4, 10, 0)),
    "rank_narrow": ranked((2, 4, 6, 4)),
    "uniform": uniform,
}
