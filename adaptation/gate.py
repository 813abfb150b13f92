"""Decides whether a candidate may serve, by a paired t-test: candidate, serving and anchor drafter are replayed on the
same validation texts, each text scored by the tokens it would have emitted per verify.

Committed tokens and sampling noise do not depend on the drafter, so a replay has no randomness of its own. What is
uncertain is whether the next texts resemble these: that is the standard error.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean, stdev
from typing import Literal

GateReason = Literal[
    "better",
    "too_little_evidence",
    "not_finite",
    "worse_than_serving",
    "worse_than_anchor",
    "within_noise",
]


@dataclass(frozen=True, slots=True)
class GateDecision:
    """What became of a candidate, and the numbers behind it; means are nan where there was nothing to average."""

    reason: GateReason
    num_texts: int
    candidate_mean: float
    serving_mean: float
    anchor_mean: float
    standard_error: float  # of the mean difference candidate - serving
    needed: float  # critical value of that difference

    @property
    def publish(self) -> bool:
        return self.reason == "better"

    @property
    def gain(self) -> float:
        return self.candidate_mean - self.serving_mean


class Gate:
    """Lets a candidate pass that is better than the serving drafter by more than chance, and no worse than the anchor.

    One training copy is judged again after each update until it is published or replaced. Of copies that are no better
    than what serves, at most a share `alpha` is ever published: each of at most `judgements` tests has the level
    alpha / judgements, and by Bonferroni's inequality the probability that any of them errs is at most the sum, however
    much the candidates and their texts have in common.
    """

    def __init__(self, *, least_texts: int, alpha: float, judgements: int) -> None:
        """`alpha`: false publishes per training copy, in (0, 1]; `judgements`: most tests of one copy."""
        assert least_texts >= 2, "one text has no standard error"
        self.least_texts = least_texts
        self._level = alpha / judgements

    def decide(self, candidate: Sequence[float], serving: Sequence[float], anchor: Sequence[float]) -> GateDecision:
        """Scores of the three, text by text."""
        assert len(candidate) == len(serving) == len(anchor), "scores do not come in triples"
        standard_error = _standard_error([new - old for new, old in zip(candidate, serving, strict=True)])
        needed = t_quantile(1.0 - self._level, max(1, len(candidate) - 1)) * standard_error
        reason = self._reason(candidate, serving, anchor, needed)
        new, old, first = map(_mean, (candidate, serving, anchor))
        return GateDecision(reason, len(candidate), new, old, first, standard_error, needed)

    def _reason(
        self, candidate: Sequence[float], serving: Sequence[float], anchor: Sequence[float], needed: float
    ) -> GateReason:
        if len(candidate) < self.least_texts:
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
