"""What is asked of replicas and what they answer, and plain server processes that are asked over HTTP."""

import asyncio
import hashlib
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol
from urllib.parse import quote

import httpx
from starlette.requests import Request

from service.errors import StartupError

Headers = tuple[tuple[bytes, bytes], ...]

LAST_EVENT_ID = b"last-event-id"
_RESUME_FROM = "resume_from"
FORWARDED_FOR = b"x-forwarded-for"
# Of a connection, not of what is said over it; and what the other side counts or says again.
_OF_A_CONNECTION = frozenset(
    b"connection keep-alive proxy-authenticate proxy-authorization proxy-connection te trailer transfer-encoding "
    b"upgrade expect content-length date server".split()
)
_PROMPT_FIELDS = ("messages", "prompt", "input")
_AFFINE_CHARACTERS = 1024  # of a prompt, by which a replica is chosen
_MOST_IMBALANCE = 4  # requests that the replica which knows a prompt's beginning may have more than the idlest
_CONNECT_SECONDS = 2.0
_PROBE_SECONDS = 5.0
_PROBE_EVERY_SECONDS = 1.0


class Unreachable(Exception):
    """A replica did not take a request."""


class Broken(Unreachable):
    """A replica took a request and did not answer it to the end."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A request as it came."""

    method: str
    path: str  # with its query
    headers: Headers
    body: bytes
    affinity: str  # digest of its prompt's beginning: whoever has read that before reads it faster

    @staticmethod
    def of(request: Request, body: bytes, request_id: str) -> "Asked":
        headers = [
            header for header in passed_on(request.headers.raw) if header[0] not in (FORWARDED_FOR, b"x-request-id")
        ]
        headers.append((b"x-request-id", request_id.encode()))
        if request.client is not None:
            headers.append((FORWARDED_FOR, request.client.host.encode()))
        path, query = quote(request.scope["path"]), request.url.query
        target = f"{path}?{query}" if query else path
        return Asked(request.method, target, tuple(headers), body, _digest(_prompt_in(body) or path))

    def behind(self, event_id: bytes) -> "Asked":
        """The same, of which all up to an event has been passed on."""
        headers = [header for header in self.headers if header[0] != LAST_EVENT_ID]
        body = self.body
        if _RESUME_FROM.encode() in body:  # it would count for more than the header
            fields = json.loads(body)
            fields.pop(_RESUME_FROM, None)
            body = json.dumps(fields).encode()
        return replace(self, headers=(*headers, (LAST_EVENT_ID, event_id)), body=body)


@dataclass(frozen=True, slots=True)
class Answer:
    """Of a replica, as it comes. `chunks` raises Broken; whoever has an answer closes it."""

    status: int
    headers: Headers
    chunks: AsyncGenerator[bytes, None]
    close: Callable[[], Awaitable[None]]

    @property
    def is_stream(self) -> bool:
        return any(name == b"content-type" and value.startswith(b"text/event-stream") for name, value in self.headers)


class Replicas(Protocol):
    """Those that serve the same model."""

    async def ask(self, asked: Asked, tried: set[str]) -> Answer | None:
        """Of one that is not among `tried`, to which it is added; None: there is no other. Raises Unreachable."""
        ...

    async def close(self) -> None: ...


class HttpReplicas:
    """Server processes by their addresses.

    The one to which a prompt's beginning belongs is asked, unless it has too much to do. One that did not answer is
    asked last, until it answers a probe.
    """

    def __init__(self, urls: Sequence[str], *, stall_seconds: float) -> None:
        """`stall_seconds`: how long one may say nothing before it is asked whether it still lives."""
        self._running = dict.fromkeys(map(_checked, urls), 0)
        self._stall_seconds = stall_seconds
        self._silent: set[str] = set()  # that did not answer when they were asked last
        self._probes: dict[str, asyncio.Task[None]] = {}
        timeout = httpx.Timeout(None, connect=_CONNECT_SECONDS)
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=2.0)
        self._client = httpx.AsyncClient(timeout=timeout, limits=limits, trust_env=False, follow_redirects=False)

    async def ask(self, asked: Asked, tried: set[str]) -> Answer | None:
        others = self._running.keys() - tried
        if not others:
            return None
        least = min(self._running[url] for url in others)

        def rank(url: str) -> tuple[bool, int, str]:
            surplus = max(0, self._running[url] - least - _MOST_IMBALANCE)
            # A digest with each address: a prompt's beginning keeps its replica when others come and go.
            return url in self._silent, surplus, _digest(url + asked.affinity)

        url = min(others, key=rank)
        tried.add(url)
        async with AsyncExitStack() as stack:
            stack.enter_context(self._counted(url))
            response = await self._sent(url, asked)
            stack.push_async_callback(self._closed, url, response)
            held = stack.pop_all()
        return Answer(response.status_code, passed_on(response.headers.raw), _chunks(response), held.aclose)

    async def close(self) -> None:
        for probe in self._probes.values():
            probe.cancel()
        await asyncio.gather(*self._probes.values(), return_exceptions=True)
        await self._client.aclose()

    @contextmanager
    def _counted(self, url: str) -> Iterator[None]:
        self._running[url] += 1
        try:
            yield
        finally:
            self._running[url] -= 1

    async def _sent(self, url: str, asked: Asked) -> httpx.Response:
        """The head of an answer; that of a whole one comes when it is done. Raises Unreachable."""
        request = self._client.build_request(asked.method, url + asked.path, headers=asked.headers, content=asked.body)
        sending = asyncio.create_task(self._client.send(request, stream=True))
        try:
            while not (await asyncio.wait({sending}, timeout=self._stall_seconds))[0]:
                if not await self._lives(url):
                    raise Broken("it has fallen silent")
            return sending.result()
        except (httpx.TransportError, Broken) as error:
            self._silent.add(url)
            self._probe(url)
            took = not isinstance(error, httpx.ConnectError | httpx.ConnectTimeout)
            raise (Broken if took else Unreachable)(f"{url} did not answer: {error!r}") from error
        finally:
            sending.cancel()

    async def _closed(self, url: str, response: httpx.Response) -> None:
        if not response.is_closed:
            self._probe(url)  # it broke off, was silent, or its client has left
        await response.aclose()

    def _probe(self, url: str) -> None:
        """Find out whether one is silent, and when it no longer is."""

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
        except httpx.TransportError:
            return False


async def _chunks(response: httpx.Response) -> AsyncGenerator[bytes, None]:
    try:
        async for chunk in response.aiter_raw():
            yield chunk
    except httpx.TransportError as error:
        raise Broken(f"{response.url} broke off: {error!r}") from error


def passed_on(headers: Iterable[tuple[bytes, bytes]]) -> Headers:
    """Without what belongs to a connection."""
    return tuple((name.lower(), value) for name, value in headers if name.lower() not in _OF_A_CONNECTION)


def _checked(url: str) -> str:
    """Raises StartupError."""
    try:
        parsed = httpx.URL(url)
        is_address = (
            parsed.scheme in ("http", "https") and bool(parsed.host) and parsed.path == "/" and not parsed.query
        )
    except httpx.InvalidURL:
        is_address = False
    if not is_address:
        raise StartupError(f"--replicas: {url!r} is no address of a server; write it as http://HOST:PORT")
    return url.rstrip("/")


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def _prompt_in(body: bytes) -> str:
    try:
        fields: Any = json.loads(body)
    except ValueError:
        return ""
    if not isinstance(fields, dict):
        return ""
    told = [fields[name] for name in _PROMPT_FIELDS if fields.get(name)]
    return json.dumps(told[0], ensure_ascii=False)[:_AFFINE_CHARACTERS] if told else ""
