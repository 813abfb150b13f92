"""From a drafter's candidates to the trees that are verified: survival corrected, nodes shared out, the likeliest kept,
and what became of them learnt. Asked for as it is, or replayed in a few fixed shapes; the same trees either way.

Knows neither drafters nor what budgets go by.
Legend: batch, nodes as in drafters/tree.py; a step's calls come in their order.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from drafters.recalibration import Claims, Recalibration
from drafters.select import select_nodes
from drafters.tree import MAX_DEPTH, ROOT, Candidates, DraftTree
from kernels.graph_runner import Capture, Places, Replayed, batches_up_to, least
from service.engine.budget import allocate_nodes

_NO_SEQUENCE = -1


class TreePruning(Protocol):
    """What is done to a step's candidates."""

    def correct(self, candidates: Candidates, deepest: Tensor) -> Candidates:
        """With survival as it turns out, and none below what can be emitted. # deepest [batch] int64"""
        ...

    def share(self, candidates: Candidates, limits: Tensor, seconds: Tensor, weights: Tensor) -> Tensor:
        """As `allocate_nodes`, of the corrected candidates."""
        ...

    def keep(self, num_keep: Tensor, width: int) -> DraftTree:
        """The trees of the likeliest. # num_keep [batch] int64, at most `width`"""
        ...

    def learn(self, path: Tensor) -> None:
        """Take in which nodes of these trees were accepted. # path [batch, depth] int64, -1 padded"""
        ...


class EagerPruning:
    """Any batch and any width, kernel by kernel."""

    def __init__(self, recalibration: Recalibration) -> None:
        self._recalibration = recalibration
        self._candidates = self._tree = DraftTree.empty(0)
        self._claims = Claims(self._tree.survival, self._tree.parents)

    def correct(self, candidates: Candidates, deepest: Tensor) -> Candidates:
        self._candidates, self._claims = self._recalibration.correct(_cut_below(candidates, deepest))
        return self._candidates

    def share(self, candidates: Candidates, limits: Tensor, seconds: Tensor, weights: Tensor) -> Tensor:
        return allocate_nodes(candidates, limits, seconds, weights)

    def keep(self, num_keep: Tensor, width: int) -> DraftTree:
        self._tree, kept = select_nodes(self._candidates, num_keep, width)
        self._claims = self._claims.take(kept)
        return self._tree

    def learn(self, path: Tensor) -> None:
        self._recalibration.learn(self._claims, self._tree, path)


class _Corrected(NamedTuple):
    survival: Tensor  # [batch, nodes] float32
    conditional: Tensor  # as `Claims`
    bucket: Tensor


class _Kept(NamedTuple):
    tree: tuple[Tensor, ...]  # as `DraftTree`
    conditional: Tensor
    bucket: Tensor


class _Replays(NamedTuple):
    """Of one batch."""

    correct: Replayed[_Corrected]
    share: Replayed[Tensor]
    keep: Replayed[_Kept]
    learn: Callable[[], None]


class CapturedPruning:
    """The same on static buffers: a step's batch is filled up with trees of no nodes."""

    @torch.inference_mode()
    def __init__(
        self, recalibration: Recalibration, capture: Capture, *, max_batch: int, width: int, device: torch.device
    ) -> None:
        """`width` is that of the widest candidates; wider ones, and more of them, are pruned as they are."""
        self._recalibration, self._capture, self._width = recalibration, capture, width
        self._eager = EagerPruning(recalibration)
        none = torch.zeros(max_batch, width, dtype=torch.int64, device=device)
        self._given = DraftTree(none, none.clone(), none.clone(), none.float(), none[:, 0].clone())
        self._deepest, self._limits, self._num_keep = (torch.zeros_like(self._given.num_nodes) for _ in range(3))
        self._seconds = torch.ones(max_batch * width + 1, device=device)
        self._weights = torch.ones(max_batch, device=device)
        self._path = torch.full((max_batch, MAX_DEPTH), ROOT, device=device)
        self._corrected: Places[_Corrected] = Places()
        self._shares: Places[Tensor] = Places()
        self._kept: Places[_Kept] = Places()
        self._replays = {batch: self._captured(batch) for batch in batches_up_to(max_batch)}
        self._batch = 0
        self._now: _Replays | None = None  # None: pruned as asked

    @torch.inference_mode()
    def correct(self, candidates: Candidates, deepest: Tensor) -> Candidates:
        padded = least(sorted(self._replays), candidates.batch) if 0 < candidates.width <= self._width else None
        if padded is None:
            self._now = None
            return self._eager.correct(candidates, deepest)
        self._batch, self._now = candidates.batch, self._replays[padded]
        self._fill(candidates, deepest, padded)
        survival = self._now.correct().survival[: self._batch]
        return replace(self._given.first(self._batch), survival=survival)

    @torch.inference_mode()
    def share(self, candidates: Candidates, limits: Tensor, seconds: Tensor, weights: Tensor) -> Tensor:
        if self._now is None:
            return self._eager.share(candidates, limits, seconds, weights)
        self._limits.fill_(_NO_SEQUENCE)
        self._seconds.fill_(float("inf"))
        for place, values in ((self._limits, limits), (self._seconds, seconds), (self._weights, weights)):
            place[: values.shape[0]] = values
        return self._now.share()[: self._batch]

    @torch.inference_mode()
    def keep(self, num_keep: Tensor, width: int) -> DraftTree:
        if self._now is None:
            return self._eager.keep(num_keep, width)
        if width == 0:
            return DraftTree.empty(self._batch, num_keep.device)
        self._num_keep[: self._batch] = num_keep
        return DraftTree(*self._now.keep().tree).first(self._batch, width)

    @torch.inference_mode()
    def learn(self, path: Tensor) -> None:
        if self._now is None:
            self._eager.learn(path)
            return
        mine = self._path[: self._batch]
        mine.fill_(ROOT)
        mine[:, : path.shape[1]] = path
        self._now.learn()

    def _fill(self, candidates: Candidates, deepest: Tensor, padded: int) -> None:
        """Nodes of nobody's, behind a tree's own and in lines behind the batch, may be anything but alive."""
        batch, width = candidates.tokens.shape
        given = self._given
        for place, values in zip(given.fields, candidates.fields, strict=True):
            place[tuple(map(slice, values.shape))] = values
        self._deepest[:batch] = deepest
        if width < self._width:
            given.survival[:batch, width:] = 0.0
        if batch < padded:
            given.num_nodes[batch:padded] = 0

    def _captured(self, batch: int) -> _Replays:
        given = self._given.first(batch)
        correct = Replayed(self._capture, partial(self._correct, given, self._deepest[:batch]), self._corrected)
        survival, *claims = correct.results
        candidates = replace(given, survival=survival)
        step = (self._limits[:batch], self._seconds[: batch * self._width + 1], self._weights[:batch])
        share = Replayed(self._capture, partial(allocate_nodes, candidates, *step), self._shares)
        keep = Replayed(self._capture, partial(_keep, candidates, Claims(*claims), self._num_keep[:batch]), self._kept)
        tree, *kept = keep.results
        learn = partial(self._recalibration.learn, Claims(*kept), DraftTree(*tree), self._path[:batch])
        return _Replays(correct, share, keep, self._capture(learn))

    def _correct(self, given: Candidates, deepest: Tensor) -> _Corrected:
        candidates, claims = self._recalibration.correct(_cut_below(given, deepest))
        return _Corrected(candidates.survival, claims.conditional, claims.bucket)


def _keep(candidates: Candidates, claims: Claims, num_keep: Tensor) -> _Kept:
    tree, kept = select_nodes(candidates, num_keep, candidates.width)
    taken = claims.take(kept)
    return _Kept(tree.fields, taken.conditional, taken.bucket)


def _cut_below(candidates: Candidates, deepest: Tensor) -> Candidates:
    """Give nodes that could not be emitted any more a survival of zero. # deepest [batch]"""
    return replace(candidates, survival=candidates.survival * (candidates.depths <= deepest[:, None]))
