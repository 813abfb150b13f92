"""Publishes updates and rolls them back.

The gate compares training copy, serving drafter and anchor by their scores (tokens per verify) on the same validation
texts since the last change of traffic. Published weights are monitored on later texts: two alarms
(adaptation/monitor.py) compare them with the anchor and, while they are new, with the weights they replaced. An alarm
or an operator rolls them back.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean, stdev

from torch import Tensor

from adaptation.bootstrap import Bootstrap
from adaptation.config import Tuning
from adaptation.evaluator import AnchorDistance, OfflineEvaluator
from adaptation.feedback import FilteredQuery
from adaptation.monitor import Alarm, RollbackMonitor
from adaptation.policy import Judgement
from adaptation.process import Training
from adaptation.records import EventLog, GateReason, NotStored
from adaptation.samples import ValidationSet, ValidationText
from adaptation.timing import Pieces
from adaptation.trainer import UpdateReport
from adaptation.weights import ANCHOR, DrafterWeights, Version
from drafters.feedback import Query
from drafters.network.checkpoint import weights_of

_NO_GAIN = (0.0, 0.0)  # gain and standard error of a training copy that equals the served weights


@dataclass(frozen=True, slots=True)
class GateDecision:
    """Decision about a candidate, with its numbers in tokens per verify. A mean is nan if there are no scores, or one
    is not finite."""

    reason: GateReason
    num_texts: int
    candidate_mean: float
    serving_mean: float
    anchor_mean: float
    standard_error: float  # standard error of the mean difference candidate - serving
    needed: float  # critical value of the mean difference

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

    Committed tokens and sampling noise do not depend on the drafter, so a replay is deterministic. The standard error
    covers how much the next texts may differ from these. `alpha` bounds false publishes per training copy, which is
    judged up to `judgements` times (Bonferroni).
    """

    def __init__(self, *, min_texts: int, alpha: float, judgements: int) -> None:
        """`alpha`: probability of a false publish per training copy, 0 to 1; `judgements`: largest number of tests of
        one copy."""
        assert min_texts >= 2, "one text has no standard error"
        self.min_texts = min_texts
        self.judgements = judgements  # tests of one training copy before it starts over
        self._level = alpha / judgements

    def decide(self, candidate: Sequence[float], serving: Sequence[float], anchor: Sequence[float]) -> GateDecision:
        """Decide from the scores of the three drafters, one triple per text."""
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
    """Quantile of Student's t, by its expansion around the normal quantile: Abramowitz and Stegun, Handbook of
    Mathematical Functions (1964), 26.7.5. Within 0.1 % for at least 7 degrees of freedom and levels of at least 1 %."""
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
"""Refusals for which the newest texts alone suffice: a wrong one costs an update, and the serving drafter stays."""


def judged(gate: Gate, evaluator: OfflineEvaluator, texts: Sequence[ValidationText]) -> Pieces[GateDecision]:
    """Judge the training copy, first on the newest `min_texts` texts, and on all texts unless it clearly fails on
    these."""
    evaluator.training_changed()
    few = texts[-gate.min_texts :] if len(texts) >= gate.min_texts else texts[:0]
    decision = yield from _compared(gate, evaluator, few)
    if decision.reason not in _HOPELESS:
        decision = yield from _compared(gate, evaluator, texts)
    return decision


def _compared(gate: Gate, evaluator: OfflineEvaluator, texts: Sequence[ValidationText]) -> Pieces[GateDecision]:
    candidate = yield from evaluator.candidate(texts)
    serving = yield from evaluator.serving(texts)
    anchor = yield from evaluator.anchor(texts)
    return gate.decide(candidate, serving, anchor)


@dataclass(frozen=True, slots=True)
class Verdict:
    """Outcome of a judged update."""

    published: bool
    judgement: Judgement | None  # None: the training copy's gain is unknown, now or before the update
    better: bool = False  # whether it was published, or is the best copy so far while nothing serves


class Publisher:
    """Judges the training copy, publishes or refuses it, monitors the serving weights, and rolls them back.

    All calls come from the adaptation thread.
    """

    def __init__(
        self,
        training: Training,
        evaluator: OfflineEvaluator,
        distance: AnchorDistance,
        validation: ValidationSet,
        bootstrap: Bootstrap,
        log: EventLog,
        tuning: Tuning,
    ) -> None:
        self.gate = Gate(min_texts=tuning.gate_texts, alpha=tuning.gate_alpha, judgements=tuning.kept_refusals + 1)
        self.monitor = RollbackMonitor(tuning)
        self.evaluator = evaluator
        self.distance = distance
        self._bootstrap = bootstrap
        self.log = log
        self._weights: DrafterWeights = bootstrap.weights
        self._validation = validation
        self._training = training
        self.num_refused = 0  # since the training copy started over or was published
        self._best_gain = -math.inf  # of a training copy while nothing serves
        self._gained: tuple[float, float] | None = _NO_GAIN  # gain of the training copy, standard error; None: unknown

    def judge(self) -> Pieces[GateDecision]:
        """Judge the training copy on the validation texts since the last change of traffic."""
        return judged(self.gate, self.evaluator, self._validation.current)

    def conclude(self, report: UpdateReport, decision: GateDecision, *, seconds: float) -> Verdict:
        """Publish or refuse a judged update, and adapt the learning rate. A refused candidate that is not clearly worse
        is trained further for a while, since small updates add up. `seconds`: training seconds that judging took"""
        judgement, published = self._judgement(decision), self._publish(decision)
        numbers = {**_numbers(report, decision), "judging_seconds": seconds}
        if published:
            if self._bootstrap.collects:
                self.log.storing(lambda: self._bootstrap.outgrown(weights_of(self._weights.training)))
                self._anchor_changed()
            self._training.pace.published(report.arm)
            self.log.add("published", decision.reason, {**numbers, "gain": decision.gain / decision.serving_mean})
            return Verdict(published, judgement, better=True)
        reason = "not_stored" if decision.publish else decision.reason
        self.log.add("refused", reason, numbers)
        if reason != "too_little_evidence":
            self.num_refused += 1
            is_clearly_worse = not decision.gain >= -decision.standard_error
            ends = self.num_refused >= self.gate.judgements
            if is_clearly_worse and (ends or not self._bootstrap.serves_nothing):  # a solution has far to go
                self._training.pace.clearly_worse(report.arm)
                ends = True
            better = self._improved(decision)
            if ends:
                self.start_over()
            return Verdict(published, judgement, better)
        return Verdict(published, judgement)

    def _improved(self, decision: GateDecision) -> bool:
        """Whether nothing serves and the training copy comes closer to what serves instead, the memory alone, than any
        before it. Then training starts over from this copy."""
        if not (self._bootstrap.serves_nothing and decision.gain > self._best_gain):
            return False
        self._best_gain = decision.gain
        self.log.storing(lambda: self._bootstrap.outgrown(weights_of(self._weights.training)))
        self._anchor_changed()
        return True

    def solve(self) -> Pieces[None]:
        """Solve for a drafter, and publish it if it is better than what serves: the memory drafter alone, or an earlier
        solution."""
        time, bootstrap = self._training.time, self._bootstrap
        numbers, began = {"made": 1.0, "positions": float(bootstrap.positions)}, time.seconds
        solution = bootstrap.solve()
        self._training.trainer.load(solution)
        yield
        numbers["seconds"], began = time.seconds - began, time.seconds
        self.log.add("solved", "enough_positions", dict(numbers))
        decision = yield from self.judge()
        numbers["judging_seconds"] = time.seconds - began
        published, self._best_gain = self._publish(decision), decision.gain
        self.log.storing(lambda: bootstrap.judged(solution, published=published))
        self._training.pace.traffic_changed()  # a solution has to learn the texts at the full rate, as after a change
        self._anchor_changed()
        reason = decision.reason if published or not decision.publish else "not_stored"
        self.log.add("published" if published else "refused", reason, {**numbers, **_scores(decision)})
        if not published:
            self.start_over()
        self.log.storing(lambda: bootstrap.keep(always=True))

    def watch(self, query: Query, filtered: FilteredQuery) -> None:
        """Queue a validation text to be scored, or any text while the served weights are new. Queries that older
        weights served are not scored."""
        if filtered.validates and filtered.text is not None:
            self.distance.add(filtered.text)
        is_current = query.first_version == query.version == self._weights.newest
        if is_current:
            self.monitor.served(query)
        if not is_current or self._weights.latest.origin == ANCHOR:
            return
        if filtered.text is not None and (filtered.validates or self.monitor.on_probation):
            self.monitor.unscored.append((filtered.text, filtered.validates))

    def score(self) -> Pieces[Alarm | None]:
        """Score the oldest queued text, if it still has to be. Returns an alarm, or None."""
        text, validates = self.monitor.unscored.popleft()
        probing = self.monitor.take_probation()
        if not (validates or probing):
            return None
        scores = yield from self.evaluator.scored(text, with_previous=probing)
        return self.monitor.observe(scores)

    def forget(self, scope: str | None) -> None:
        """Drop the texts of a scope, or all texts if it is None."""
        self.distance.forget(scope)
        self.monitor.forget(scope)

    @property
    def watches_closely(self) -> bool:
        """Whether the served weights are new, so that every text is scored."""
        return self._weights.latest.origin != ANCHOR and self.monitor.on_probation

    def roll_back(self, reason: str, numbers: Mapping[str, float]) -> Version:
        """Condemn the current weights, so that they are never served again, and serve the newest earlier ones that are
        not condemned."""
        condemned = self._weights.condemn()
        restored = self._weights.restore_before(condemned)
        self._bootstrap.rolled_back()
        self._serves_others()
        self.log.add("rolled_back", reason, {**numbers, "condemned": condemned, "origin": restored.origin})
        return restored

    def adopt(self, weights: Mapping[str, Tensor], reason: str) -> int:
        """Stage these weights, shapes [...] as in `DrafterWeights.layout`, without judging them, and return their
        version. Raises NotStored."""
        version = self._weights.adopt(weights)
        self.log.storing(lambda: self._bootstrap.adopted(dict(weights)))
        self._anchor_changed()
        self._serves_others()
        self.log.add("loaded", reason)
        return version

    def restored(self, training: Mapping[str, Tensor] | None) -> None:
        """Load a saved training copy, shapes [...] as in `OnlineTrainer.tensors`, or restart from the served weights if
        there is none."""
        if training is None:
            self.start_over()
        else:
            self._training.trainer.load_tensors(training)
            self._gained = None  # the copy may have been ahead of the serving weights

    def start_over(self) -> None:
        """Reset the training copy to the served weights."""
        self.num_refused, self._gained = 0, _NO_GAIN
        self._training.trainer.load(self._bootstrap.training_start())

    def forget_gain(self) -> None:
        """Mark the training copy's gain as unknown, because an update was abandoned."""
        self._gained = None

    def traffic_changed(self) -> None:
        """Mark the training copy's gain as unknown, and train at the full learning rate."""
        self._training.pace.traffic_changed()
        if self._gained != _NO_GAIN:
            self._gained = None

    def kl_to_anchor(self) -> float | None:
        """Return KL(serving || anchor) in nats, computed once per version. Returns None if there are too few texts
        yet."""
        if not self.distance.is_due:
            return self.distance.value()
        with self._training.time.spent():
            return self.distance.value()

    def _publish(self, decision: GateDecision) -> bool:
        """Stage the training copy if the gate accepts it. Returns whether it was staged: the disk may be full."""
        if not decision.publish:
            return False
        scores = {"candidate": decision.candidate_mean, "serving": decision.serving_mean}
        try:
            self._weights.publish({**scores, "anchor": decision.anchor_mean})
        except NotStored:
            return False
        self.evaluator.published()
        self.num_refused, self._gained = 0, _NO_GAIN
        self.monitor.weights_changed()
        self.monitor.predicted_gain += decision.gain / decision.serving_mean
        return True

    def _judgement(self, decision: GateDecision) -> Judgement | None:
        """Compute the gain of the last update alone. Returns None if it is unknown."""
        before, self._gained = self._gained, None
        if not decision.serving_mean > 0:
            return None
        numbers = (decision.gain, decision.standard_error, decision.needed)
        gain, error, needed = (number / decision.serving_mean for number in numbers)
        if not all(map(math.isfinite, (gain, error, needed))):
            return None
        self._gained = gain, error
        if before is None:
            return None
        return Judgement(gain, math.hypot(error, before[1]), needed, before[0])

    def _serves_others(self) -> None:
        """Restart the monitor and the training copy, because the serving weights did not come from an update."""
        self.monitor.weights_changed()
        self.start_over()

    def _anchor_changed(self) -> None:
        self.evaluator.anchor_changed()
        self.distance.anchor_changed()


def _numbers(report: UpdateReport, decision: GateDecision) -> dict[str, float]:
    losses = report.losses[-1] if report.losses else {}
    return {
        **{f"{term}_loss": loss for term, loss in losses.items()},
        "head": float(report.arm == "head"),
        "seconds": report.seconds,
        "moved": report.moved,
        **_scores(decision),
    }


def _scores(decision: GateDecision) -> dict[str, float]:
    return {
        "sequences": decision.num_texts,
        "candidate": decision.candidate_mean,
        "serving": decision.serving_mean,
        "anchor": decision.anchor_mean,
        "standard_error": decision.standard_error,
    }
