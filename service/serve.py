"""The server process: HTTP is up while the model loads, a log line reports when it is ready, SIGTERM drains it."""

import asyncio
import itertools
import json
import logging
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from types import FrameType

import anyio
import uvicorn
import uvloop
from fastapi import FastAPI

from adaptation.persistence import owned
from adaptation.records import Event
from drafters.protocol import Drafter
from drafters.registry import memory_of, reads_predictions
from drafters.tree import MAX_DEPTH
from service import __version__
from service.api.app import create_app
from service.api.connections import listen, server_config, started, url_of
from service.api.settings import ApiSettings, naming_key
from service.api.tenants import Tenants
from service.api_keys import digest_in
from service.assembly import Assembly, assemble
from service.config import ServiceConfig
from service.engine.budget import REASONS, CostBudget, keep_gains, restore_gains
from service.engine.engine import EngineOutput
from service.engine.requests import GenerationRequest, SamplingParams, Scope
from service.engine.stats import LoadStats
from service.engine.thread import EngineThread, Observe
from service.errors import RequestError
from service.follow import follows
from service.learning.adaptive import Adaptive, build_adaptive, learning_folder, log_event, naming_secret
from service.observability.guard import Part
from service.observability.live import Live
from service.observability.metric_tables import ServerStatus
from service.observability.metrics import Metrics
from service.past.file import AnswersFile, MemoryFile
from service.past.sharing import AnswerStream, SharedAnswers
from service.runtime import ModelCard, Runtime, ServedModel
from service.text.prompts import read_prompt_set, refuse_too_long

logger = logging.getLogger(__name__)

_READ_SECONDS_AFTER_DRAIN = 5
_SCRAPE_PATIENCE_SECONDS = 0.5
_LOST_EXIT_CODE = 1  # so that what has started the server starts it again
_SPARE_CONNECTIONS = 256  # in addition to one per running or waiting request
_IDLE_CHECK_SECONDS = 0.25
_BOOTSTRAP_TOKENS = 256  # maximum length of an answer: learning uses no more of a text
_BOOTSTRAP_SCOPE = Scope(address="bootstrap prompts")


def serve(config: ServiceConfig) -> None:
    """Serve until SIGTERM or interrupt, or compute a part of the model where torchrun has started this process for it.
    Raises StartupError when the model cannot be served as configured, SystemExit when a process that shares the model
    is lost."""
    if follows(config):
        return
    with suppress(asyncio.CancelledError):  # interrupted while the model was loading
        uvloop.run(_serve(config))


async def _serve(config: ServiceConfig) -> None:
    listening = listen(config.host, config.port)
    app, runtime = application(config)
    settings = server_config(
        app,
        config.host,
        config.port,
        shutdown_seconds=_READ_SECONDS_AFTER_DRAIN,
        max_connections=config.max_sequences + config.max_waiting + _SPARE_CONNECTIONS,
    )
    server = _DrainingServer(settings, runtime, config.drain_seconds)
    serving = asyncio.create_task(server.serve([listening]))
    seeding: asyncio.Task[None] | None = None
    try:
        await _announce(server, runtime, serving, config)
        if not serving.done():
            seeding = asyncio.create_task(answer_bootstrap_prompts(runtime))
    finally:
        await serving
        if seeding is not None:
            seeding.cancel()
            with suppress(asyncio.CancelledError):
                await seeding
        if runtime.has_lost_peer:
            raise SystemExit(_LOST_EXIT_CODE)


def application(config: ServiceConfig) -> tuple[FastAPI, Runtime]:
    """Build the ASGI application, and the runtime that its lifespan starts and stops. Raises StartupError."""
    metrics, live, api = metrics_of(config), Live(), api_settings(config)
    runtime = Runtime(lambda: load_model_service(config, metrics, live), max_waiting=config.max_waiting)
    app = create_app(runtime, api, live=live, render_metrics=lambda: rendered(metrics, live, runtime, api.tenants))
    return app, runtime


def metrics_of(config: ServiceConfig) -> Metrics:
    """Build the metrics that a server of this configuration exports."""
    return Metrics(
        max_depth=MAX_DEPTH,
        budget_reasons=REASONS,
        model=config.public_model_name,
        key_names=tuple(key.name for key in config.api_keys if key.name is not None),
    )


async def rendered(metrics: Metrics, live: Live, runtime: Runtime, tenants: Tenants) -> tuple[bytes, str]:
    """Render the metrics page and return it with its content type. If an update keeps learning from answering, its last
    status is shown."""
    with suppress(RequestError), anyio.move_on_after(_SCRAPE_PATIENCE_SECONDS):
        metrics.observe_adaptation(await runtime.ask_adaptation(lambda control: control.status()))
    status = ServerStatus(
        ready=runtime.state == "ready",
        requests_in_flight=runtime.num_open,
        requests_refused=runtime.num_refused,
        requests_limited=tenants.refusals,
        loop_lag_seconds=runtime.max_loop_lag_seconds(),
        internal_errors=live.guard.errors,
        switched_off=live.guard.switched_off,
    )
    metrics.observe_server(status)
    return metrics.render()


async def _announce(
    server: "_DrainingServer", runtime: Runtime, serving: asyncio.Task[None], config: ServiceConfig
) -> None:
    """Log the address, and how to use it once the model is loaded; end the server if loading fails."""
    if not await started(server, serving):
        return
    url, model = url_of(server), config.public_model_name
    logger.info("adaptree %s listens on %s and loads the model %s", __version__, url, model)
    try:
        await runtime.wait_until_loaded()
    except BaseException:
        server.should_exit = True
        raise
    logger.info("ready: %s/v1 (base URL for OpenAI clients)", url)
    key = " -H 'authorization: Bearer YOUR_KEY'" if config.api_keys else ""
    question = {"role": "user", "content": "Name three rivers."}
    body = json.dumps({"model": model, "messages": [question], "max_tokens": 60})
    logger.info("try it: curl %s/v1/chat/completions%s -H 'content-type: application/json' -d '%s'", url, key, body)
    logger.info("chat and live charts: %s/", url)


class _DrainingServer(uvicorn.Server):
    """A uvicorn server that completes running answers before it shuts down; probes see it draining meanwhile."""

    def __init__(self, config: uvicorn.Config, runtime: Runtime, drain_seconds: float) -> None:
        super().__init__(config)
        self._runtime = runtime
        self._drain_seconds = drain_seconds
        self._draining: asyncio.Task[None] | None = None

    async def on_tick(self, counter: int) -> bool:
        """Return whether to shut down; called ten times a second."""
        return await super().on_tick(counter) or self._runtime.has_lost_peer

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Drain on the first signal; end at once on the second."""
        if self._draining is not None:
            super().handle_exit(sig, frame)
            return
        logger.info(
            "stopping: running requests have %g seconds to finish; press Ctrl-C or signal again to stop at once",
            self._drain_seconds,
        )
        self._draining = asyncio.create_task(self._drain_then_exit(sig, frame))

    async def _drain_then_exit(self, sig: int, frame: FrameType | None) -> None:
        await self._runtime.drain(self._drain_seconds)
        super().handle_exit(sig, frame)


def load_model_service(config: ServiceConfig, metrics: Metrics, live: Live) -> ServedModel:
    """Load the model and build engine, learning and observers, without starting them. Raises StartupError."""
    assembly = assemble(config)
    adaptive = _adaptive(assembly, metrics, live)
    engine = assembly.engine() if adaptive is None else adaptive.engine
    metrics.credit(engine.drafter.sources)
    gains = None if assembly.costs is None else assembly.costs.gains_file
    ended: list[Callable[[], None]] = [assembly.target.peers.close]
    if gains is not None and isinstance(engine.policy, CostBudget):
        restore_gains(engine.policy.gate, gains)
        ended.append(partial(keep_gains, engine.policy.gate, gains))
    live.guard = engine.guard
    observers: Mapping[Part, Observe] = {"metrics": observed_by(metrics), "observers": observed_by(live)}
    thread = EngineThread(engine, observers, ended, num_threads=config.num_threads)
    ended += keep_past_answers(assembly, engine.drafter, thread)
    return ServedModel(thread, assembly.tokenizer, card_of(assembly), adaptive, seeds_of(assembly))


def keep_past_answers(assembly: Assembly, drafter: Drafter, thread: EngineThread) -> list[Callable[[], None]]:
    """Start to keep past answers over restarts and to share them with replicas, as configured. Returns the functions to
    call when the engine has ended. Raises StartupError."""
    config, memory = assembly.config, memory_of(drafter)
    learning, tokenizer = config.adaptation, assembly.tokenizer.fingerprint
    if memory is None:
        if config.memory_file is not None:
            logger.warning("memory_file has no effect: the drafter %s keeps no past answers", assembly.drafter_name)
        return []
    keepers: list[MemoryFile | SharedAnswers] = []
    if config.memory_file is not None:
        names = naming_key(naming_secret(config))
        file = AnswersFile(config.memory_file, memory, tokenizer=tokenizer, names=names)
        keepers.append(MemoryFile(file, memory, thread))
    if learning.redis_url is not None and learning.redis_secret is not None:
        vocab, from_start = assembly.target.vocab_size, not keepers  # a file restores the earlier answers
        stream = AnswerStream(learning, tokenizer=tokenizer, vocab=vocab, from_start=from_start)
        keepers.append(SharedAnswers(stream, memory, thread))
    for keeper in keepers:
        keeper.start()
    return [keeper.finish for keeper in keepers]


def seeds_of(assembly: Assembly) -> tuple[tuple[int, ...], ...]:
    """Return the bootstrap prompts as token ids. Raises StartupError for a file that cannot be used."""
    file = assembly.config.adaptation.bootstrap_prompts
    if file is None:
        return ()
    prompts = read_prompt_set(file, assembly.tokenizer).prompts
    refuse_too_long(prompts, _BOOTSTRAP_TOKENS, assembly.limits.max_model_len, f"bootstrap prompts {file}")
    if assembly.loaded.initial_drafter is None:
        logger.info("bootstrap prompts are not used: there is a drafter already")
    return prompts


def observed_by(observer: Metrics | Live) -> Observe:
    """Build the callback with which the engine's thread passes each step to an observer."""

    def observe(report: EngineOutput, load: LoadStats) -> None:
        observer.observe_load(load)
        if report.stats is not None:
            observer.observe_step(report.stats)
        for finished in report.finished:
            observer.observe_finish(finished)

    return observe


def _adaptive(assembly: Assembly, metrics: Metrics, live: Live) -> Adaptive | None:
    """Build learning. Returns None if it is off, and logs why."""
    config, (on, reason) = assembly.config, assembly.learns
    if not on:
        is_asked_for = config.adaptation.enabled is True or config.adaptation.learns_together
        logger.log(logging.WARNING if is_asked_for else logging.INFO, "learning while serving is %s", reason)
        return None

    def emit(event: Event) -> None:
        live.guard.run("metrics", partial(metrics.observe_event, event), lambda: None, "event")
        log_event(event)
        live.guard.run("observers", partial(live.observe_event, event), lambda: None, "event")

    folder = owned(learning_folder(config.state_dir, assembly.loaded, assembly.drafter_folder))
    logger.info(
        "learning while serving is %s; from requests and answers without `store: false`, policy %s, weights and counts "
        "in %s; --adaptation.enabled false turns it off",
        *(reason, config.adaptation.policy, folder),
    )
    return build_adaptive(assembly, folder=folder, emit=emit)


def card_of(assembly: Assembly) -> ModelCard:
    """Build the public description of the model."""
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
        reads_predictions=reads_predictions(assembly.drafter_name),
        learns=assembly.learns[1],
    )


def api_settings(config: ServiceConfig) -> ApiSettings:
    """Build the settings of the HTTP interface. Raises StartupError if used budgets cannot be stored."""
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
        control_in_prompts=config.raw_prompts == "special",
        naming_key=naming_key(naming_secret(config)),
    )


async def answer_bootstrap_prompts(runtime: Runtime) -> None:
    """Answer the bootstrap prompts while the server is idle, so that a drafter is trained before the first user comes.
    Ends when learning has collected enough. An answer that another request interrupts is repeated later."""
    await runtime.wait_until_loaded()
    seeds, answered, numbers = runtime.seeds, 0, itertools.count()
    if not seeds:
        return
    while answered < len(seeds) and await _is_collecting(runtime):
        await asyncio.sleep(_IDLE_CHECK_SECONDS)
        if runtime.state != "ready":
            return
        if not runtime.num_open and await _answered(runtime, seeds[answered], next(numbers)):
            answered += 1
    logger.info("answered %d of %d bootstrap prompts", answered, len(seeds))


async def _is_collecting(runtime: Runtime) -> bool:
    try:
        status = await runtime.ask_adaptation(lambda control: control.status())
    except RequestError:
        return False
    return status.phase == "collecting"


async def _answered(runtime: Runtime, prompt: tuple[int, ...], number: int) -> bool:
    """Answer a prompt. Returns whether no other request interrupted it."""
    request = GenerationRequest(
        request_id=f"bootstrap-{number}",
        prompt=prompt,
        sampling=SamplingParams(max_tokens=_BOOTSTRAP_TOKENS, temperature=0.0, seed=0),
        scope=_BOOTSTRAP_SCOPE,
    )
    try:
        with runtime.generate(request) as stream:
            async for _ in stream:
                if runtime.num_open > 1:
                    return False
    except RequestError as error:
        logger.warning("a bootstrap prompt is skipped: %s", error)
    return True
