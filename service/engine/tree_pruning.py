"""From a drafter's candidates to the trees that are verified: survival corrected, nodes shared out, the likeliest kept,
and what became of them learnt.

Legend: batch, nodes as in drafters/tree.py; a step's calls come in their order.
"""

import torch
from torch import Tensor

from drafters.calibration import Claims, SurvivalCalibration
from drafters.tree import MAX_DEPTH, ROOT, Candidates, DraftTree, select_nodes
from kernels.graph_runner import Capture, GraphRunner, batches_up_to, leading
from service.engine.budget import allocate_nodes

_NO_SEQUENCE = -1
_Pruned = tuple[DraftTree, Claims]


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
        path = torch.full((max_batch, MAX_DEPTH), ROOT, device=device)
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
                for batch, (trees, _) in corrected
            ),
        )
        self._keep = GraphRunner(_keep, capture, (((none[:batch], width), given) for batch, given in corrected))
        kept = zip(batches, self._keep.results, strict=True)
        self._learn = GraphRunner(self._run_learn, capture, (((path[:batch],), given) for batch, given in kept))

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

    def learn(self, path: Tensor) -> None:
        """Take in which nodes of these trees were accepted. # path [batch, depth] int64, -1 padded"""
        self._learn((path,), self._kept)

    def _run_correct(self, candidates: Candidates, deepest: Tensor) -> _Pruned:
        emitted = candidates.depths <= deepest[:, None]
        return self._calibration.correct(candidates._replace(survival=candidates.survival * emitted))

    def _run_learn(self, path: Tensor, tree: DraftTree, claims: Claims) -> tuple[()]:
        self._calibration.learn(claims, tree, path)
        return ()


def _share(limits: Tensor, seconds: Tensor, weights: Tensor, candidates: Candidates) -> Tensor:
    return allocate_nodes(candidates, limits, seconds, weights)


def _keep(num_keep: Tensor, width: int, candidates: Candidates, claims: Claims) -> _Pruned:
    tree, kept = select_nodes(candidates, num_keep, width)
    return tree, claims.take(kept)
