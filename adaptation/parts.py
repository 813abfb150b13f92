"""What a learner is made of: unpacks settings and fixed numbers into parts that take the values they use."""

import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from adaptation.bandit import Bandit, BanditRules
from adaptation.checkpoint import LearnerCheckpoint, SnapshotRing
from adaptation.config import AdaptationConfig, Tuning, usable_cores
from adaptation.evaluator import OfflineEvaluator
from adaptation.feedback import FeedbackFilter, Quota, RecordingSampler
from adaptation.gate import Gate
from adaptation.losses import Drift
from adaptation.monitor import RollbackMonitor
from adaptation.policy import EveryBatch, Policy
from adaptation.process import TrainingProcess, training_parts
from adaptation.samples import SampleBuffers, ValidationSet
from adaptation.traffic import TrafficMonitor
from adaptation.trainer import Rules, Trainer, bf16_is_faster
from adaptation.vocabulary import DraftVocabulary, TokenCounts, untrained_rows
from adaptation.weights import DrafterWeights, ServedDrafter
from drafters.feedback import Query

_LEAST_TAKEN = 0.1
"""Of the time of training on a core of its own: what training and serving share is the memory, and in a thread the
interpreter. On two cores a process that trained 40 % of the time made forwards of the target 3 % longer."""


class TrainingTime:
    """Seconds that training has computed, and those that no query was charged for yet."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter, *, taken_share: float = 1.0) -> None:
        """`clock` goes while training computes; `taken_share`: how much of that time it takes from serving."""
        self.seconds = 0.0
        self.taken_share = taken_share
        self._clock = clock
        self._uncharged = 0.0

    @contextmanager
    def spent(self) -> Iterator[None]:
        began = self._clock()
        yield
        seconds = self._clock() - began
        self.seconds += seconds
        self._uncharged += seconds * self.taken_share

    def charge(self, query: Query) -> float:
        """What training took since the query before, in the units of this query's costs."""
        if query.seconds <= 0:
            return 0.0
        seconds, self._uncharged = self._uncharged, 0.0
        return seconds * (query.draft_cost + query.verify_cost) / query.seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerParts:
    """What a learner decides with, each an object of its own."""

    weights: DrafterWeights
    trainer: Trainer
    process: TrainingProcess | None  # that computes updates; to be closed when nobody learns any more
    policy: Policy
    feedback: FeedbackFilter
    sampler: RecordingSampler
    vocabulary: DraftVocabulary
    evaluator: OfflineEvaluator
    monitor: RollbackMonitor
    traffic: TrafficMonitor
    checkpoint: LearnerCheckpoint
    time: TrainingTime


def build_parts(
    config: AdaptationConfig,
    tuning: Tuning,
    drafter: ServedDrafter,
    folder: Path,
    *,
    device: torch.device,
    clock: Callable[[], float],
    seed: int,
    in_bf16: bool,
    serves: bool,
) -> LearnerParts:
    """`device` is where updates are computed; the rest as `Learner.from_config` has it."""
    autocast = in_bf16 and bf16_is_faster(device)
    ring = SnapshotRing(folder / "snapshots", in_memory=tuning.snapshots_in_memory, on_disk=tuning.snapshots_on_disk)
    weights = DrafterWeights(
        drafter.weights,
        drafter.config,
        prepare=drafter.prepare,
        snapshots=ring,
        train_device=device,
        replica_dtype=torch.float32 if in_bf16 and not autocast else None,
    )
    rows = untrained_rows(weights.anchor, drafter.target_head)
    rules, train_in = rules_of(config, tuning, autocast=autocast), config.train_in if serves else "thread"
    trainer, replay, process = training_parts(
        drafter, weights, rows, rules, train_in=train_in, niceness=tuning.niceness, seed=seed
    )
    vocab, can_exchange = drafter.config.target_vocab_size, drafter.target_head is not None
    gate = Gate(least_texts=tuning.gate_texts, standard_errors=tuning.gate_standard_errors)
    drift = Drift(weights.anchor, drafter.embed, rows, max_texts=tuning.drift_texts)
    evaluator = OfflineEvaluator(weights, gate, replay, drift, max_known=2 * tuning.validation_texts)
    policy = policy_of(config, tuning, rng=random.Random(seed))
    return LearnerParts(
        weights=weights,
        trainer=trainer,
        process=process,
        policy=policy,
        feedback=_feedback(config, tuning, policy, clock=clock, seed=seed),
        # Replicas record every query: none of them knows what the others' queries promise.
        sampler=RecordingSampler() if config.redis_url is None else RecordingSampler(share=1.0),
        vocabulary=DraftVocabulary(TokenCounts(vocab), least_count=tuning.exchange_count if can_exchange else 0),
        evaluator=evaluator,
        monitor=_monitor(tuning),
        traffic=TrafficMonitor(vocab, evaluator),
        checkpoint=LearnerCheckpoint(folder),
        time=_training_time(device, process, serves=serves),
    )


def policy_of(config: AdaptationConfig, tuning: Tuning, *, rng: random.Random) -> Policy:
    match config.policy:
        case "bandit":
            rules = BanditRules(
                batch_queries={"head": config.head_queries, "full": config.full_queries},
                alpha=config.alpha,
                epsilon=config.epsilon,
                s_min=config.s_min,
                measured_queries=config.measured_queries,
                warm_up_queries=tuning.warm_up_queries,
            )
            return Bandit(rules, rng=rng)
        case "always":
            return EveryBatch("full", tuning.always_queries)
        case "head_only":
            return EveryBatch("head", config.head_queries)
        case "full_only":
            return EveryBatch("full", config.full_queries)
        case "never":
            return EveryBatch(None)


def _feedback(
    config: AdaptationConfig, tuning: Tuning, policy: Policy, *, clock: Callable[[], float], seed: int
) -> FeedbackFilter:
    quota = Quota(client_share=tuning.client_share, free_queries=tuning.client_free_queries, clock=clock)
    buffers = SampleBuffers(
        {"head": config.head_queries, "full": max(config.full_queries, tuning.always_queries)},
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


def _monitor(tuning: Tuning) -> RollbackMonitor:
    return RollbackMonitor(
        window=tuning.window_texts,
        fall_standard_errors=tuning.fall_standard_errors,
        collapse_verifies=tuning.collapse_verifies,
    )


def rules_of(config: AdaptationConfig, tuning: Tuning, *, autocast: bool) -> Rules:
    return Rules(
        rates={"head": config.head_learning_rate, "full": config.full_learning_rate},
        anchor_weight=config.anchor_weight,
        head_steps=tuning.head_steps,
        full_steps=tuning.full_steps,
        step_texts=tuning.step_texts,
        warm_up_steps=tuning.warm_up_steps,
        update_norm=tuning.update_norm,
        autocast=autocast,
    )


def _training_time(device: torch.device, process: TrainingProcess | None, *, serves: bool) -> TrainingTime:
    """On a CPU training waits whenever others want a core, and that does not count; nor does serving lack all of it
    where its own threads leave a core free."""
    has_core = device.type == "cpu" and usable_cores() > torch.get_num_threads()
    taken_share = (_LEAST_TAKEN if has_core else 1.0) if serves else 0.0
    if device.type != "cpu":
        return TrainingTime(taken_share=taken_share)
    if process is not None:
        return TrainingTime(lambda: process.seconds + time.thread_time(), taken_share=taken_share)
    return TrainingTime(time.thread_time, taken_share=taken_share)
