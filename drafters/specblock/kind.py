"""What sets one kind of trained drafter apart from the others, whose network, trees, training and files they share."""

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

Context = Literal["run", "injected"]
"""What attention finds of committed positions: the keys and values of entries that were run through the layers, or each
layer's keys and values of the condition itself."""

_SHORT = 2  # positions; a further forward for so few is asked for only while it pays, as all are


class TrainedKind(NamedTuple):
    """Numbers of a kind; blocks behind the first start at the drafter's own states."""

    trained_blocks: int  # in a row, that it is trained through
    shape: Mapping[str, Any]  # what it sets in `SpecBlockConfig`; entries of a block and layers always
    context: Context = "run"
    two_way: bool = False  # all entries of a block see each other; of an injected context
    paths: int = 1  # to a position, behind which what a block says of it is drafted; more are of kinds of one block
    conditioned: bool = False
    """Blocks of one position, all from one forward of the layers on an injected context, whose states an MLP tells the
    token before them."""

    glancing: float = 0.0  # share of entries on a token guessed wrong that training tells it
    with_target: bool = False  # its weights come with the target's own, and are not trained from nothing

    def blocks(self, asked: int) -> int:
        """Of a tree, where so many are asked for: one where it never learnt to go on, and short ones go as far as it
        learnt, or as far as there are states."""
        if self.trained_blocks == 1 or self.conditioned:
            return self.trained_blocks
        return max(asked, self.trained_blocks) if self.shape["block_size"] <= _SHORT else asked


SPECBLOCK = TrainedKind(trained_blocks=2, shape={"block_size": 4, "num_layers": 2})
