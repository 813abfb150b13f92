"""From a drafter's candidates to the trees that are verified: survival corrected, nodes shared out, the likeliest kept,
and what became of them learnt.

Legend: batch, nodes as in drafters/tree.py; a step's calls come in their order.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from drafters.calibration import SurvivalCalibration
from drafters.tree import MAX_DEPTH, Candidates, DraftTree
from kernels import ops
from kernels.graph_runner import Capture, GraphRunner, batches_up_to, leading
from service.engine.budget import allocate_nodes

_NO_SEQUENCE = -1


class _Pruned(NamedTuple):
    trees: DraftTree
    claimed: Tensor  # of their nodes before correction, as of `Corrected`
    buckets: Tensor


class TreePruning:
    """What is done to a step's candidates. Captured, a batch is filled up with trees of no nodes."""

    def __init__(
        self,
        calibration: SurvivalCalibration,
        *,
        capture: Capture | None = None,
        max_batch: int = 0,
        width: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:
        """`width` is that of the widest candidates to capture."""
        self._calibration = calibration
        self._corrected: _Pruned
        self._kept: _Pruned
        self._batch = 0
        batches = batches_up_to(max_batch) if capture else []
        nodes = torch.zeros(max_batch, width, dtype=torch.int64, device=device)
        none, ones = nodes.new_zeros(max_batch), torch.ones(max_batch, device=device)
        self._ops = ops.on(nodes.device)
        text = torch.zeros(max_batch, MAX_DEPTH + 1, dtype=torch.int64, device=device)
        endless = torch.full((max_batch * width + 1,), torch.inf, device=device)
        candidates = DraftTree(nodes, nodes, nodes, nodes.float(), none)
        self._correct = GraphRunner(
            self._run_correct, capture, ((leading((candidates, none), batch), ()) for batch in batches)
        )
        corrected = list(zip(batches, self._correct.results, strict=True))
        self._share = GraphRunner(
            _share,
            capture,
            (
                ((none[:batch] + _NO_SEQUENCE, endless[: batch * width + 1], ones[:batch]), (trees,))
                for batch, (trees, *_) in corrected
            ),
        )
        self._keep = GraphRunner(
            self._run_keep, capture, (((none[:batch], width), given) for batch, given in corrected)
        )
        kept = zip(batches, self._keep.results, strict=True)
        learnt = (((text[:batch], none[:batch]), given) for batch, given in kept)
        self._learn = GraphRunner(self._run_learn, capture, learnt)

    def correct(self, candidates: Candidates, deepest: Tensor) -> Candidates:
        """With survival as it turns out, and none below what can be emitted. # deepest [batch] int64"""
        self._batch = candidates.batch
        self._corrected = self._correct((candidates, deepest))
        return self._corrected[0].first(self._batch, candidates.width)

    def share(self, candidates: Candidates, limits: Tensor, seconds: Tensor, weights: Tensor) -> Tensor:
        """As `allocate_nodes`, of the corrected candidates."""
        return self._share((limits, seconds, weights), (self._corrected[0],))[: self._batch]

    def keep(self, num_keep: Tensor, width: int) -> DraftTree:
        """The trees of the likeliest. # num_keep [batch] int64, at most `width`"""
        if width == 0:
            return DraftTree.empty(self._batch, num_keep.device)
        self._kept = self._keep((num_keep, width), self._corrected)
        return self._kept[0].first(self._batch, width)

    def learn(self, tokens: Tensor, counts: Tensor) -> None:
        """Take in what was committed of these trees. # tokens [batch, longest], counts [batch] as of `Committed`"""
        self._learn((tokens, counts), self._kept)

    def _run_correct(self, candidates: Candidates, deepest: Tensor) -> _Pruned:
        survival, claimed, buckets = self._calibration.correct(candidates, deepest)
        return _Pruned(candidates._replace(survival=survival), claimed, buckets)

    def _run_keep(
        self, num_keep: Tensor, width: int, candidates: Candidates, claimed: Tensor, buckets: Tensor
    ) -> _Pruned:
        tree, kept = self._ops.select_nodes(candidates, num_keep, width)
        return _Pruned(tree, claimed.gather(1, kept), buckets.gather(1, kept))

    def _run_learn(
        self, tokens: Tensor, counts: Tensor, tree: DraftTree, claimed: Tensor, buckets: Tensor
    ) -> tuple[()]:
        self._calibration.learn(claimed, buckets, tree, tokens, counts)
        return ()


def _share(limits: Tensor, seconds: Tensor, weights: Tensor, candidates: Candidates) -> Tensor:
    return allocate_nodes(candidates, limits, seconds, weights)
