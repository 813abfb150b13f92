"""Everything a caller can cause, as one tree of exceptions."""

from typing import ClassVar


class AdaptreeError(Exception):
    """Base of every error that is not a bug of ours."""


class StartupError(AdaptreeError):
    """The server cannot start as configured; the message says which setting to change and how."""


class RequestError(AdaptreeError):
    """A request that cannot be served, in the terms of OpenAI's error body."""

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
    status = 400  # a field has a value that cannot be honoured; `param` names it


class Unauthorized(RequestError):
    status = 401  # no key or a wrong one


class Forbidden(RequestError):
    status = 403  # it comes from, or is meant for, a host that is not allowed


class NotFound(RequestError):
    status = 404  # no such model or route


class Conflict(RequestError):
    status = 409  # it goes on with something that was not asked of this server, or not so


class RequestTimeout(RequestError):
    status = 408  # headers or body did not arrive in time


class RequestTooLarge(RequestError):
    status = 413


class UnsupportedMedia(RequestError):
    status = 415  # the body is encoded as nobody here reads it


class QueueFull(RequestError):
    status = 429  # with Retry-After
    kind = "rate_limit_error"


class RequestLimit(RequestError):
    status = 429  # with Retry-After: requests of a key, per minute or at the same time
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
