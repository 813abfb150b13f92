"""The command `adaptree trainer`. Imports nothing heavy before it runs, so that help answers at once."""

from typing import Annotated

import typer
from pydantic import SecretStr

from service.config import LoadedConfig, ServiceConfig
from service.errors import StartupError


def trainer(
    loaded: LoadedConfig,
    redis: Annotated[
        str | None, typer.Option("--redis", metavar="URL", help="The same as --adaptation.redis-url.")
    ] = None,
) -> None:
    """Learn for the replicas that share a Redis server, in a process of its own that serves nobody."""
    from service.logging import configure_logging
    from service.trainer import train

    configure_logging(loaded.config.log_level, as_json=loaded.config.log_json)
    train(_with_url(loaded.config, redis))


def _with_url(config: ServiceConfig, url: str | None) -> ServiceConfig:
    """It leads if nobody else does, whatever role the replicas of the same configuration have."""
    settings = config.adaptation
    chosen = settings.redis_url if url is None else SecretStr(url)
    if chosen is None:
        raise StartupError("a trainer needs replicas to learn for: give --redis URL, or set adaptation.redis_url")
    changes = {"enabled": True, "redis_url": chosen, "redis_role": "auto"}
    return config.model_copy(update={"adaptation": settings.model_copy(update=changes)})
