"""The exceptions that a caller can cause; each request error has an HTTP status and a type of OpenAI's. JSON of clients
is parsed here, so that whatever is wrong with it is such an error."""

import json
from typing import Any, ClassVar

import numpy as np
import pydantic_core
from pydantic import JsonValue

MAX_JSON_DEPTH = 127
"""Levels that JSON of clients may nest: as many as llguidance reads of a schema (serde_json's limit). pydantic reads
200, and Python's 1,000 frames suffice for seven a level; the rules for schemas take four."""
_PATH_PARTS = 4  # of a field that is named: tools.0.function.parameters is the longest that holds anything
_STEPS = np.zeros(256, dtype=np.int8)  # of the depth, by character
_STEPS[[*b"[{"]], _STEPS[[*b"]}"]] = 1, -1


class AdaptreeError(Exception):
    """Base of all errors that are not bugs."""


class StartupError(AdaptreeError):
    """The server cannot start as configured; the message names the setting to change, and how."""


class RequestError(AdaptreeError):
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
    status = 400  # `param` names a field whose value cannot be honoured


class Unauthorized(RequestError):
    status = 401  # no key or a wrong one


class Forbidden(RequestError):
    status = 403  # from a page of, or addressed to, a host that is not allowed


class NotFound(RequestError):
    status = 404  # no such model or route


class Conflict(RequestError):
    status = 409  # it resumes another request, or one of another model


class RequestTimeout(RequestError):
    status = 408  # headers or body did not arrive in time


class RequestTooLarge(RequestError):
    status = 413


class UnsupportedMedia(RequestError):
    status = 415  # the body has an unsupported encoding


class QueueFull(RequestError):
    status = 429  # with Retry-After
    kind = "rate_limit_error"


class RequestLimit(RequestError):
    status = 429  # with Retry-After: requests of a key, per minute or concurrent
    kind = "requests"


class TokenLimit(RequestError):
    status = 429  # with Retry-After: tokens of a key, per minute
    kind = "tokens"


class QuotaUsedUp(RequestError):
    status = 429  # with Retry-After: tokens of a key, per month
    kind = "insufficient_quota"


class HeadersTooLarge(RequestError):
    status = 431


class EngineFailure(RequestError):
    status = 500  # the engine stopped on an internal error
    kind = "server_error"


class NotReady(RequestError):
    status = 503  # with Retry-After, while loading or draining
    kind = "server_error"


def parsed_json(text: str | bytes, param: str | None = None) -> JsonValue:
    """Parse a client's JSON: the text of the field `param`, or a body. Raises InvalidRequest."""
    refuse_deep_json(text, param)
    try:
        parsed: JsonValue = json.loads(text)
    except (ValueError, RecursionError) as error:  # other encodings than UTF-8 may hide their depth
        subject = "The body is not" if param is None else f"Invalid value for '{param}': no"
        raise InvalidRequest(f"{subject} valid JSON: {error}.", param=param) from error
    return parsed


def refuse_deep_json(text: str | bytes, param: str | None = None) -> None:
    """Raise InvalidRequest for JSON of too many levels, in time linear in its length; names `param`, or the field of a
    body."""
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
    """The path of the field in which the beginning of a body ends; None: it is no object."""
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
