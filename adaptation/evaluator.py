"""Scores drafters by replaying validation texts, and decides by these scores whether a candidate may serve.

A text's score is tau, the mean number of tokens per verify that this drafter would have reached on it. The anchor's
scores never change, those of the serving drafter only with its version; each replay is done once.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import NormalDist, fmean, stdev

import torch

from adaptation.losses import TextDivergence
from adaptation.monitor import TextScores
from adaptation.records import GateReason
from adaptation.samples import ValidationText
from adaptation.timing import Pieces
from adaptation.weights import ANCHOR, DrafterWeights
from drafters.network.model import Embed, SpecBlock
from drafters.training.corpus import Batch, Example
from drafters.training.replay import replay_beside_memory, replay_blocks, replay_memory

Replay = Callable[[SpecBlock, Example], float | Pieces[float]]  # -> tau; pieces: it is computed elsewhere
# Replays of whole trees as they are served take tens of times as long.
_EVERY = 2  # positions; neighbours see nearly the same, and each costs a block
_NODES = 8  # some breadth: chains alone flatter a head that has only become more certain


@dataclass(frozen=True, slots=True)
class GateDecision:
    """The verdict on a candidate, and the numbers it rests on; means are nan where there was nothing to average."""

    reason: GateReason
    num_texts: int
    candidate_mean: float
    serving_mean: float
    anchor_mean: float
    standard_error: float  # of the mean difference candidate - serving
    needed: float  # critical value of that difference

    @property
    def publish(self) -> bool:
        """Whether the candidate may serve."""
        return self.reason == "better"

    @property
    def gain(self) -> float:
        """Mean difference candidate - serving, in tokens per verify."""
        return self.candidate_mean - self.serving_mean


class Gate:
    """Decides whether a candidate may serve, by a paired t-test of tokens per verify on the same texts.

    Committed tokens and sampling noise do not depend on the drafter, so a replay has no randomness of its own. What is
    uncertain is whether the next texts resemble these: that is the standard error. `alpha` bounds false publishes per
    training copy, which is judged up to `judgements` times (Bonferroni).
    """

    def __init__(self, *, min_texts: int, alpha: float, judgements: int) -> None:
        """`alpha`: false publishes per training copy, in (0, 1]; `judgements`: at most so many tests of one copy."""
        assert min_texts >= 2, "one text has no standard error"
        self.min_texts = min_texts
        self._level = alpha / judgements

    def decide(self, candidate: Sequence[float], serving: Sequence[float], anchor: Sequence[float]) -> GateDecision:
        """Judge by the scores of the three drafters, text by text."""
        assert len(candidate) == len(serving) == len(anchor), "scores do not come in triples"
        standard_error = _standard_error([new - old for new, old in zip(candidate, serving, strict=True)])
        needed = t_quantile(1.0 - self._level, max(1, len(candidate) - 1)) * standard_error
        reason = self._reason(candidate, serving, anchor, needed)
        new, old, first = map(_mean, (candidate, serving, anchor))
        return GateDecision(reason, len(candidate), new, old, first, standard_error, needed)

    def _reason(
        self, candidate: Sequence[float], serving: Sequence[float], anchor: Sequence[float], needed: float
    ) -> GateReason:
        if len(candidate) < self.min_texts:
            return "too_little_evidence"
        if not all(math.isfinite(score) for scores in (candidate, serving, anchor) for score in scores):
            return "not_finite"
        gain = fmean(new - old for new, old in zip(candidate, serving, strict=True))
        if gain < 0:
            return "worse_than_serving"
        if fmean(candidate) < fmean(anchor):
            return "worse_than_anchor"
        return "better" if gain > needed else "within_noise"


def t_quantile(probability: float, freedom: int) -> float:
    """Quantile of Student's t, by its expansion around the normal one: Abramowitz and Stegun, Handbook of Mathematical
    Functions (1964), 26.7.5. Within 0.1 % from 7 degrees of freedom and levels of 1 % on."""
    x = NormalDist().inv_cdf(probability)
    first, second = (x**3 + x) / 4, (5 * x**5 + 16 * x**3 + 3 * x) / 96
    third = (3 * x**7 + 19 * x**5 + 17 * x**3 - 15 * x) / 384
    return float(x + first / freedom + second / freedom**2 + third / freedom**3)


def _mean(scores: Sequence[float]) -> float:
    return fmean(scores) if scores and all(map(math.isfinite, scores)) else math.nan


def _standard_error(differences: Sequence[float]) -> float:
    if len(differences) < 2 or not all(map(math.isfinite, differences)):
        return math.nan
    return stdev(differences) / math.sqrt(len(differences))


_HOPELESS: tuple[GateReason, ...] = ("too_little_evidence", "not_finite", "worse_than_serving", "worse_than_anchor")
"""Verdicts that the newest texts alone may give: a wrong one costs an update, not the serving drafter."""


def replay_of(embed: Embed, *, beside_memory: bool) -> Callable[[SpecBlock, Example], float]:
    """Return a replay: tau of one block at every other position as a tree of its 8 likeliest paths, ranked with the
    noise that sampled the text; one forward per text. `beside_memory`: together with the memory drafter.

    The served drafter may have more blocks, other node counts and a rank head: the score compares drafters, and is not
    the served tau. Attention of whole texts is fp32, whatever type the weights have.
    """

    def replay(model: SpecBlock, text: Example) -> float:
        with torch.autocast(model.d2t.device.type, dtype=torch.bfloat16, enabled=model.dtype == torch.bfloat16):
            blocks = replay_beside_memory if beside_memory else replay_blocks
            return blocks(model, embed, text, every=_EVERY, nodes=_NODES).tau

    return replay


def memory_alone(model: SpecBlock, text: Example) -> float:
    """tau of the memory drafter alone, which has no weights: the baseline of a drafter that is solved from traffic."""
    return replay_memory(text, every=_EVERY, nodes=_NODES).tau


@dataclass
class _CachedScores:
    """Scores of one drafter by number of the text."""

    version: int
    scores: dict[int, float] = field(default_factory=dict)


class AnchorDistance:
    """Measures KL(serving || anchor) on the first validation texts, once per version. For people: it decides nothing,
    since far from the anchor may be where the traffic is."""

    def __init__(self, weights: DrafterWeights, divergence: TextDivergence, *, num_texts: int) -> None:
        """`num_texts`: measured on so many texts, always the same ones, so that numbers can be compared."""
        self._weights = weights
        self._divergence = divergence
        self._num_texts = num_texts
        self._texts: list[Example] = []
        self._measured: tuple[int, float] | None = None  # version, distance

    def add(self, text: ValidationText) -> None:
        """Measure on this text too, unless there are enough."""
        if len(self._texts) < self._num_texts:
            self._texts.append(text.example)

    def forget(self) -> None:
        """Measure again: the anchor has other weights."""
        self._measured = None

    @property
    def is_due(self) -> bool:
        """Whether the next call of `value` has to compute."""
        is_known = self._measured is not None and self._measured[0] == self._weights.newest
        return len(self._texts) >= self._num_texts and not is_known

    def value(self) -> float | None:
        """The mean over the texts, in nats; None: there are not enough texts yet."""
        if self.is_due:
            self._measured = self._weights.newest, self._measure(self._weights.served_in_full())
        return None if self._measured is None else self._measured[1]

    @torch.no_grad()
    def _measure(self, model: SpecBlock) -> float:
        reach, device = model.config.reach, model.d2t.device
        batches = (Batch.of([text], reach, device) for text in self._texts)
        return float(torch.stack([self._divergence(model, batch) for batch in batches]).mean())


class OfflineEvaluator:
    """Compares versions of a drafter on the same texts."""

    def __init__(
        self, weights: DrafterWeights, gate: Gate, replay: Replay, *, max_scores: int, baseline: Replay | None = None
    ) -> None:
        """`max_scores`: kept of each drafter; `baseline`: scores what serves before the first version, if that is no
        network."""
        self._weights = weights
        self._gate = gate
        self._replay, self._baseline = replay, baseline
        self._max_scores = max_scores
        self._anchor, self._baseline_scores = _CachedScores(0), _CachedScores(0)
        self._serving = _CachedScores(weights.newest)
        self._candidate = _CachedScores(weights.newest)
        self._model, self._loaded = weights.replica, _CachedScores(0)  # the scores of what is loaded go there

    def evaluate(self, texts: Sequence[ValidationText]) -> Pieces[GateDecision]:
        """Judge the training copy, one replay per piece."""
        self._candidate = _CachedScores(self._weights.newest)
        least = self._gate.min_texts
        few = texts[-least:] if len(texts) >= least else texts[:0]
        decision = yield from self._decide(few)
        if decision.reason not in _HOPELESS:
            decision = yield from self._decide(texts)
        return decision

    def published(self) -> None:
        """Keep the scores of the last candidate: it serves now."""
        self._serving = _CachedScores(self._weights.newest, self._candidate.scores)

    def scored(self, text: ValidationText, *, with_previous: bool) -> Pieces[TextScores]:
        """Score the drafters on one text; `with_previous`: also the weights that a publish replaced."""
        before = None
        if with_previous and self._weights.latest.replaced is not None:
            (before,) = yield from self._lookup(_CachedScores(0), self._weights.previous, [text], self._replay)
        (serving,) = yield from self.serving([text])
        (anchor,) = yield from self.anchor([text])
        return TextScores(serving, anchor, before)

    def anchor_changed(self) -> None:
        """Forget the anchor's scores: it has other weights."""
        self._anchor = _CachedScores(0)

    def serving(self, texts: Sequence[ValidationText]) -> Pieces[list[float]]:
        """Score what serves, or is staged to."""
        if self._weights.latest.origin == ANCHOR:
            return (yield from self.anchor(texts))
        if self._serving.version != self._weights.newest:
            self._serving = _CachedScores(self._weights.newest)
        return (yield from self._lookup(self._serving, self._weights.served, texts, self._replay))

    def anchor(self, texts: Sequence[ValidationText]) -> Pieces[list[float]]:
        """Score the anchor, or the baseline while that serves."""
        if self._baseline is not None and self._weights.latest.origin == ANCHOR:
            return (yield from self._lookup(self._baseline_scores, self._weights.unchanged, texts, self._baseline))
        return (yield from self._lookup(self._anchor, self._weights.unchanged, texts, self._replay))

    def _decide(self, texts: Sequence[ValidationText]) -> Pieces[GateDecision]:
        candidate = yield from self._lookup(self._candidate, self._weights.candidate, texts, self._replay)
        serving = yield from self.serving(texts)
        anchor = yield from self.anchor(texts)
        return self._gate.decide(candidate, serving, anchor)

    def _lookup(
        self, cached: _CachedScores, load: Callable[[], SpecBlock], texts: Sequence[ValidationText], replay: Replay
    ) -> Pieces[list[float]]:
        """Score one drafter. All drafters are loaded into the same replica, some between two pieces of this."""
        scores = []
        for text in texts:
            if text.number not in cached.scores:
                yield
                if self._loaded is not cached:
                    self._model, self._loaded = load(), cached
                with torch.no_grad():
                    score = replay(self._model, text.example)
                cached.scores[text.number] = score if isinstance(score, float) else (yield from score)
            scores.append(cached.scores[text.number])
        for number in sorted(cached.scores)[: -self._max_scores]:
            del cached.scores[number]
        return scores
