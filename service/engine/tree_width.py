"""For how many nodes of each sequence a step's rows are laid out."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from drafters.tree import Candidates
from service.engine.budget import Wish, allocate_nodes, allocate_width

WIDTHS = (7, 15, 31, 63, 127)
"""With the root a power of two, for which kernels have tiles."""


def widths_up_to(max_nodes: int) -> tuple[int, ...]:
    """Those that trees of so many nodes may need."""
    return (*(width for width in WIDTHS if width < max_nodes), max_nodes) if max_nodes else ()


class TreeWidth(Protocol):
    choices: tuple[int, ...] | None
    """Nodes of each tree that rows can be laid out for, rising from 0; None: any number."""

    def allocate(self, candidates: Candidates, limits: Tensor, seconds: Tensor, weights: Tensor) -> Tensor:
        """Nodes per sequence with the most expected tokens per second. # seconds of a step of each choice -> [batch]"""
        ...

    def lay_out(self, wish: Wish, free: int) -> tuple[Tensor, list[int]]:
        """Nodes of each tree to verify, and rows for nodes that each gets, in all at most `free`. # -> [batch] int64"""
        ...

    def learn(self, num_nodes: Sequence[int]) -> None:
        """Take in how many nodes were wanted of each of the last trees."""
        return


class ExactWidth(TreeWidth):
    """As many rows as each tree has nodes: the host knows them at once."""

    choices = None

    def allocate(self, candidates: Candidates, limits: Tensor, seconds: Tensor, weights: Tensor) -> Tensor:
        return allocate_nodes(candidates, limits, seconds, weights)

    def lay_out(self, wish: Wish, free: int) -> tuple[Tensor, list[int]]:
        nodes: list[int] = wish.nodes.tolist()  # planned transfer: how large the step will be
        return wish.nodes, nodes


class FixedWidth(TreeWidth):
    """One of a few, the same for all trees: reading the device's choice would leave it idle until the next launch.

    Rows are laid out for the width that the step before wanted, or the smallest one, and hold the likeliest nodes that
    fit: once laid out they cost the same whether they are filled or not.
    """

    def __init__(self, max_nodes: int, device: str | torch.device = "cpu") -> None:
        self.choices = (0, *widths_up_to(max_nodes))
        self._on_device = torch.tensor(self.choices, device=device)
        self._wanted = max_nodes

    def allocate(self, candidates: Candidates, limits: Tensor, seconds: Tensor, weights: Tensor) -> Tensor:
        return allocate_width(candidates, limits, seconds, weights, self._on_device)

    def lay_out(self, wish: Wish, free: int) -> tuple[Tensor, list[int]]:
        batch = wish.nodes.shape[0]
        fitting = [width for width in self.choices[1:] if width * batch <= free]
        enough = [width for width in fitting if width >= self._wanted]
        return wish.most, [min(enough, default=max(fitting, default=0))] * batch

    def learn(self, num_nodes: Sequence[int]) -> None:
        self._wanted = max(num_nodes, default=0)
