"""From a drafter's candidates to the trees that are verified, and what became of them learnt.

Legend: batch, nodes as in drafters/tree.py.
"""

import torch
from torch import Tensor

from drafters.calibration import SurvivalCalibration
from drafters.tree import MAX_DEPTH, ROOT, Candidates, DraftTree
from kernels import ops
from kernels.graph_runner import Capture, GraphRunner, batches_up_to, leading
from kernels.survival import Pruned
from service.engine.tree_width import TreeWidth

_NO_SEQUENCE = -1


class TreePruning:
    """What is done to a step's candidates. Captured, a batch is filled up with trees of no nodes."""

    def __init__(
        self,
        calibration: SurvivalCalibration,
        *,
        capture: Capture | None = None,
        max_batch: int = 0,
        width: TreeWidth,
        is_priced: bool = True,
        device: torch.device | str = "cpu",
    ) -> None:
        """With `capture` trees have the widths that `width` offers, candidates at most the largest of them.
        `is_priced`: whether `prune` is called with seconds."""
        self._calibration, self._widths = calibration, width.on_device
        self._pruned: Pruned
        choices = width.choices or (0,)
        nodes = torch.zeros(max_batch, choices[-1], dtype=torch.int64, device=device)
        none, ones = nodes.new_zeros(max_batch), torch.ones(max_batch, device=device)
        self._ops = ops.on(nodes.device)
        seconds = torch.full((len(choices) if is_priced else 0,), torch.inf, device=device)
        candidates = DraftTree(nodes, nodes + ROOT, nodes, nodes.float(), none)
        lines = candidates, none, none + _NO_SEQUENCE, ones
        shapes = [(most, batch) for most in choices[:0:-1] for batch in batches_up_to(max_batch)] if capture else []
        padding = (((*leading(lines, batch), seconds, most), ()) for most, batch in shapes)
        self._prune = GraphRunner(self._run_prune, capture, padding)
        text = torch.zeros(max_batch, MAX_DEPTH + 1, dtype=torch.int64, device=device)
        kept = zip(shapes, self._prune.results, strict=True)
        learnt = (((text[:batch], none[:batch]), pruned) for (_, batch), pruned in kept)
        self._learn = GraphRunner(self._run_learn, capture, learnt)

    def prune(
        self, candidates: Candidates, deepest: Tensor, wished: Tensor, seconds: Tensor, weights: Tensor, width: int
    ) -> tuple[DraftTree, Tensor]:
        """Trees and sizes as of `prune_trees`, padding in width not cut off; what the step learns is of them."""
        pruned = self._prune((candidates, deepest, wished, weights, seconds, width))
        self._pruned = pruned
        return pruned.trees, pruned.sizes[: candidates.batch]

    def learn(self, tokens: Tensor, counts: Tensor) -> None:
        """Take in what was committed of these trees. # tokens [batch, longest], counts [batch] as of `Committed`"""
        self._learn((tokens, counts), self._pruned)

    def _run_prune(
        self, candidates: Candidates, deepest: Tensor, wished: Tensor, weights: Tensor, seconds: Tensor, width: int
    ) -> Pruned:
        rates, widths = self._calibration.rates, self._widths
        return self._ops.prune_trees(candidates, deepest, wished, rates, seconds, weights, width, widths)

    def _run_learn(
        self, tokens: Tensor, counts: Tensor, trees: DraftTree, claimed: Tensor, buckets: Tensor, sizes: Tensor
    ) -> tuple[()]:
        self._calibration.learn(trees, claimed, buckets, tokens, counts)
        return ()
