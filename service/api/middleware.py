"""Pure ASGI layers around every route: request ids, keys, and the size of a body.

They decide on `scope["path"]` alone, because everything else that describes the address comes from the client.
"""

import hmac
import re
import secrets

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.api.errors import REQUEST_ID_HEADER, error_response
from service.errors import RequestError, RequestTooLarge, Unauthorized

_ACCEPTABLE_REQUEST_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")
_PROBES = frozenset({"/livez", "/readyz", "/health"})
_OPERATORS = ("/admin", "/v1/adaptation", "/update_weights_from_disk")
_POLICY_VIOLATION = 1008
_MOST_LENGTH_DIGITS = 18


class RequestIdMiddleware:
    """Every answer carries an `X-Request-Id`: the client's own when it is a sane one, otherwise a new one."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = _request_id(Headers(scope=scope).get(REQUEST_ID_HEADER))
        scope.setdefault("state", {})["request_id"] = request_id

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[REQUEST_ID_HEADER] = request_id
            await send(message)

        await self._app(scope, receive, send_with_id)


def _request_id(offered: str | None) -> str:
    if offered is not None and _ACCEPTABLE_REQUEST_ID.fullmatch(offered):
        return offered
    return f"req-{secrets.token_hex(16)}"


class AuthMiddleware:
    """Refuses whoever shows no valid key. Only the probes, and `/metrics` when opened, need none.

    Without API keys everything is open but what belongs to operators; that has a key of its own, and without one it is
    closed.
    """

    def __init__(self, app: ASGIApp, *, api_keys: tuple[str, ...], admin_key: str | None, open_metrics: bool) -> None:
        self._app = app
        self._api_keys = tuple(key.encode() for key in api_keys)
        self._admin_keys = () if admin_key is None else (admin_key.encode(),)
        self._open_paths = _PROBES | ({"/metrics"} if open_metrics else set())

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


class BodySizeMiddleware:
    """Refuses bodies over the limit, whether the client announces their length or not."""

    def __init__(self, app: ASGIApp, *, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        announced = Headers(scope=scope).get("content-length", "")
        if self._announces_too_much(announced):
            await error_response(self._too_large())(scope, receive, send)
            return
        await self._app(scope, self._counting(receive), send)

    def _announces_too_much(self, announced: str) -> bool:
        return announced.isdecimal() and (len(announced) > _MOST_LENGTH_DIGITS or int(announced) > self._max_bytes)

    def _counting(self, receive: Receive) -> Receive:
        received = 0

        async def counted() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self._max_bytes:
                raise self._too_large()
            return message

        return counted

    def _too_large(self) -> RequestError:
        return RequestTooLarge(f"The request is larger than {self._max_bytes} bytes.", code="request_too_large")
