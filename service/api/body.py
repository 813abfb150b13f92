"""Parse the JSON body of a request into its schema, and report errors in OpenAI's terms."""

import re
import zlib
from typing import TypeVar

import pydantic_core
from pydantic import BaseModel, JsonValue, ValidationError
from starlette.datastructures import Headers
from starlette.requests import Request

from service.api.settings import Server
from service.errors import InvalidRequest, RequestTooLarge, UnsupportedMedia, refuse_deep_json

Schema = TypeVar("Schema", bound=BaseModel)

LARGE_BODY_BYTES = 64 * 1024
_MEDIUM = re.compile(r"Input tag '(\w*(image|audio|video|file)\w*)'")
_MEDIA = {"image": "images are", "audio": "audio is", "video": "video is", "file": "files are"}
_MAX_QUOTED_CHARACTERS = 80
_PIECE_BYTES = 4096  # input per decompression call; small, as the rest is copied after each gzip member
_MAX_MEMBERS = 1024  # gzip members per body; block-wise gzip has one per 64 KiB or less
_GZIP = 16  # flag in zlib's window bits: expect gzip header and trailer


async def read_body(request: Request, schema: type[Schema], server: Server) -> Schema:
    """Read, decompress and validate the JSON body of a request. Raises RequestError."""
    _check_content_type(request)
    was_packed, max_bytes = is_packed(request.headers), server.settings.max_request_bytes
    body = await request.body()
    if len(body) < LARGE_BODY_BYTES and not was_packed:
        return parse_body(body, schema)

    # Parsing a large body takes milliseconds and would delay all streams; compressed bytes may expand to megabytes.
    def parse() -> Schema:
        return parse_body(unpack(body, max_bytes) if was_packed else body, schema)

    return await server.runtime.in_turn(server.account_of(request), parse)


def is_packed(headers: Headers) -> bool:
    """Whether the body is compressed with gzip. Raises UnsupportedMedia for other encodings."""
    encoding = ",".join(headers.getlist("content-encoding")).strip().lower()
    if encoding not in ("", "identity", "gzip", "x-gzip"):
        message = f"The Content-Encoding may be gzip or identity, not '{encoding[:_MAX_QUOTED_CHARACTERS]}'."
        raise UnsupportedMedia(message, param="content-encoding", code="unsupported_content_encoding")
    return encoding.endswith("gzip")


def unpack(body: bytes, max_bytes: int) -> bytes:
    """Decompress all members of a gzip body. Raises InvalidRequest for invalid gzip, and RequestTooLarge before the
    output exceeds `max_bytes`."""
    num_members, unpacked, at, member = 1, bytearray(), 0, zlib.decompressobj(zlib.MAX_WBITS | _GZIP)
    try:
        while at < len(body):
            if member.eof:
                num_members += 1
                if num_members > _MAX_MEMBERS:
                    message = f"A gzip body may have at most {_MAX_MEMBERS} members."
                    raise InvalidRequest(message, param="content-encoding")
                member = zlib.decompressobj(zlib.MAX_WBITS | _GZIP)
            piece = body[at : at + _PIECE_BYTES]
            unpacked += member.decompress(piece, max_bytes + 1 - len(unpacked))
            if len(unpacked) > max_bytes:
                message = f"The request is larger than {max_bytes} bytes after decompression."
                raise RequestTooLarge(message, code="request_too_large")
            at += len(piece) - len(member.unused_data)
        if body and not member.eof:
            raise InvalidRequest("The body is not valid gzip: it is truncated.", param="content-encoding")
    except zlib.error as error:
        raise InvalidRequest(f"The body is not valid gzip: {error}.", param="content-encoding") from error
    return bytes(unpacked)


def _check_content_type(request: Request) -> None:
    """Refuse all content types except JSON: browsers send others across origins without a preflight request."""
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json":
        raise InvalidRequest(f"The Content-Type must be application/json, not '{media_type}'.")


def parse_body(body: bytes, schema: type[Schema]) -> Schema:
    """Validate a JSON body against its schema. Raises InvalidRequest naming the field."""
    refuse_deep_json(body)
    try:
        return schema.model_validate_json(body)
    except ValidationError as error:
        raise _explain(error, body) from error


def _explain(error: ValidationError, body: bytes) -> InvalidRequest:
    failures = error.errors(include_url=False, include_context=False)
    if failures[0]["type"] == "json_invalid":
        return InvalidRequest(f"The body is not valid JSON: {failures[0]['msg']}.")
    value = pydantic_core.from_json(body)
    paths = [_path(failure, value) for failure in failures]
    # A value may be validated as several union members. Report the failure deepest inside the value; among equally
    # deep ones, prefer a member whose type matches.
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
    if failure["type"] in ("missing", "union_tag_not_found"):
        return InvalidRequest(f"Missing required parameter: '{path}'.", param=path)
    given = failure["input"]
    quote = f" (got {given!r:.{_MAX_QUOTED_CHARACTERS}})" if isinstance(given, str | int | float) else ""
    where = f" for '{path}'" if path else ""
    reason = re.sub(r" found using \S+", "", failure["msg"])  # pydantic names our discriminator function
    medium = _MEDIUM.match(reason)
    if medium is not None and ".content." in path:
        reason = f"{medium[1]!r} is not supported: {_MEDIA[medium[2]]} not supported, only text"
    return InvalidRequest(f"Invalid value{where}: {reason}{quote}.", param=path or None)


def _path(failure: pydantic_core.ErrorDetails, value: JsonValue) -> list[int | str]:
    """Return the location of a failure in the body as keys and indices, without the names of union members."""
    path: list[int | str] = []
    location, is_missing = failure["loc"], failure["type"] == "missing"
    for position, part in enumerate(location):
        if isinstance(value, dict) and isinstance(part, str):
            if part in value or (is_missing and position == len(location) - 1):
                path.append(part)
                value = value.get(part)
        elif isinstance(value, list) and isinstance(part, int) and part < len(value):
            path.append(part)
            value = value[part]
    return [*path, "type"] if str(failure["type"]).startswith("union_tag") else path
