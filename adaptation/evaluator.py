"""Scores of drafters on validation texts: the evidence of gate and alarms, each replay done once.

A text's score is tau, mean emitted tokens per verify, had this drafter drafted it. The anchor's never changes, the
serving drafter's only with its version.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from adaptation.gate import Gate, GateDecision, GateReason
from adaptation.losses import TextDivergence
from adaptation.monitor import TextScores
from adaptation.samples import ValidationText
from adaptation.weights import ANCHOR, DrafterWeights
from drafters.specblock.model import Embed, SpecBlock
from drafters.training.corpus import Batch, Example
from drafters.training.replay import replay_beside_memory, replay_blocks, replay_memory

Replay = Callable[[SpecBlock, Example], float]  # -> tau
# Replays of whole trees as they are served take tens of times as long.
_EVERY = 2  # positions; neighbours see nearly the same, and each costs a block
_NODES = 8  # some breadth: likeliest tokens alone flatter a head that has only grown surer of them
_HOPELESS: tuple[GateReason, ...] = ("too_little_evidence", "not_finite", "worse_than_serving", "worse_than_anchor")
"""What the newest texts alone may decide: to be wrong about these costs an update, not a serving drafter."""


def replay_of(embed: Embed, *, beside_memory: bool) -> Replay:
    """tau of one block at every other position as a tree of its 8 likeliest paths, ranked as it serves with the noise
    that sampled the text: one forward per text. `beside_memory`: and of copies from the text. What is served may have
    more blocks and other node counts, and has a rank head: the score compares drafters, and is not the served tau.
    Attention of whole texts is fp32 whatever the weights are."""

    def replay(model: SpecBlock, text: Example) -> float:
        with torch.autocast(model.d2t.device.type, dtype=torch.bfloat16, enabled=model.dtype == torch.bfloat16):
            blocks = replay_beside_memory if beside_memory else replay_blocks
            return blocks(model, embed, text, every=_EVERY, nodes=_NODES).tau

    return replay


def memory_alone(model: SpecBlock, text: Example) -> float:
    """tau of drafting by copying, which needs no weights: what a drafter that is made must add to."""
    return replay_memory(text, every=_EVERY, nodes=_NODES).tau


@dataclass
class _Known:
    """Scores by number of the text, of one drafter."""

    version: int
    scores: dict[int, float] = field(default_factory=dict)


class OfflineEvaluator:
    """Compares versions of a drafter on the same texts."""

    def __init__(
        self,
        weights: DrafterWeights,
        gate: Gate,
        replay: Replay,
        divergence: TextDivergence,
        *,
        drift_texts: int,
        max_known: int,
        first: Replay | None = None,
    ) -> None:
        """`drift_texts`: on which the distance to the anchor is measured; `max_known`: scores kept of each drafter;
        `first`: scores of what serves before any version, where that is no network."""
        self._weights = weights
        self._gate = gate
        self._replay, self._first = replay, first
        self._divergence = divergence
        self._num_drift_texts = drift_texts
        self._drift_texts: list[Example] = []
        self._max_known = max_known
        self._known_drift: tuple[int, float] | None = None  # by version
        self._anchor, self._without = _Known(0), _Known(0)
        self._serving = _Known(weights.newest)
        self._candidate = _Known(weights.newest)

    def evaluate(self, texts: Sequence[ValidationText]) -> tuple[GateDecision, float]:
        """Whether the training copy may serve, and the seconds it took to find out."""
        began = time.perf_counter()
        self._candidate = _Known(self._weights.newest)
        least = self._gate.least_texts
        few = texts[-least:] if len(texts) >= least else texts[:0]
        candidate = self._lookup(self._candidate, self._weights.candidate, few, self._replay)
        decision = self._decide(candidate, few)
        if decision.reason not in _HOPELESS:
            candidate = self._lookup(self._candidate, self._weights.candidate, texts, self._replay)
            decision = self._decide(candidate, texts)
        return decision, time.perf_counter() - began

    def published(self) -> None:
        """What was evaluated last is served now, and so are its scores."""
        self._serving = _Known(self._weights.newest, self._candidate.scores)

    def scored(self, text: ValidationText, *, with_previous: bool) -> TextScores:
        """How the drafters did on one text, the one that was replaced only where asked for."""
        compares = with_previous and self._weights.has_previous
        before = self._scores(self._weights.previous(), [text], self._replay)[0] if compares else None
        return TextScores(self.serving([text])[0], self.anchor([text])[0], before)

    def serving(self, texts: Sequence[ValidationText]) -> list[float]:
        if self._weights.latest.origin == ANCHOR:
            return self.anchor(texts)
        if self._serving.version != self._weights.newest:
            self._serving = _Known(self._weights.newest)
        return self._lookup(self._serving, self._weights.served, texts, self._replay)

    def anchor(self, texts: Sequence[ValidationText]) -> list[float]:
        """Of the anchor, or of what serves while there is none."""
        if self._first is not None and self._weights.latest.origin == ANCHOR:
            return self._lookup(self._without, self._weights.unchanged, texts, self._first)
        return self._lookup(self._anchor, self._weights.unchanged, texts, self._replay)

    def probe(self, text: ValidationText) -> None:
        """Measure the distance to the anchor on this text too. Of enough texts, the set stays as it is, so that numbers
        can be compared."""
        if len(self._drift_texts) < self._num_drift_texts:
            self._drift_texts.append(text.example)

    def rebased(self) -> None:
        """The anchor has other weights."""
        self._known_drift, self._anchor = None, _Known(0)

    @property
    def kl_is_due(self) -> bool:
        """Whether asking for it takes the time to measure it."""
        is_known = self._known_drift is not None and self._known_drift[0] == self._weights.newest
        return len(self._drift_texts) >= self._num_drift_texts and not is_known

    def kl_to_anchor(self) -> float | None:
        """Mean KL(serving || anchor) over the first texts, once there are enough: a number for people, which decides
        nothing, because far from the anchor may be exactly where the traffic is."""
        if self.kl_is_due:
            self._known_drift = self._weights.newest, self._drift(self._weights.served_in_full())
        return None if self._known_drift is None else self._known_drift[1]

    @torch.no_grad()
    def _drift(self, model: SpecBlock) -> float:
        reach, device = model.config.reach, model.d2t.device
        batches = (Batch.of([text], reach, device) for text in self._drift_texts)
        return float(torch.stack([self._divergence(model, batch) for batch in batches]).mean())

    def _decide(self, candidate: Sequence[float], texts: Sequence[ValidationText]) -> GateDecision:
        return self._gate.decide(candidate, self.serving(texts), self.anchor(texts))

    def _lookup(
        self, known: _Known, load: Callable[[], SpecBlock], texts: Sequence[ValidationText], replay: Replay
    ) -> list[float]:
        missing = [text for text in texts if text.number not in known.scores]
        if missing:
            found = self._scores(load(), missing, replay)
            known.scores |= {text.number: score for text, score in zip(missing, found, strict=True)}
        scores = [known.scores[text.number] for text in texts]
        for number in sorted(known.scores)[: -self._max_known]:
            del known.scores[number]
        return scores

    @torch.no_grad()
    def _scores(self, model: SpecBlock, texts: Sequence[ValidationText], replay: Replay) -> list[float]:
        return [replay(model, text.example) for text in texts]
