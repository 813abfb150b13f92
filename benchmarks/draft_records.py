"""Records of what a drafter proposed in each step, and of what the target made of it.

A proxy stands between the engine and a drafter. The drafter itself is not changed.
Legend: batch, depth as in `drafters.protocol`; paths = token paths from the root of a tree.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from drafters.protocol import Committed, DraftContext, Drafter, Noise, Observer, StepTimes
from drafters.tree import MAX_DEPTH, Candidates, DraftTree
from kernels.lattice import Lattice
from service.assembly import Assembly

TokenPath = tuple[int, ...]
Survival = Mapping[TokenPath, float]
"""Survival probability of each node of a tree, by its path; parents come before children."""


@dataclass(slots=True)
class Distribution:
    """What a drafter forward predicted for the token after one node."""

    node: TokenPath  # () for the root
    tokens: TokenPath  # the most likely ones, most likely first
    distance: float | None = None  # total variation distance to the target's; None where the target has none there


@dataclass(slots=True, kw_only=True)
class StepRecord:
    """One verified step of one sequence."""

    truth: TokenPath = ()  # tokens that followed the root, MAX_DEPTH + 1 at most
    accepted: int = 0  # accepted length; truth[accepted] is the bonus token
    candidates: Survival = field(default_factory=dict)  # as proposed
    distributions: list[Distribution] = field(default_factory=list)
    verified: Survival = field(default_factory=dict)  # with corrected survival

    def ranked(self, node: TokenPath) -> TokenPath:
        """Return the tokens proposed after `node`, most likely first.

        The first forward that predicted this node decides, or the tree where no forward did.
        """
        children = [path for path in self.candidates if path[:-1] == node]
        found = (one.tokens for one in self.distributions if one.node == node)
        return next(found, tuple(path[-1] for path in sorted(children, key=self.candidates.__getitem__, reverse=True)))


def paths_of(tokens: Sequence[int], parents: Sequence[int]) -> list[TokenPath]:
    """Return the path of each node. Parents come before children; a negative parent is the root."""
    paths: list[TokenPath] = []
    for token, parent in zip(tokens, parents, strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    return paths


def survival_of(tree: DraftTree) -> list[Survival]:
    """Return each sequence's survival by path."""
    tokens, parents, survival = tree.tokens.tolist(), tree.parents.tolist(), tree.survival.tolist()
    return [
        dict(zip(paths_of(tokens[index][:count], parents[index][:count]), survival[index], strict=False))
        for index, count in enumerate(tree.num_nodes.tolist())
    ]


def total_variation(target: Tensor, drafter: Tensor, ids: Tensor) -> float:
    """1 - sum_v min(p(v), q(v)) of two distributions at temperature 1, never below 0 by rounding.

    target: logits [vocab]; drafter: logits [draft_vocab]; ids: their target ids [draft_vocab] int64."""
    p, q = (logits.float().softmax(0) for logits in (target, drafter))
    return max(0.0, 1.0 - float(torch.minimum(p[ids], q).sum()))


class DrafterProxy:
    """Passes everything that a subclass does not define on to a drafter."""

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter

    def __getattr__(self, name: str) -> Any:
        return getattr(self.drafter, name)

    def as_drafter(self) -> Drafter:
        """Return this proxy under the type that engines take."""
        return cast(Drafter, self)


class SteeredDrafter(DrafterProxy):
    """Can keep step times and sampling noise from a drafter."""

    hides_times = False  # True: it cannot find any of its parts too expensive, so that all run in every step
    hides_noise = False  # True: it drafts as at temperature 0

    def timed(self, times: StepTimes) -> None:
        """As `Drafter`."""
        if not self.hides_times:
            self.drafter.timed(times)

    def grow(self, rows: Tensor, noise: Noise) -> Candidates:
        """As `Drafter`. rows [batch] int64"""
        temperatures = torch.zeros_like(noise.temperatures) if self.hides_noise else noise.temperatures
        return self.drafter.grow(rows, replace(noise, temperatures=temperatures))


class _Forward(NamedTuple):
    """One drafter forward, as an observer is given it."""

    lattice: Lattice
    logits: Tensor  # [batch, starts, block, draft_vocab]
    ids: Tensor  # [draft_vocab] int64, target ids


class _Pending(NamedTuple):
    """A distribution that the target has not been compared with yet."""

    record: Distribution
    logits: Tensor  # [draft_vocab]
    ids: Tensor  # [draft_vocab] int64


class Recorder(SteeredDrafter):
    """Records every step of a drafter. A sequence's records are complete once it has finished."""

    wants_scores = True
    hides_times = True

    def __init__(self, make: Callable[[Observer], Drafter]) -> None:
        """`make` returns the drafter that reports its forwards to the given observer."""
        super().__init__(make(self.observe))
        self._texts: dict[int, list[int]] = {}  # by row
        self._open: defaultdict[int, StepRecord] = defaultdict(StepRecord)  # drafted, not verified
        self._forwards: list[_Forward] = []  # of the tree that grows now
        self._pending: defaultdict[int, list[_Pending]] = defaultdict(list)
        self._verified: defaultdict[int, list[tuple[int, StepRecord]]] = defaultdict(list)
        self._complete: list[StepRecord] = []

    def take(self) -> list[StepRecord]:
        """Return the records of sequences that have finished since the last call."""
        complete, self._complete = self._complete, []
        return complete

    def observe(self, lattice: Lattice, logits: Tensor, ids: Tensor) -> None:
        """Keep one forward. logits [batch, starts, block, draft_vocab], ids [draft_vocab] int64"""
        self._forwards.append(_Forward(lattice, logits.clone(), ids))

    def start(self, contexts: Sequence[DraftContext]) -> None:
        """As `Drafter`."""
        self.drafter.start(contexts)
        self._texts.update((context.row, list(context.tokens)) for context in contexts)

    def grow(self, rows: Tensor, noise: Noise) -> Candidates:
        """As `Drafter`. rows [batch] int64"""
        tree = super().grow(rows, noise)
        forwards, self._forwards = self._forwards, []
        for index, (row, survival) in enumerate(zip(rows.tolist(), survival_of(tree), strict=True)):
            self._pending[row] = list(_predicted(forwards, index))
            self._open[row].candidates = survival
            self._open[row].distributions = [record for record, _, _ in self._pending[row]]
        return tree

    def commit(self, committed: Committed) -> None:
        """As `Drafter`."""
        self.drafter.commit(committed)
        verified = survival_of(committed.tree)
        tokens, counts = committed.tokens.tolist(), committed.counts.tolist()
        self._compare(committed, tokens, counts)
        for index, row in enumerate(committed.rows.tolist()):
            text, step = self._texts[row], self._open.pop(row, StepRecord())
            step.accepted, step.verified = counts[index] - 1, verified[index]
            self._verified[row].append((len(text), step))
            text += tokens[index][: counts[index]]
        self._pending.clear()

    def finish(self, rows: Sequence[int]) -> list[int]:
        """As `Drafter`."""
        for row in rows:
            text = self._texts.pop(row)
            self._open.pop(row, None)
            for at, step in self._verified.pop(row, []):
                step.truth = tuple(text[at : at + MAX_DEPTH + 1])
                self._complete.append(step)
        return self.drafter.finish(rows)

    @torch.inference_mode()
    def _compare(self, committed: Committed, tokens: list[list[int]], counts: list[int]) -> None:
        """Compare drafter and target at the committed nodes that both have a distribution for."""
        logits_of, chosen_by = committed.logits, committed.chosen_by
        assert logits_of is not None, "the engine was not asked for the target's scores"
        assert chosen_by is not None, "as with logits"
        for index, row in enumerate(committed.rows.tolist()):
            for record, logits, ids in self._pending[row]:
                depth = len(record.node)
                if depth < counts[index] and record.node == tuple(tokens[index][:depth]):
                    target = logits_of[chosen_by[index, depth]]
                    record.distance = total_variation(target, logits, ids)


def _predicted(forwards: Sequence[_Forward], index: int) -> Iterator[_Pending]:
    """Yield the distributions of all forwards of one sequence's tree, `index` being its position in the batch."""
    nodes = [[values[index] for values in lattice.nodes()[:2]] for lattice, _, _ in forwards]
    paths = paths_of(*(torch.cat(values).tolist() for values in zip(*nodes, strict=True))) if nodes else []
    first = 0
    for lattice, logits, ids in forwards:
        _, starts, block, ranks = lattice.tokens.shape
        begun = lattice.origin.survival[index].tolist()
        for start, position in product(range(starts), range(block)):
            siblings = paths[first : first + ranks]
            first += ranks
            if begun[start]:
                record = Distribution(siblings[0][:-1], tuple(path[-1] for path in siblings))
                yield _Pending(record, logits[index, start, position], ids)


def observed(assembly: Assembly) -> Recorder:
    """Return the configured drafter with a recorder in front of it. Its forwards are never captured."""
    return Recorder(lambda observer: assembly.drafter(observer=observer))
