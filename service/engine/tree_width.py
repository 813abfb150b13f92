"""For how many nodes of each sequence a step's rows are laid out."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from drafters.tree import Candidates

WIDTHS = (7, 15, 31, 63, 127)
"""With the root a power of two, for which kernels have tiles."""


def widths_up_to(max_nodes: int) -> tuple[int, ...]:
    """Those that trees of so many nodes may need."""
    return (*(width for width in WIDTHS if width < max_nodes), max_nodes) if max_nodes else ()


class TreeWidth(Protocol):
    choices: tuple[int, ...] | None
    """Nodes of each tree that rows can be laid out for, rising from 0; None: any number."""
    on_device: Tensor | None
    """The same for `prune_trees`. # [choices] int64"""

    def lay_out(self, candidates: Candidates, free: int) -> int:
        """Most nodes of each tree, for which there are at most `free` rows in all."""
        ...

    def rows(self, sizes: Tensor, width: int) -> list[int]:
        """Rows for nodes that each tree gets. # sizes [batch, SIZES] as of `Pruned`; width from `lay_out`"""
        ...

    def learn(self, num_nodes: Sequence[int]) -> None:
        """Take in how many nodes were wanted of each of the last trees."""
        return


class ExactWidth(TreeWidth):
    """As many rows as each tree has nodes: the host knows them at once."""

    choices = on_device = None

    def lay_out(self, candidates: Candidates, free: int) -> int:
        return candidates.width

    def rows(self, sizes: Tensor, width: int) -> list[int]:
        return [kept for _, kept, _ in sizes.tolist()]  # planned transfer: how large the step will be


class FixedWidth(TreeWidth):
    """One of a few, the same for all trees: reading the device's choice would leave it idle until the next launch.

    Rows are laid out for the width that the step before wanted, or the smallest one, and hold the likeliest nodes that
    fit: once laid out they cost the same whether they are filled or not.
    """

    def __init__(self, max_nodes: int, device: str | torch.device = "cpu") -> None:
        self.choices = (0, *widths_up_to(max_nodes))
        self.on_device = torch.tensor(self.choices, device=device)
        self._wanted = max_nodes

    def lay_out(self, candidates: Candidates, free: int) -> int:
        fitting = [width for width in self.choices[1:] if width * candidates.batch <= free]
        enough = [width for width in fitting if width >= self._wanted]
        return min(enough, default=max(fitting, default=0))

    def rows(self, sizes: Tensor, width: int) -> list[int]:
        return [width] * sizes.shape[0]

    def learn(self, num_nodes: Sequence[int]) -> None:
        self._wanted = max(num_nodes, default=0)
