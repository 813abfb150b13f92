"""The ingress as an ASGI application and as a process: the routes that it forwards, and its responses to clients."""

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, nullcontext
from functools import partial

import uvicorn
import uvloop
from fastapi import FastAPI
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from service.api.body import LARGE_BODY_BYTES
from service.api.connections import listen, server_config, started, url_of
from service.api.errors import install_error_handlers
from service.api.middleware import AccessMiddleware, BodyMiddleware
from service.api.settings import MAX_REQUEST_BYTES
from service.api.sse import EventStream, json_response, unless_client_gone
from service.ingress.forwarding import PATIENCE_SECONDS, STALL_SECONDS, Forwarding
from service.ingress.replicas import ForwardedRequest, Headers, HttpReplicas, ReplicaAnswer, Replicas

logger = logging.getLogger(__name__)

# The routes that any replica can answer. Other routes concern a single process: its metrics, its page, its learning.
_ROUTES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("/v1/chat/completions", "/v1/completions", "/v1/responses"), ("POST",)),
    **dict.fromkeys(("/tokenize", "/detokenize"), ("POST",)),
    "/v1/responses/{response_id}": ("GET", "DELETE"),
    "/v1/models/{model_id:path}": ("GET",),
    **dict.fromkeys(("/v1/models", "/readyz", "/health", "/version"), ("GET", "HEAD")),
}


def create_ingress(
    replicas: Replicas, *, stall_seconds: float = STALL_SECONDS, patience_seconds: float = PATIENCE_SECONDS
) -> FastAPI:
    """Build the ASGI application that forwards requests to these replicas.

    `stall_seconds`: silence of a stream after which its replica counts as lost; `patience_seconds`: how long a POST
    request waits for a replica.
    """

    async def forward(request: Request) -> Response:
        body = await request.body()
        read = partial(ForwardedRequest.of, request, body, request.state.request_id)
        # A small compressed body may unpack to millions of bytes; parsing them here would delay every running stream.
        is_small = len(body) < LARGE_BODY_BYTES and "content-encoding" not in request.headers
        forwarded = read() if is_small else await asyncio.to_thread(read)
        forwarding = Forwarding(
            replicas,
            forwarded,
            stall_seconds=stall_seconds,
            patience_seconds=patience_seconds if request.method == "POST" else 0.0,
        )
        return await _answer(forwarding, request)

    async def live(request: Request) -> Response:
        return json_response({"status": "alive"})

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        await replicas.close()

    app = FastAPI(
        lifespan=lifespan,
        middleware=[Middleware(AccessMiddleware), Middleware(BodyMiddleware, max_bytes=MAX_REQUEST_BYTES)],
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    install_error_handlers(app)
    app.add_route("/livez", live, methods=["GET", "HEAD"], include_in_schema=False)
    for path, methods in _ROUTES.items():
        app.add_route(path, forward, methods=[*methods])
    return app


async def _answer(forwarding: Forwarding, request: Request) -> Response:
    try:
        found = await unless_client_gone(request.receive, forwarding.begin())
    except BaseException:
        await forwarding.close()
        raise
    if isinstance(found, ReplicaAnswer):
        return _ResumedStream(forwarding, found.headers)
    response = Response(found.body, found.status)
    response.raw_headers = [*found.headers, (b"content-length", str(len(found.body)).encode())]
    return response


class _ResumedStream(EventStream):
    """The response to a client whose stream continues on another replica when one fails."""

    def __init__(self, forwarding: Forwarding, headers: Headers) -> None:
        super().__init__(forwarding.frames(), nullcontext())
        self._forwarding = forwarding
        self.raw_headers = [*headers]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._forwarding.close()


def serve(urls: Sequence[str], host: str, port: int) -> None:
    """Run an ingress in front of the servers at `urls` until it is interrupted. Raises StartupError."""
    uvloop.run(_serve(urls, host, port))


async def _serve(urls: Sequence[str], host: str, port: int) -> None:
    app = create_ingress(HttpReplicas(urls, stall_seconds=STALL_SECONDS))
    listening = listen(host, port)
    server = uvicorn.Server(server_config(app, host, port, shutdown_seconds=round(PATIENCE_SECONDS)))
    serving = asyncio.create_task(server.serve([listening]))
    if await started(server, serving):
        logger.info("ready: %s/v1 in front of %s", url_of(server), ", ".join(urls))
    await serving
