"""The loop of learning while serving, as a plain object: observe queries, update, evaluate, publish, roll back.

Every decision becomes an event with its reason. Whoever owns the learner calls it from one thread, and after any
exception calls `recover`.
"""

import math
import random
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import TypeVar

import torch
from pydantic import JsonValue
from torch import Tensor

from adaptation.bandit import LEARNING, policy_of
from adaptation.bootstrap import Bootstrap
from adaptation.checkpoint import SNAPSHOTS, LearnerCheckpoint, SavedLearner, SnapshotRing
from adaptation.config import AdaptationConfig, Tuning
from adaptation.evaluator import OfflineEvaluator, Replay, memory_alone, replay_of
from adaptation.feedback import FeedbackFilter, FilteredQuery, Quota, RecordingSampler
from adaptation.gate import Gate, GateDecision
from adaptation.idle import IdleTime
from adaptation.losses import Rows, TextDivergence, untrained_rows
from adaptation.monitor import RollbackMonitor
from adaptation.policy import Arm, Judgement, Policy
from adaptation.process import TrainingTime, training_process
from adaptation.records import AdaptationError, AdaptationStatus, Damaged, Emit, Event, EventKind, NotStored
from adaptation.samples import SampleBuffers, TrainingSample, ValidationSet
from adaptation.traffic import TrafficMonitor
from adaptation.trainer import RATE, Pace, Rules, Trainer, UpdateReport, bf16_is_faster
from adaptation.weights import ANCHOR, DrafterWeights, ServedDrafter, Version
from adaptation.worker import Worker, received
from drafters.feedback import Query, QueryFeedback
from drafters.regret import RegretLedger
from drafters.training.corpus import Example

Result = TypeVar("Result")
_NOTHING = (0.0, 0.0)
"""Gained, and its standard error, of a training copy that is what serves."""
_KEPT_EVENTS = 50
_MADE_STEP = 0.01
"""Of each parameter's size: how far a step takes a drafter that was solved and not trained yet."""
_DRIFT_ANCHORS = 8  # blocks per text on which the distance to the anchor is reported


class Learner:
    """Decides when the drafter that serves is replaced, and by what."""

    def __init__(
        self,
        config: AdaptationConfig,
        drafter: ServedDrafter,
        *,
        folder: Path,
        emit: Emit,
        clock: Callable[[], float] = time.time,
        seed: int = 0,
        ledger: RegretLedger | None = None,
        tuning: Tuning | None = None,
    ) -> None:
        """`ledger`: of the server in this process, from which training then takes time; None: none serves. Raises
        ValueError where training cannot be had as it is configured. What is served in bf16 is trained and replayed so
        where products are faster then."""
        self.tuning = tuning = tuning or Tuning()
        self.paused = False
        self.num_updates: Counter[Arm] = Counter()
        head = drafter.weights["lm_head.weight"]
        device, in_bf16 = head.device, head.dtype == torch.bfloat16
        if config.train_device != "same":
            device = torch.device(config.train_device)
        autocast = in_bf16 and bf16_is_faster(device)
        replica_dtype = torch.float32 if in_bf16 and not autocast else None
        self.weights = weights = _weights_of(drafter, tuning, folder, device, replica_dtype)
        rows = untrained_rows(weights.anchor, drafter.target_head)
        rules = _rules_of(config, drafter, tuning, autocast=autocast)
        self._trainer = Trainer(weights.training, weights.anchor, drafter.embed, rows, rules=rules, seed=seed)
        self._serves, self._ledger = ledger is not None, ledger or RegretLedger()
        train_in = config.train_in if self._serves else "thread"
        self.process = process = training_process(drafter, weights, self._trainer, train_in)
        self._update = self._trainer.update if process is None else process.update
        replay = replay_of(drafter.embed, beside_memory=not drafter.made) if process is None else process.replay
        self.time = TrainingTime(device, process)
        self._policy = policy_of(config, tuning, self._ledger, rng=random.Random(seed))
        self.time.covers = self._policy.covers
        self._feedback = _feedback_of(config, tuning, self._policy, clock=clock, seed=seed)
        self._buffers, self._validation = self._feedback.buffers, self._feedback.validation
        # Replicas record every query: none of them knows what the others' queries promise.
        self.sampler = RecordingSampler() if config.redis_url is None else RecordingSampler(share=1.0)
        self._checkpoint = LearnerCheckpoint(folder)
        makes = not drafter.made and config.policy != "never"
        self._bootstrap = Bootstrap(
            weights, drafter.embed, rows, self._checkpoint, makes=makes, given=drafter.given, seed=seed
        )
        self._evaluator = _evaluator_of(weights, drafter, rows, self.time.paced(replay), tuning)
        self._monitor = RollbackMonitor(tuning)
        self._traffic = TrafficMonitor(drafter.config.target_vocab_size)
        self._pace = Pace()
        self._policy_name = config.policy
        self._emit = emit
        self._event_counts: Counter[EventKind] = Counter()
        self._last_events: deque[Event] = deque(maxlen=_KEPT_EVENTS)
        self._idle = IdleTime(share=config.idle_share, most_in_vain=tuning.kept_refusals)
        self._num_refused = 0
        self._gained: tuple[float, float] | None = _NOTHING

    def worker(self) -> Worker:
        """A thread that runs the learner."""
        worker = Worker(
            self,
            max_waiting=self.tuning.queued_queries,
            niceness=self.tuning.niceness,
            device=self.weights.train_device,
        )
        self.time.is_urged = lambda: worker.is_urged
        return worker

    def observe(self, feedback: QueryFeedback) -> FilteredQuery:
        """One finished query."""
        feedback = received(feedback, self.weights.train_device)
        if not self._serves:
            self._ledger.elapse(feedback.query.seconds)
        filtered = self._feedback.take(feedback, learning=not self.paused, updating=not self._bootstrap.collects)
        if filtered.validates and filtered.text is not None:
            self._evaluator.probe(filtered.text)
        elif filtered.text is not None and self._bootstrap.collects and not self.paused:
            self._collect(filtered.text.example)
        if feedback.query.store and self._traffic.observe(feedback.query.answer):
            self._traffic_changed()
            self._tell("changed", "other_words")
        self._watch(feedback.query, filtered)
        self._charge()
        self.sampler.resting = self._may_rest()
        return filtered

    def update(self, interrupted: Callable[[], bool] = lambda: False) -> UpdateReport | None:
        """Train, evaluate and publish, if an update is due; says what was trained."""
        if self.paused or self.weights.pending or not self._validation.suffices:
            return None
        if self._bootstrap.due:
            self._make()
            return None
        signals = self._buffers.signals
        arm = self._policy.due(signals)
        if arm is None:
            self._train_idle(interrupted)
            return None
        self._charge()  # what comes from here on is the arm's
        report = self._train(arm, self._buffers.take(arm), interrupted)
        self._finish(report, fmean(signals[arm]))
        return report

    def pause(self) -> None:
        """Learn nothing until resumed, by a later process neither; alarms go on."""
        self._pause("operator")

    def resume(self) -> None:
        self.paused = False
        self._tell("resumed", "operator")
        self.save(training=False)

    def rollback(self) -> Version:
        """An operator distrusts what is served: back to what was before it."""
        return self._roll_back("operator", {})

    def adopt(self, weights: Mapping[str, Tensor], reason: str = "operator") -> int:
        """Somebody brings weights: they are served without a gate. # -> their version. Raises NotStored."""
        version = self.weights.adopt(weights)
        self._storing(lambda: self._bootstrap.adopted(dict(weights)))
        self._evaluator.rebased()
        self._forget_arms()
        self._tell("loaded", reason)
        self.save(training=False)
        return version

    def shared(self) -> dict[str, JsonValue]:
        """What whoever learns after this process should know: which updates were worth their time, and whether an
        operator has paused."""
        return {"policy": self._policy.state(), "paused": self.paused}

    def inherit(self, shared: Mapping[str, JsonValue]) -> None:
        """Go on from what another process has shared; what cannot be used is told, and costs nothing else."""
        policy = shared.get("policy")
        try:
            self._policy.restore(policy if isinstance(policy, dict) else {})
        except ValueError as error:
            self._tell("restored", f"policy: {error}")
        if shared.get("paused") is True and not self.paused:  # what was shared may be older than a pause here
            self._pause("inherited")

    def recover(self, error: str) -> None:
        """Something broke at any place: forget the update under way and go on from what is served."""
        if self.process is not None:
            self.process.quiet()
        self._tell("failed", error)
        self._charge()
        self._buffers.clear_replay()
        self._start_over()

    def save(self, *, training: bool) -> None:
        """Keep what a later process needs to go on; a full disk is told and costs nothing else.

        The training copy with its optimizers is ten times what is served: worth its seconds when the process ends, not
        at every publish. A process that is killed goes on from what it served, with optimizers that remember nothing.
        """
        weights = self.weights
        parts = {"policy": self._policy.state(), **self._monitor.state()}
        if self._bootstrap.makes:
            parts |= {"bootstrap": self._bootstrap.state(), "tokens": self._bootstrap.counts.state()}
        newest, origin, condemned = weights.newest, weights.latest.origin, weights.condemned
        save = partial(self._checkpoint.save, newest=newest, origin=origin, condemned=condemned, parts=parts)
        self._storing(lambda: save(paused=self.paused))
        if training:
            tensors = self._trainer.tensors()
            self._storing(lambda: self._checkpoint.save_tensors("training", tensors, origin=origin))

    def restore(self) -> None:
        """Take up what an earlier process left; to be called once, before the engine's first step."""
        saved = self._checkpoint.load()
        for complaint in saved.complaints:
            self._tell("restored", complaint)
        self.paused = saved.paused
        self.weights.resume(saved.newest, saved.condemned)
        if self.weights.newest != ANCHOR:  # whatever serves now has a version of its own, be it as deployed
            self._serve_again(saved.origin)
        self._monitor.weights_changed()
        self._restore_parts(saved)
        self._bootstrap.restore_tensors()
        tensors = self._saved_training()
        if tensors is None:
            self._start_over()
        else:
            self._trainer.load_tensors(tensors)
            self._gained = None  # it may have been ahead of what serves

    def status(self, worker: Worker) -> AdaptationStatus:
        """What an operator sees."""
        weights, feedback, counts = self.weights, self._feedback, self._event_counts
        with self.time.spent() if self._evaluator.kl_is_due else nullcontext():
            kl_to_anchor = self._evaluator.kl_to_anchor()
        return AdaptationStatus(
            policy=self._policy_name,
            paused=self.paused,
            version=weights.version,
            origin=weights.origin,
            newest=weights.newest,
            condemned=tuple(sorted(weights.condemned)),
            snapshots=tuple(weights.snapshots.versions),
            values={arm: value for arm, value in self._policy.values.items()},
            phase="collecting" if self._bootstrap.collects else "learning",
            collected_positions=self._bootstrap.positions,
            wanted_positions=self._bootstrap.wanted if self._bootstrap.collects else 0,
            balance_seconds=self._ledger.balances.get(LEARNING),
            waiting={arm: count for arm, count in self._buffers.counts.items()},
            validation_texts=len(self._validation.texts),
            queries_observed=feedback.decisions.total(),
            queries_dropped=worker.num_dropped,
            queries_excluded=feedback.refusals.total(),
            excluded=dict(feedback.refusals),
            samples_dropped=self._buffers.num_dropped,
            decisions=dict(feedback.decisions),
            updates={arm: count for arm, count in self.num_updates.items()},
            publishes=counts["published"],
            refusals=counts["refused"],
            rollbacks=counts["rolled_back"],
            discards=counts["discarded"],
            training_seconds=self.time.seconds,
            kl_to_anchor=kl_to_anchor,
            failures={stage: count for stage, count in worker.failures.items()},
            restarts=worker.num_restarts,
            events=tuple(self._last_events),
        )

    def _pause(self, reason: str) -> None:
        self.paused = True
        self._tell("paused", reason)
        self.save(training=False)

    def _collect(self, example: Example) -> None:
        """A text that the drafter is made of."""
        with self.time.spent():
            self._bootstrap.add(example)
        self._keep_sums()

    def _make(self) -> None:
        """Solve for a drafter, and publish it if it is better than what serves: drafting by memory alone, or the one
        that was made before."""
        began = time.perf_counter()
        numbers = {"made": 1.0, "positions": float(self._bootstrap.positions)}
        with self.time.spent():
            solution = self._bootstrap.solve()
            self._trainer.load(solution)
            numbers["seconds"] = time.perf_counter() - began
            self._tell("solved", "enough_positions", dict(numbers))
            decision, numbers["judging_seconds"] = self._evaluator.evaluate(self._validation.current)
        published = decision.publish and self._publish(decision)
        self._storing(lambda: self._bootstrap.judged(solution, published=published))
        self._pace.traffic_changed()  # what is solved is as far from the texts as another's drafter
        self._evaluator.rebased()
        self._charge()
        reason = decision.reason if published or not decision.publish else "not_stored"
        self._tell("published" if published else "refused", reason, {**numbers, **_scores(decision)})
        if not published:
            self._start_over()
        self._storing(lambda: self._bootstrap.keep(always=True))
        self.save(training=False)

    def _keep_sums(self) -> None:
        with self.time.spent():
            if self._storing(self._bootstrap.keep):
                self.save(training=False)

    def _storing(self, store: Callable[[], Result]) -> Result | None:
        """A full disk is told and costs nothing else."""
        try:
            return store()
        except AdaptationError as error:
            self._tell("not_stored", str(error))
            return None

    def _traffic_changed(self) -> None:
        """What arms gained, and the texts that validated, are of the past."""
        for part in (self._policy, self._validation, self._pace):
            part.traffic_changed()
        self._buffers.clear_replay()
        if self._gained != _NOTHING:
            self._gained = None  # what was gained was gained on other texts

    def _may_rest(self) -> bool:
        """Whether few queries are enough: what is served is not new, and nothing is learnt, or nothing promises a gain
        and there are texts that could validate an update, or none come."""
        is_new = self.weights.latest.origin != ANCHOR and self._monitor.on_probation
        learns_nothing = self.paused or self._feedback.sees_no_text
        if self._bootstrap.collects and not self.paused:
            return not self._policy.covers(0.0)
        return not is_new and (learns_nothing or (self._policy.resting and self._validation.suffices))

    def _watch(self, query: Query, filtered: FilteredQuery) -> None:
        """Ask the alarms where the text may validate, and of any text while the weights are new; unless the query was
        served by weights that are no longer served."""
        is_current = query.first_version == query.version == self.weights.newest
        if not is_current or self.weights.latest.origin == ANCHOR:
            return
        probing = self._monitor.take_probation()
        if filtered.text is None or not (filtered.validates or probing):
            return
        with self.time.spent():
            scores = self._evaluator.scored(filtered.text, with_previous=probing)
        alarm = self._monitor.observe(scores)
        if alarm is not None:
            self._roll_back(alarm.reason, {"statistic": alarm.statistic, "limit": alarm.limit})

    def _roll_back(self, reason: str, numbers: dict[str, float]) -> Version:
        """Serve what was before, and believe nothing that was learnt about what is served now."""
        condemned = self.weights.condemn()
        restored = self.weights.restore_before(condemned)
        self._bootstrap.rolled_back()
        self._forget_arms()
        self._tell("rolled_back", reason, {**numbers, "condemned": condemned, "origin": restored.origin})
        self.save(training=False)
        return restored

    def _forget_arms(self) -> None:
        """Weights serve that no update has made: nothing is known of what updates do to them."""
        self._policy.traffic_changed()
        self._buffers.clear()
        self._monitor.weights_changed()
        self._start_over()

    def _train_idle(self, interrupted: Callable[[], bool]) -> None:
        """A full update on texts seen before; who serves nobody does not know when nobody asks."""
        texts = self._buffers.rehearsal()
        if not self._serves or self._bootstrap.collects or not texts or not self.time.is_idle:
            return
        if not self._idle.may_begin(self._buffers.num_remembered):
            return
        began = time.monotonic()
        report = self._train("full", texts, lambda: interrupted() or not self.time.is_idle)
        published = None if report.outcome == "interrupted" else self._finish(report, None)
        self._charge()
        self._idle.ended(time.monotonic() - began, published=published)

    def _train(self, arm: Arm, samples: list[TrainingSample], interrupted: Callable[[], bool]) -> UpdateReport:
        with self.time.spent():
            share = self._pace.share(arm)
            stops = partial(self.time.wait, interrupted) if self.process is None else interrupted
            report = self._update(arm, samples, stops, rate_share=share)
        self.num_updates[arm] += report.applied
        return report

    def _finish(self, report: UpdateReport, signal: float | None) -> bool:
        """Judge what was trained, or say why there is nothing to judge. `signal`: mean of the queries it was due for;
        None in idle time. # -> whether it was published"""
        if report.applied:
            return self._conclude(report, signal)
        self._charge()
        if report.outcome == "interrupted":
            self._buffers.put_back()
        elif report.outcome != "nothing_to_learn":
            self._buffers.clear_replay()
        self._tell("discarded", report.outcome, {"seconds": report.seconds})
        return False

    def _conclude(self, report: UpdateReport, signal: float | None) -> bool:
        """Publish what was trained if it is better, and say which. # -> whether it was"""
        with self.time.spent():
            decision, seconds = self._evaluator.evaluate(self._validation.current)
        numbers = {**_numbers(report, decision), "judging_seconds": seconds}
        judgement = self._judgement(decision)
        published = decision.publish and self._publish(decision)
        if judgement is None or signal is None:
            self._charge()
        else:
            self._policy.ended(report.arm, signal, judgement, self.time.taken(), published=published)
        if not published:
            self._refuse(report, decision, "not_stored" if decision.publish else decision.reason, numbers)
            return False
        self._pace.published(report.arm)
        self._tell("published", decision.reason, numbers)
        self.save(training=False)
        return True

    def _publish(self, decision: GateDecision) -> bool:
        """Serve the training copy; False where it cannot be kept."""
        scores = {"candidate": decision.candidate_mean, "serving": decision.serving_mean}
        try:
            self.weights.publish({**scores, "anchor": decision.anchor_mean})
        except NotStored:
            return False
        self._evaluator.published()
        self._num_refused, self._gained = 0, _NOTHING
        self._monitor.weights_changed()
        return True

    def _refuse(self, report: UpdateReport, decision: GateDecision, reason: str, numbers: dict[str, float]) -> None:
        """Small updates add up, so that a candidate which is not clearly worse is trained on for a while."""
        self._tell("refused", reason, numbers)
        if reason == "too_little_evidence":
            return
        self._num_refused += 1
        clearly_worse = not decision.gain >= -decision.standard_error
        if clearly_worse:
            self._pace.clearly_worse(report.arm)
        if clearly_worse or self._num_refused > self.tuning.kept_refusals:
            self._start_over()

    def _judgement(self, decision: GateDecision) -> Judgement | None:
        """None where there was nothing to judge by, or nothing is known of the training copy before the update."""
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

    def _charge(self) -> None:
        """Enter what was taken from serving since the last time, and says nothing of an arm."""
        self._policy.spent(self.time.taken())

    def _start_over(self) -> None:
        """Train on from what is served."""
        self._num_refused, self._gained = 0, _NOTHING
        self._trainer.load(self._bootstrap.training_start())

    def _saved_training(self) -> dict[str, Tensor] | None:
        """The training copy with its optimizers; an earlier release kept no rates with them."""
        like, origin = self._trainer.tensors(), self.weights.latest.origin
        without = {name: value for name, value in like.items() if not name.endswith(RATE)}
        found = (self._checkpoint.load_tensors("training", each, origin=origin) for each in (like, without))
        return next((tensors for tensors in found if tensors is not None), None)

    def _serve_again(self, origin: int) -> None:
        try:
            self.weights.restore(origin)
            self._tell("restored", "same_weights", {"origin": origin})
        except Damaged as error:
            restored = self.weights.restore_before(origin)
            self._tell("restored", f"version {origin}: {error}", {"origin": restored.origin})

    def _restore_parts(self, saved: SavedLearner) -> None:
        """Whoever's state cannot be used starts anew; what was known about other weights is not wanted."""
        if self.weights.latest.origin != saved.origin:
            return
        for name, state in saved.parts.items():
            try:
                if name == "policy":
                    self._policy.restore(state)
                elif name == "bootstrap":
                    self._bootstrap.restore(state)
                elif name == "tokens":
                    self._bootstrap.counts.restore(state)
                else:
                    self._monitor.restore(name, state)
            except ValueError as error:
                self._tell("restored", f"{name}: {error}")

    def _tell(self, kind: EventKind, reason: str, numbers: dict[str, float] | None = None) -> None:
        event = Event(kind, self.weights.newest, reason, numbers or {})
        self._event_counts[kind] += 1
        self._last_events.append(event)
        self._emit(event)


def _weights_of(
    drafter: ServedDrafter, tuning: Tuning, folder: Path, device: torch.device, replica_dtype: torch.dtype | None
) -> DrafterWeights:
    """Raises ValueError for a drafter that cannot learn."""
    if drafter.config.own_heads:
        raise ValueError(
            "Medusa's heads in their published form do not learn: set adaptation.enabled to false, or train others "
            "with `adaptree train drafter --kind medusa`"
        )
    ring = SnapshotRing(folder / SNAPSHOTS, in_memory=tuning.snapshots_in_memory, on_disk=tuning.snapshots_on_disk)
    return DrafterWeights(
        drafter.weights,
        drafter.config,
        prepare=drafter.prepare,
        snapshots=ring,
        train_device=device,
        replica_dtype=replica_dtype,
    )


def _rules_of(config: AdaptationConfig, drafter: ServedDrafter, tuning: Tuning, *, autocast: bool) -> Rules:
    """A drafter that is made here has far to go: its steps are as large as its weights allow."""
    if not drafter.made:
        tuning = replace(tuning, update_norm=_MADE_STEP * tuning.full_steps)
    return Rules(
        learning_rate=config.learning_rate if drafter.made else _MADE_STEP,
        relative=not drafter.made,
        anchor_weight=config.anchor_weight,
        blocks=drafter.config.trained_blocks if drafter.made else drafter.blocks,  # of one that was trained, as it was
        autocast=autocast,
        tuning=tuning,
    )


def _evaluator_of(
    weights: DrafterWeights, drafter: ServedDrafter, rows: Rows, replay: Replay, tuning: Tuning
) -> OfflineEvaluator:
    divergence = TextDivergence(weights.anchor, drafter.embed, rows, anchors=_DRIFT_ANCHORS)
    first = None if drafter.made else memory_alone
    judgements = tuning.kept_refusals + 1  # of one training copy, before it starts over
    gate = Gate(least_texts=tuning.gate_texts, alpha=tuning.gate_alpha, judgements=judgements)
    known = 2 * tuning.validation_texts
    return OfflineEvaluator(
        weights, gate, replay, divergence, drift_texts=tuning.drift_texts, max_known=known, first=first
    )


def _feedback_of(
    config: AdaptationConfig, tuning: Tuning, policy: Policy, *, clock: Callable[[], float], seed: int
) -> FeedbackFilter:
    quota = Quota(client_share=tuning.client_share, free_queries=tuning.client_free_queries, clock=clock)
    buffers = SampleBuffers(
        {"head": tuning.head_queries, "full": max(tuning.full_queries, tuning.always_queries)},
        replay_texts=tuning.replay_texts,
        update_samples=tuning.full_steps * tuning.step_texts,
        rng=random.Random(seed + 2),
    )
    validation = ValidationSet(
        share=tuning.validation_share,
        enough=tuning.gate_texts,
        max_texts=tuning.validation_texts,
        rng=random.Random(seed + 1),
    )
    return FeedbackFilter(policy, quota, buffers, validation)


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
