"""Pure ASGI layers around every route: request ids, the access log, hosts, keys, and limits of a body.

Keys are asked for by `scope["path"]` alone, because everything else that describes the address comes from the client.
"""

import asyncio
import hmac
import logging
import re
import secrets
import time
from urllib.parse import quote

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.api.errors import REQUEST_ID_HEADER, error_response
from service.api.feed import FEED_PATH
from service.api.page import PAGE_PATHS
from service.api.sse import CLIENT_CLOSED_REQUEST
from service.config import is_loopback
from service.errors import Forbidden, RequestError, RequestTimeout, RequestTooLarge, Unauthorized

logger = logging.getLogger(__name__)

BODY_SECONDS = 20.0

_ACCEPTABLE_REQUEST_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")
_PROBES = frozenset({"/livez", "/readyz", "/health"})
_OBSERVERS = frozenset({"/metrics", FEED_PATH})
_OPERATORS = ("/admin", "/v1/adaptation", "/update_weights_from_disk")
_SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
_ADDRESS = re.compile(r"(?P<name>\[[0-9a-fA-F:.]+\]|[^\s:/?#@\[\]]+)(:\d+)?")
_POLICY_VIOLATION = 1008
_MOST_LENGTH_DIGITS = 18
_LONGEST_LOGGED_PATH = 200
_BUG = 500


class AccessMiddleware:
    """Every answer carries an `X-Request-Id`, the client's own when it is a sane one, and has a line in the log when
    its last byte is out: who asked for what under which id, and how long it took.

    Neither keys, addresses, queries nor bodies are in it. Probes, observers and the page are told of only to those who
    debug.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = _request_id(Headers(scope=scope).get(REQUEST_ID_HEADER))
        scope.setdefault("state", {})["request_id"] = request_id
        began, status = time.monotonic(), CLIENT_CLOSED_REQUEST

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)[REQUEST_ID_HEADER] = request_id
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception:
            status = _BUG
            raise
        finally:
            _log_access(scope, status, time.monotonic() - began)


def _request_id(offered: str | None) -> str:
    if offered is not None and _ACCEPTABLE_REQUEST_ID.fullmatch(offered):
        return offered
    return f"req-{secrets.token_hex(16)}"


def _log_access(scope: Scope, status: int, seconds: float) -> None:
    quiet = scope["path"] in _PROBES | _OBSERVERS | PAGE_PATHS
    # A path comes decoded, and a line break in it would forge a line of the log.
    path = quote(scope["path"][:_LONGEST_LOGGED_PATH], errors="replace")
    fields = {"request_id": scope["state"]["request_id"], "method": scope["method"], "path": path, "status": status}
    logger.log(
        logging.DEBUG if quiet else logging.INFO,
        "%s %s %d in %.3f s, request %s",
        scope["method"],
        path,
        status,
        seconds,
        fields["request_id"],
        extra={**fields, "seconds": round(seconds, 4)},
    )


class HostMiddleware:
    """Refuses requests under a name that is not this server's, and changes that a page of another host asks for.

    A web page can make its own name resolve to this machine (DNS rebinding), and its browser then takes our answers for
    its own; but it sends that name.
    """

    def __init__(self, app: ASGIApp, *, allowed_hosts: frozenset[str]) -> None:
        self._app = app
        self._allowed_hosts = allowed_hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = self._complaint(scope) if scope["type"] == "http" else None
        await (self._app if error is None else error_response(error))(scope, receive, send)

    def _complaint(self, scope: Scope) -> RequestError | None:
        headers = Headers(scope=scope)
        for host in headers.getlist("host"):
            if not self._allows(host):
                return _forbidden("host", host)
        for origin in headers.getlist("origin") if scope["method"] not in _SAFE_METHODS else []:
            if not self._allows(origin.partition("://")[2]):
                return _forbidden("origin", origin)
        return None

    def _allows(self, address: str) -> bool:
        match = _ADDRESS.fullmatch(address)
        name = match["name"].lower().strip("[].") if match else ""
        return name in self._allowed_hosts or is_loopback(name)


def _forbidden(header: str, value: str) -> Forbidden:
    message = f"This server does not answer to the {header} {value[:_LONGEST_LOGGED_PATH]!r}: see allowed_hosts."
    return Forbidden(message, code=f"{header}_not_allowed")


class AuthMiddleware:
    """Refuses whoever shows no valid key. Only the probes, the files of the page, and `/metrics` and the feed when
    opened, need none.

    Without API keys everything is open but what belongs to operators; that has a key of its own, and without one it is
    closed.
    """

    def __init__(self, app: ASGIApp, *, api_keys: tuple[str, ...], admin_key: str | None, open_metrics: bool) -> None:
        self._app = app
        self._api_keys = tuple(key.encode() for key in api_keys)
        self._admin_keys = () if admin_key is None else (admin_key.encode(),)
        self._open_paths = _PROBES | PAGE_PATHS | (_OBSERVERS if open_metrics else frozenset())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or self._allowed(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": _POLICY_VIOLATION})
        else:
            await error_response(_unauthorized(scope["path"]))(scope, receive, send)

    def _allowed(self, scope: Scope) -> bool:
        path = scope["path"]
        if path in self._open_paths:
            return True
        if _for_operators(path):
            return _shows_key(scope, self._admin_keys)
        return not self._api_keys or _shows_key(scope, self._api_keys)


def _shows_key(scope: Scope, keys: tuple[bytes, ...]) -> bool:
    scheme, _, shown = (Headers(scope=scope).get("authorization") or "").partition(" ")
    if scheme.lower() != "bearer":
        return False
    offered = shown.strip().encode("latin-1")
    # All keys are compared, so that the time taken does not tell which one was close.
    return any([hmac.compare_digest(offered, key) for key in keys])


def _for_operators(path: str) -> bool:
    return any(path == root or path.startswith(root + "/") for root in _OPERATORS)


def _unauthorized(path: str) -> RequestError:
    message = "Incorrect or missing API key. Send it as 'Authorization: Bearer KEY'."
    if _for_operators(path):
        message = (
            "This is for operators: send the server's admin_key as 'Authorization: Bearer KEY'. "
            "Where none is configured, nobody is let in."
        )
    return Unauthorized(message, code="invalid_api_key")


class BodyMiddleware:
    """Refuses bodies over the limit, whether their length is announced or not, and those that come too slowly."""

    def __init__(self, app: ASGIApp, *, max_bytes: int, seconds: float = BODY_SECONDS) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._seconds = seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        announced = Headers(scope=scope).get("content-length", "")
        if self._announces_too_much(announced):
            await error_response(self._too_large())(scope, receive, send)
            return
        await self._app(scope, self._limited(receive), send)

    def _announces_too_much(self, announced: str) -> bool:
        return announced.isdecimal() and (len(announced) > _MOST_LENGTH_DIGITS or int(announced) > self._max_bytes)

    def _limited(self, receive: Receive) -> Receive:
        received, complete = 0, False
        deadline = asyncio.get_running_loop().time() + self._seconds

        async def limited() -> Message:
            nonlocal received, complete
            if complete:  # what is waited for now is that the client leaves
                return await receive()
            try:
                async with asyncio.timeout_at(deadline):
                    message = await receive()
            except TimeoutError:
                raise RequestTimeout("The request's body did not arrive in time.", code="request_timeout") from None
            received += len(message.get("body", b""))
            complete = not message.get("more_body", False)
            if received > self._max_bytes:
                raise self._too_large()
            return message

        return limited

    def _too_large(self) -> RequestError:
        return RequestTooLarge(f"The request is larger than {self._max_bytes} bytes.", code="request_too_large")
