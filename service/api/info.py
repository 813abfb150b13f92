"""The routes that generate nothing: models, tokenization, probes, metrics, version."""

from collections.abc import Awaitable, Callable

from fastapi import APIRouter
from pydantic import JsonValue
from starlette.requests import Request
from starlette.responses import Response

from service import __version__
from service.api.body import read_body
from service.api.request_builder import check_model, check_token_ids, render
from service.api.schemas import DetokenizeRequest, TokenizeRequest
from service.api.settings import Server
from service.api.sse import whole
from service.errors import InvalidRequest, NotReady
from service.tokenizer import ChatTokenizer

RenderMetrics = Callable[[], Awaitable[tuple[bytes, str]]]


def info_router(server: Server, render_metrics: RenderMetrics) -> APIRouter:
    router = APIRouter()

    @router.get("/v1/models")
    async def list_models() -> Response:
        return whole({"object": "list", "data": [_model(name, server) for name in server.settings.served_model_names]})

    @router.get("/v1/models/{model_id:path}")
    async def retrieve_model(model_id: str) -> Response:
        check_model(model_id, server)
        return whole(_model(model_id, server))

    @router.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        body = await read_body(request, TokenizeRequest, server)
        check_model(body.model, server)
        tokenizer = server.runtime.tokenizer
        ids = await server.runtime.off_loop(lambda: _tokenize(body, tokenizer))
        strings: JsonValue = [tokenizer.token_string(token_id) for token_id in ids] if body.return_token_strs else None
        length = server.runtime.card.max_model_len
        return whole({"count": len(ids), "max_model_len": length, "tokens": [*ids], "token_strs": strings})

    @router.post("/detokenize")
    async def detokenize(request: Request) -> Response:
        body = await read_body(request, DetokenizeRequest, server)
        check_model(body.model, server)
        check_token_ids(body.tokens, server.runtime.card, param="tokens")
        tokenizer = server.runtime.tokenizer
        return whole({"prompt": await server.runtime.off_loop(lambda: tokenizer.decode(body.tokens))})

    @router.get("/livez")
    async def live() -> Response:
        return whole({"status": "alive"})

    @router.get("/readyz")
    @router.get("/health")
    async def ready() -> Response:
        if server.runtime.state == "failed":
            raise NotReady("The engine has stopped.", code="engine_stopped")
        server.runtime.check_ready()
        return whole({"status": server.runtime.state})

    @router.get("/metrics")
    async def metrics() -> Response:
        content, media_type = await render_metrics()
        return Response(content, headers={"content-type": media_type})

    @router.get("/version")
    async def version() -> Response:
        return whole({"version": __version__})

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


def _tokenize(body: TokenizeRequest, tokenizer: ChatTokenizer) -> list[int]:
    if body.messages is not None and body.prompt is None:
        return render(body.messages, body, tokenizer, body.tools or ())
    if body.prompt is not None and body.messages is None:
        return tokenizer.encode(body.prompt, add_special_tokens=body.add_special_tokens is not False)
    raise InvalidRequest("Send either 'prompt' or 'messages'.", param="prompt")
