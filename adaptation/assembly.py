"""Puts a learner together from the configuration and what the engine's drafter is made of.

Everything here reads the configuration and passes on the few values that each part takes.
"""

import random
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from adaptation.arena import Arena
from adaptation.build import (
    build_buffers,
    build_gate,
    build_held_back,
    build_monitor,
    build_policy,
    build_quota,
    build_rules,
    build_sampler,
    build_snapshots,
    build_traffic_change,
    build_vocabulary,
    build_words,
)
from adaptation.checkpoint import LearnerCheckpoint
from adaptation.config import AdaptationConfig, usable_cores
from adaptation.evaluator import OfflineEvaluator, Replay, replay_of
from adaptation.feedback import FeedbackFilter, RecordingSampler
from adaptation.learner import Learner
from adaptation.losses import Drift
from adaptation.overview import Overview
from adaptation.process import EMBEDDING, HEAD, RemoteTrainer, Setup, TrainingProcess, remote_replay, shared_tensors
from adaptation.records import Emit, History
from adaptation.traffic import AskedTexts
from adaptation.trainer import Rules, Trainer, bf16_is_faster
from adaptation.vocabulary import DraftVocabulary, Rows, untrained_rows
from adaptation.weights import DrafterWeights, Prepare
from drafters.specblock.config import SpecBlockConfig
from drafters.specblock.model import Embed

_LEAST_WEIGHTS = 1_000_000
"""Of a drafter that is worth a process: with fewer an update takes milliseconds, and a process costs 400 MB."""

_LEAST_TAKEN = 0.1
"""Of the time of training on a core of its own: what training and serving share is the memory, and in a thread the
interpreter. On two cores a process that trained 40 % of the time made forwards of the target 3 % longer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedDrafter:
    """The drafter that serves, as learning needs to know it."""

    config: SpecBlockConfig
    weights: Mapping[str, Tensor]  # by name, in the serving dtype, taken before linear layers were packed
    target_head: Tensor | None  # [target_vocab, hidden], rows for tokens it may come to propose; None: there are none
    prepare: Prepare
    embed: Embed  # the target's embedding, on the device that trains
    embedding: Tensor | None  # [target_vocab, hidden], the same as a table, for a process of its own; None: no process
    max_nodes: int  # of a tree


@dataclass(frozen=True, slots=True)
class Built:
    """A learner; the weights whose `between_steps` the engine calls; what an operator sees of both."""

    learner: Learner
    weights: DrafterWeights
    overview: Overview
    sampler: RecordingSampler
    taken_share: float  # of the time of training, that serving lacks
    process: TrainingProcess | None  # to be closed when nobody learns any more


def build_learner(
    config: AdaptationConfig,
    drafter: ServedDrafter,
    *,
    folder: Path,
    device: torch.device | str,
    clock: Callable[[], float],
    seed: int,
    in_bf16: bool,
    emit: Emit,
    serves: bool = True,
) -> Built:
    """`device` is where the drafter serves; `in_bf16`: as it is served, so that training and replays may multiply in
    bf16 where that is faster; `serves`: in this process, from which training then takes time."""
    train_device = torch.device(device if config.train_device == "same" else config.train_device)
    autocast = in_bf16 and bf16_is_faster(train_device)
    weights = _weights(config, drafter, folder, train_device, torch.float32 if in_bf16 and not autocast else None)
    policy, quota = build_policy(config, clock=clock, rng=random.Random(seed)), build_quota(config, clock=clock)
    buffers = build_buffers(config, rng=random.Random(seed + 2))
    held_back = build_held_back(config, rng=random.Random(seed + 1))
    rows = untrained_rows(weights.anchor, drafter.target_head)
    feedback_filter = FeedbackFilter(policy, quota, buffers, held_back, query_positions=config.query_positions)
    watch, sampler, history = build_monitor(config), build_sampler(config), History(emit)
    taken_share = _taken_share(config, train_device) if serves else 0.0
    trainer, replay, process = _training(config, drafter, weights, rows, autocast=autocast, seed=seed, serves=serves)
    judge = _evaluator(config, weights, replay)
    learner = Learner(
        weights=weights,
        trainer=trainer,
        policy=policy,
        feedback_filter=feedback_filter,
        buffers=buffers,
        vocabulary=_vocabulary(config, drafter),
        held_back=held_back,
        judge=judge,
        watch=watch,
        traffic=build_traffic_change(config),
        asked=AskedTexts(build_traffic_change(config), judge),
        words=build_words(config, vocab=drafter.config.target_vocab_size),
        sampler=sampler,
        drift=Drift(weights.anchor, drafter.embed, rows, most_texts=config.probe_texts),
        checkpoint=LearnerCheckpoint(folder),
        emit=history,
        kept_refusals=config.kept_refusals,
        least_texts=config.gate_sequences,
        worked=_work_clock(config, train_device, process),
        taken_share=taken_share,
    )
    overview = Overview(
        config.policy,
        learner=learner,
        weights=weights,
        policy=policy,
        feedback_filter=feedback_filter,
        buffers=buffers,
        held_back=held_back,
        watch=watch,
        history=history,
    )
    return Built(learner, weights, overview, sampler, taken_share, process)


def _vocabulary(config: AdaptationConfig, drafter: ServedDrafter) -> DraftVocabulary:
    vocab, has_rows = drafter.config.target_vocab_size, drafter.target_head is not None
    return build_vocabulary(config, vocab=vocab, has_rows=has_rows)


def _weights(
    config: AdaptationConfig,
    drafter: ServedDrafter,
    folder: Path,
    train_device: torch.device,
    replica_dtype: torch.dtype | None,
) -> DrafterWeights:
    return DrafterWeights(
        drafter.weights,
        drafter.config,
        prepare=drafter.prepare,
        snapshots=build_snapshots(config, folder / "snapshots"),
        train_device=train_device,
        replica_dtype=replica_dtype,
    )


def _training(
    config: AdaptationConfig,
    drafter: ServedDrafter,
    weights: DrafterWeights,
    rows: Rows,
    *,
    autocast: bool,
    seed: int,
    serves: bool,
) -> tuple[Trainer, Replay, TrainingProcess | None]:
    """Who computes updates and replays: this process, or one of its own."""
    rules, generator = build_rules(config, autocast=autocast), torch.Generator().manual_seed(seed)
    replay = replay_of(config.replay, drafter.embed, max_nodes=drafter.max_nodes)
    if not (serves and _in_its_own_process(config, weights, drafter)):
        trainer = Trainer(weights.training, weights.anchor, drafter.embed, rows, rules=rules, generator=generator)
        return trainer, replay, None
    remote = RemoteTrainer(weights.training, weights.anchor, drafter.embed, rows, rules=rules, generator=generator)
    remote.process = process = _process(config, drafter, weights, remote, rules, seed)
    return remote, remote_replay(process, weights.replica), process


def _in_its_own_process(config: AdaptationConfig, weights: DrafterWeights, drafter: ServedDrafter) -> bool:
    possible = sys.platform == "linux" and weights.train_device.type == "cpu" and drafter.embedding is not None
    if config.train_in == "process" and not possible:
        raise ValueError("adaptation.train_in: a process of its own trains on Linux, on a CPU; choose auto or thread")
    worthwhile = sum(value.numel() for value in weights.training.parameters()) >= _LEAST_WEIGHTS
    return config.train_in == "process" or (config.train_in == "auto" and possible and worthwhile)


def _process(
    config: AdaptationConfig, drafter: ServedDrafter, weights: DrafterWeights, trainer: Trainer, rules: Rules, seed: int
) -> TrainingProcess:
    table, head = drafter.embedding, drafter.target_head
    assert table is not None, "a process of its own has no table to look tokens up in"
    is_tied = head is not None and head.data_ptr() == table.data_ptr()
    computed_on = shared_tensors(trainer, training=weights.training, anchor=weights.anchor, replica=weights.replica)
    tables = {EMBEDDING: table} if head is None or is_tied else {EMBEDDING: table, HEAD: head}
    arena = Arena.holding(computed_on | tables)
    arena.lend(computed_on)
    setup = Setup(
        config=drafter.config,
        replica_dtype=weights.replica.dtype,
        rules=rules,
        replay=config.replay,
        max_nodes=drafter.max_nodes,
        seed=seed,
        threads=config.train_threads,
        niceness=config.train_niceness,
        head=None if head is None else EMBEDDING if is_tied else HEAD,
        places=arena.places,
    )
    return TrainingProcess(arena, setup)


def _evaluator(config: AdaptationConfig, weights: DrafterWeights, replay: Replay) -> OfflineEvaluator:
    return OfflineEvaluator(
        weights,
        build_gate(config),
        replay,
        least_texts=config.gate_sequences,
        most_known=2 * config.held_back_sequences,
    )


def _work_clock(
    config: AdaptationConfig, train_device: torch.device, process: TrainingProcess | None
) -> Callable[[], float]:
    """Seconds that training computes: on a CPU it waits whenever others want a core, and that does not count."""
    if train_device.type != "cpu":
        return time.perf_counter
    if process is not None:
        return lambda: process.seconds + time.thread_time()
    return lambda: time.thread_time() * config.train_threads


def _taken_share(config: AdaptationConfig, train_device: torch.device) -> float:
    """Share of these that serving lacks: on a CPU those of threads for which its own leave no core, and some always."""
    if train_device.type != "cpu":
        return 1.0
    free_cores = usable_cores() - torch.get_num_threads()
    without_core = 1.0 - min(max(free_cores, 0), config.train_threads) / config.train_threads
    return max(without_core, _LEAST_TAKEN)
