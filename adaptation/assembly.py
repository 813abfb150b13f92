"""Puts a learner together from the configuration and what the engine's drafter is made of.

Everything here reads the configuration and passes on the few values that each part takes.
"""

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from adaptation.build import (
    build_buffers,
    build_gate,
    build_held_back,
    build_policy,
    build_quota,
    build_rules,
    build_snapshots,
    build_watch,
)
from adaptation.config import AdaptationConfig
from adaptation.drift import Drift
from adaptation.events import Emit
from adaptation.intake import Intake
from adaptation.judging import Judge, replay_of
from adaptation.learner import Learner
from adaptation.memory import Memory
from adaptation.pair import DrafterPair, Write
from adaptation.trainer import Trainer
from drafters.specblock.config import SpecBlockConfig
from drafters.specblock.model import Embed


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedDrafter:
    """The drafter that serves, as learning needs to know it."""

    config: SpecBlockConfig
    weights: Mapping[str, Tensor]  # by name, in the serving dtype, taken before linear layers were packed
    vocabulary: Tensor  # [draft_vocab] int64, target ids
    write: Write
    embed: Embed  # the target's embedding, on the device that trains
    max_nodes: int  # of a tree


def build_learner(
    config: AdaptationConfig,
    drafter: ServedDrafter,
    *,
    folder: Path,
    device: torch.device | str,
    clock: Callable[[], float],
    seed: int,
    autocast: bool,
    emit: Emit,
) -> tuple[Learner, DrafterPair]:
    """The learner, and the pair whose `between_steps` the engine calls. `device` is where the drafter serves."""
    train_device = device if config.train_device == "same" else config.train_device
    snapshots = build_snapshots(config, folder / "snapshots")
    pair = DrafterPair(
        drafter.weights,
        drafter.vocabulary,
        drafter.config,
        write=drafter.write,
        snapshots=snapshots,
        train_device=train_device,
    )
    trainer = Trainer(
        pair.training,
        pair.anchor,
        drafter.embed,
        rules=build_rules(config, autocast=autocast),
        generator=torch.Generator().manual_seed(seed),
    )
    policy = build_policy(config, clock=clock, rng=random.Random(seed))
    buffers = build_buffers(config)
    held_back = build_held_back(config, rng=random.Random(seed + 1))
    quota = build_quota(config, clock=clock)
    replay = replay_of(config.replay, drafter.embed, max_nodes=drafter.max_nodes)
    learner = Learner(
        pair=pair,
        trainer=trainer,
        policy=policy,
        intake=Intake(policy, quota, buffers, held_back, query_positions=config.query_positions),
        buffers=buffers,
        held_back=held_back,
        judge=Judge(
            pair,
            build_gate(config),
            replay,
            least_texts=config.gate_sequences,
            most_known=2 * config.held_back_sequences,
        ),
        watch=build_watch(config),
        drift=Drift(pair.anchor, drafter.embed, most_texts=config.probe_texts),
        memory=Memory(folder),
        emit=emit,
        kept_refusals=config.kept_refusals,
    )
    return learner, pair
