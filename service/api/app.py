"""The HTTP application: its routes, its middleware and its OpenAPI document."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import cache, partial
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel
from pydantic.json_schema import JsonSchemaMode, models_json_schema
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware

from service import __version__
from service.api.completions import completions_router
from service.api.errors import REQUEST_ID_HEADER, install_error_handlers
from service.api.info import RenderMetrics, info_router, learnt_router
from service.api.middleware import AccessMiddleware, BodyMiddleware, HeadMiddleware, LimitMiddleware, RefusingMiddleware
from service.api.page import Feed, page_router
from service.api.request_builder import RELAXED_HEADER
from service.api.responses import responses_router
from service.api.responses_schemas import ResponsesRequest
from service.api.schemas import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
    UpdateWeightsRequest,
)
from service.api.settings import ApiSettings, Server
from service.observability.live import Live
from service.runtime import Runtime

BODIES: Mapping[str, type[BaseModel]] = {
    "/v1/chat/completions": ChatCompletionRequest,
    "/v1/completions": CompletionRequest,
    "/v1/responses": ResponsesRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
    "/update_weights_from_disk": UpdateWeightsRequest,
}

_TEXT = {"type": ["string", "null"]}
_ERROR = {
    "type": "object",
    "properties": {"message": {"type": "string"}, "type": {"type": "string"}, "param": _TEXT, "code": _TEXT},
    "required": ["message", "type", "param", "code"],
}
REFUSAL: dict[str, Any] = {
    "description": "What is wrong, and with which field.",
    "content": {
        "application/json": {"schema": {"type": "object", "properties": {"error": _ERROR}, "required": ["error"]}}
    },
}
"""The error response of every route."""


def create_app(runtime: Runtime, settings: ApiSettings, *, live: Live, render_metrics: RenderMetrics) -> FastAPI:
    """Create the application; its lifespan starts and stops the runtime."""
    server, feed = Server(runtime, settings), Feed(live, runtime)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with settings.tenants.kept(), feed.running():
            await runtime.start()
            yield
            await runtime.stop()

    app = FastAPI(
        title="adaptree",
        version=__version__,
        lifespan=lifespan,
        middleware=[  # outermost first
            Middleware(AccessMiddleware),
            *_cross_origin(settings),
            Middleware(RefusingMiddleware, settings),
            Middleware(LimitMiddleware),
            Middleware(BodyMiddleware, max_bytes=settings.max_request_bytes),
            Middleware(HeadMiddleware),
        ],
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        responses={"default": REFUSAL},
    )
    install_error_handlers(app)
    app.include_router(completions_router(server))
    app.include_router(responses_router(server))
    app.include_router(info_router(server, live, render_metrics))
    app.include_router(learnt_router(server))
    app.include_router(page_router(feed))
    app.openapi = cache(partial(_openapi, app))  # type: ignore[method-assign]  # also read for each unknown path
    return app


def _cross_origin(settings: ApiSettings) -> list[Middleware]:
    """Build the middleware that admits pages of the configured origins. It precedes the key check, because a preflight
    request has no key."""
    if not settings.cors_origins:
        return []
    exposed = [REQUEST_ID_HEADER, RELAXED_HEADER, "retry-after"]
    methods = ["GET", "HEAD", "POST", "DELETE"]
    return [
        Middleware(
            CORSMiddleware,
            allow_origins=settings.cors_origins,
            allow_methods=methods,
            allow_headers=["*"],
            expose_headers=exposed,
        )
    ]


def _openapi(app: FastAPI) -> dict[str, Any]:
    """Build the OpenAPI document, including the bodies that the routes parse themselves."""
    document = FastAPI.openapi(app)
    models: list[tuple[type[BaseModel], JsonSchemaMode]] = [(model, "validation") for model in BODIES.values()]
    _, schemas = models_json_schema(models, ref_template="#/components/schemas/{model}")
    document["components"] = {"schemas": schemas["$defs"]}
    for path, model in BODIES.items():
        schema = {"$ref": f"#/components/schemas/{model.__name__}"}
        body = {"required": True, "content": {"application/json": {"schema": schema}}}
        document["paths"][path]["post"]["requestBody"] = body
    return document
