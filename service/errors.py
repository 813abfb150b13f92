"""The exceptions that a caller can cause; each request error has an HTTP status and a type of OpenAI's."""

from typing import ClassVar


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
