"""An engine whose drafter learns while it serves: puts engine, drafter, learner and learning thread together.

Composition only. What may be asked from any thread runs in the thread that learns, or touches nothing of it.
"""

import hashlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from adaptation.assembly import Built, ServedDrafter, build_learner
from adaptation.config import AdaptationConfig
from adaptation.feedback import RecordingSampler
from adaptation.learner import Learner
from adaptation.overview import Overview
from adaptation.process import TrainingProcess
from adaptation.records import AdaptationStatus, Emit
from adaptation.replicas.exchange import Joined, Replicas, join_replicas
from adaptation.trainer import all_finite
from adaptation.weights import DrafterWeights
from adaptation.worker import Worker
from drafters.feedback import FeedbackRecorder, Query
from drafters.specblock import checkpoint
from drafters.specblock.checkpoint import DrafterError
from drafters.specblock.model import Embed, SpecBlock
from drafters.specblock.recording import BlockRecorder
from drafters.specblock.weights import weights_of
from service.assembly import Assembly, choose_drafter, device_of
from service.engine import trained
from service.engine.budget import BudgetPolicy
from service.engine.build import EngineLimits
from service.engine.engine import Engine
from service.engine.trained import Replaceable
from service.engine.weights import LoadedModel
from service.errors import InvalidRequest, StartupError

logger = logging.getLogger(__name__)

_HASH_LENGTH = 16
_STORING_SECONDS = 60.0  # the training copy and its optimizers are large, and the thread gives way to everybody


@dataclass
class Adaptive:
    """What serves and what learns. `engine` belongs to the engine's thread, `learner` and `weights` to the worker's."""

    engine: Engine
    learner: Learner
    weights: DrafterWeights
    worker: Worker
    replicas: Replicas
    overview: Overview
    loaded: LoadedModel
    network: SpecBlock  # that serves
    process: TrainingProcess | None

    def start(self, wake: Callable[[], None] = lambda: None) -> None:
        """Begin to learn; `wake` makes an idle engine step once, so that new weights need not wait for a request."""
        self.weights.waits = wake
        if self.process is not None:
            _start_early(self.process)
        self.worker.start()
        self.replicas.start()

    def stop(self) -> None:
        """End the learning thread, which stores its state."""
        if not self.replicas.stop():
            logger.warning("the store of the replicas did not answer in time; leaving without a word")
        if not self.worker.stop(_STORING_SECONDS):
            logger.error("learning did not end within %.0f seconds; its last state may be lost", _STORING_SECONDS)
        if self.process is not None:
            self.process.close()

    def settle(self, timeout_seconds: float) -> bool:
        """Wait until every finished query is heard and every update that is due is done."""
        return self.worker.settle(timeout_seconds)

    def status(self) -> AdaptationStatus:
        """Waits for an update under way, as everything below does. Raises CancelledError once learning is stopped."""
        status = self.worker.ask(lambda: self.overview.status(self.worker)).result()
        return replace(status, replicas=self.replicas.status())

    def pause(self) -> None:
        self.worker.ask(self.learner.pause).result()

    def resume(self) -> None:
        self.worker.ask(self.learner.resume).result()

    def rollback(self) -> int:
        """Serve what was before, as a new version. # -> that version; raises InvalidRequest"""
        self._check_leads()
        return self.worker.ask(self.learner.rollback).result().version

    def load_from_disk(self, folder: Path) -> int:
        """Serve the drafter in a folder, as a new version; no gate is asked. Raises DrafterError, NotStored,
        InvalidRequest."""
        self._check_leads()
        weights = self._fitting(trained.load_network(folder, self.loaded), folder)
        return self.worker.ask(lambda: self.learner.adopt(weights)).result()

    def _check_leads(self) -> None:
        """What is served is decided by the replica that leads: any other would be told otherwise at once."""
        replicas = self.replicas.status()
        if replicas.standing == "following":
            raise InvalidRequest(
                f"This replica serves what {replicas.leader or 'its leader'} announces; ask that one.",
                code="not_leading",
            )

    def _fitting(self, network: SpecBlock, folder: Path) -> dict[str, Tensor]:
        """The weights of a network that may stand in for the one that serves. Raises DrafterError."""
        if network.config != self.network.config:
            raise DrafterError(f"drafter {folder}: its shapes or switches are not those of the drafter that serves")
        weights = weights_of(network)
        if not all_finite(weights.values()):
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
    drafter = _served(assembly, source, limits, _train_embed(assembly, config))
    built = _learner(assembly, config, drafter, folder, emit, seed, clock)
    joined = _joined(config, built, drafter, assembly.loaded.parts.identity)
    tables = _tables(config, network, limits)
    recorder = _recorder(config, network, limits, tables, built.sampler)
    weights = replace(source.weights, recorder=recorder, version=lambda: built.weights.version)
    engine = assembly.engine(
        assembly.drafter(limits=limits, weights=weights), policy, limits, _Told(built.weights, tables, joined.replicas)
    )
    built.learner.restore()
    return Adaptive(
        engine,
        built.learner,
        built.weights,
        joined.worker,
        joined.replicas,
        built.overview,
        assembly.loaded,
        network,
        built.process,
    )


def _start_early(process: TrainingProcess) -> None:
    """Before there is anything to serve that its imports would slow down."""
    try:
        process.start()
    except OSError as error:
        logger.error("the process that trains did not start; the first query to learn from tries again: %s", error)


@dataclass(frozen=True, slots=True)
class _Told:
    """The engine's `Learning`: weights come in here, and what a query left behind goes out."""

    weights: DrafterWeights
    tables: FeedbackRecorder
    replicas: Replicas

    def between_steps(self) -> int:
        return self.weights.between_steps()

    def ended(self, query: Query) -> None:
        self.replicas.offer(self.tables.finish(query))


def _replaceable(assembly: Assembly) -> Replaceable:
    _, folder = choose_drafter(assembly.config)
    known = assembly.weights
    if folder is None or known is None:
        raise StartupError(
            f"drafter {assembly.drafter_name} has nothing to learn: set drafter to specblock or lookup+specblock with "
            "trained weights, or set adaptation.enabled to false"
        )
    found = trained.load_replaceable(
        folder, assembly.loaded, blocks=known.blocks, starts=known.starts, policy=known.policy
    )
    return replace(found, weights=replace(found.weights, capture=known.capture))


def _train_embed(assembly: Assembly, config: AdaptationConfig) -> Embed:
    """The target's embedding where training computes. Raises StartupError for a device that is not there."""
    table, name = assembly.loaded.parts.embedding, config.train_device
    return trained.embed_with(table if name == "same" else table.to(device_of(name)))


def _served(assembly: Assembly, source: Replaceable, limits: EngineLimits, embed: Embed) -> ServedDrafter:
    network = source.weights.model
    return ServedDrafter(
        config=network.config,
        weights=source.first,
        target_head=assembly.loaded.parts.head,
        prepare=source.prepare,
        embed=embed,
        embedding=assembly.loaded.parts.embedding,
        max_nodes=limits.max_budget,
    )


def _learner(
    assembly: Assembly,
    config: AdaptationConfig,
    drafter: ServedDrafter,
    folder: Path,
    emit: Emit,
    seed: int,
    clock: Callable[[], float],
) -> Built:
    device, in_bf16 = assembly.target.device, assembly.loaded.model.dtype == torch.bfloat16
    try:
        return build_learner(
            config, drafter, folder=folder, device=device, clock=clock, seed=seed, in_bf16=in_bf16, emit=emit
        )
    except ValueError as error:
        raise StartupError(str(error)) from error


def _joined(config: AdaptationConfig, built: Built, drafter: ServedDrafter, target_identity: str) -> Joined:
    try:
        return join_replicas(config, built, drafter, target_identity=target_identity)
    except ValueError as error:
        raise StartupError(f"adaptation.redis_url cannot be used: {error}") from error


def learning_folder(state_dir: Path, target_identity: str, drafter: Path) -> Path:
    """Where the state of learning lies: what was learnt fits one target and one deployed drafter only."""
    digest = hashlib.sha256()
    for name in (checkpoint.CONFIG_FILE, checkpoint.WEIGHTS_FILE):
        digest.update((drafter / name).read_bytes())
    return state_dir / "adaptation" / f"{target_identity}-{digest.hexdigest()[:_HASH_LENGTH]}"


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
    config: AdaptationConfig,
    network: SpecBlock,
    limits: EngineLimits,
    tables: FeedbackRecorder,
    sampler: RecordingSampler,
) -> BlockRecorder:
    return BlockRecorder(
        tables,
        t2d=network.t2d,
        max_sequences=limits.max_sequences,
        block_size=network.config.block_size,
        hidden=network.config.hidden_size,
        target_top=min(config.target_top, network.config.target_vocab_size),
        wanted=sampler.draws,
    )
