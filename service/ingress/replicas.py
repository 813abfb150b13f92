"""Sends requests to replicas (server processes), and chooses the replica for each by prompt affinity and load."""

import asyncio
import hashlib
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol
from urllib.parse import quote

import httpx
from pydantic import JsonValue
from starlette.datastructures import Headers as NamedHeaders
from starlette.requests import Request

from service.api.body import is_packed, unpack
from service.api.settings import MAX_REQUEST_BYTES
from service.errors import RequestError, StartupError, parsed_json

Headers = tuple[tuple[bytes, bytes], ...]

LAST_EVENT_ID = b"last-event-id"
_CONTENT_ENCODING = b"content-encoding"
_RESUME_FROM = "resume_from"
FORWARDED_FOR = b"x-forwarded-for"
# Hop-by-hop headers, and headers that the receiving side sets itself.
_CONNECTION_HEADERS = frozenset(
    b"connection keep-alive proxy-authenticate proxy-authorization proxy-connection te trailer transfer-encoding "
    b"upgrade expect content-length date server".split()
)
_PROMPT_FIELDS = ("messages", "prompt", "input")
_AFFINITY_CHARACTERS = 1024  # length of the prompt's beginning that determines its replica
_MAX_IMBALANCE = 4  # running requests that the replica with affinity may have beyond those of the least busy replica
_CONNECT_SECONDS = 2.0
_PROBE_SECONDS = 5.0
_PROBE_EVERY_SECONDS = 1.0


class Unreachable(Exception):
    """A replica did not accept a request, so that another one can take it."""


class Broken(Unreachable):
    """A replica accepted a request, but did not complete its answer."""


@dataclass(frozen=True, slots=True)
class ForwardedRequest:
    """A client's request in the form that is sent to replicas."""

    method: str
    path: str  # path and query
    headers: Headers
    body: bytes
    affinity: str  # digest of the prompt's beginning; equal beginnings go to the same replica and its prefix cache

    @staticmethod
    def of(request: Request, body: bytes, request_id: str) -> "ForwardedRequest":
        """Build the forwarded form of an incoming request."""
        headers = [
            header for header in passed_on(request.headers.raw) if header[0] not in (FORWARDED_FOR, b"x-request-id")
        ]
        headers.append((b"x-request-id", request_id.encode()))
        if request.client is not None:
            headers.append((FORWARDED_FOR, request.client.host.encode()))
        path, query = quote(request.scope["path"]), request.url.query
        target = f"{path}?{query}" if query else path
        prompt = _prompt_in(_fields_in(headers, body))
        return ForwardedRequest(request.method, target, tuple(headers), body, _digest(prompt or path))

    def resumed_after(self, event_id: bytes) -> "ForwardedRequest":
        """Build the request that continues this one's stream after the event with this id."""
        replaced, body, fields = {LAST_EVENT_ID}, self.body, _fields_in(self.headers, self.body)
        if fields.pop(_RESUME_FROM, None) is not None:  # the field takes precedence over the header
            replaced, body = {LAST_EVENT_ID, _CONTENT_ENCODING}, json.dumps(fields).encode()
        headers = (header for header in self.headers if header[0] not in replaced)
        return replace(self, headers=(*headers, (LAST_EVENT_ID, event_id)), body=body)


@dataclass(frozen=True, slots=True)
class ReplicaAnswer:
    """A replica's answer while it arrives. Reading `chunks` raises Broken; the receiver calls `close`."""

    status: int
    headers: Headers
    chunks: AsyncGenerator[bytes, None]
    close: Callable[[], Awaitable[None]]

    @property
    def is_stream(self) -> bool:
        """Whether the body is a stream of server-sent events."""
        return any(name == b"content-type" and value.startswith(b"text/event-stream") for name, value in self.headers)


class Replicas(Protocol):
    """The replicas of one model that an ingress can send requests to."""

    async def send(self, request: ForwardedRequest, tried: set[str]) -> ReplicaAnswer | None:
        """Send a request to a replica that is not in `tried`, and add that replica to `tried`. Returns None if all have
        been tried. Raises Unreachable, or Broken if the replica had accepted the request."""

    async def close(self) -> None:
        """Close all connections."""


class HttpReplicas:
    """Replicas at given HTTP addresses.

    Prompts with the same beginning go to the same replica, unless it is much busier than another. A replica that did
    not answer is tried last until it answers a probe.
    """

    def __init__(self, urls: Sequence[str], *, stall_seconds: float) -> None:
        """`stall_seconds`: wait for response headers after which the replica is probed. Raises StartupError for a bad
        address."""
        self._running = dict.fromkeys(map(_checked, urls), 0)
        self._stall_seconds = stall_seconds
        self._silent: set[str] = set()  # replicas that did not answer the last request
        self._probes: dict[str, asyncio.Task[None]] = {}
        timeout = httpx.Timeout(None, connect=_CONNECT_SECONDS)
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=2.0)
        self._client = httpx.AsyncClient(timeout=timeout, limits=limits, trust_env=False, follow_redirects=False)

    async def send(self, request: ForwardedRequest, tried: set[str]) -> ReplicaAnswer | None:
        """Send to the replica with affinity, or to a less busy one; see `Replicas.send`."""
        others = self._running.keys() - tried
        if not others:
            return None
        least = min(self._running[url] for url in others)

        def rank(url: str) -> tuple[bool, int, str]:
            surplus = max(0, self._running[url] - least - _MAX_IMBALANCE)
            # Rendezvous hashing: a prompt's beginning keeps its replica when others come and go.
            return url in self._silent, surplus, _digest(url + request.affinity)

        url = min(others, key=rank)
        tried.add(url)
        self._running[url] += 1
        try:
            response = await self._response(url, request)
        except BaseException:
            self._running[url] -= 1
            raise
        close = partial(self._close_answer, url, response)
        return ReplicaAnswer(response.status_code, passed_on(response.headers.raw), _chunks(response), close)

    async def close(self) -> None:
        """Stop all probes and close all connections."""
        for probe in self._probes.values():
            probe.cancel()
        await asyncio.gather(*self._probes.values(), return_exceptions=True)
        await self._client.aclose()

    async def _response(self, url: str, request: ForwardedRequest) -> httpx.Response:
        """Send a request and wait for the response headers, which an unstreamed answer sends with its body. Raises
        Unreachable, or Broken if the replica had accepted the request."""
        built = self._client.build_request(
            request.method, url + request.path, headers=request.headers, content=request.body
        )
        sending = asyncio.create_task(self._client.send(built, stream=True))
        try:
            while not (await asyncio.wait({sending}, timeout=self._stall_seconds))[0]:
                if not await self._lives(url):
                    raise Broken("no response, and its probe failed")
            return sending.result()
        except (httpx.TransportError, Broken) as error:
            self._silent.add(url)
            self._probe(url)
            accepted = not isinstance(error, httpx.ConnectError | httpx.ConnectTimeout)
            raise (Broken if accepted else Unreachable)(f"{url} did not answer: {error!r}") from error
        finally:
            sending.cancel()

    async def _close_answer(self, url: str, response: httpx.Response) -> None:
        self._running[url] -= 1
        if not response.is_closed:
            self._probe(url)  # the stream was interrupted, or the client has disconnected
        await response.aclose()

    def _probe(self, url: str) -> None:
        """Start probing a replica, and treat it as silent from the first failed probe until it answers one."""

        async def probe() -> None:
            while not await self._lives(url):
                self._silent.add(url)
                await asyncio.sleep(_PROBE_EVERY_SECONDS)
            self._silent.discard(url)
            del self._probes[url]

        if url not in self._probes:
            self._probes[url] = asyncio.create_task(probe())

    async def _lives(self, url: str) -> bool:
        try:
            return (await self._client.get(f"{url}/livez", timeout=_PROBE_SECONDS)).status_code == 200
        except httpx.RequestError:
            return False


async def _chunks(response: httpx.Response) -> AsyncGenerator[bytes, None]:
    try:
        async for chunk in response.aiter_raw():
            yield chunk
    except httpx.TransportError as error:
        raise Broken(f"the answer of {response.url} was interrupted: {error!r}") from error


def passed_on(headers: Iterable[tuple[bytes, bytes]]) -> Headers:
    """Return the end-to-end headers, with lower-case names."""
    return tuple((name.lower(), value) for name, value in headers if name.lower() not in _CONNECTION_HEADERS)


def _checked(url: str) -> str:
    """Check the address of a server, and return it without a trailing slash. Raises StartupError."""
    try:
        parsed = httpx.URL(url)
        is_address = (
            parsed.scheme in ("http", "https") and bool(parsed.host) and parsed.path == "/" and not parsed.query
        )
    except httpx.InvalidURL:
        is_address = False
    if not is_address:
        raise StartupError(f"--replicas: {url!r} is not a server address; give http://HOST:PORT")
    return url.rstrip("/")


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def _fields_in(headers: Iterable[tuple[bytes, bytes]], body: bytes) -> dict[str, JsonValue]:
    """Parse the JSON fields of a body; empty if the body is not a JSON object, which a replica will refuse."""
    try:
        if is_packed(NamedHeaders(raw=[*headers])):
            body = unpack(body, MAX_REQUEST_BYTES)
        fields = parsed_json(body)
    except RequestError:
        return {}
    return fields if isinstance(fields, dict) else {}


def _prompt_in(fields: dict[str, JsonValue]) -> str:
    prompts = [fields[name] for name in _PROMPT_FIELDS if fields.get(name)]
    return json.dumps(prompts[0], ensure_ascii=False)[:_AFFINITY_CHARACTERS] if prompts else ""
