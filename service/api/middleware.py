"""ASGI middleware around every route: request ids, access log, checks of hosts and keys, limits of keys and bodies.

Whether a request needs a key depends on `scope["path"]` alone: everything else that describes the address comes from
the client.
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

from service.api.errors import CLIENT_CLOSED_REQUEST, REQUEST_ID_HEADER, error_response
from service.api.page import FEED_PATH, PAGE_PATHS
from service.api.settings import ApiSettings
from service.api.tenants import Tenant
from service.api_keys import digest_of
from service.config import is_loopback
from service.errors import Forbidden, RequestError, RequestTimeout, RequestTooLarge, Unauthorized

logger = logging.getLogger(__name__)

BODY_SECONDS = 20.0

_ACCEPTABLE_REQUEST_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")
_PROBES = frozenset({"/livez", "/readyz", "/health"})
_OBSERVERS = frozenset({"/metrics", FEED_PATH})
_OPERATORS = ("/v1/adaptation", "/update_weights_from_disk")
_SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
_ADDRESS = re.compile(r"(?P<name>\[[0-9a-fA-F:.]+\]|[^\s:/?#@\[\]]+)(:\d+)?")
_POLICY_VIOLATION = 1008
_MAX_LENGTH_DIGITS = 18
_MAX_LOGGED_CHARACTERS = 200
_BUG = 500
_NO_KEY = "Incorrect or missing API key. Send it as 'Authorization: Bearer KEY'."
_NO_ADMIN_KEY = (
    "This is for operators: send the server's admin_key as 'Authorization: Bearer KEY'. "
    "Without a configured admin_key this route is closed."
)


class AccessMiddleware:
    """Gives every response an `X-Request-Id`, the client's own if it is well-formed, and logs method, path, status, id
    and duration after the last byte is sent.

    The log holds no keys, addresses, queries or bodies. Requests to probes, `/metrics`, the feed and the page are
    logged at level debug.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = Headers(scope=scope).get(REQUEST_ID_HEADER, "")
        if not _ACCEPTABLE_REQUEST_ID.fullmatch(request_id):
            request_id = f"req-{secrets.token_hex(16)}"
        scope.setdefault("state", {})["request_id"] = request_id
        if len(scope["path"]) > 1:
            scope["path"] = scope["path"].rstrip("/") or "/"  # routes have no trailing slash
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


def _log_access(scope: Scope, status: int, seconds: float) -> None:
    quiet = scope["path"] in _PROBES | _OBSERVERS | PAGE_PATHS
    # A path arrives decoded, and a line break in it would forge a log line.
    path = quote(scope["path"][:_MAX_LOGGED_CHARACTERS], errors="replace")
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


class RefusingMiddleware:
    """Refuses requests by host, origin, key and Content-Length, before their body is read."""

    def __init__(self, app: ASGIApp, settings: ApiSettings) -> None:
        self._app = app
        self._settings = settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = None if scope["type"] == "lifespan" else self._complaint(scope)
        if error is None:
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": _POLICY_VIOLATION})
        else:
            await error_response(error)(scope, receive, send)

    def _complaint(self, scope: Scope) -> RequestError | None:
        headers = Headers(scope=scope)
        error = _foreign_host(scope, headers, self._settings) or _unknown_key(scope, headers, self._settings)
        if error is not None:
            return error
        announced, most = headers.get("content-length", ""), self._settings.max_request_bytes
        if announced.isdecimal() and (len(announced) > _MAX_LENGTH_DIGITS or int(announced) > most):
            return _too_large(most)
        return None


def _foreign_host(scope: Scope, headers: Headers, settings: ApiSettings) -> RequestError | None:
    """Return an error for a foreign host name, or for a state-changing request from a page of a foreign origin;
    otherwise return None.

    A web page can make its own host name resolve to this machine (DNS rebinding), so that the browser treats our
    responses as the page's own; but the browser still sends that name.
    """
    if settings.allowed_hosts is None:
        return None
    addresses = [("host", host, host) for host in headers.getlist("host")]
    if scope.get("method") not in _SAFE_METHODS:
        foreign = [origin for origin in headers.getlist("origin") if origin not in settings.cors_origins]
        addresses += [("origin", origin, origin.partition("://")[2]) for origin in foreign]
    for header, value, address in addresses:
        match = _ADDRESS.fullmatch(address)
        name = match["name"].lower().strip("[].") if match else ""
        if name not in settings.allowed_hosts and not is_loopback(name):
            named = f"the {header} {value[:_MAX_LOGGED_CHARACTERS]!r}"
            message = f"This server does not answer to {named}: see allowed_hosts."
            return Forbidden(message, code=f"{header}_not_allowed")
    return None


def _unknown_key(scope: Scope, headers: Headers, settings: ApiSettings) -> Unauthorized | None:
    """Return an error if a request lacks the key that it needs. A valid key is stored in the scope's state as `tenant`.

    Probes and the files of the page need no key, nor do `/metrics` and the feed with `open_metrics`. Without configured
    API keys all routes are open except the operators', which need the admin key and are closed if there is none.
    """
    scheme, _, sent = headers.get("authorization", "").partition(" ")
    offered = digest_of(sent.strip().encode("latin-1")) if scheme.lower() == "bearer" else None
    if _for_operators(scope):
        expected = settings.admin_digest
        known = offered is not None and expected is not None and hmac.compare_digest(offered, expected)
        return None if known else Unauthorized(_NO_ADMIN_KEY, code="invalid_api_key")
    open_paths = _PROBES | PAGE_PATHS | (_OBSERVERS if settings.open_metrics else frozenset())
    if not settings.tenants or scope["path"] in open_paths:
        return None
    tenant = None if offered is None else settings.tenants.find(offered)
    if tenant is None:
        return Unauthorized(_NO_KEY, code="invalid_api_key")
    scope.setdefault("state", {})["tenant"] = tenant
    return None


def _for_operators(scope: Scope) -> bool:
    return any(scope["path"] == root or scope["path"].startswith(root + "/") for root in _OPERATORS)


def _too_large(max_bytes: int) -> RequestError:
    return RequestTooLarge(f"The request is larger than {max_bytes} bytes.", code="request_too_large")


class LimitMiddleware:
    """Applies the limits of an API key to every POST before its body is read. Response headers report the remaining
    limits, whether or not the request was admitted."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        tenant: Tenant | None = scope.get("state", {}).get("tenant")
        if scope["type"] != "http" or scope["method"] != "POST" or tenant is None:
            await self._app(scope, receive, send)
            return

        async def send_with_limits(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(tenant.headers)
            await send(message)

        try:
            admission = tenant.admit()
        except RequestError as error:
            await error_response(error)(scope, receive, send_with_limits)
            return
        scope["state"]["admission"] = admission
        try:
            await self._app(scope, receive, send_with_limits)
        finally:
            admission.end()


class BodyMiddleware:
    """Refuses bodies that exceed the limit or arrive too slowly."""

    def __init__(self, app: ASGIApp, *, max_bytes: int, seconds: float = BODY_SECONDS) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._seconds = seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, self._limited(receive) if scope["type"] == "http" else receive, send)

    def _limited(self, receive: Receive) -> Receive:
        received, complete = 0, False
        deadline = asyncio.get_running_loop().time() + self._seconds

        async def limited() -> Message:
            nonlocal received, complete
            if complete:  # the next message is the client's disconnect
                return await receive()
            try:
                async with asyncio.timeout_at(deadline):
                    message = await receive()
            except TimeoutError:
                raise RequestTimeout("The request's body did not arrive in time.", code="request_timeout") from None
            received += len(message.get("body", b""))
            complete = not message.get("more_body", False)
            if received > self._max_bytes:
                raise _too_large(self._max_bytes)
            return message

        return limited


class HeadMiddleware:
    """Answers HEAD like GET, without the body."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return

        async def send_head(message: Message) -> None:
            if message["type"] == "http.response.start":
                await send(message)
                await send({"type": "http.response.body", "body": b""})  # ends a stream as if its client had gone

        await self._app({**scope, "method": "GET"}, receive, send_head)
