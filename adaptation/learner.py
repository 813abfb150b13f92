"""The loop of learning while serving. One update, from finished queries to the served weights:

    observe   FeedbackFilter.take     queries fill the buffer of the arm that may gain, and the validation set
    work      FeedbackFilter.due      a full buffer whose update the ledger covers is a lesson
              Training.update         the training copy learns from it, one optimizer step per piece
              Publisher.judge         training copy, serving drafter and anchor are replayed on validation texts
              Publisher.conclude      the better copy is published: staged for the engine's next step
              Bandit.ended            gain and cost update the arm's value and the ledger
    observe   Publisher.watch         later texts are queued
    work      Publisher.score         they are scored; an alarm rolls the weights back (Publisher.roll_back)

Every decision is an event with its reason. All calls come from one thread, which calls `recover` after any exception.
"""

from collections.abc import Mapping
from functools import partial
from pathlib import Path

from pydantic import JsonValue
from torch import Tensor

from adaptation.bootstrap import Bootstrap
from adaptation.config import AdaptationConfig, Tuning
from adaptation.evaluator import (
    AnchorDistance,
    OfflineEvaluator,
    TextDivergence,
    replay_of,
    untrained_rows,
)
from adaptation.feedback import FeedbackFilter, FilteredQuery, Lesson, RecordingSampler, build_filter
from adaptation.persistence import LearnerCheckpoint, Part, Persistence
from adaptation.policy import Bandit, policy_of
from adaptation.process import Training, training_process
from adaptation.publisher import Publisher
from adaptation.records import AdaptationStatus, Emit, EventLog, TrainingLost
from adaptation.replay_buffer import ReplayFile
from adaptation.timing import IdleTime, Pauses, Pieces, TrainingTime
from adaptation.trainer import OnlineTrainer, UpdateReport, rules_of
from adaptation.weights import DrafterWeights, ServedDrafter, Version, copies_of
from adaptation.worker import Worker, received
from drafters.feedback import QueryFeedback

_DISTANCE_ANCHORS = 8  # blocks per text on which the distance to the anchor is measured


class Learner:
    """Learns while serving: observes finished queries, and trains, publishes and rolls back the drafter."""

    def __init__(
        self,
        feedback: FeedbackFilter,
        training: Training,
        publisher: Publisher,
        bootstrap: Bootstrap,
        persistence: Persistence,
        *,
        idle: IdleTime,
    ) -> None:
        self.paused = False
        self.log = publisher.log
        self.sampler = feedback.sampler
        self.training = training
        self.weights = bootstrap.weights
        self._bootstrap = bootstrap
        self.feedback = feedback
        self._idle = idle
        self._persistence = persistence
        self._policy = feedback.policy
        self._publisher = publisher
        self._job: Pieces[None] | None = None  # an update under way

    def observe(self, feedback: QueryFeedback) -> FilteredQuery:
        """Observe one finished query: as a training sample, a validation text, or neither."""
        feedback = received(feedback, self.weights.train_device)
        collects = self._bootstrap.collects and not self.paused
        filtered = self.feedback.take(feedback, learning=not self.paused, updating=not self._bootstrap.collects)
        if collects and filtered.text is not None and not filtered.validates:
            self.feedback.buffers.for_sums.append(filtered.text)
        if filtered.changed:
            self._publisher.traffic_changed()
            self.log.add("changed", "other_words")
        self._publisher.watch(feedback.query, filtered)
        if self._job is None:  # an update under way is charged when it ends
            self._charge()
        self.feedback.choose_share(
            learning=not self.paused, collects=self._bootstrap.collects, watched=self._publisher.watches_closely
        )
        return filtered

    def work(self) -> bool:
        """Do the next piece of work, an optimizer step or a replay, and begin an update if one is due. Returns whether
        a piece was done."""
        self._keep_texts()
        if self.training.time.may_compute:
            self.training.go_on()
        elif not self.training.waits:
            return False
        monitor = self._publisher.monitor
        if monitor.scoring is None and monitor.unscored and not self.training.waits:
            monitor.scoring = self._score()
        scoring, monitor.scoring = monitor.scoring, None
        if scoring is not None:
            monitor.scoring = self.training.advanced(scoring)
            return True
        job, self._job = self._job or self._due(), None
        if job is not None:
            self._job = self.training.advanced(job)
        return job is not None

    def _score(self) -> Pieces[None]:
        """Score a text, and roll the weights back if that raises an alarm."""
        alarm = yield from self._publisher.score()
        if alarm is not None:
            self._roll_back(alarm.reason, {"statistic": alarm.statistic, "limit": alarm.limit})

    def _due(self) -> Pieces[None] | None:
        """Return the due work in pieces: a first drafter, an arm's update, or a rehearsal in idle time. Returns None if
        none is due."""
        if not self._bootstrap.collects:
            self.feedback.buffers.for_sums.clear()
        elif self.feedback.buffers.for_sums and not self.paused:
            return self._collect()
        if self.paused or self.weights.pending or not self.feedback.validation.suffices:
            return None
        if self._bootstrap.due:
            return self._solve()
        lesson = self.feedback.due()
        if lesson is None and self._bootstrap.trains and self.training.time.is_idle:
            pass_updates = self.feedback.buffers.updates_of_pass
            replay = self.feedback.buffers.replay
            if self._idle.may_begin(replay.num_added, num_kept=len(replay), pass_updates=pass_updates):
                lesson = self.feedback.rehearsal()
        return None if lesson is None else self._update(lesson)

    def _collect(self) -> Pieces[None]:
        """Add the oldest waiting text to the sums."""
        self._bootstrap.add(self.feedback.buffers.for_sums.popleft().example)
        if self.log.storing(self._bootstrap.keep):
            self.save(training=False)
        yield from ()

    def _solve(self) -> Pieces[None]:
        yield from self._publisher.solve()
        if not self._bootstrap.collects:
            self.feedback.buffers.for_sums.clear()
        self._charge()
        self.save(training=False)

    def _update(self, lesson: Lesson) -> Pieces[None]:
        """Train on a lesson, judge the result, and publish it if it is better."""
        self._charge()  # seconds taken after this are the arm's cost
        began, better = self.training.time.seconds, False
        try:
            report = yield from self.training.update(lesson.arm, lesson.samples)
            self.training.num_unjudged += report.applied
            is_due = lesson.signal is not None or self.training.num_unjudged >= self._updates_per_judgement
            if report.applied and is_due:
                better = yield from self._conclude(report, lesson.signal)
            else:
                self._charge()
                self._publisher.forget_gain()
            if not report.applied:
                if report.outcome != "nothing_to_learn":
                    self.feedback.buffers.replay.drop_taken()
                self.log.add("discarded", report.outcome, {"seconds": report.seconds})
        except GeneratorExit:
            self.feedback.buffers.put_back()
            self.log.add("discarded", "interrupted", {"seconds": self.training.time.seconds - began})
            raise
        if lesson.signal is None:
            self._idle.ended(self.training.time.seconds - began, better=better)

    @property
    def _updates_per_judgement(self) -> int:
        """Updates in idle time until the judge is asked: twice as many after each refusal, so that a pass over many
        texts is judged no more often than the gate's level allows, and a large gain is published at once."""
        return min(
            1 << self._publisher.num_refused,
            1 + self.feedback.buffers.updates_of_pass // self._publisher.gate.judgements,
        )

    def _conclude(self, report: UpdateReport, signal: float | None) -> Pieces[bool]:
        """Judge an update, publish it if it is better, and credit gain and cost to its arm. Returns whether it was
        better."""
        began, self.training.num_unjudged = self.training.time.seconds, 0
        decision = yield from self._publisher.judge()
        verdict = self._publisher.conclude(report, decision, seconds=self.training.time.seconds - began)
        if verdict.judgement is None or signal is None:
            self._charge()
        else:
            seconds = self.training.time.taken()
            self._policy.ended(report.arm, signal, verdict.judgement, seconds, published=verdict.published)
        if verdict.published:
            self.save(training=False)
        return verdict.better

    def _charge(self) -> None:
        """Charge the seconds taken from serving since the last call to the ledger, and to no arm."""
        self._policy.spent(self.training.time.taken())

    def _roll_back(self, reason: str, numbers: Mapping[str, float]) -> Version:
        self.abandon()
        restored = self._publisher.roll_back(reason, numbers)
        self.feedback.weights_replaced()
        self.save(training=False)
        return restored

    def abandon(self) -> None:
        """Undo the update under way, if any, and return its samples to their buffer."""
        monitor = self._publisher.monitor
        scoring, monitor.scoring = monitor.scoring, None
        job, self._job = self._job, None
        if scoring is not None:
            scoring.close()
        if job is None:
            return
        self._publisher.forget_gain()
        try:
            job.close()
        except TrainingLost:  # the process has died and cannot undo the update
            self._publisher.start_over()
        self._charge()

    def recover(self, error: str) -> None:
        """Abandon the update under way and reset the training copy to the served weights, after an exception."""
        if self.training.waits:  # the thread that waited for this answer has died
            self.training.close()
        self.abandon()
        self.log.add("failed", error)
        self._charge()
        self.feedback.buffers.replay.drop_taken()
        self._publisher.start_over()

    def forget(self, scope: str | None) -> None:
        """Forget all texts of a scope, or of all scopes if it is None. What weights and sums have learnt stays."""
        self.abandon()
        self.feedback.forget(scope)
        self._publisher.forget(scope)
        self._keep_texts(forgot=True)

    def pause(self, reason: str = "operator") -> None:
        """Stop learning until `resume`, in later processes too. The alarms stay on."""
        self.abandon()
        self.paused = True
        self.log.add("paused", reason)
        self.save(training=False)

    def resume(self) -> None:
        """Learn again after a pause."""
        self.paused = False
        self.log.add("resumed", "operator")
        self.save(training=False)

    def rollback(self) -> Version:
        """Condemn the current weights and serve the newest earlier ones that are not condemned. Returns their
        version."""
        return self._roll_back("operator", {})

    def adopt(self, weights: Mapping[str, Tensor], reason: str = "operator") -> int:
        """Stage these weights, shapes [...] as in `weights.layout`, without judging them, and return their version.
        Raises NotStored."""
        self.abandon()
        version = self._publisher.adopt(weights, reason)
        self.feedback.weights_replaced()
        self.save(training=False)
        return version

    def shared(self) -> dict[str, JsonValue]:
        """State for the replica that leads next: the policy's state, and whether learning is paused."""
        return {"policy": self._policy.state(), "paused": self.paused}

    def inherit(self, shared: Mapping[str, JsonValue]) -> None:
        """Load the `shared` state of another replica; if it is unusable, only an event is added."""
        policy = shared.get("policy")
        try:
            self._policy.restore(policy if isinstance(policy, dict) else {})
        except ValueError as error:
            self.log.add("restored", f"policy: {error}")
        if shared.get("paused") is True and not self.paused:  # a pause here may be newer than the shared state
            self.pause("inherited")

    def save(self, *, training: bool) -> None:
        """Save what a later process needs; `training`: also the training copy, without the update under way. A failure
        is an event."""
        if training:
            self.abandon()
            self._keep_texts(at_end=True)
        self._persistence.save(paused=self.paused, training=training)

    def keep_texts_in(self, file: ReplayFile) -> None:
        """Load the texts in a file, and keep the replay buffer there. Raises ValueError for a file that is not this
        server's."""
        self.feedback.buffers.replay.restore(file.read())
        self.feedback.buffers.replay.file = file

    def _keep_texts(self, *, forgot: bool = False, at_end: bool = False) -> None:
        self.log.storing(partial(self.feedback.buffers.replay.keep, forgot=forgot, at_end=at_end))

    def restore(self) -> None:
        """Load what an earlier process saved; called once, before the engine's first step."""
        self.paused = self._persistence.restore()
        self._bootstrap.restore_tensors()
        self._publisher.restored(self._persistence.training_copy())

    def status(self, worker: Worker) -> AdaptationStatus:
        """Return the status of learning; may measure the distance to the anchor."""
        weights, feedback, bootstrap, counts = self.weights, self.feedback, self._bootstrap, self.log.counts
        kl_to_anchor = self._publisher.kl_to_anchor()  # first, because it adds to the training seconds
        return AdaptationStatus(
            policy=self._policy.name,
            paused=self.paused,
            version=weights.version,
            origin=weights.origin,
            newest=weights.newest,
            condemned=tuple(sorted(weights.condemned)),
            snapshots=tuple(weights.snapshots.versions),
            values={arm: value for arm, value in self._policy.values.items()},
            phase="collecting" if bootstrap.collects else "learning",
            collected_positions=bootstrap.positions,
            wanted_positions=bootstrap.wanted if bootstrap.collects else 0,
            balance_seconds=self._policy.balance,
            waiting={arm: count for arm, count in feedback.buffers.counts.items()},
            validation_texts=len(feedback.validation.texts),
            queries_observed=feedback.decisions.total(),
            queries_dropped=worker.inbox.num_dropped,
            queries_excluded=feedback.refusals.total(),
            excluded=dict(feedback.refusals),
            samples_dropped=feedback.buffers.num_dropped,
            decisions=dict(feedback.decisions),
            updates={arm: count for arm, count in self.training.num_updates.items()},
            publishes=counts["published"],
            refusals=counts["refused"],
            rollbacks=counts["rolled_back"],
            discards=counts["discarded"],
            training_seconds=self.training.time.seconds,
            kl_to_anchor=kl_to_anchor,
            predicted_gain=self._publisher.monitor.predicted_gain,
            served_tau=self._publisher.monitor.served_tau,
            failures={stage: count for stage, count in worker.failures.items()},
            restarts=worker.num_restarts,
            events=tuple(self.log.latest),
        )


def build_learner(
    config: AdaptationConfig,
    drafter: ServedDrafter,
    *,
    folder: Path,
    emit: Emit,
    serves: bool = True,
    tuning: Tuning | None = None,
    policy: Bandit | None = None,
) -> Learner:
    """Build a learner and its parts. `serves`: whether an engine runs in this process; `policy`: replaces the
    configured one in benchmarks. A drafter served in bf16 is trained and replayed in bf16 where such products are
    faster. Raises ValueError for a configuration that is not possible."""
    tuning = tuning or Tuning()
    weights, autocast = copies_of(drafter, config, tuning, folder)
    rows = untrained_rows(weights.anchor, drafter.target_head)
    rules = rules_of(config, drafter, tuning, autocast=autocast)
    trainer = OnlineTrainer(weights.training, weights.anchor, drafter.embed, rows, rules=rules, seed=tuning.seed)
    policy = policy or policy_of(config, tuning)
    asked_for = config.redis_url is not None or config.bootstrap_prompts is not None
    pauses = Pauses(needed=config.enabled == "auto" and not asked_for)
    timing = TrainingTime(weights.train_device, policy.covers, pauses)
    train_in = config.train_in if serves else "thread"
    training = Training(trainer, training_process(drafter, weights, trainer, timing, train_in), timing)
    # Replicas record every query: none of them knows what the others' queries promise.
    least = 0.0 if config.redis_url is None else 1.0
    sampler = RecordingSampler(tuning.recorded_share, least=least, may=pauses.suffice)
    feedback = build_filter(tuning, policy, sampler, vocab=weights.anchor.config.target_vocab_size)
    checkpoint, log = LearnerCheckpoint(folder), EventLog(emit, lambda: weights.newest)
    enabled = config.policy != "never"
    bootstrap = Bootstrap(weights, drafter, rows, checkpoint, enabled=enabled, seed=tuning.seed)
    evaluator = _evaluator_of(weights, drafter, training, tuning)
    divergence = TextDivergence(weights.anchor, drafter.embed, rows, anchors=_DISTANCE_ANCHORS)
    distance = AnchorDistance(weights, divergence, num_texts=tuning.drift_texts)
    publisher = Publisher(training, evaluator, distance, feedback.validation, bootstrap, log, tuning)
    parts: dict[str, Part] = {"policy": policy, **publisher.monitor.alarms}
    if bootstrap.makes:
        parts |= {"bootstrap": bootstrap, "tokens": bootstrap.counts}
    persistence = Persistence(checkpoint, weights, trainer, parts, log)
    idle = IdleTime(share=config.idle_share if serves else 0.0, least_failures=tuning.kept_refusals)
    return Learner(feedback, training, publisher, bootstrap, persistence, idle=idle)


def _evaluator_of(
    weights: DrafterWeights, drafter: ServedDrafter, training: Training, tuning: Tuning
) -> OfflineEvaluator:
    replay = training.process.replay if training.process else replay_of(drafter.embed)
    baseline = None if drafter.made else replay_of(drafter.embed, alone=True)
    return OfflineEvaluator(weights, replay, max_scores=2 * tuning.validation_texts, baseline=baseline)
