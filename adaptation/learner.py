"""The loop of learning while serving, as a plain object: hear queries, update, judge, publish, watch, take back.

Every decision becomes an event with its reason. Knows no threads: whoever owns the learner calls it from one thread,
and after any exception calls `recover`.
"""

import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict

from pydantic import JsonValue
from torch import Tensor

from adaptation.checkpoint import LearnerCheckpoint, SavedLearner
from adaptation.evaluator import OfflineEvaluator
from adaptation.feedback import FeedbackFilter, FilteredQuery, RecordingSampler
from adaptation.gate import GateDecision
from adaptation.losses import Drift
from adaptation.monitor import Alarm, RollbackMonitor
from adaptation.policy import Arm, Policy
from adaptation.records import AdaptationError, Damaged, Emit, Event, EventKind, NotStored
from adaptation.samples import SampleBuffers, ValidationSet
from adaptation.traffic import AskedTexts, TokenChange, TrafficChange
from adaptation.trainer import Pace, Trainer, UpdateReport
from adaptation.vocabulary import DraftVocabulary
from adaptation.weights import ANCHOR, DrafterWeights, Restored
from adaptation.worker import received
from drafters.feedback import QueryFeedback


def _never() -> bool:
    return False


class Learner:
    """Decides when the drafter that serves is replaced, and by what."""

    def __init__(
        self,
        *,
        weights: DrafterWeights,
        trainer: Trainer,
        policy: Policy,
        feedback_filter: FeedbackFilter,
        buffers: SampleBuffers,
        vocabulary: DraftVocabulary,
        held_back: ValidationSet,
        judge: OfflineEvaluator,
        watch: RollbackMonitor,
        traffic: TrafficChange,
        asked: AskedTexts,
        words: TokenChange,
        sampler: RecordingSampler,
        drift: Drift,
        checkpoint: LearnerCheckpoint,
        emit: Emit,
        kept_refusals: int,
        least_texts: int,
        worked: Callable[[], float] = time.perf_counter,
        taken_share: float = 1.0,
    ) -> None:
        """`kept_refusals`: how often in a row a candidate may be refused and yet be trained on; `least_texts`: held
        back before the first update, because nobody could judge it; `worked`: a clock that goes while training
        computes; `taken_share`: how much of that time it takes from serving."""
        self.paused = False
        self.training_seconds = 0.0
        self.num_updates: Counter[Arm] = Counter()
        self._weights = weights
        self._trainer = trainer
        self._policy = policy
        self._filter = feedback_filter
        self._buffers = buffers
        self._vocabulary = vocabulary
        self._held_back = held_back
        self._evaluator = judge
        self._monitor = watch
        self._traffic = traffic
        self._asked = asked
        self._words = words
        self._sampler = sampler
        self._drift = drift
        self._checkpoint = checkpoint
        self._emit = emit
        self._kept_refusals = kept_refusals
        self._least_texts = least_texts
        self._worked = worked
        self._taken_share = taken_share
        self._pace = Pace()
        self._known_drift: tuple[int, float] | None = None  # by version
        self._num_refused = 0
        self._unpaid_seconds = 0.0
        self._updating = False

    def observe(self, feedback: QueryFeedback) -> FilteredQuery:
        """One finished query."""
        feedback = received(feedback, self._weights.train_device)
        taken = self._filter.take(feedback, training_cost=self._pay(feedback), learning=not self.paused)
        if taken.held_back and taken.text is not None and not self._drift.ready:
            self._drift.offer([taken.text.example])
        if taken.admission.admitted and not taken.held_back:
            self._vocabulary.observe(feedback.query.tokens[feedback.prompt :])
        self._notice_change(feedback, taken)
        self._listen(feedback, taken)
        self._sampler.rest(self._may_rest())
        return taken

    def update(self, interrupted: Callable[[], bool] = _never) -> UpdateReport | None:
        """Train, judge and publish, if an update is due; says what was trained."""
        if self.paused or self._weights.pending or len(self._held_back.alike) < self._least_texts:
            return None
        arm = self._policy.take_update()
        if arm is None:
            return None
        self._updating = True
        report = self._trained(arm, interrupted)
        if report.applied:
            self._conclude(report)
        else:
            self._discarded(counted=report.outcome != "interrupted")
            if report.outcome not in ("nothing_to_learn", "interrupted"):
                self._buffers.forget_heard()
            self._tell("discarded", report.outcome, {"seconds": report.seconds})
        return report

    def pause(self) -> None:
        """Learn nothing until resumed; alarms go on."""
        self.paused = True
        self._tell("paused", "operator")

    def resume(self) -> None:
        self.paused = False
        self._tell("resumed", "operator")

    def rollback(self) -> Restored:
        """An operator distrusts what is served: back to what was before it."""
        return self._take_back("operator", {})

    def adopt(self, weights: Mapping[str, Tensor], reason: str = "operator") -> int:
        """Somebody brings weights: they are served without being judged. # -> their version. Raises NotStored."""
        version = self._weights.adopt(weights)
        self._policy.reset()
        self._buffers.clear()
        self._served_anew()
        self._start_over()
        self._tell("loaded", reason)
        self.save(training=False)
        return version

    def shared(self) -> dict[str, JsonValue]:
        """What whoever learns after this process should know: which updates were worth their time."""
        return {"policy": self._policy.state()}

    def inherit(self, shared: Mapping[str, JsonValue]) -> None:
        """Go on from what another process has shared; what cannot be used is told, and costs nothing else."""
        policy = shared.get("policy")
        try:
            self._policy.restore(policy if isinstance(policy, dict) else {})
        except ValueError as error:
            self._tell("restored", f"policy: {error}")

    def recover(self, error: str) -> None:
        """Something broke at any place: forget the update under way and go on from what is served."""
        self._tell("failed", error)
        if self._updating:
            self._discarded()
        self._buffers.forget_heard()
        self._start_over()

    def save(self, *, training: bool) -> None:
        """Keep what a later process needs to go on; a full disk is told and costs nothing else.

        The training copy with its optimizers is ten times what is served: worth its seconds when the process ends, not
        at every publish. A process that is killed goes on from what it served, with optimizers that remember nothing.
        """
        weights = self._weights
        parts = {"policy": self._policy.state(), "tokens": self._vocabulary.counts.state(), **self._monitor.state()}
        try:
            self._checkpoint.save(
                newest=weights.newest, origin=weights.latest_origin, condemned=weights.condemned, parts=parts
            )
            if training:
                self._checkpoint.save_training(self._trainer.tensors(), origin=weights.latest_origin)
        except AdaptationError as error:
            self._tell("not_stored", str(error))

    def restore(self) -> None:
        """Take up what an earlier process left; to be called once, before the engine's first step."""
        saved = self._checkpoint.load()
        for complaint in saved.complaints:
            self._tell("restored", complaint)
        self._weights.resume(saved.newest, saved.condemned)
        if self._weights.newest != ANCHOR:  # whatever serves now has a version of its own, be it as deployed
            self._serve_again(saved.origin)
        self._monitor.served_anew()
        self._restore_parts(saved)
        tensors = self._checkpoint.load_training(self._trainer.tensors(), origin=self._weights.latest_origin)
        if tensors is None:
            self._start_over()
        else:
            self._trainer.load_tensors(tensors)

    def drift(self) -> float | None:
        """KL of the serving drafter from the anchor, once there are texts to measure it on."""
        if not self._drift.ready:
            return None
        if self._known_drift is None or self._known_drift[0] != self._weights.newest:
            self._known_drift = self._weights.newest, self._drift.of(self._weights.served_in_full())
        return self._known_drift[1]

    def _pay(self, feedback: QueryFeedback) -> float:
        """What training took since the query before, in the units of this query's costs."""
        query = feedback.query
        if query.seconds <= 0:
            return 0.0
        seconds, self._unpaid_seconds = self._unpaid_seconds, 0.0
        return seconds * (query.draft_cost + query.verify_cost) / query.seconds

    def _notice_change(self, feedback: QueryFeedback, taken: FilteredQuery) -> None:
        """By the words of answers, and by how likely the drafter held them, whatever else was drafted from."""
        if self._sampler.accepted(feedback.query.accepted_by_step):
            self._traffic.suspect()
            self._asked.suspect()
        says_otherwise = feedback.query.store and self._words.observe(feedback.query)
        if says_otherwise or (taken.admission.admitted and self._fares_otherwise(feedback, taken)):
            self._meet_other_traffic()
            self._tell("changed", "other_words" if says_otherwise else "other_traffic")

    def _fares_otherwise(self, feedback: QueryFeedback, taken: FilteredQuery) -> bool:
        asks_otherwise = taken.text is not None and self._asked.observe(taken.text, judges=taken.held_back)
        return self._traffic.observe_values(feedback.draft_labels.chances.tolist()) or asks_otherwise

    def _meet_other_traffic(self) -> None:
        """What was usual, which arm paid, and the texts that judged are of the past."""
        for usual in (self._traffic, self._asked, self._words):
            usual.start_anew()
        for part in (self._policy, self._held_back, self._monitor, self._pace):
            part.traffic_changed()
        self._buffers.forget_heard()

    def _may_rest(self) -> bool:
        """Whether few queries are enough: what is served is not new, and nothing is learnt, or nothing promises a gain
        and there are texts that could judge an update, or none come."""
        is_new = self._weights.latest_origin != ANCHOR and self._monitor.on_probation
        can_judge = len(self._held_back.alike) >= self._least_texts
        learns_nothing = self.paused or self._filter.hears_no_text
        return not is_new and (learns_nothing or (self._policy.resting and can_judge))

    def _listen(self, feedback: QueryFeedback, taken: FilteredQuery) -> None:
        """Ask the alarms, unless the query was served by weights that are no longer served."""
        query = feedback.query
        if not query.first_version == query.version == self._weights.newest:
            return
        alarm = self._monitor.served(query.accepted)
        if alarm is None and self._weights.latest_origin != ANCHOR:
            alarm = self._compare(taken)
        if alarm is not None:
            self._answer(alarm)

    def _compare(self, taken: FilteredQuery) -> Alarm | None:
        """What was learnt against the anchor, and for a while against what it replaced, where the text may judge."""
        probing = self._monitor.take_probation()
        if taken.text is None or not (taken.held_back or probing):
            return None
        return self._monitor.replayed(self._evaluator.scored(taken.text, with_previous=probing))

    def _answer(self, alarm: Alarm) -> None:
        numbers = {"statistic": alarm.statistic, "limit": alarm.limit}
        falling, is_deployed = alarm.reason == "falling", self._weights.latest_origin == ANCHOR
        if is_deployed:
            self._tell("alarm", alarm.reason, numbers)
        elif falling and self._evaluator.better_than_anchor(self._held_back.texts):
            self._tell("dismissed", "other_traffic", numbers)
        else:
            self._take_back(alarm.reason, numbers)
            return
        if falling:
            self._meet_other_traffic()

    def _take_back(self, reason: str, numbers: dict[str, float]) -> Restored:
        """Serve what was before, and believe nothing that was learnt about what is served now."""
        condemned = self._weights.condemn()
        restored = self._weights.restore_before(condemned)
        self._policy.reset()
        self._buffers.clear()
        self._served_anew()
        self._start_over()
        self._tell("rolled_back", reason, {**numbers, "condemned": condemned, "origin": restored.origin})
        self.save(training=False)
        return restored

    def _trained(self, arm: Arm, interrupted: Callable[[], bool]) -> UpdateReport:
        began = self._worked()
        wanted = self._vocabulary.wanted(self._trainer.vocabulary)
        samples, share = self._buffers.take(arm), self._pace.share(arm)
        report = self._trainer.update(arm, samples, interrupted, vocabulary=wanted, rate_share=share)
        self._spend(self._worked() - began)
        self.num_updates[arm] += report.applied
        return report

    def _conclude(self, report: UpdateReport) -> None:
        """Publish what was trained if it is better, and say which."""
        began = self._worked()
        decision, seconds = self._evaluator.judge(self._held_back.alike)
        self._spend(self._worked() - began)
        numbers = {**_numbers(report, decision), "judging_seconds": seconds}
        if not decision.publish:
            return self._refuse(report, decision, decision.reason, numbers)
        scores = {"candidate": decision.candidate_mean, "serving": decision.serving_mean}
        try:
            self._weights.publish({**scores, "anchor": decision.anchor_mean})
        except NotStored:
            return self._refuse(report, decision, "not_stored", numbers)
        self._evaluator.published()
        self._policy.published(1 + decision.sure_gain / decision.serving_mean)
        self._pace.published(report.arm)
        self._num_refused = 0
        self._updating = False
        self._served_anew()
        self._tell("published", decision.reason, numbers)
        self.save(training=False)

    def _refuse(self, report: UpdateReport, decision: GateDecision, reason: str, numbers: dict[str, float]) -> None:
        """Small updates add up, so that a candidate which is not clearly worse is trained on for a while. What is not
        served has gained nothing; but one that seems better says nothing of its arm yet, and neither does the first one
        at a rate that still rises: replays are too noisy to tell small gains from none."""
        self._tell("refused", reason, numbers)
        if reason == "too_little_evidence":
            self._discarded()
            return
        self._num_refused += 1
        clearly_worse = not decision.gain >= -decision.standard_error
        if clearly_worse:
            self._pace.clearly_worse(report.arm)
        if clearly_worse or self._num_refused > self._kept_refusals:
            self._discarded()
            self._start_over()
        else:
            self._discarded(counted=not (reason == "within_noise" or report.is_warming_up))

    def _discarded(self, *, counted: bool = True) -> None:
        self._updating = False
        self._policy.discarded(counted=counted)

    def _served_anew(self) -> None:
        """Whatever was known of how queries fare was about other weights."""
        for part in (self._monitor, self._traffic, self._sampler):
            part.served_anew()

    def _start_over(self) -> None:
        """Train on from what is served."""
        self._num_refused = 0
        self._trainer.load(self._weights.train_from_served())

    def _spend(self, seconds: float) -> None:
        self.training_seconds += seconds
        self._unpaid_seconds += seconds * self._taken_share

    def _serve_again(self, origin: int) -> None:
        try:
            self._weights.restore(origin)
            self._tell("restored", "same_weights", {"origin": origin})
        except Damaged as error:
            restored = self._weights.restore_before(origin)
            self._tell("restored", f"version {origin}: {error}", {"origin": restored.origin})

    def _restore_parts(self, saved: SavedLearner) -> None:
        """Whoever's state cannot be used starts anew; what was known about other weights is not wanted."""
        if self._weights.latest_origin != saved.origin:
            return
        for name, state in saved.parts.items():
            try:
                if name == "policy":
                    self._policy.restore(state)
                elif name == "tokens":
                    self._vocabulary.counts.restore(state)
                else:
                    self._monitor.restore(name, state)
            except ValueError as error:
                self._tell("restored", f"{name}: {error}")

    def _tell(self, kind: EventKind, reason: str, numbers: dict[str, float] | None = None) -> None:
        self._emit(Event(kind, self._weights.newest, reason, numbers or {}))


def _numbers(report: UpdateReport, decision: GateDecision) -> dict[str, float]:
    losses = asdict(report.losses[-1]) if report.losses else {}
    return {
        **{f"{term}_loss": loss for term, loss in losses.items() if loss is not None},
        "head": float(report.arm == "head"),
        "seconds": report.seconds,
        "moved": report.moved,
        "exchanged": float(report.exchanged),
        "sequences": decision.num_sequences,
        "candidate": decision.candidate_mean,
        "serving": decision.serving_mean,
        "anchor": decision.anchor_mean,
        "standard_error": decision.standard_error,
    }
