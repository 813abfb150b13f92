"""May a candidate serve? Decided on a paired replay: candidate, serving and anchor drafter over the same validation
texts, each scored by the tokens it would have emitted per verify.

Committed tokens do not depend on the drafter, so these scores are exact; what remains uncertain is only whether the
next texts are like the last ones, hence the standard error.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
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
    needed: float  # what that difference must exceed, for noise alone seldom does

    @property
    def publish(self) -> bool:
        return self.reason == "better"

    @property
    def gain(self) -> float:
        return self.candidate_mean - self.serving_mean


class Gate:
    """Lets a candidate pass that beats the serving drafter by `standard_errors` and is no worse than the anchor.

    With `standard_errors` above 1 no single text can carry a candidate that gains on no other: if one difference
    is x > 0 and none of the rest is, the mean is at most one standard error.
    """

    def __init__(self, *, least_texts: int, standard_errors: float) -> None:
        assert least_texts >= 2, "one text has no standard error"
        self.least_texts = least_texts
        self._standard_errors = standard_errors

    def decide(self, candidate: Sequence[float], serving: Sequence[float], anchor: Sequence[float]) -> GateDecision:
        """Scores of the three, text by text."""
        assert len(candidate) == len(serving) == len(anchor), "scores do not come in triples"
        standard_error = _standard_error([new - old for new, old in zip(candidate, serving, strict=True)])
        needed = self._standard_errors * standard_error
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


def _mean(scores: Sequence[float]) -> float:
    return fmean(scores) if scores and all(map(math.isfinite, scores)) else math.nan


def _standard_error(differences: Sequence[float]) -> float:
    if len(differences) < 2 or not all(map(math.isfinite, differences)):
        return math.nan
    return stdev(differences) / math.sqrt(len(differences))
