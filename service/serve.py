"""The server process: HTTP answers while the model loads; a line says when it is ready; SIGTERM drains."""

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from types import FrameType

import anyio
import uvicorn
from fastapi import FastAPI

from adaptation.persistence import owned
from adaptation.records import Event
from drafters.protocol import Drafter
from drafters.registry import memory_of
from drafters.tree import MAX_DEPTH
from service.api.app import create_app
from service.api.connections import GuardedProtocol
from service.api.settings import ApiSettings, naming_key
from service.api.tenants import Tenants
from service.api_keys import digest_in
from service.assembly import Assembly, assemble
from service.config import ServiceConfig
from service.engine.budget import REASONS
from service.engine.costs.gains_file import keep_gains, restore_gains
from service.engine.engine import StepReport
from service.engine.stats import LoadStats
from service.engine.thread import EngineThread, Observe
from service.errors import RequestError
from service.learning.adaptive import Adaptive, build_adaptive, learning_folder, log_event
from service.observability.live import Live
from service.observability.metric_tables import ServerStatus
from service.observability.metrics import Metrics
from service.past.file import MemoryFile, key_beside
from service.past.sharing import SharedAnswers
from service.prompts import read_prompt_set, refuse_too_long
from service.runtime import ModelCard, Runtime, Served
from service.seeding import ANSWER_TOKENS, answer_seeds

logger = logging.getLogger(__name__)

_READ_SECONDS_AFTER_DRAIN = 5
_SCRAPE_PATIENCE_SECONDS = 0.5
_SPARE_CONNECTIONS = 256  # beside one for each request that runs or waits


def serve(config: ServiceConfig) -> None:
    """Serve until SIGTERM or interrupt. Raises StartupError when the model cannot be served as configured."""
    asyncio.run(_serve(config))


async def _serve(config: ServiceConfig) -> None:
    app, runtime = application(config)
    settings = uvicorn.Config(
        app,
        http=GuardedProtocol,
        ws="none",
        host=config.host,
        port=config.port,
        log_config=None,
        access_log=False,
        limit_concurrency=config.max_sequences + config.max_waiting + _SPARE_CONNECTIONS,
        timeout_graceful_shutdown=_READ_SECONDS_AFTER_DRAIN,
    )
    server = _DrainingServer(settings, runtime, config.drain_seconds)
    serving = asyncio.create_task(server.serve())
    seeding: asyncio.Task[None] | None = None
    try:
        await _announce(server, runtime, serving)
        if not serving.done():
            seeding = asyncio.create_task(answer_seeds(runtime))
    finally:
        await serving
        if seeding is not None:
            seeding.cancel()
            with suppress(asyncio.CancelledError):
                await seeding


def application(config: ServiceConfig) -> tuple[FastAPI, Runtime]:
    """What answers HTTP, and what it starts and stops; for whoever runs ASGI. Raises StartupError."""
    metrics, live, api = metrics_of(config), Live(), api_settings(config)
    runtime = Runtime(lambda: load_served(config, metrics, live), max_waiting=config.max_waiting)
    app = create_app(runtime, api, live=live, render_metrics=lambda: rendered(metrics, runtime, api.tenants))
    return app, runtime


def metrics_of(config: ServiceConfig) -> Metrics:
    """What is exported by a server of this configuration."""
    return Metrics(
        max_depth=MAX_DEPTH,
        budget_reasons=REASONS,
        model=config.public_model_name,
        key_names=tuple(key.name for key in config.api_keys if key.name is not None),
    )


async def rendered(metrics: Metrics, runtime: Runtime, tenants: Tenants) -> tuple[bytes, str]:
    """The metrics page, with learning as it is now, or as it was last when an update keeps it from answering."""
    with suppress(RequestError), anyio.move_on_after(_SCRAPE_PATIENCE_SECONDS):
        metrics.observe_adaptation(await runtime.ask_adaptation(lambda control: control.status()))
    status = ServerStatus(
        ready=runtime.state == "ready",
        requests_in_flight=runtime.num_open,
        requests_refused=runtime.num_refused,
        requests_limited=tenants.refusals(),
        loop_lag_seconds=runtime.max_loop_lag_seconds(),
    )
    metrics.observe_server(status)
    return metrics.render()


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
        self._draining = asyncio.create_task(self._drain_then_exit(sig, frame))

    async def _drain_then_exit(self, sig: int, frame: FrameType | None) -> None:
        await self._runtime.drain(self._drain_seconds)
        super().handle_exit(sig, frame)


def load_served(config: ServiceConfig, metrics: Metrics, live: Live) -> Served:
    """Everything that is served, loaded and wired but not started. Raises StartupError."""
    assembly = assemble(config)
    adaptive = _adaptive(assembly, metrics, live)
    engine = assembly.engine() if adaptive is None else adaptive.engine
    metrics.credit(engine.drafter.sources)
    gains = None if assembly.costs is None else assembly.costs.gains_file
    if gains is not None:
        restore_gains(engine.policy, gains)
    ended: list[Callable[[], None]] = [] if gains is None else [partial(keep_gains, engine.policy, gains)]
    thread = EngineThread(engine, telling(metrics, live), ended)
    ended += keep_past_answers(assembly, engine.drafter, thread)
    return Served(thread, assembly.tokenizer, card_of(assembly), adaptive, seeds_of(assembly))


def keep_past_answers(assembly: Assembly, drafter: Drafter, thread: EngineThread) -> list[Callable[[], None]]:
    """Begin to keep what is remembered over restarts, and to share it with replicas, as far as that is configured.
    Raises StartupError. # -> what is to be called when the engine has ended"""
    config, memory = assembly.config, memory_of(drafter)
    learning, tokenizer = config.adaptation, assembly.tokenizer.fingerprint
    if memory is None:
        if config.memory_file is not None:
            logger.warning("memory_file: the drafter %s remembers no past answers", assembly.drafter_name)
        return []
    keepers: list[MemoryFile | SharedAnswers] = []
    if config.memory_file is not None:
        names = naming_key(naming_secret(config))
        keepers.append(MemoryFile(config.memory_file, memory, thread, tokenizer=tokenizer, names=names))
    if learning.redis_url is not None and learning.redis_secret is not None:
        vocab = assembly.target.vocab_size
        keepers.append(
            SharedAnswers(learning, memory, thread, tokenizer=tokenizer, vocab=vocab, knows_earlier=bool(keepers))
        )
    for keeper in keepers:
        keeper.start()
    return [keeper.finish for keeper in keepers]


def seeds_of(assembly: Assembly) -> tuple[tuple[int, ...], ...]:
    """The prompts that the server shall answer itself. Raises StartupError for a file that cannot be used."""
    file = assembly.config.adaptation.bootstrap_prompts
    if file is None:
        return ()
    prompts = read_prompt_set(file, assembly.tokenizer).prompts
    refuse_too_long(prompts, ANSWER_TOKENS, assembly.limits.max_model_len, f"bootstrap prompts {file}")
    if assembly.loaded.unmade is None:
        logger.info("bootstrap prompts are not needed: no drafter is made here")
    return prompts


def telling(*observers: Metrics | Live) -> Observe:
    """What the engine's thread calls after each step: every observer sees it."""

    def observe(report: StepReport, load: LoadStats) -> None:
        for observer in observers:
            observer.observe_load(load)
            if report.stats is not None:
                observer.observe_step(report.stats)
            for finished in report.finished:
                observer.observe_finish(finished)

    return observe


def _adaptive(assembly: Assembly, metrics: Metrics, live: Live) -> Adaptive | None:
    """Learning, if it is wanted and there is something to train."""
    config = assembly.config
    if not config.adaptation.enabled:
        return None
    if assembly.drafter_folder is None and assembly.loaded.unmade is None:
        logger.warning("the drafter %s has no weights to train: serving without learning", assembly.drafter_name)
        return None

    def emit(event: Event) -> None:
        metrics.observe_event(event)
        log_event(event)
        live.observe_event(event)

    folder = owned(learning_folder(config.state_dir, assembly.loaded, assembly.drafter_folder))
    logger.info("learning while serving: policy %s, state in %s", config.adaptation.policy, folder)
    return build_adaptive(assembly, config.adaptation, folder=folder, emit=emit)


def card_of(assembly: Assembly) -> ModelCard:
    """What clients may know of the model."""
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


def api_settings(config: ServiceConfig) -> ApiSettings:
    """Limits and keys of the HTTP interface. Raises StartupError when what is used of budgets cannot be kept."""
    return ApiSettings(
        tenants=Tenants(config.api_keys, config.state_dir),
        admin_digest=None if config.admin_key is None else digest_in(config.admin_key),
        open_metrics=config.open_metrics,
        max_output_tokens=config.max_output_tokens,
        served_model_names=(config.public_model_name,),
        release_seconds=config.release_seconds,
        allowed_hosts=config.checked_hosts,
        cors_origins=config.cors_origins,
        separate_names=config.prefix_cache == "per_client",
        naming_key=naming_key(naming_secret(config)),
    )


def naming_secret(config: ServiceConfig) -> bytes | None:
    """What scopes shall have the same names by as long as it is the same. Raises StartupError."""
    shared, file = config.adaptation.redis_secret, config.memory_file
    if shared is not None:
        return shared.get_secret_value().encode()
    return None if file is None else key_beside(file)
