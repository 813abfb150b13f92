"""Drafters under observation: what each source proposed in every step, what target and drafter thought of it, and how
the text went on."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from drafters.memory.drafter import MemoryDrafter
from drafters.protocol import Committed, DraftContext, Drafter, Noise
from drafters.registry import MEMORY
from drafters.tree import MAX_DEPTH, Candidates, DraftTree
from kernels.lattice import Lattice
from service.assembly import Assembly

TokenPath = tuple[int, ...]
Odds = Mapping[TokenPath, float]
"""Survival of each node of a tree, parents before children."""


@dataclass(slots=True)
class Place:
    """What a drafter that has distributions said of the token behind one node."""

    source: str
    forward: int  # which of the source's forwards said it, from 0
    node: TokenPath  # () for the root
    tokens: TokenPath  # by falling odds, as they were ranked
    distance: float | None = None  # total variation to the target's distribution, where that verified the place


@dataclass(slots=True, kw_only=True)
class StepRecord:
    """One step of one sequence, filled in as it goes on."""

    root: int = -1  # the last committed token before the step
    truth: TokenPath = ()  # what followed the root, as far as the text went
    accepted: int = 0  # accepted length; truth[accepted] is the bonus token
    candidates: Odds = field(default_factory=dict)  # the whole tree, all sources together
    proposals: dict[str, Odds] = field(default_factory=dict)  # by source; empty when nobody was asked
    places: list[Place] = field(default_factory=list)
    verified: Odds = field(default_factory=dict)  # with survival as it was corrected

    @property
    def emitted(self) -> TokenPath:
        return self.truth[: self.accepted + 1]

    def ranked(self, node: TokenPath) -> TokenPath:
        """Tokens behind a node by falling odds: as the first distribution there has them, else the tree's."""
        children = [path for path in self.candidates if path[:-1] == node]
        found = (place.tokens for place in self.places if place.node == node)
        return next(found, tuple(path[-1] for path in sorted(children, key=self.candidates.__getitem__, reverse=True)))


def paths_of(tokens: Sequence[int], parents: Sequence[int]) -> list[TokenPath]:
    """Paths of nodes that stand after their parents; a parent below 0 is the root."""
    paths: list[TokenPath] = []
    for token, parent in zip(tokens, parents, strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    return paths


class _Heard(NamedTuple):
    """What a forward said of the tokens behind some nodes."""

    lattice: Lattice
    logits: Tensor  # [batch, starts, block, draft_vocab]
    ids: Tensor  # [draft_vocab] int64, target ids


class _Said(NamedTuple):
    """A place, and its distribution until the target has one of it."""

    place: Place
    logits: Tensor  # [draft_vocab]
    ids: Tensor


class Recorder:
    """Records of all sequences of an engine; a sequence's steps are complete when it has finished."""

    def __init__(self) -> None:
        self._texts: dict[int, list[int]] = {}
        self._drafts: defaultdict[int, StepRecord] = defaultdict(StepRecord)  # steps that are not verified yet
        self._heard: list[_Heard] = []  # of the trees that grow now
        self._said: defaultdict[int, list[_Said]] = defaultdict(list)
        self._steps: defaultdict[int, list[tuple[int, StepRecord]]] = defaultdict(list)
        self._done: list[StepRecord] = []

    def take(self) -> list[StepRecord]:
        """The steps of all sequences that have finished since the last call."""
        done, self._done = self._done, []
        return done

    def hear(self, lattice: Lattice, logits: Tensor, ids: Tensor) -> None:
        """As `Observer`."""
        self._heard.append(_Heard(lattice, logits.clone(), ids))

    def listen(self, drafter: Drafter) -> None:
        """Record what is asked of the drafter that the engine is given."""
        listen(drafter, "start", self._started)
        listen(drafter, "grow", self._grown)
        listen(drafter, "commit", self._committed)
        listen(drafter, "finish", self._finished)

    def listen_to_source(self, name: str, drafter: Drafter, method: str = "grow") -> None:
        """Record what one source proposes, by the method that says it."""

        def grown(tree: DraftTree, rows: Tensor, *_: Noise) -> None:
            forwards, self._heard = self._heard, []
            for line, (row, odds) in enumerate(zip(rows.tolist(), odds_of(tree), strict=True)):
                self._drafts[row].proposals[name] = odds
                said = list(_said(name, forwards, line))
                self._said[row] += said
                self._drafts[row].places += [place for place, _, _ in said]

        listen(drafter, method, grown)

    def _started(self, answer: None, contexts: Sequence[DraftContext]) -> None:
        for context in contexts:
            self._texts[context.row] = list(context.tokens)

    def _grown(self, tree: DraftTree, rows: Tensor, noise: Noise) -> None:
        for row, odds in zip(rows.tolist(), odds_of(tree), strict=True):
            self._drafts[row].candidates = odds

    def _committed(self, answer: None, committed: Committed) -> None:
        verified = odds_of(committed.tree)
        tokens, counts = committed.tokens.tolist(), committed.counts.tolist()
        self._measure(committed, tokens, counts)
        for line, row in enumerate(committed.rows.tolist()):
            text, step = self._texts[row], self._drafts.pop(row, StepRecord())
            step.root, step.accepted, step.verified = text[-1], counts[line] - 1, verified[line]
            self._steps[row].append((len(text), step))
            text += tokens[line][: counts[line]]
        self._said.clear()

    @torch.inference_mode()
    def _measure(self, committed: Committed, tokens: list[list[int]], counts: list[int]) -> None:
        """How far drafter and target are apart wherever the text went and both have a distribution."""
        assert committed.scores is not None, "the engine was not asked for the target's scores"
        order = {place: at for at, place in enumerate(committed.scores.places.tolist())}
        width = committed.tokens.shape[1]
        for line, row in enumerate(committed.rows.tolist()):
            for place, logits, ids in self._said[row]:
                depth = len(place.node)
                if depth < counts[line] and place.node == tuple(tokens[line][:depth]):
                    target = committed.scores.logits[order[line * width + depth]]
                    place.distance = total_variation(target, logits, ids)

    def _finished(self, answer: object, rows: Sequence[int]) -> None:
        for row in rows:
            text = self._texts.pop(row)
            self._drafts.pop(row, None)
            for at, step in self._steps.pop(row, []):
                step.truth = tuple(text[at : at + MAX_DEPTH + 1])
                self._done.append(step)


def _said(source: str, forwards: Sequence[_Heard], line: int) -> Iterator[_Said]:
    """What was said behind the nodes of one sequence's tree."""
    nodes = [[values[line] for values in lattice.nodes()[:2]] for lattice, _, _ in forwards]
    paths = paths_of(*(torch.cat(values).tolist() for values in zip(*nodes, strict=True))) if nodes else []
    first = 0
    for number, (lattice, logits, ids) in enumerate(forwards):
        _, starts, block, ranks = lattice.tokens.shape
        begun = lattice.origin.survival[line].tolist()
        for start, position in product(range(starts), range(block)):
            siblings = paths[first : first + ranks]
            first += ranks
            place = Place(source, number, siblings[0][:-1], tuple(path[-1] for path in siblings))
            if begun[start]:
                yield _Said(place, logits[line, start, position], ids)


def total_variation(target: Tensor, drafter: Tensor, ids: Tensor) -> float:
    """1 - sum_v min(p(v), q(v)) >= 0, of distributions at temperature 1; their sums are rounded, to above 1 as well.
    # target [vocab] and drafter [draft_vocab] logits, ids [draft_vocab] int64, the tokens that can be drafted"""
    wanted, drafted = (logits.float().softmax(0) for logits in (target, drafter))
    return max(0.0, 1.0 - float(torch.minimum(wanted[ids], drafted).sum()))


def odds_of(tree: DraftTree) -> list[Odds]:
    """Survival by path, for each sequence."""
    tokens, parents, survival = tree.tokens.tolist(), tree.parents.tolist(), tree.survival.tolist()
    return [
        dict(zip(paths_of(tokens[line][:count], parents[line][:count]), survival[line], strict=False))
        for line, count in enumerate(tree.num_nodes.tolist())
    ]


def listen(drafter: Drafter, method: str, told: Callable[..., None]) -> None:
    """Have `told` hear of every call of that method after it: the answer, and what it was given."""
    call = getattr(drafter, method)

    def called(*args: Any) -> Any:
        answer = call(*args)
        told(answer, *args)
        return answer

    setattr(drafter, method, called)


def without_noise(drafter: Drafter) -> Drafter:
    """Keep a drafter from seeing the noise the target samples with: it drafts as at temperature 0."""
    grow = drafter.grow

    def silent(rows: Tensor, noise: Noise) -> Candidates:
        return grow(rows, replace(noise, temperatures=torch.zeros_like(noise.temperatures)))

    drafter.grow = silent  # type: ignore[method-assign]
    return drafter


def without_times(drafter: Drafter) -> Drafter:
    """Have all of a drafter asked in every step: without times nothing is found too dear."""
    vars(drafter)["timed"] = lambda times: None
    return drafter


def observed(assembly: Assembly) -> tuple[Drafter, Recorder]:
    """The configured drafter, never captured and always asked, and what records it."""
    recorder = Recorder()
    whole = assembly.drafter(observer=recorder.hear)
    network = whole.network if isinstance(whole, MemoryDrafter) else whole
    if isinstance(whole, MemoryDrafter):
        recorder.listen_to_source(MEMORY, whole, "recall")
    if network is not None:
        recorder.listen_to_source(network.name, network)
    without_times(whole)
    # A property, of which one object cannot have one of its own.
    whole.__class__ = type(type(whole).__name__, (type(whole),), {"wants_scores": True})
    recorder.listen(whole)
    return whole, recorder
