"""Candidates pruned as in `kernels/pruning.py`, with survival corrected in one launch."""

from torch import Tensor

from kernels.pruning import Pruned, prune_corrected
from kernels.trees import DraftTree
from kernels.triton.hit_rates import correct_survival


def prune_trees(
    candidates: DraftTree,
    deepest: Tensor,
    wished: Tensor,
    rates: Tensor,
    seconds: Tensor,
    weights: Tensor,
    width: int,
    widths: Tensor | None = None,
) -> Pruned:
    """As the reference's."""
    corrected = correct_survival(candidates, deepest, rates)
    return prune_corrected(candidates, corrected, wished, seconds, weights, width, widths)
