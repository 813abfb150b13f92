"""`GET /` and the files of the live page, read once at start.

The content policy lets the page reach this server only. The files hold no secrets and need no key; the routes that the
page reads check keys themselves.
"""

import hashlib
from importlib.resources import files
from typing import Final

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

_FOLDER: Final = "/adaptree/page/"
_START: Final = "index.html"
_MODULES: Final = ("app.js", "charts.js", "chat.js", "drawing.js", "learning.js", "server.js", "tree.js")
_FILES: Final = {_START: "text/html", "style.css": "text/css"} | dict.fromkeys(_MODULES, "text/javascript")

PAGE_PATHS: Final = frozenset({"/", *(_FOLDER + name for name in _FILES if name != _START)})

_HEADERS: Final = {
    "cache-control": "no-cache",
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "cross-origin-opener-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


def page_router() -> APIRouter:
    """The routes of the page's files."""
    paths = {"/" if name == _START else _FOLDER + name: name for name in _FILES}
    return APIRouter(routes=[_route(path, name) for path, name in paths.items()])


def _route(path: str, name: str) -> Route:
    content = files(__package__).joinpath(name).read_bytes()
    etag = f'"{hashlib.sha256(content).hexdigest()[:16]}"'
    headers = {**_HEADERS, "etag": etag}

    async def send(request: Request) -> Response:
        if request.headers.get("if-none-match") == etag:
            return Response(status_code=304, headers=headers)
        return Response(content, media_type=f"{_FILES[name]}; charset=utf-8", headers=headers)

    return Route(path, send, methods=["GET"])
