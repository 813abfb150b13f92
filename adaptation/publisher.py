"""Decides which weights serve next: judges the training copy, publishes or refuses it, and watches what serves."""

import math
from collections.abc import Mapping

from torch import Tensor

from adaptation.bootstrap import Bootstrap
from adaptation.config import Tuning
from adaptation.evaluator import AnchorDistance, GateDecision, OfflineEvaluator
from adaptation.feedback import FilteredQuery
from adaptation.monitor import Alarm, RollbackMonitor
from adaptation.policy import ARMS, Arm, Judgement
from adaptation.process import Training
from adaptation.records import EventLog, NotStored
from adaptation.samples import ValidationSet
from adaptation.timing import Pieces, completed
from adaptation.trainer import UpdateReport
from adaptation.weights import ANCHOR, DrafterWeights
from drafters.feedback import Query

_RATE_GROWTH, _RATE_CUT = 1.25, 0.7  # of the share, after a publish and a clearly worse candidate
_FIRST_SHARE, _LEAST_SHARE = 0.5, 0.25
_NO_GAIN = (0.0, 0.0)  # gain and standard error of a training copy that is what serves


class Pace:
    """Each arm's share of its learning rate, raised after a publish and cut after a clearly worse candidate.

    Far from the traffic large steps learn faster; close to it they make a trained drafter forget.
    """

    def __init__(self) -> None:
        self._shares = dict.fromkeys(ARMS, _FIRST_SHARE)

    def share(self, arm: Arm) -> float:
        """Share of the learning rate, above 0 and at most 1."""
        return self._shares[arm]

    def published(self, arm: Arm) -> None:
        """Raise the share."""
        self._shares[arm] = min(1.0, self._shares[arm] * _RATE_GROWTH)

    def clearly_worse(self, arm: Arm) -> None:
        """Cut the share."""
        self._shares[arm] = max(_LEAST_SHARE, self._shares[arm] * _RATE_CUT)

    def traffic_changed(self) -> None:
        """Use the whole rate: the drafter may be far from the new traffic."""
        self._shares = dict.fromkeys(ARMS, 1.0)


class Publisher:
    """Judges, publishes, refuses and watches. All calls come from the adaptation thread."""

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
        self.bootstrap = bootstrap
        self.distance = distance
        self.evaluator = evaluator
        self.log = log
        self.monitor = RollbackMonitor(tuning)
        self.pace = Pace()
        self._weights: DrafterWeights = bootstrap.weights
        self._validation = validation
        self._training = training
        self._max_refusals = tuning.kept_refusals  # in a row, before the training copy starts over
        self._num_refused = 0
        self._gained: tuple[float, float] | None = _NO_GAIN  # by the training copy, with its error; None: not known

    def evaluate(self) -> Pieces[GateDecision]:
        """Judge the training copy on texts of today's traffic."""
        return self.evaluator.evaluate(self._validation.current)

    def publish(self, decision: GateDecision) -> bool:
        """Stage the training copy if the gate accepts it. # -> whether it is staged: the disk may be full"""
        if not decision.publish:
            return False
        scores = {"candidate": decision.candidate_mean, "serving": decision.serving_mean}
        try:
            self._weights.publish({**scores, "anchor": decision.anchor_mean})
        except NotStored:
            return False
        self.evaluator.published()
        self._num_refused, self._gained = 0, _NO_GAIN
        self.monitor.weights_changed()
        return True

    def judgement(self, decision: GateDecision) -> Judgement | None:
        """What the last update gained; None: too little is known of the training copy, now or before the update."""
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

    def conclude(self, report: UpdateReport, decision: GateDecision, *, seconds: float, published: bool) -> None:
        """Report a judged update, and adapt the learning rate. A candidate that is not clearly worse is trained on for
        a while, since small updates add up. `seconds`: of judging"""
        numbers = {**_numbers(report, decision), "judging_seconds": seconds}
        if published:
            self.pace.published(report.arm)
            self.log.add("published", decision.reason, numbers)
            return
        reason = "not_stored" if decision.publish else decision.reason
        self.log.add("refused", reason, numbers)
        if reason == "too_little_evidence":
            return
        self._num_refused += 1
        is_clearly_worse = not decision.gain >= -decision.standard_error
        if is_clearly_worse:
            self.pace.clearly_worse(report.arm)
        if is_clearly_worse or self._num_refused > self._max_refusals:
            self.start_over()

    def solve(self) -> Pieces[None]:
        """Solve for a drafter, and publish it if it is better than what serves: the memory drafter alone, or the one
        that was solved before."""
        time = self._training.time
        numbers, began = {"made": 1.0, "positions": float(self.bootstrap.positions)}, time.seconds
        solution = self.bootstrap.solve()
        self._training.trainer.load(solution)
        yield
        numbers["seconds"], began = time.seconds - began, time.seconds
        self.log.add("solved", "enough_positions", dict(numbers))
        decision = yield from self.evaluate()
        numbers["judging_seconds"] = time.seconds - began
        published = self.publish(decision)
        self.log.storing(lambda: self.bootstrap.judged(solution, published=published))
        self.pace.traffic_changed()  # a solution is as far from the texts as a drafter of other traffic
        self.anchor_changed()
        reason = decision.reason if published or not decision.publish else "not_stored"
        self.log.add("published" if published else "refused", reason, {**numbers, **_scores(decision)})
        if not published:
            self.start_over()
        self.log.storing(lambda: self.bootstrap.keep(always=True))

    def forget_gain(self) -> None:
        """What the training copy has gained is not known: an update was abandoned."""
        self._gained = None

    def start_over(self) -> None:
        """Train on from what is served."""
        self._num_refused, self._gained = 0, _NO_GAIN
        self._training.trainer.load(self.bootstrap.training_start())

    def restored(self, training: Mapping[str, Tensor] | None) -> None:
        """Train on from a saved training copy, shapes [...] as in `OnlineTrainer.tensors`; None: from what is
        served."""
        if training is None:
            self.start_over()
        else:
            self._training.trainer.load_tensors(training)
            self._gained = None  # it may have been ahead of what serves

    def watch(self, query: Query, filtered: FilteredQuery) -> Alarm | None:
        """Score a validation text, or any text while the served weights are new. # -> an alarm, if any. A query served
        by older weights says nothing of those that serve."""
        is_current = query.first_version == query.version == self._weights.newest
        if not is_current or self._weights.latest.origin == ANCHOR:
            return None
        probing = self.monitor.take_probation()
        if filtered.text is None or not (filtered.validates or probing):
            return None
        with self._training.time.spent():
            scores = completed(self.evaluator.scored(filtered.text, with_previous=probing))
        return self.monitor.observe(scores)

    @property
    def watches_closely(self) -> bool:
        """Whether the served weights are new, so that every text is scored."""
        return self._weights.latest.origin != ANCHOR and self.monitor.on_probation

    def traffic_changed(self) -> None:
        """Judge by texts from now on: what the training copy gained, it gained on other texts."""
        self._validation.traffic_changed()
        self.pace.traffic_changed()
        if self._gained != _NO_GAIN:
            self._gained = None

    def anchor_changed(self) -> None:
        """Measure against other anchor weights from now on."""
        self.evaluator.anchor_changed()
        self.distance.forget()


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
