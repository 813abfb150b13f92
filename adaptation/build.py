"""Unpacks the configuration into the parts that decide: policy, gate, alarms, quota, ring of snapshots.

Adaptation as a whole is put together in `adaptation/assembly.py`.
"""

import random
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from adaptation.bandit import Bandit, BanditRules
from adaptation.checkpoint import SnapshotRing
from adaptation.config import AdaptationConfig
from adaptation.feedback import Quota, RecordingSampler
from adaptation.gate import Gate
from adaptation.monitor import Collapse, FallingWindows, PairedCusum, RollbackMonitor
from adaptation.policy import Arm, EveryBatch, Never, Policy
from adaptation.samples import SampleBuffers, ValidationSet
from adaptation.traffic import TokenChange, TrafficChange
from adaptation.trainer import Rules
from adaptation.vocabulary import DraftVocabulary, TokenCounts
from adaptation.worker import Loop, Worker

Clock = Callable[[], float]
_TRIALS: Mapping[Arm, int] = {"head": 1, "full": 8}
"""Of full updates much may come, yet seldom at once: a few texts teach little."""


def build_policy(config: AdaptationConfig, *, clock: Clock, rng: random.Random) -> Policy:
    match config.policy:
        case "bandit":
            return Bandit(_bandit_rules(config), clock=clock, rng=rng)
        case "always":
            return EveryBatch("full", config.always_queries)
        case "head_only":
            return EveryBatch("head", config.head_queries)
        case "full_only":
            return EveryBatch("full", config.full_queries)
        case "never":
            return Never()


def build_gate(config: AdaptationConfig) -> Gate:
    return Gate(least_sequences=config.gate_sequences, standard_errors=config.gate_standard_errors)


def build_cusum(config: AdaptationConfig) -> PairedCusum:
    return PairedCusum(
        slack=config.cusum_slack,
        threshold=config.cusum_threshold,
        least_pairs=max(2, config.window_sequences // 2),
    )


def build_falling_windows(config: AdaptationConfig) -> FallingWindows:
    return FallingWindows(standard_errors=config.fall_standard_errors)


def build_collapse(config: AdaptationConfig) -> Collapse:
    return Collapse(margin=config.collapse_margin, least_verifies=config.collapse_verifies)


def build_quota(config: AdaptationConfig, *, clock: Clock) -> Quota:
    return Quota(
        client_share=config.client_share,
        free_queries=config.client_free_queries,
        query_positions=config.query_positions,
        half_life_seconds=config.quota_half_life_seconds,
        most_clients=config.quota_clients,
        clock=clock,
    )


def build_snapshots(config: AdaptationConfig, folder: Path) -> SnapshotRing:
    return SnapshotRing(folder, in_memory=config.snapshots_in_memory, on_disk=config.snapshots_on_disk)


def _bandit_rules(config: AdaptationConfig) -> BanditRules:
    return BanditRules(
        batch_queries={"head": config.head_queries, "full": config.full_queries},
        alpha=config.alpha,
        min_signal=config.min_signal,
        warm_up_queries=config.warm_up_queries,
        cold_start_events=config.cold_start_events,
        epsilon_start=config.epsilon_start,
        epsilon_end=config.epsilon_end,
        blocked_queries=config.blocked_queries,
        measured_queries=config.measured_queries,
        measured_seconds=config.measured_seconds,
        payback_queries=config.payback_queries,
        explore_share=config.explore_share,
        explore_queries=config.explore_queries,
        trials=_TRIALS,
    )


def build_buffers(config: AdaptationConfig, *, rng: random.Random) -> SampleBuffers:
    return SampleBuffers(
        most_positions=config.buffer_positions,
        most_samples={"head": config.head_queries, "full": max(config.full_queries, config.always_queries)},
        replayed=config.rehearsed_texts,
        update_samples=config.full_steps * config.step_texts,
        rng=rng,
    )


def build_vocabulary(config: AdaptationConfig, *, vocab: int, has_rows: bool) -> DraftVocabulary:
    """`has_rows`: new tokens have something to start from."""
    return DraftVocabulary(TokenCounts(vocab), least_count=config.exchange_count if has_rows else 0)


def build_held_back(config: AdaptationConfig, *, rng: random.Random) -> ValidationSet:
    return ValidationSet(
        share=config.held_back_share, enough=config.gate_sequences, most=config.held_back_sequences, rng=rng
    )


def build_traffic_change(config: AdaptationConfig) -> TrafficChange:
    return TrafficChange(slack=config.cusum_slack, threshold=config.change_threshold)


def build_words(config: AdaptationConfig, *, vocab: int) -> TokenChange:
    return TokenChange(vocab, slack=config.cusum_slack, threshold=config.change_threshold)


def build_sampler(config: AdaptationConfig) -> RecordingSampler:
    """Replicas that share one learner record every query: none of them knows what the others' queries promise."""
    share = config.resting_share if config.redis_url is None else 1.0
    return RecordingSampler(share=share, change=build_traffic_change(config))


def build_monitor(config: AdaptationConfig) -> RollbackMonitor:
    return RollbackMonitor(
        build_cusum(config),
        build_cusum(config),
        build_falling_windows(config),
        build_collapse(config),
        window=config.window_sequences,
        pairs=max(2, config.window_sequences // 2),
    )


def build_rules(config: AdaptationConfig, *, autocast: bool) -> Rules:
    return Rules(
        rates={"head": config.head_learning_rate, "full": config.full_learning_rate},
        head_steps=config.head_steps,
        full_steps=config.full_steps,
        step_texts=config.step_texts,
        warm_up_steps=config.warm_up_steps,
        anchor_weight=config.anchor_weight,
        gradient_norm=config.gradient_norm,
        update_norm=config.update_norm,
        autocast=autocast,
    )


def build_worker(config: AdaptationConfig, loop: Loop, device: torch.device, *, taken_share: float) -> Worker:
    """`device` is where the loop computes; `taken_share`: how much of that time serving lacks."""
    return Worker(
        loop,
        most_waiting=config.queued_queries,
        threads=config.train_threads,
        duty_cycle=config.duty_cycle,
        taken_share=taken_share,
        niceness=config.train_niceness,
        device=device,
    )
