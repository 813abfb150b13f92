"""The server process: HTTP answers while the model loads; a line says when it is ready; SIGTERM drains."""

import asyncio
import logging
import time
from types import FrameType

import uvicorn

from drafters.tree import MAX_DEPTH
from service.api.app import create_app
from service.api.settings import ApiSettings
from service.assembly import Assembly, assemble, choose_drafter
from service.config import ServiceConfig
from service.engine.budget import REASONS
from service.engine.engine import StepReport
from service.engine.stats import LoadStats
from service.engine.thread import EngineThread
from service.metrics import Metrics
from service.runtime import ModelCard, Runtime, Served

logger = logging.getLogger(__name__)

_READ_SECONDS_AFTER_DRAIN = 5


def serve(config: ServiceConfig) -> None:
    """Serve until SIGTERM or interrupt. Raises StartupError when the model cannot be served as configured."""
    asyncio.run(_serve(config))


async def _serve(config: ServiceConfig) -> None:
    metrics = Metrics(
        max_depth=MAX_DEPTH,
        budget_reasons=REASONS,
        sources=choose_drafter(config)[0].split("+"),
        vllm_names=config.vllm_metric_names,
    )
    runtime = Runtime(lambda: _load(config, metrics), max_waiting=config.max_waiting)
    metrics.watch_event_loop(runtime.max_loop_lag_seconds)
    app = create_app(runtime, _api_settings(config), render_metrics=metrics.render)
    settings = uvicorn.Config(
        app,
        host=config.host,
        port=config.port,
        log_config=None,
        access_log=False,
        timeout_graceful_shutdown=_READ_SECONDS_AFTER_DRAIN,
    )
    server = _DrainingServer(settings, runtime, config.drain_seconds)
    serving = asyncio.create_task(server.serve())
    try:
        await _announce(server, runtime, serving)
    finally:
        await serving


async def _announce(server: "_DrainingServer", runtime: Runtime, serving: asyncio.Task[None]) -> None:
    """Say when the server is ready; end it when loading fails."""
    while not server.started and not serving.done():
        await asyncio.sleep(0.01)
    if serving.done():
        return
    try:
        await runtime.wait_until_loaded()
    except BaseException:
        server.should_exit = True
        raise
    logger.info("ready: %s/v1 (try %s/v1/models)", server.url, server.url)


class _DrainingServer(uvicorn.Server):
    """uvicorn that lets running answers end before it shuts down, while probes can see the server draining."""

    def __init__(self, config: uvicorn.Config, runtime: Runtime, drain_seconds: float) -> None:
        super().__init__(config)
        self._runtime = runtime
        self._drain_seconds = drain_seconds
        self._draining: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        port = self.servers[0].sockets[0].getsockname()[1]
        host = self.config.host
        return f"http://{'127.0.0.1' if host == '0.0.0.0' else host}:{port}"

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal drains; a second one ends at once."""
        if self._draining is not None:
            super().handle_exit(sig, frame)
            return
        logger.info("draining for at most %g seconds; signal again to stop at once", self._drain_seconds)
        loop = asyncio.get_running_loop()
        self._draining = loop.create_task(self._drain_then_exit(sig, frame))

    async def _drain_then_exit(self, sig: int, frame: FrameType | None) -> None:
        await self._runtime.drain(self._drain_seconds)
        super().handle_exit(sig, frame)


def _load(config: ServiceConfig, metrics: Metrics) -> Served:
    assembly = assemble(config)

    def observe(report: StepReport, load: LoadStats) -> None:
        metrics.observe_load(load)
        if report.stats is not None:
            metrics.observe_step(report.stats)
        for finished in report.finished:
            metrics.observe_finish(finished)

    return Served(EngineThread(assembly.engine(), observe), assembly.tokenizer, _card(assembly))


def _card(assembly: Assembly) -> ModelCard:
    return ModelCard(
        name=assembly.config.public_model_name,
        created=int(time.time()),
        max_model_len=assembly.limits.max_model_len,
        system_fingerprint=assembly.fingerprint,
        drafter=assembly.drafter_name,
        numerics=assembly.numerics,
        vocab_size=assembly.target.vocab_size,
        num_spec_tokens=MAX_DEPTH,
        eos_token_ids=assembly.loaded.eos_token_ids,
    )


def _api_settings(config: ServiceConfig) -> ApiSettings:
    return ApiSettings(
        api_keys=tuple(key.get_secret_value() for key in config.api_keys),
        admin_key=None if config.admin_key is None else config.admin_key.get_secret_value(),
        open_metrics=config.open_metrics,
        max_request_bytes=config.max_request_bytes,
        max_output_tokens=config.max_output_tokens,
        served_model_names=(config.public_model_name,),
    )
