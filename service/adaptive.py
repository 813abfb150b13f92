"""An engine whose drafter learns while it serves: puts engine, drafter, learner and learning thread together.

Composition only. What may be asked from any thread runs in the thread that learns, or touches nothing of it.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from adaptation.assembly import Built, ServedDrafter, build_learner
from adaptation.build import build_worker
from adaptation.config import AdaptationConfig
from adaptation.events import Emit
from adaptation.learner import Learner
from adaptation.overview import Overview
from adaptation.pair import DrafterPair
from adaptation.snapshot_folder import all_finite
from adaptation.status import AdaptationStatus
from adaptation.worker import Worker
from drafters.feedback import FeedbackRecorder, Query
from drafters.specblock.checkpoint import DrafterError
from drafters.specblock.model import SpecBlock
from drafters.specblock.recording import BlockRecorder
from service.assembly import Assembly, choose_drafter
from service.engine import trained
from service.engine.budget import BudgetPolicy
from service.engine.build import EngineLimits
from service.engine.engine import Engine
from service.engine.trained import Replaceable
from service.engine.weights import LoadedModel
from service.errors import StartupError

logger = logging.getLogger(__name__)

_STORING_SECONDS = 60.0  # the training copy and its optimizers are large, and the thread gives way to everybody


@dataclass
class Adaptive:
    """What serves and what learns. `engine` belongs to the engine's thread, `learner` and `pair` to the worker's."""

    engine: Engine
    learner: Learner
    pair: DrafterPair
    worker: Worker
    overview: Overview
    loaded: LoadedModel
    network: SpecBlock  # that serves

    def start(self, wake: Callable[[], None] = lambda: None) -> None:
        """Begin to learn; `wake` makes an idle engine step once, so that new weights need not wait for a request."""
        self.pair.waits = wake
        self.worker.start()

    def stop(self) -> None:
        """End the learning thread, which stores its state."""
        if not self.worker.stop(_STORING_SECONDS):
            logger.error("learning did not end within %.0f seconds; its last state may be lost", _STORING_SECONDS)

    def settle(self, timeout_seconds: float) -> bool:
        """Wait until every finished query is heard and every update that is due is done."""
        return self.worker.settle(timeout_seconds)

    def status(self) -> AdaptationStatus:
        """Waits for an update under way, as everything below does. Raises CancelledError once learning is stopped."""
        return self.worker.ask(lambda: self.overview.status(self.worker)).result()

    def pause(self) -> None:
        self.worker.ask(self.learner.pause).result()

    def resume(self) -> None:
        self.worker.ask(self.learner.resume).result()

    def rollback(self) -> int:
        """Serve what was before, as a new version. # -> that version"""
        return self.worker.ask(self.learner.rollback).result().version

    def load_from_disk(self, folder: Path) -> int:
        """Serve the drafter in a folder, as a new version; no gate is asked. Raises DrafterError, NotStored."""
        weights = self._fitting(trained.load_network(folder, self.loaded), folder)
        return self.worker.ask(lambda: self.learner.adopt(weights)).result()

    def _fitting(self, network: SpecBlock, folder: Path) -> dict[str, Tensor]:
        """The weights of a network that may stand in for the one that serves. Raises DrafterError."""
        if network.config != self.network.config:
            raise DrafterError(f"drafter {folder}: its shapes or switches are not those of the drafter that serves")
        if not torch.equal(network.d2t, self.network.d2t):
            raise DrafterError(f"drafter {folder}: its vocabulary is not that of the drafter that serves")
        weights = {name: value.detach() for name, value in network.named_parameters()}
        if not all_finite(weights):
            raise DrafterError(f"drafter {folder}: holds weights that are not finite")
        return weights


def build_adaptive(
    assembly: Assembly,
    config: AdaptationConfig,
    *,
    folder: Path,
    emit: Emit,
    policy: BudgetPolicy | None = None,
    limits: EngineLimits | None = None,
    seed: int = 0,
    clock: Callable[[], float] = time.time,
) -> Adaptive:
    """An engine as the assembly would build it, with a drafter of its own that learns, or goes on with what it had
    learnt in `folder`. Raises StartupError."""
    limits = limits or assembly.limits
    source = _replaceable(assembly)
    network = source.weights.model
    built = _learner(assembly, config, source, folder, emit, limits, seed, clock)
    worker = build_worker(config, built.learner)
    tables = _tables(config, network, limits)
    weights = replace(
        source.weights, recorder=_recorder(config, network, limits, tables), version=lambda: built.pair.version
    )
    engine = assembly.engine(
        assembly.drafter(limits=limits, weights=weights), policy, limits, _Told(built.pair, tables, worker)
    )
    built.learner.restore()
    return Adaptive(engine, built.learner, built.pair, worker, built.overview, assembly.loaded, network)


@dataclass(frozen=True, slots=True)
class _Told:
    """The engine's `Learning`: weights come in here, and what a query left behind goes out."""

    pair: DrafterPair
    tables: FeedbackRecorder
    worker: Worker

    def between_steps(self) -> int:
        return self.pair.between_steps()

    def ended(self, query: Query) -> None:
        self.worker.offer(self.tables.finish(query))


def _replaceable(assembly: Assembly) -> Replaceable:
    _, folder = choose_drafter(assembly.config)
    known = assembly.weights
    if folder is None or known is None:
        raise StartupError(
            f"drafter {assembly.drafter_name} has nothing to learn: set drafter to specblock or lookup+specblock with "
            "trained weights, or set adaptation.enabled to false"
        )
    return trained.load_replaceable(
        folder, assembly.loaded, blocks=known.blocks, starts=known.starts, policy=known.policy
    )


def _learner(
    assembly: Assembly,
    config: AdaptationConfig,
    source: Replaceable,
    folder: Path,
    emit: Emit,
    limits: EngineLimits,
    seed: int,
    clock: Callable[[], float],
) -> Built:
    network, device = source.weights.model, assembly.target.device
    drafter = ServedDrafter(
        config=network.config,
        weights=source.first,
        vocabulary=network.d2t,
        prepare=source.prepare,
        embed=source.weights.embed,
        max_nodes=limits.max_budget,
    )
    autocast = assembly.loaded.model.dtype == torch.bfloat16
    return build_learner(
        config, drafter, folder=folder, device=device, clock=clock, seed=seed, autocast=autocast, emit=emit
    )


def _tables(config: AdaptationConfig, network: SpecBlock, limits: EngineLimits) -> FeedbackRecorder:
    shape = network.config
    return FeedbackRecorder(
        max_sequences=limits.max_sequences,
        window_tokens=config.window_tokens,
        width=len(shape.tap_layers) * shape.hidden_size,
        hidden=shape.hidden_size,
        top=min(config.target_top, shape.target_vocab_size),
        dtype=network.dtype,
        device=network.d2t.device,
    )


def _recorder(
    config: AdaptationConfig, network: SpecBlock, limits: EngineLimits, tables: FeedbackRecorder
) -> BlockRecorder:
    return BlockRecorder(
        tables,
        t2d=network.t2d,
        max_sequences=limits.max_sequences,
        block_size=network.config.block_size,
        hidden=network.config.hidden_size,
        target_top=min(config.target_top, network.config.target_vocab_size),
    )
