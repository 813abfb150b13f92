"""Routes that generate no text: models, tokenization, probes, metrics, version, forgetting past answers, and the
operators' routes of learning, for which the middleware requires the admin key."""

import logging
from collections.abc import Awaitable, Callable
from functools import partial
from operator import methodcaller
from pathlib import Path

import pydantic_core
from fastapi import APIRouter
from pydantic import JsonValue
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from adaptation.records import AdaptationError, AdaptationStatus
from service import __version__
from service.api.body import read_body
from service.api.prompts import check_token_ids, render
from service.api.request_builder import check_model
from service.api.schemas import DetokenizeRequest, TokenizeRequest, UpdateWeightsRequest
from service.api.settings import Server
from service.api.sse import json_response
from service.errors import EngineFailure, InvalidRequest, NotReady
from service.observability.live import Live
from service.runtime import AdaptationControl
from service.text.tokenizer import ChatTokenizer

logger = logging.getLogger(__name__)

RenderMetrics = Callable[[], Awaitable[tuple[bytes, str]]]


def info_router(server: Server, live: Live, render_metrics: RenderMetrics) -> APIRouter:
    """Build the router of models, tokenization, probes, metrics and version."""
    router = APIRouter()

    @router.get("/v1/models")
    async def list_models() -> Response:
        return json_response(
            {"object": "list", "data": [_model(name, server) for name in server.settings.served_model_names]}
        )

    @router.get("/v1/models/{model_id:path}")
    async def retrieve_model(model_id: str) -> Response:
        check_model(model_id, server)
        return json_response(_model(model_id, server))

    @router.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        body = await read_body(request, TokenizeRequest, server)
        check_model(body.model, server)
        tokenizer = server.runtime.tokenizer
        control, account = server.settings.control_in_prompts, server.account_of(request)
        ids = await server.runtime.in_turn(account, partial(_tokenize, body, tokenizer, control))
        strings: JsonValue = [tokenizer.token_string(token_id) for token_id in ids] if body.return_token_strs else None
        length = server.runtime.card.max_model_len
        return json_response({"count": len(ids), "max_model_len": length, "tokens": [*ids], "token_strs": strings})

    @router.post("/detokenize")
    async def detokenize(request: Request) -> Response:
        body = await read_body(request, DetokenizeRequest, server)
        check_model(body.model, server)
        check_token_ids(body.tokens, server.runtime.card, param="tokens")
        decode = partial(server.runtime.tokenizer.decode, body.tokens)
        return json_response({"prompt": await server.runtime.in_turn(server.account_of(request), decode)})

    @router.get("/livez")
    async def alive() -> Response:
        return json_response({"status": "alive"})

    @router.get("/readyz")
    @router.get("/health")
    async def ready() -> Response:
        try:
            server.runtime.check_ready()
        except EngineFailure as error:
            raise NotReady("The engine has stopped.", code="engine_stopped") from error
        return json_response({"status": server.runtime.state, "switched_off": {**live.guard.switched_off}})

    @router.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        content, media_type = await render_metrics()
        return Response(content, headers={"content-type": media_type})

    @router.get("/version")
    async def version() -> Response:
        return json_response({"version": __version__})

    return router


def _model(name: str, server: Server) -> dict[str, JsonValue]:
    card = server.runtime.card
    return {
        "id": name,
        "object": "model",
        "created": card.created,
        "owned_by": "adaptree",
        "root": card.name,
        "parent": None,
        "max_model_len": card.max_model_len,
        "drafter": card.drafter,
        "numerics": card.numerics,
    }


def _tokenize(body: TokenizeRequest, tokenizer: ChatTokenizer, control: bool) -> list[int]:
    if body.messages is not None and body.prompt is None:
        return render(body.messages, body, tokenizer, body.tools or ())
    if body.prompt is not None and body.messages is None:
        special = body.add_special_tokens is not False
        return tokenizer.encode(body.prompt, add_special_tokens=special, control=control)
    raise InvalidRequest("Send either 'prompt' or 'messages'.", param="prompt")


def learnt_router(server: Server) -> APIRouter:
    """Build the router of what was learnt: it forgets past answers, which leaves a drafter that has learnt from them as
    it is, and has the operators' commands for learning, whose responses may wait for an update in progress."""
    router = APIRouter()

    @router.delete("/v1/memory", name="forget_own")
    async def forget_own(request: Request, safety_identifier: str | None = None, user: str | None = None) -> Response:
        """Forget the past answers of the sender's scope: no later request is drafted from them. Where the users of a
        key are separated, the query names the user, as bodies do."""
        return _forgotten(server, server.scope_of(request, safety_identifier or user).cache_namespace)

    @router.delete("/v1/adaptation/memory", name="forget_all")
    async def forget_all() -> Response:
        """Forget the past answers of all scopes. For operators."""
        return _forgotten(server, None)

    @router.get("/v1/adaptation")
    async def show() -> Response:
        return await _state_after(server)

    for command in ("pause", "resume", "rollback"):
        change = partial(_state_after, server, methodcaller(command))
        router.add_api_route(f"/v1/adaptation/{command}", change, methods=["POST"], name=command, description=command)

    @router.post("/update_weights_from_disk")
    async def update_weights_from_disk(request: Request) -> Response:
        return await _load(await read_body(request, UpdateWeightsRequest, server), server)

    return router


def _forgotten(server: Server, scope: str | None) -> Response:
    server.runtime.forget(scope)
    return json_response({"object": "memory", "deleted": True})


async def _state_after(server: Server, change: Callable[[AdaptationControl], object] = lambda _: None) -> Response:
    """Apply a command and respond with the status of learning after it."""

    def changed(control: AdaptationControl) -> AdaptationStatus:
        change(control)
        return control.status()

    status = await server.runtime.ask_adaptation(changed)
    return json_response({"object": "adaptation", **pydantic_core.to_jsonable_python(status)})


async def _load(body: UpdateWeightsRequest, server: Server) -> Response:
    """Load a drafter. A refused drafter is reported with `success: false`, as other servers with this route do."""
    for name in body.model_extra or {}:
        server.note_ignored(name)
    try:
        version = await server.runtime.ask_adaptation(lambda control: control.load_from_disk(Path(body.model_path)))
    except (ValueError, AdaptationError) as error:
        logger.warning("the drafter in %s was refused: %s", body.model_path, error)
        return json_response({"success": False, "message": str(error)}, status=400)
    return json_response(
        {"success": True, "message": f"Serving the drafter in {body.model_path} as version {version}."}
    )
