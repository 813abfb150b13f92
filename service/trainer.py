"""A process that learns for replicas that only follow: target's embedding, drafter and learner, but nobody to serve.

Its queries come from the store that the replicas share, and what it learns goes back there. Knows no HTTP.
"""

import logging
import signal
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import torch
from torch import Tensor
from torch.nn.functional import embedding

from adaptation.assembly import Built, ServedDrafter, build_learner
from adaptation.config import AdaptationConfig
from adaptation.replicas.exchange import Joined, join_replicas
from adaptation.weights import DrafterWeights, in_place
from drafters.specblock.checkpoint import DrafterError
from drafters.specblock.weights import weights_of
from service.adaptation_report import tell
from service.adaptive import learning_folder
from service.assembly import choose_drafter, device_of
from service.config import ServiceConfig
from service.engine import build, trained
from service.engine.weights import load_model
from service.errors import StartupError

logger = logging.getLogger(__name__)

_STORING_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class _Taught:
    """The drafter that is trained, and what its target says of itself."""

    drafter: ServedDrafter
    target_identity: str
    folder: Path  # it comes from
    device: torch.device
    in_bf16: bool


def train(config: ServiceConfig) -> None:
    """Learn until SIGTERM or interrupt. Raises StartupError."""
    torch.set_num_threads(config.num_threads)
    taught = _load(config)
    built = _learner(config, taught)
    joined = _joined(config.adaptation, built, taught)
    built.weights.waits = lambda: _write(built.weights)
    built.learner.restore()
    built.weights.between_steps()
    stopped = _told_to_stop()
    joined.worker.start()
    joined.replicas.start()
    logger.info("ready: learning for the replicas of target %s", taught.target_identity)
    stopped.wait()
    joined.replicas.stop()
    if not joined.worker.stop(_STORING_SECONDS):
        logger.error("learning did not end within %.0f seconds; its last state may be lost", _STORING_SECONDS)


def _told_to_stop() -> threading.Event:
    """Set by the signals that end a server."""
    stopped = threading.Event()

    def stop(number: int, frame: FrameType | None) -> None:
        stopped.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    return stopped


def _write(weights: DrafterWeights) -> None:
    """Nobody takes steps here, so that whatever waits for one need not wait."""
    weights.between_steps()


def _load(config: ServiceConfig) -> _Taught:
    """All of the target but its embedding and head is let go again."""
    _, folder = choose_drafter(config)
    if folder is None:
        raise StartupError(f"no drafter to train for {config.model}: set drafter_path to a folder with trained weights")
    device = device_of(config.device)
    dtype = build.default_dtype(device) if config.load_dtype == "auto" else getattr(torch, config.load_dtype)
    cache = config.state_dir / "cache"
    loaded = load_model(config.model, revision=config.revision, dtype=dtype, device=device, cache_dir=cache)
    try:
        network = trained.load_network(folder, loaded)
    except DrafterError as error:
        raise StartupError(str(error)) from error
    table = loaded.parts.embedding

    def embed(tokens: Tensor) -> Tensor:
        return embedding(tokens, table)

    drafter = ServedDrafter(
        config=network.config,
        weights=weights_of(network),
        target_head=loaded.parts.head,
        embedding=None,
        prepare=in_place(network),
        embed=embed,
        max_nodes=config.max_budget,
    )
    return _Taught(drafter, loaded.parts.identity, folder, device, dtype == torch.bfloat16)


def _learner(config: ServiceConfig, taught: _Taught) -> Built:
    """Its state lies beside a replica's that has the same state_dir, not in it."""
    usual = learning_folder(config.state_dir, taught.target_identity, taught.folder)
    return build_learner(
        config.adaptation,
        taught.drafter,
        folder=usual.with_name(f"{usual.name}-trainer"),
        device=taught.device,
        clock=time.time,
        seed=0,
        in_bf16=taught.in_bf16,
        emit=tell,
        serves=False,
    )


def _joined(config: AdaptationConfig, built: Built, taught: _Taught) -> Joined:
    try:
        return join_replicas(config, built, taught.drafter, target_identity=taught.target_identity)
    except ValueError as error:
        raise StartupError(f"adaptation.redis_url cannot be used: {error}") from error
