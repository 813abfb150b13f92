"""The service on Ray Serve: the replicas are one deployment, the ingress is another.

Ray places, scales and replaces replicas and routes requests to them; the ingress resumes streams as it does in front of
plain server processes.
"""

import asyncio
import os
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import uvicorn
from fastapi import FastAPI
from ray import serve
from ray.exceptions import RayError
from ray.serve.config import AutoscalingConfig, RequestRouterConfig
from ray.serve.exceptions import BackPressureError, RayServeException

from drafters.files import lock
from service.api.connections import listen, server_config, started, url_of
from service.config_sources import load_config
from service.errors import QueueFull
from service.ingress.app import create_ingress
from service.ingress.forwarding import STALL_SECONDS, WholeAnswer
from service.ingress.replicas import Broken, ForwardedRequest, Headers, HttpReplicas, ReplicaAnswer
from service.logging import configure_logging
from service.serve import application

_ROUTER = "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter"
_MIN_REPLICAS = 2  # with a single one, interrupted streams would wait until its replacement has loaded
_MAX_TRIES = 3
_MAX_STREAMS = 10_000  # open streams per ingress
_INGRESS_DRAIN_SECONDS = 600.0
_HEALTH_SECONDS = 5.0
_RETRY_AFTER_SECONDS = 5
_HOST = "127.0.0.1"
_CLOSE_SECONDS = 5


def app(settings: dict[str, Any]) -> Any:
    """Build the Ray application for `serve run service.ray_serve:app NAME=VALUE` or the `args` of a configuration file.

    `settings`: settings of `adaptree serve` by their flat names, and optionally `config`, the path of a settings file.
    Raises StartupError.
    """
    return deployed(settings, _MIN_REPLICAS)


def deployed(settings: dict[str, Any], replicas: int) -> Any:
    """Build an ingress in front of `replicas` replicas, which Ray scales to at most twice as many. Raises
    StartupError."""
    config = load_config(settings).config
    # Where a model is shared, the replica's process starts those that follow, on the same node.
    bundles = [{"CPU": config.threads or 1}] * config.tensor_parallel if config.tensor_parallel > 1 else None
    replica = serve.deployment(
        placement_group_bundles=bundles,
        placement_group_strategy=bundles and "STRICT_PACK",
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
    )(ServerReplica).bind(settings)
    return serve.deployment(
        name="Ingress", max_ongoing_requests=_MAX_STREAMS, graceful_shutdown_timeout_s=_INGRESS_DRAIN_SECONDS
    )(serve.ingress()(Ingress)).bind(replica)


class ServerReplica:
    """Deployment of one server process. The server listens on this node's loopback address only, and gets its requests
    through Ray."""

    async def __init__(self, settings: Mapping[str, object]) -> None:  # type: ignore[misc]  # Ray awaits it
        config = load_config(settings).config
        configure_logging(config.log_level, as_json=config.log_json)
        app, self._runtime = application(config)
        listening = listen(_HOST, 0)
        http = server_config(app, _HOST, 0, shutdown_seconds=_CLOSE_SECONDS)
        http.forwarded_allow_ips = _HOST  # not FORWARDED_ALLOW_IPS: this process itself forwards the requests
        self._server = uvicorn.Server(http)
        async with _alone_on_this_node(config.state_dir):
            self._serving = asyncio.create_task(self._server.serve([listening]))
            await started(self._server, self._serving)
            await self._runtime.wait_until_loaded()
        self._replicas = HttpReplicas([url_of(self._server)], stall_seconds=STALL_SECONDS)

    async def answer(self, request: ForwardedRequest) -> AsyncIterator[tuple[int, Headers] | bytes]:
        """Forward a request to the server; yields its status and headers, then its body in chunks."""
        answer = await self._replicas.send(request, set())
        assert answer is not None, "there is one replica"
        try:
            yield answer.status, answer.headers
            async for chunk in answer.chunks:
                yield chunk
        finally:
            await answer.close()

    async def check_health(self) -> None:
        """Raise RuntimeError if Ray must replace the replica."""
        if self._runtime.state == "failed":
            raise RuntimeError("the engine has stopped")

    async def __del__(self) -> None:
        """Stop the server. Ray calls this when the running requests have ended, or after `drain_seconds`."""
        self._server.should_exit = True
        await self._serving
        await self._replicas.close()


class Ingress:
    """Deployment that clients connect to: the ingress's ASGI application in front of the replicas."""

    def __init__(self, replicas: Any) -> None:
        self._replicas = HandleReplicas(replicas)

    def __serve_build_asgi_app__(self) -> FastAPI:
        return create_ingress(self._replicas)


class HandleReplicas:
    """The replicas of a Ray deployment; Ray's router chooses one by the prompt's beginning."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle.options(stream=True)

    async def send(self, request: ForwardedRequest, tried: set[str]) -> ReplicaAnswer | None:
        """Send through Ray's router; see `Replicas.send`. `tried` holds session ids instead of replicas, since another
        id most likely leads to another replica. Raises Broken."""
        names = (f"{request.affinity}-{attempt}" for attempt in range(_MAX_TRIES))
        affinity = next((name for name in names if name not in tried), None)
        if affinity is None:
            return None
        tried.add(affinity)
        answers = self._handle.options(session_id=affinity).answer.remote(request)

        async def close() -> None:
            answers.cancel()

        try:
            status, headers = await anext(answers)
        except BackPressureError as error:
            full = QueueFull(str(error), code="queue_full", retry_after_seconds=_RETRY_AFTER_SECONDS)
            return _buffered(WholeAnswer.of(full))
        except (RayError, RayServeException) as error:
            raise Broken(f"a replica failed: {type(error).__name__}") from error
        except BaseException:
            answers.cancel()
            raise
        return ReplicaAnswer(status, headers, _chunks(answers), close)

    async def close(self) -> None:
        """No-op: handles belong to Ray."""


async def _chunks(answers: Any) -> AsyncGenerator[bytes, None]:
    try:
        async for chunk in answers:
            yield chunk
    except (RayError, RayServeException) as error:
        raise Broken(f"a replica failed: {type(error).__name__}") from error


def _buffered(whole: WholeAnswer) -> ReplicaAnswer:
    async def chunks() -> AsyncGenerator[bytes, None]:
        yield whole.body

    async def close() -> None: ...

    return ReplicaAnswer(whole.status, whole.headers, chunks(), close)


@asynccontextmanager
async def _alone_on_this_node(folder: Path) -> AsyncIterator[None]:
    """Let only one replica of this node load at a time: the first one fetches and converts the model for all."""
    folder.mkdir(parents=True, exist_ok=True)
    with os.fdopen(await anyio.to_thread.run_sync(partial(lock, folder / "loading", waits=True))):
        yield
