"""The command `adaptree trainer`: a process that learns for replicas that only follow, through the store that they
share, and serves nobody. Imports nothing heavy before it runs, so that help answers at once."""

import logging
import signal
import threading
from types import FrameType
from typing import Annotated

import typer
from pydantic import SecretStr

from adaptation.config import AdaptationConfig
from service.config import LoadedConfig, ServiceConfig
from service.errors import StartupError

logger = logging.getLogger(__name__)


def trainer(
    loaded: LoadedConfig,
    redis: Annotated[
        str | None, typer.Option("--redis", metavar="URL", help="The same as --adaptation.redis-url.")
    ] = None,
) -> None:
    """Learn for the replicas that share a Redis server, in a process of its own that serves nobody."""
    from service.logging import configure_logging

    configure_logging(loaded.config.log_level, as_json=loaded.config.log_json)
    train(with_url(loaded.config, redis))


def with_url(config: ServiceConfig, url: str | None) -> ServiceConfig:
    """It learns, though replicas of the same configuration may not."""
    settings = config.adaptation
    chosen = settings.redis_url if url is None else SecretStr(url)
    if chosen is None:
        raise StartupError("a trainer needs replicas to learn for: give --redis URL, or set adaptation.redis_url")
    policy = AdaptationConfig().policy if settings.policy == "never" else settings.policy
    changes = {"enabled": True, "redis_url": chosen, "policy": policy}
    return config.model_copy(update={"adaptation": settings.model_copy(update=changes)})


def train(config: ServiceConfig) -> None:
    """Learn until SIGTERM or interrupt. Raises StartupError."""
    import torch

    from service.learning.adaptive import build_trainer, stop_learning

    torch.set_num_threads(config.num_threads)
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
