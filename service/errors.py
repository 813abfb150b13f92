"""Exceptions that callers can cause. Each request error has an HTTP status and an OpenAI error type. Client JSON is
parsed here, so that malformed JSON is always such an error."""

import json
from typing import Any, ClassVar

import numpy as np
import pydantic_core
from pydantic import JsonValue

MAX_JSON_DEPTH = 127
"""Nesting limit of client JSON, equal to llguidance's limit for schemas (from serde_json). pydantic reads 200 levels.
Python's 1,000 frames allow seven per level; the schema rules use four."""
_PATH_PARTS = 4  # longest reported path, as in tools.0.function.parameters
_STEPS = np.zeros(256, dtype=np.int8)  # change of nesting depth, by character code
_STEPS[[*b"[{"]], _STEPS[[*b"]}"]] = 1, -1


class PeerLost(BaseException):
    """A process that shares the model has ended, or does not answer: no fault of a request, which would end alone."""


class StartupError(Exception):
    """The server cannot start as configured; the message names the setting to change, and how."""


class RequestError(Exception):
    """A request that cannot be served, with the fields of OpenAI's error body."""

    status: ClassVar[int]
    kind: ClassVar[str] = "invalid_request_error"

    def __init__(
        self, message: str, *, param: str | None = None, code: str | None = None, retry_after_seconds: int | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code
        self.retry_after_seconds = retry_after_seconds


class InvalidRequest(RequestError):
    status = 400  # `param` names the invalid or unsupported field


class Unauthorized(RequestError):
    status = 401  # API key missing or wrong


class Forbidden(RequestError):
    status = 403  # Host or Origin header not allowed


class NotFound(RequestError):
    status = 404  # unknown model or route


class Conflict(RequestError):
    status = 409  # resume point of another request or model


class RequestTimeout(RequestError):
    status = 408  # headers or body not received in time


class RequestTooLarge(RequestError):
    status = 413


class UnsupportedMedia(RequestError):
    status = 415  # unsupported Content-Encoding


class QueueFull(RequestError):
    status = 429  # has Retry-After: the queue is full
    kind = "rate_limit_error"


class RequestLimit(RequestError):
    status = 429  # has Retry-After: requests of a key, per minute or concurrent
    kind = "requests"


class TokenLimit(RequestError):
    status = 429  # has Retry-After: tokens of a key, per minute or held by running requests
    kind = "tokens"


class QuotaUsedUp(RequestError):
    status = 429  # has Retry-After: tokens of a key, per month
    kind = "insufficient_quota"


class HeadersTooLarge(RequestError):
    status = 431


class EngineFailure(RequestError):
    status = 500  # the engine stopped on an internal error
    kind = "server_error"


class NotReady(RequestError):
    status = 503  # has Retry-After: loading or draining
    kind = "server_error"


def parsed_json(text: str | bytes, param: str | None = None) -> JsonValue:
    """Parse client JSON: the text of the field `param`, or a body. Raises InvalidRequest."""
    refuse_deep_json(text, param)
    try:
        parsed: JsonValue = json.loads(text)
    except (ValueError, RecursionError) as error:  # RecursionError: encodings other than UTF-8 bypass the depth check
        subject = "The body is not" if param is None else f"Invalid value for '{param}': not"
        raise InvalidRequest(f"{subject} valid JSON: {error}.", param=param) from error
    return parsed


def refuse_deep_json(text: str | bytes, param: str | None = None) -> None:
    """Raise InvalidRequest for JSON nested too deeply, in linear time. Names `param`, or the deep field of a body."""
    written = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
    if written.count(b"[") + written.count(b"{") <= MAX_JSON_DEPTH:
        return
    letters = np.frombuffer(written.replace(rb"\\", b"__").replace(rb"\"", b"__"), dtype=np.uint8)
    in_strings = np.bitwise_xor.accumulate(letters == ord('"'))
    depth = np.cumsum(_STEPS[letters] * ~in_strings, dtype=np.int32)
    first = int(np.argmax(depth > MAX_JSON_DEPTH))
    if depth[first] > MAX_JSON_DEPTH:
        param = param or _path_to_the_end(written[: first + 1])
        subject = f"Invalid value for '{param}': it" if param else "The body"
        raise InvalidRequest(f"{subject} is nested deeper than {MAX_JSON_DEPTH} levels.", param=param)


def _path_to_the_end(begun: bytes) -> str | None:
    """Return the path of the field at which the truncated body `begun` ends, or None if it is not an object."""
    try:
        value: Any = pydantic_core.from_json(begun, allow_partial=True)
    except ValueError:
        return None
    path: list[str] = []
    while isinstance(value, dict if not path else (dict, list)) and value and len(path) < _PATH_PARTS:
        part = next(reversed(value)) if isinstance(value, dict) else len(value) - 1
        path.append(str(part))
        value = value[part]
    return ".".join(path) or None
