"""Assembles the HTTP application from its routes and layers. Whoever runs it brings the runtime and the settings."""

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import cache, partial

from fastapi import FastAPI
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware

from service import __version__
from service.api.adaptation import adaptation_router
from service.api.completions import completions_router
from service.api.errors import REQUEST_ID_HEADER, install_error_handlers
from service.api.feed import Feed, feed_router
from service.api.info import RenderMetrics, info_router
from service.api.memory import memory_router
from service.api.middleware import AccessMiddleware, BodyMiddleware, HeadMiddleware, LimitMiddleware, RefusingMiddleware
from service.api.openapi import described
from service.api.page import page_router
from service.api.request_builder import RELAXED_HEADER
from service.api.responses import responses_router
from service.api.settings import ApiSettings, Server
from service.api.tenants import Tenants
from service.observability.live import Live
from service.runtime import Runtime


def create_app(runtime: Runtime, settings: ApiSettings, *, live: Live, render_metrics: RenderMetrics) -> FastAPI:
    """The application; it starts the runtime when it starts, and stops it when it ends."""
    server, feed = Server(runtime, settings), Feed(live, runtime)
    app = FastAPI(
        title="adaptree",
        version=__version__,
        lifespan=_lifespan(runtime, settings.tenants, feed),
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
    )
    install_error_handlers(app)
    app.include_router(completions_router(server))
    app.include_router(responses_router(server))
    app.include_router(info_router(server, render_metrics))
    app.include_router(adaptation_router(server))
    app.include_router(memory_router(server))
    app.include_router(page_router())
    app.include_router(feed_router(feed))
    app.openapi = cache(partial(described, app))  # type: ignore[method-assign]  # an unknown address asks for it, too
    return app


def _cross_origin(settings: ApiSettings) -> list[Middleware]:
    """Lets pages of the configured origins ask, and read headers; before keys, for a preflight has none."""
    if not settings.cors_origins:
        return []
    told = [REQUEST_ID_HEADER, RELAXED_HEADER, "retry-after"]
    methods = ["GET", "HEAD", "POST", "DELETE"]
    return [
        Middleware(
            CORSMiddleware,
            allow_origins=settings.cors_origins,
            allow_methods=methods,
            allow_headers=["*"],
            expose_headers=told,
        )
    ]


def _lifespan(runtime: Runtime, tenants: Tenants, feed: Feed) -> Callable[[FastAPI], AbstractAsyncContextManager[None]]:
    @asynccontextmanager
    async def run(app: FastAPI) -> AsyncIterator[None]:
        async with tenants.kept(), feed.running():
            await runtime.start()
            yield
            await runtime.stop()

    return run
