"""`kernels.settle` on a device: the walk and the commit are kernels."""

from torch import Tensor

from kernels.settle import Verified, settle_with
from kernels.triton.accept import accept
from kernels.triton.commit_slots import commit_slots


def settle(
    table: Tensor,
    choice: tuple[Tensor, Tensor],
    logits: tuple[Tensor, Tensor, Tensor],
    completing: tuple[Tensor, Tensor],
    lines: tuple[Tensor, Tensor, Tensor],
    slots: Tensor,
    trees: tuple[Tensor, Tensor, Tensor],
    sizes: Tensor,
) -> Verified:
    """As the reference."""
    return settle_with(accept, commit_slots, table, choice, logits, completing, lines, slots, trees, sizes)
