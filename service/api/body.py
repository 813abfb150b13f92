"""Reads a request's JSON body into its schema, and says in OpenAI's terms what is wrong with it."""

from functools import partial
from typing import TypeVar

import pydantic_core
from pydantic import BaseModel, JsonValue, ValidationError
from starlette.requests import Request

from service.api.settings import Server
from service.errors import InvalidRequest

Schema = TypeVar("Schema", bound=BaseModel)

_LARGE_BODY_BYTES = 64 * 1024
_LONGEST_QUOTE = 80


async def read_body(request: Request, schema: type[Schema], server: Server) -> Schema:
    _check_content_type(request)
    body = await request.body()
    parse = partial(parse_body, body, schema)
    # Large bodies take milliseconds, which every running stream would feel.
    return parse() if len(body) < _LARGE_BODY_BYTES else await server.runtime.off_loop(parse)


def _check_content_type(request: Request) -> None:
    """A web page may send any other type across origins without asking; this one makes its browser ask first."""
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json":
        raise InvalidRequest(f"The Content-Type must be application/json, not '{media_type}'.")


def parse_body(body: bytes, schema: type[Schema]) -> Schema:
    try:
        return schema.model_validate_json(body)
    except ValidationError as error:
        raise _explain(error, body) from error


def _explain(error: ValidationError, body: bytes) -> InvalidRequest:
    failures = error.errors(include_url=False, include_context=False)
    if failures[0]["type"] == "json_invalid":
        return InvalidRequest(f"The body is not valid JSON: {failures[0]['msg']}.")
    value = pydantic_core.from_json(body)
    paths = [_path(failure["loc"], value) for failure in failures]
    # A value may be tried as several types; the failure that got furthest into it is the one that helps, and of several
    # there the one of the type that it has.
    path, failure = max(
        zip(paths, failures, strict=True),
        key=lambda one: (
            len(one[0]),
            not str(one[1]["type"]).endswith("_type"),
            [part for part in one[0] if isinstance(part, int)],
        ),
    )
    return _describe(".".join(map(str, path)), failure)


def _describe(path: str, failure: pydantic_core.ErrorDetails) -> InvalidRequest:
    if failure["type"] == "missing":
        return InvalidRequest(f"Missing required parameter: '{path}'.", param=path)
    given = failure["input"]
    quote = f" (got {given!r:.{_LONGEST_QUOTE}})" if isinstance(given, str | int | float) else ""
    where = f" for '{path}'" if path else ""
    return InvalidRequest(f"Invalid value{where}: {failure['msg']}{quote}.", param=path or None)


def _path(location: tuple[int | str, ...], value: JsonValue) -> list[int | str]:
    """The part of a location that names things in the body: the names of union members are left out."""
    path: list[int | str] = []
    for position, part in enumerate(location):
        if isinstance(value, dict) and isinstance(part, str) and (part in value or position == len(location) - 1):
            path.append(part)
            value = value.get(part)
        elif isinstance(value, list) and isinstance(part, int) and part < len(value):
            path.append(part)
            value = value[part]
    return path
