"""Convert all failures to OpenAI's error bodies."""

import difflib
import logging

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from service.errors import EngineFailure, InvalidRequest, RequestError, RequestTimeout, RequestTooLarge

logger = logging.getLogger(__name__)

REQUEST_ID_HEADER = "x-request-id"
CLIENT_CLOSED_REQUEST = 499


def error_body(error: RequestError) -> dict[str, dict[str, str | None]]:
    """Format an error as OpenAI's error body."""
    return {"error": {"message": error.message, "type": error.kind, "param": error.param, "code": error.code}}


def error_event(error: RequestError) -> dict[str, str | None]:
    """Build the event that ends a failed stream of `/v1/responses`."""
    return {"type": "error", "code": error.code, "message": error.message, "param": error.param}


def error_response(error: RequestError) -> JSONResponse:
    """Build the HTTP response of an error."""
    headers = {} if error.retry_after_seconds is None else {"retry-after": str(error.retry_after_seconds)}
    if isinstance(error, RequestTimeout | RequestTooLarge):
        headers["connection"] = "close"  # the rest of the body is not read
    return JSONResponse(error_body(error), status_code=error.status, headers=headers)


def internal_error() -> EngineFailure:
    """Return the error that clients see for a bug; the log has the details."""
    return EngineFailure("The server had an error while processing this request.", code="internal_error")


def install_error_handlers(app: FastAPI) -> None:
    """Register handlers that answer every exception with an error body."""
    app.add_exception_handler(RequestError, _on_request_error)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(ClientDisconnect, _on_client_gone)
    app.add_exception_handler(Exception, _on_bug)


async def _on_request_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestError)
    return error_response(error)


async def _on_http_exception(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    message, code = {
        404: (f"Invalid URL ({request.method} {request.url.path}){_near(request)}", "unknown_url"),
        405: (f"Not allowed to {request.method} {request.url.path}", "method_not_allowed"),
    }.get(error.status_code, (str(error.detail), None))
    body = error_body(InvalidRequest(message, code=code))
    return JSONResponse(body, status_code=error.status_code, headers=error.headers)


def _near(request: Request) -> str:
    """Return a hint at the known path that is most similar to the request's, or an empty text."""
    paths = [path for path in request.app.openapi()["paths"] if "{" not in path]
    found = difflib.get_close_matches(request.url.path, paths, n=1, cutoff=0.75)
    return f"; did you mean {found[0]}?" if found else ""


async def _on_client_gone(request: Request, error: Exception) -> Response:
    """Return a response that is never delivered; its status is for the access log."""
    return Response(status_code=CLIENT_CLOSED_REQUEST)


async def _on_bug(request: Request, error: Exception) -> JSONResponse:
    response = error_response(internal_error())
    # This response bypasses our middleware, which adds the header to the others.
    if (request_id := getattr(request.state, "request_id", None)) is not None:
        response.headers[REQUEST_ID_HEADER] = request_id
    return response
