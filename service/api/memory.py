"""Forgetting of past answers that are drafted from: a client forgets its own, an operator all. What a network has
learnt from them is not forgotten."""

from dataclasses import dataclass

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from service.api.settings import Server
from service.api.sse import whole


@dataclass(frozen=True, slots=True)
class _Name:
    """As requests have it in their bodies."""

    safety_identifier: str | None
    user: str | None


def memory_router(server: Server) -> APIRouter:
    router = APIRouter()

    @router.delete("/v1/memory", name="forget_own")
    async def forget_own(request: Request, safety_identifier: str | None = None, user: str | None = None) -> Response:
        """Forget the past answers of the sender's scope: no request that comes later is drafted from them. Where names
        are kept apart, it is the scope of requests with this name, in a query as in their bodies."""
        return _forgotten(server, server.scope_of(request, _Name(safety_identifier, user)).cache_namespace)

    @router.delete("/v1/adaptation/memory", name="forget_all")
    async def forget_all() -> Response:
        """Forget the past answers of all scopes. For operators."""
        return _forgotten(server, None)

    return router


def _forgotten(server: Server, scope: str | None) -> Response:
    server.runtime.forget(scope)
    return whole({"object": "memory", "deleted": True})
