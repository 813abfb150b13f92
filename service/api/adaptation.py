"""The operators' routes of learning while serving: look at it, halt it, take back what it did, bring other weights.

Whoever gets here has shown the admin key. Answers may wait for an update under way; nobody else waits with them.
"""

import logging
from collections.abc import Callable
from functools import partial
from operator import methodcaller
from pathlib import Path

import pydantic_core
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from adaptation.records import AdaptationError, AdaptationStatus
from service.api.body import read_body
from service.api.schemas import UpdateWeightsRequest
from service.api.settings import Server
from service.api.sse import whole
from service.runtime import AdaptationControl

logger = logging.getLogger(__name__)

_REFUSED = 400


def adaptation_router(server: Server) -> APIRouter:
    router = APIRouter()

    @router.get("/v1/adaptation")
    async def look() -> Response:
        return await _state_after(server)

    for command in ("pause", "resume", "rollback"):
        change = partial(_state_after, server, methodcaller(command))
        router.add_api_route(f"/v1/adaptation/{command}", change, methods=["POST"], name=command, description=command)

    @router.post("/update_weights_from_disk")
    async def update_weights_from_disk(request: Request) -> Response:
        return await _load(await read_body(request, UpdateWeightsRequest, server), server)

    return router


async def _state_after(server: Server, change: Callable[[AdaptationControl], object] = lambda _: None) -> Response:
    """Do what was asked, and answer with what is so from then on."""

    def changed(control: AdaptationControl) -> AdaptationStatus:
        change(control)
        return control.status()

    status = await server.runtime.ask_adaptation(changed)
    return whole({"object": "adaptation", **pydantic_core.to_jsonable_python(status)})


async def _load(body: UpdateWeightsRequest, server: Server) -> Response:
    """In the shape of the servers that other tools know: a refusal is an answer of its own, not an error."""
    for name in body.model_extra or {}:
        server.note_ignored(name)
    try:
        version = await server.runtime.ask_adaptation(lambda control: control.load_from_disk(Path(body.model_path)))
    except (ValueError, AdaptationError) as error:
        logger.warning("the drafter in %s was refused: %s", body.model_path, error)
        return whole({"success": False, "message": str(error)}, status=_REFUSED)
    return whole({"success": True, "message": f"Serving the drafter in {body.model_path} as version {version}."})
