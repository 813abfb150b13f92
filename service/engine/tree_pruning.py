"""From a drafter's candidates to the trees that are verified: survival corrected, nodes shared out, the likeliest kept,
and what became of them learnt.

Legend: batch, nodes as in drafters/tree.py; a step's calls come in their order.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from drafters.calibration import SurvivalCalibration
from drafters.tree import MAX_DEPTH, ROOT, Candidates, DraftTree
from kernels import ops
from kernels.graph_runner import Capture, GraphRunner, batches_up_to, by_batch
from service.engine.tree_width import TreeWidth

_NO_SEQUENCE = -1


class _Corrected(NamedTuple):
    trees: DraftTree
    claimed: Tensor  # of their nodes before correction, as of `Corrected`
    buckets: Tensor
    worth: Tensor  # [batch] int64, nodes that have a chance
    limits: Tensor  # [batch] int64, of them those that are wished for


class _Kept(NamedTuple):
    trees: DraftTree
    claimed: Tensor
    buckets: Tensor
    sizes: Tensor  # [batch, 3] int64, nodes wanted, nodes kept, and nodes that have a chance


class TreePruning:
    """What is done to a step's candidates. Captured, a batch is filled up with trees of no nodes."""

    def __init__(
        self,
        calibration: SurvivalCalibration,
        *,
        capture: Capture | None = None,
        max_batch: int = 0,
        width: TreeWidth,
        device: torch.device | str = "cpu",
    ) -> None:
        """With `capture` trees have the widths that `width` offers, candidates at most the largest of them."""
        self._calibration = calibration
        self._corrected: _Corrected
        self._kept: _Kept
        self._batch = 0
        batches, choices = batches_up_to(max_batch) if capture else [], width.choices or (0,)
        nodes = torch.zeros(max_batch, choices[-1], dtype=torch.int64, device=device)
        none, ones = nodes.new_zeros(max_batch), torch.ones(max_batch, device=device)
        self._ops = ops.on(nodes.device)
        text = torch.zeros(max_batch, MAX_DEPTH + 1, dtype=torch.int64, device=device)
        endless = torch.full((len(choices),), torch.inf, device=device)
        candidates = DraftTree(nodes, nodes + ROOT, nodes, nodes.float(), none)
        self._correct = by_batch(self._run_correct, capture, max_batch, (candidates, none, none))
        corrected = list(zip(batches, self._correct.results, strict=True))
        self._share = GraphRunner(
            lambda limits, seconds, weights, trees: width.allocate(trees, limits, seconds, weights),
            capture,
            (((none[:batch] + _NO_SEQUENCE, endless, ones[:batch]), (trees,)) for batch, (trees, *_) in corrected),
        )
        self._keep = GraphRunner(
            self._run_keep,
            capture,
            (((none[:batch], none[:batch], most), given) for most in choices[:0:-1] for batch, given in corrected),
        )
        kept = zip([*batches] * (len(choices) - 1), self._keep.results, strict=True)
        learnt = (((text[:batch], none[:batch]), given) for batch, given in kept)
        self._learn = GraphRunner(self._run_learn, capture, learnt)

    def correct(self, candidates: Candidates, deepest: Tensor, wished: Tensor) -> tuple[Candidates, Tensor]:
        """With survival as it turns out, and none below what can be emitted; and how many nodes may be kept of each.
        # deepest, wished [batch] int64"""
        self._batch = candidates.batch
        self._corrected = self._correct((candidates, deepest, wished))
        return self._corrected.trees.first(self._batch, candidates.width), self._corrected.limits[: self._batch]

    def share(self, candidates: Candidates, limits: Tensor, seconds: Tensor, weights: Tensor) -> Tensor:
        """Nodes per sequence of the corrected candidates, as `TreeWidth.allocate`."""
        return self._share((limits, seconds, weights), (self._corrected.trees,))[: self._batch]

    def keep(self, num_keep: Tensor, wanted: Tensor, width: int) -> tuple[DraftTree, Tensor]:
        """The trees of the likeliest nodes, as many as fit into the width, and the numbers of nodes wanted, kept, and
        with a chance. # num_keep, wanted [batch] int64 -> trees, [batch, 3] int64"""
        kept = self._keep((num_keep, wanted, width), self._corrected)
        sizes = kept.sizes[: self._batch]
        if not width:
            return DraftTree.empty(self._batch, num_keep.device), sizes
        self._kept = kept
        return kept.trees.first(self._batch, width), sizes

    def learn(self, tokens: Tensor, counts: Tensor) -> None:
        """Take in what was committed of these trees. # tokens [batch, longest], counts [batch] as of `Committed`"""
        self._learn((tokens, counts), self._kept)

    def _run_correct(self, candidates: Candidates, deepest: Tensor, wished: Tensor) -> _Corrected:
        survival, claimed, buckets = self._calibration.correct(candidates, deepest)
        worth = (survival > 0).sum(1)
        trees = candidates._replace(survival=survival)
        return _Corrected(trees, claimed, buckets, worth, torch.minimum(wished, worth))

    def _run_keep(
        self,
        num_keep: Tensor,
        wanted: Tensor,
        width: int,
        candidates: Candidates,
        claimed: Tensor,
        buckets: Tensor,
        worth: Tensor,
        limits: Tensor,
    ) -> _Kept:
        tree, kept = self._ops.select_nodes(candidates, num_keep.clamp(max=width), width)
        sizes = torch.stack([wanted, tree.num_nodes, worth], dim=1)
        return _Kept(tree, claimed.gather(1, kept), buckets.gather(1, kept), sizes)

    def _run_learn(
        self, tokens: Tensor, counts: Tensor, tree: DraftTree, claimed: Tensor, buckets: Tensor, sizes: Tensor
    ) -> tuple[()]:
        self._calibration.learn(claimed, buckets, tree, tokens, counts)
        return ()
