"""The service on Ray Serve: replicas of it as one deployment, the ingress as another.

Ray places, scales, replaces and routes; streams are kept whole by the ingress as in front of plain processes.
"""

import fcntl
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
from fastapi import FastAPI
from ray import serve
from ray.exceptions import RayError
from ray.serve.config import AutoscalingConfig, RequestRouterConfig
from ray.serve.exceptions import BackPressureError, RayServeException

from service.config_sources import load_config
from service.errors import QueueFull
from service.ingress.app import create_ingress
from service.ingress.forwarding import Whole
from service.ingress.local import answered
from service.ingress.replicas import Answer, Asked, Broken, Headers
from service.logging import configure_logging
from service.serve import application

_ROUTER = "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter"
_LEAST_REPLICAS = 2  # with one, streams wait until another has loaded
_MOST_TRIES = 3
_MOST_STREAMS = 10_000  # of one ingress
_INGRESS_DRAIN_SECONDS = 600.0
_HEALTH_SECONDS = 5.0
_RETRY_AFTER_SECONDS = 5


def app(settings: dict[str, Any]) -> Any:
    """What `serve run service.ray_serve:app NAME=VALUE` and `args` of a configuration file build.

    Settings are those of `adaptree serve` by their flat names, and `config` for the path of a file with more of them.
    Raises StartupError.
    """
    return deployed(settings, _LEAST_REPLICAS)


def deployed(settings: dict[str, Any], replicas: int) -> Any:
    """An ingress before so many replicas, and twice as many under load."""
    config = load_config(settings).config
    replica = serve.deployment(
        name="Replica",
        max_ongoing_requests=config.max_sequences,
        max_queued_requests=config.max_waiting,
        autoscaling_config=AutoscalingConfig(
            min_replicas=replicas,
            max_replicas=2 * replicas,
            target_ongoing_requests=max(1, config.max_sequences // 2),
        ),
        request_router_config=RequestRouterConfig(request_router_class=_ROUTER),
        graceful_shutdown_timeout_s=config.drain_seconds,
        health_check_period_s=_HEALTH_SECONDS,
        health_check_timeout_s=_HEALTH_SECONDS,
    )(Replica).bind(settings)
    return serve.deployment(
        name="Ingress", max_ongoing_requests=_MOST_STREAMS, graceful_shutdown_timeout_s=_INGRESS_DRAIN_SECONDS
    )(serve.ingress()(Ingress)).bind(replica)


class Replica:
    """One server without a socket."""

    async def __init__(self, settings: Mapping[str, object]) -> None:  # type: ignore[misc]  # Ray awaits it
        config = load_config(settings).config
        configure_logging(config.log_level, as_json=config.log_json)
        self._app, self._runtime = application(config)
        self._running = AsyncExitStack()
        async with _alone_on_this_node(config.state_dir):
            await self._running.enter_async_context(self._app.router.lifespan_context(self._app))
            await self._runtime.wait_until_loaded()

    async def answer(self, asked: Asked) -> AsyncIterator[tuple[int, Headers] | bytes]:
        """Status and headers, then the body in pieces."""
        async with aclosing(answered(self._app, asked)) as pieces:
            async for piece in pieces:
                yield piece

    async def check_health(self) -> None:
        """Raises where the replica is to be replaced."""
        if self._runtime.state == "failed":
            raise RuntimeError("the engine has stopped")

    async def __del__(self) -> None:
        """Called by Ray once running requests have ended, or drain_seconds are over."""
        await self._running.aclose()


class Ingress:
    """The one that clients speak to."""

    def __init__(self, replicas: Any) -> None:
        self._replicas = HandleReplicas(replicas)

    def __serve_build_asgi_app__(self) -> FastAPI:
        return create_ingress(self._replicas)


class HandleReplicas:
    """Those of a deployment, one of which Ray's router chooses by the prompt's beginning."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle.options(stream=True)

    async def ask(self, asked: Asked, tried: set[str]) -> Answer | None:
        # Another session is most likely another replica's.
        names = (f"{asked.affinity}-{attempt}" for attempt in range(_MOST_TRIES))
        affinity = next((name for name in names if name not in tried), None)
        if affinity is None:
            return None
        tried.add(affinity)
        answers = self._handle.options(session_id=affinity).answer.remote(asked)

        async def close() -> None:
            answers.cancel()

        try:
            status, headers = await anext(answers)
        except BackPressureError as error:
            full = QueueFull(str(error), code="queue_full", retry_after_seconds=_RETRY_AFTER_SECONDS)
            return _told(Whole.of(full))
        except (RayError, RayServeException) as error:
            raise Broken(f"a replica broke off: {type(error).__name__}") from error
        except BaseException:
            answers.cancel()
            raise
        return Answer(status, headers, _chunks(answers), close)

    async def close(self) -> None:
        """Handles are Ray's."""


async def _chunks(answers: Any) -> AsyncGenerator[bytes, None]:
    try:
        async for chunk in answers:
            yield chunk
    except (RayError, RayServeException) as error:
        raise Broken(f"a replica broke off: {type(error).__name__}") from error


def _told(whole: Whole) -> Answer:
    async def chunks() -> AsyncGenerator[bytes, None]:
        yield whole.body

    async def close() -> None: ...

    return Answer(whole.status, whole.headers, chunks(), close)


@asynccontextmanager
async def _alone_on_this_node(folder: Path) -> AsyncIterator[None]:
    """One replica after the other: what the first one of a node fetches and converts, the others find."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "loading").open("w") as file:
        await anyio.to_thread.run_sync(fcntl.flock, file, fcntl.LOCK_EX)
        yield
