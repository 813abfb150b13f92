"""Assembles a server that learns (engine, drafter, learner and its thread), or a trainer for other replicas."""

import hashlib
import hmac
import logging
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Final

from pydantic import SecretStr

from adaptation.checkpoint import all_finite
from adaptation.config import AdaptationConfig, Tuning
from adaptation.learner import Learner, build_learner
from adaptation.persistence import owned
from adaptation.policy import Bandit
from adaptation.records import AdaptationStatus, Emit, Event, EventKind
from adaptation.replay_buffer import ReplayFile
from adaptation.replicas.exchange import Replicas, join_replicas
from adaptation.timing import TrainingTime
from adaptation.weights import ANCHOR, DrafterWeights, ServedDrafter, in_place
from adaptation.worker import Worker
from drafters import folders as published
from drafters.decision import RegretLedger
from drafters.feedback import Query
from drafters.files import lock
from drafters.network import checkpoint
from drafters.network.checkpoint import DrafterError, weights_of
from drafters.network.model import DrafterConfig
from drafters.network.recording import FeedbackRecorder
from drafters.network.served import ServingNetwork
from kernels.cpu.library import use_threads
from kernels.layers import Embedding
from service.assembly import Assembly, device_of, load_target
from service.config import ServiceConfig
from service.drafter import LoadedDrafter, begin_drafter, choose_drafter, load_drafter, load_network, source_of
from service.engine.budget import Budget
from service.engine.engine import Engine, EngineLimits
from service.engine.stats import StepStats
from service.engine.weights import LoadedModel
from service.errors import InvalidRequest, StartupError
from service.learning.learnt import Origin
from service.observability.guard import Guard
from service.past.file import key_beside, key_path

logger = logging.getLogger(__name__)

_HASH_LENGTH = 16
_WARNINGS: Final[frozenset[EventKind]] = frozenset({"rolled_back", "failed", "not_stored"})
_STORING_SECONDS = 60.0  # the training copy and its optimizers are large, and the thread has a low priority


@dataclass
class Adaptive:
    """A server that learns: its engine, its learner, and their control. `engine` belongs to the engine's thread and
    `learner` to the worker's; the methods may be called from any thread."""

    engine: Engine
    learner: Learner
    worker: Worker
    replicas: Replicas
    loaded: LoadedModel
    network: ServingNetwork
    reason: str  # why it learns, as `decide` describes it

    def start(self, wake: Callable[[], None] = lambda: None) -> None:
        """Start learning. `wake` makes an idle engine run one step, so that new weights are served without waiting for
        a request."""
        self.learner.weights.on_staged = wake
        self.worker.start()
        self.worker.ask(self._start_process).result()  # before serving, which its imports would slow down
        self.replicas.start()

    def _start_process(self) -> None:
        """Start the training process in the thread with which it ends."""
        try:
            self.learner.training.start()
        except OSError as error:
            logger.error("the training process did not start; the first query will try again: %s", error)

    def stop(self) -> None:
        """Stop learning, and save its state."""
        stop_learning(self.worker, self.replicas)
        self.learner.training.close()

    def status(self) -> AdaptationStatus:
        """Return the status of learning. Like all methods below, this waits for the current optimizer step, and raises
        CancelledError after `stop`."""
        status = self.worker.ask(lambda: self.learner.status(self.worker)).result()
        waits = "" if self.learner.training.time.pauses.suffice() else "; waits for idle time"
        return replace(status, replicas=self.replicas.status(), reason=self.reason + waits)

    def pause(self) -> None:
        """Abandon the current update and start no other, here and in replicas that lead later. Raises InvalidRequest on
        a follower."""
        self._check_leads()
        self.worker.ask(self.learner.pause).result()

    def resume(self) -> None:
        """Resume learning; a replica that was paused as the leader may be resumed as a follower. Raises InvalidRequest
        on another follower."""
        if not self.learner.paused:
            self._check_leads()
        self.worker.ask(self.learner.resume).result()

    def rollback(self) -> int:
        """Serve the weights before the current ones as a new version; returns that version. Raises InvalidRequest on a
        follower."""
        self._check_leads()
        return self.worker.ask(self.learner.rollback).result().version

    def load_from_disk(self, folder: Path) -> int:
        """Serve the drafter in a folder as a new version, bypassing the gate; returns that version. Raises
        DrafterError, NotStored, and InvalidRequest on a follower."""
        self._check_leads()
        network = load_network(folder, self.loaded)
        if network.config != self.network.config:
            raise DrafterError(f"drafter {folder}: its shapes or switches differ from those of the serving drafter")
        weights = weights_of(network)
        if not all_finite(weights.values()):
            raise DrafterError(f"drafter {folder}: has weights that are not finite")
        return self.worker.ask(lambda: self.learner.adopt(weights)).result()

    def _check_leads(self) -> None:
        """Raise InvalidRequest on a follower, which would return to the leader's version at once."""
        replicas = self.replicas.status()
        if replicas.role == "following":
            raise InvalidRequest(
                f"This replica serves what {replicas.leader or 'its leader'} announces; ask that one.",
                code="not_leading",
            )


def build_adaptive(
    assembly: Assembly,
    *,
    folder: Path,
    emit: Emit,
    budget: Budget | None = None,
    limits: EngineLimits | None = None,
    tuning: Tuning | None = None,
    policy: Bandit | None = None,
) -> Adaptive:
    """Build an engine whose drafter learns, and restore the learning state in `folder` if there is one. `emit` receives
    learning events; `policy` replaces the configured learning policy. Raises StartupError."""
    config, limits, tuning = assembly.config.adaptation, limits or assembly.limits, tuning or Tuning()
    ledger, source, parts = RegretLedger(), _own_drafter(assembly), assembly.loaded.parts
    network, table = source.serving.network, parts.embedding
    train_table = table if config.train_device == "same" else table.to(device_of(config.train_device))
    drafter = ServedDrafter(
        config=network.config,
        weights=source.weights,
        target_head=parts.head,
        prepare=network.prepare,
        embed=Embedding(train_table),
        embedding=table,
        blocks=source.serving.blocks,
        made=source.made,
        given=source.given,
    )
    with _refusing():
        learner = build_learner(config, drafter, folder=folder, emit=emit, tuning=tuning, policy=policy)
        _keep_texts(learner, assembly.config, parts.identity, network.config)
        worker, replicas = join_replicas(
            config, learner, drafter, tuning, target_identity=assembly.loaded.parts.identity
        )
    _write_origin(folder, assembly.config, assembly.loaded, network.config, assembly.drafter_folder)
    shape = network.config
    recorder = FeedbackRecorder(
        shape,
        network.t2d,
        max_sequences=limits.max_sequences,
        window_tokens=tuning.window_tokens,
        top=min(tuning.target_top, shape.target_vocab_size),
        dtype=network.dtype,
        wanted=learner.sampler.draws,
    )
    recorder.captured = assembly.target.capture is not None
    guard = Guard()
    worker.on_death = partial(guard.count, "adaptation")
    weights = replace(
        source.serving,
        recorder=recorder,
        attempt=partial(guard.run, "recorder"),
        version=lambda: learner.weights.version,
        ready=lambda: source.made or learner.weights.origin != ANCHOR,
    )
    hooks = _EngineHooks(learner.weights, learner.training.time, recorder, replicas, guard)
    drafting = assembly.drafter(limits=limits, weights=weights, ledger=ledger)
    engine = assembly.engine(drafting, budget, limits, hooks, ledger)
    learner.restore()
    return Adaptive(engine, learner, worker, replicas, assembly.loaded, network, assembly.learns[1])


def build_trainer(config: ServiceConfig) -> tuple[Worker, Replicas]:
    """Build a learning thread and its connection to the replicas that it learns for. Of the target, only embedding and
    head are kept. The state has its own folder, next to that of a replica with the same state_dir. Raises
    StartupError."""
    loaded = load_target(config, device_of(config.device), begin=begin_drafter(config))
    _, source = choose_drafter(config, starts=loaded.initial_drafter is not None)
    with _refusing():
        network = loaded.initial_drafter
        if network is None and source is not None:
            network = load_network(source, loaded)
    if network is None:
        raise StartupError(f"no drafter to train for {config.model}: set drafter_path to a folder with trained weights")
    drafter = ServedDrafter(
        config=network.config,
        weights=weights_of(network),
        target_head=loaded.parts.head,
        prepare=in_place(network),
        embed=Embedding(loaded.parts.embedding),
        embedding=None,
        blocks=network.config.blocks(config.draft_blocks),
        made=loaded.initial_drafter is None,
    )
    folder = learning_folder(config.state_dir, loaded, source)
    folder = owned(folder.with_name(f"{folder.name}-trainer"))
    with _refusing():
        learner = build_learner(config.adaptation, drafter, folder=folder, emit=log_event, serves=False)
        _keep_texts(learner, config, loaded.parts.identity, network.config)
        worker, replicas = join_replicas(
            config.adaptation, learner, drafter, Tuning(), target_identity=loaded.parts.identity
        )
    _write_origin(folder, config, loaded, network.config, source)

    def write() -> None:
        learner.weights.between_steps()  # no engine runs here, so staged weights serve at once

    learner.weights.on_staged = write
    learner.restore()
    write()
    logger.info("learning for the replicas of target %s, state in %s", loaded.parts.identity, folder)
    return worker, replicas


def with_url(config: ServiceConfig, url: str | None) -> ServiceConfig:
    """Derive a trainer's configuration, in which learning is always on. `url` replaces the configured Redis URL. Raises
    StartupError if there is none."""
    settings = config.adaptation
    chosen = settings.redis_url if url is None else SecretStr(url)
    if chosen is None:
        raise StartupError("a trainer needs replicas to learn for: give --redis URL, or set adaptation.redis_url")
    policy = AdaptationConfig().policy if settings.policy == "never" else settings.policy
    changes = {"enabled": True, "redis_url": chosen, "policy": policy}
    return config.model_copy(update={"adaptation": settings.model_copy(update=changes)})


def train(config: ServiceConfig) -> None:
    """Run a trainer for replicas until SIGTERM or SIGINT. Raises StartupError."""
    use_threads(1)
    worker, replicas = build_trainer(config)
    stopped = threading.Event()

    def stop(number: int, frame: FrameType | None) -> None:
        stopped.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    worker.start()
    replicas.start()
    logger.info("ready: learning for the replicas that share the store")
    stopped.wait()
    stop_learning(worker, replicas)


@contextmanager
def _refusing() -> Iterator[None]:
    """Convert a ValueError inside the block to a StartupError."""
    try:
        yield
    except ValueError as error:
        raise StartupError(str(error)) from error


def stop_learning(worker: Worker, replicas: Replicas) -> None:
    """Stop the threads of learning and of replicas; the learning thread saves its state."""
    if not replicas.stop():
        logger.warning("the store of the replicas did not answer in time; the lease ends by itself")
    if not worker.stop(_STORING_SECONDS):
        logger.error("learning did not end within %.0f seconds; its last state may be lost", _STORING_SECONDS)


@dataclass(frozen=True, slots=True)
class _EngineHooks:
    """Implements the engine's `Learning` hooks: new weights before a step, feedback after a query."""

    weights: DrafterWeights
    time: TrainingTime
    recorder: FeedbackRecorder
    replicas: Replicas
    guard: Guard

    def stepped(self, stats: StepStats) -> bool:
        """Record the time of a step; returns whether no training ran at the same time."""
        kind = bool(stats.prompt_tokens), bool(stats.drafted_nodes), stats.verify_rows.bit_length()
        return self.time.stepped(kind, stats.seconds)

    def between_steps(self, *, idle: bool) -> int:
        if not idle:
            self.time.stepping()
        return self.weights.between_steps()

    def ended(self, query: Query) -> None:
        self.replicas.offer(self.recorder.finish(query))

    def forgot(self, scope: str | None) -> None:
        self.recorder.forget()  # of running sequences, whose later tokens would come with the earlier ones
        self.replicas.forget(scope)


def _own_drafter(assembly: Assembly) -> LoadedDrafter:
    """Load a second copy of the drafter, whose weights learning replaces. Raises StartupError if it has no weights."""
    found = load_drafter(assembly.drafter_folder, assembly.loaded, blocks=assembly.config.draft_blocks, learns=True)
    if found is None:
        raise StartupError(
            f"drafter {assembly.drafter_name} has nothing to learn: set drafter to specblock or memory+specblock with "
            "trained weights, or set adaptation.enabled to false"
        )
    return found


def _keep_texts(learner: Learner, config: ServiceConfig, target: str, drafter: DrafterConfig) -> None:
    """Keep the learner's texts in the file that the operator named, if any, locked until this process ends. Raises
    StartupError, and ValueError for a file that is not this server's."""
    path, names = config.adaptation.replay_file, naming_secret(config)
    if path is None or names is None:
        return
    key = key_beside(path)
    try:
        lock(key_path(path))
    except BlockingIOError as error:
        raise ValueError(f"adaptation.replay_file: {path} is in use by another process") from error
    shape = hashlib.sha256(drafter.as_json.encode()).hexdigest()
    named = hmac.digest(key, names, "sha256").hex()
    learner.keep_texts_in(ReplayFile(path, key, {"target": target, "drafter": shape, "names of clients": named}))


def naming_secret(config: ServiceConfig) -> bytes | None:
    """Return the secret that keeps the hashes of scopes the same across restarts and replicas, or None. Raises
    StartupError."""
    shared, file = config.adaptation.redis_secret, config.memory_file or config.adaptation.replay_file
    if shared is not None:
        return shared.get_secret_value().encode()
    return None if file is None else key_beside(file)


def _write_origin(
    folder: Path, config: ServiceConfig, loaded: LoadedModel, drafter: DrafterConfig, deployed: Path | None
) -> None:
    """Write the drafter's provenance, which an export needs, next to the snapshots. A failure is logged."""
    try:
        sha256 = None if deployed is None else hashlib.sha256(published.weights_bytes(deployed)).hexdigest()
        model = source_of(config)
        Origin(loaded.parts.identity, drafter, model, sha256).write(folder)
    except OSError as error:
        logger.warning("learnt drafters cannot be exported, because their provenance was not written: %s", error)


def learning_folder(state_dir: Path, loaded: LoadedModel, drafter: Path | None) -> Path:
    """Return the folder of the learning state. There is one for each target and deployed drafter; without a deployed
    drafter, one for each target and shape of the drafter that is solved from traffic."""
    digest = hashlib.sha256()
    if drafter is None:
        assert loaded.initial_drafter is not None, "nothing learns"
        digest.update(loaded.initial_drafter.config.as_json.encode())
    else:
        if drafter.is_dir():  # or else in a file of its target
            digest.update((drafter / checkpoint.CONFIG_FILE).read_bytes())
        digest.update(published.weights_bytes(drafter))
    return state_dir / "adaptation" / f"{loaded.parts.identity}-{digest.hexdigest()[:_HASH_LENGTH]}"


def log_event(event: Event) -> None:
    """Log a learning event as one line."""
    level = logging.WARNING if event.kind in _WARNINGS else logging.INFO
    numbers = ", ".join(f"{name} {value:.4g}" for name, value in event.numbers.items())
    reason = " ".join(event.reason.split())  # messages of exceptions may have several lines
    line = f"learning: {event.kind.replace('_', ' ')} ({reason}), drafter version {event.version}"
    fields = {"event": event.kind, "drafter_version": event.version, "reason": event.reason}
    extra = {**fields, "numbers": dict(event.numbers)}
    logger.log(level, "%s", f"{line}: {numbers}" if numbers else line, extra=extra)
