"""What sets one kind of trained drafter apart from the others, whose network, trees, training and files they share."""

from collections.abc import Mapping
from typing import Any, NamedTuple


class TrainedKind(NamedTuple):
    """Numbers of a kind; more than one block in a row is drafted, and trained, behind the drafter's own states."""

    trained_blocks: int  # in a row, that it is trained through
    least_blocks: int  # of a tree, however few are asked for
    shape: Mapping[str, Any]  # what it sets in `SpecBlockConfig`; entries of a block and layers always


SPECBLOCK = TrainedKind(trained_blocks=2, least_blocks=1, shape={"block_size": 4, "num_layers": 2})
