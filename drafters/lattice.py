"""The nodes of a block that says the same behind every path: its own likeliest paths go on (`kernels.lattice` has those
of other blocks). Legend: batch, block, rank = TOP as there."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import pad

from drafters.tree import MAX_DEPTH
from kernels.lattice import Lattice, StartNodes
from kernels.survival import CEILING


class Chain:
    """The nodes of a block at the root: at each position as many of the likeliest paths go on. Numbers count by path,
    position and rank."""

    def __init__(
        self, origin: StartNodes, tokens: Tensor, predicted: Tensor, trust: Tensor, least: float, *, paths: int
    ) -> None:
        """As of `grow_lattice`. # tokens, predicted [batch, 1, block, rank]"""
        block, ranks = tokens.shape[2:]
        numbers = torch.arange(paths * block * ranks, device=tokens.device).view(paths, block, ranks)
        depths = origin.depth[..., None] + 1 + torch.arange(block, device=tokens.device)  # [batch, 1, block]
        conditional = (predicted * trust).clamp(max=CEILING) * (depths <= MAX_DEPTH)[..., None]
        above, parent = pad(origin.survival, (0, paths - 1)), origin.node.expand(-1, paths)  # both [batch, paths]
        said, parents = list[Tensor](), list[Tensor]()
        for position in range(block):
            parents.append(parent)
            said.append(above[:, :, None] * conditional[:, :, position])  # [batch, paths, rank]
            above, best = said[-1].flatten(1).topk(paths, dim=1)
            parent = numbers[:, position].flatten()[best]
        wide, survival = (-1, paths, -1, ranks), torch.stack(said, dim=2)
        self._by_node = (
            tokens.expand(wide),
            torch.stack(parents, dim=2)[..., None].expand(wide),
            depths.clamp(max=MAX_DEPTH)[..., None].expand(wide),
            survival * (survival >= least),
        )

    def nodes(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """As of `Lattice`. # four [batch, paths * block * rank]"""
        tokens, parents, depths, survival = (value.flatten(1) for value in self._by_node)
        return tokens, parents, depths, survival


Witness = Callable[[Lattice, Tensor, Tensor], None]
"""Is told of each forward what it says of the tokens that its nodes were chosen from: before the sampling noise, and
not of forwards that are captured. # logits [batch, starts, block, draft_vocab], their target ids [draft_vocab] int64"""


def unwitnessed(lattice: Lattice, logits: Tensor, ids: Tensor) -> None:
    """A witness that keeps nothing."""
