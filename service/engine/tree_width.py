"""For how many nodes of each sequence a step's rows are laid out."""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

WIDTHS = (7, 15, 31, 63, 127)
"""With the root a power of two, for which kernels have tiles."""


def widths_up_to(max_nodes: int) -> tuple[int, ...]:
    """Those that trees of so many nodes may need."""
    return (*(width for width in WIDTHS if width < max_nodes), max_nodes) if max_nodes else ()


class TreeWidth(Protocol):
    def of(self, num_nodes: Tensor, free: int) -> list[int]:
        """Rows of nodes for each tree, in all not more than are free. # num_nodes [batch] int64, as they are wanted, in
        all not more either"""
        ...

    def learn(self, num_nodes: Sequence[int]) -> None:
        """How many nodes the last trees were to have."""
        return


class ExactWidth(TreeWidth):
    """As many as there are: where nodes are known at once."""

    def of(self, num_nodes: Tensor, free: int) -> list[int]:
        nodes: list[int] = num_nodes.tolist()  # planned transfer: how large the step will be
        return nodes


class FixedWidth(TreeWidth):
    """One of a few, the same for all: the device is not asked, whose answer would come when it has nothing left to do.
    Which one follows from the trees of the step before; more nodes than that are not verified, fewer are padding. Where
    none were wanted there is no room for any: those that come then are verified a step later."""

    def __init__(self, max_nodes: int) -> None:
        self._widths = widths_up_to(max_nodes)
        self._wanted = max_nodes

    def of(self, num_nodes: Tensor, free: int) -> list[int]:
        batch = num_nodes.shape[0]
        fitting = [width for width in self._widths if width * batch <= free]
        enough = [width for width in fitting if width >= self._wanted]
        return [min(enough, default=max(fitting, default=0)) if self._wanted else 0] * batch

    def learn(self, num_nodes: Sequence[int]) -> None:
        self._wanted = max(num_nodes, default=0)
