"""Which server process is asked, what its silence means, and whose address it sees."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

import httpx
import pytest
import uvicorn
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from service.api.connections import listen, server_config, started, url_of
from service.api.settings import Server
from service.errors import StartupError
from service.ingress.app import create_ingress
from service.ingress.replicas import Broken, ForwardedRequest, HttpReplicas, ReplicaAnswer, Unreachable
from tests.service.api.client import SETTINGS, TEXT
from tests.service.scripted import ScriptedEngine, runtime_of, say

Handle = Callable[[bytes, asyncio.StreamWriter], Awaitable[None]]


def asked(prompt: str = "a") -> ForwardedRequest:
    return ForwardedRequest("POST", "/v1/completions", ((b"host", b"me"),), b"{}", prompt)


@asynccontextmanager
async def served(*handles: Handle, stall_seconds: float = 5.0) -> AsyncIterator[HttpReplicas]:
    """Servers that are handed the head of each request."""
    handling: list[asyncio.Task[None]] = []

    def serving(handle: Handle) -> Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            assert task is not None
            handling.append(task)
            await handle(await reader.readuntil(b"\r\n\r\n"), writer)
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()

        return serve

    servers = [await asyncio.start_server(serving(handle), "127.0.0.1", 0) for handle in handles]
    urls = [f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}" for server in servers]
    replicas = HttpReplicas(urls, stall_seconds=stall_seconds)
    yield replicas
    await replicas.close()
    await asyncio.gather(*handling)
    for server in servers:
        server.close()


def saying(name: bytes) -> Handle:
    async def answer(head: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\nx-a: b\r\n\r\n" + name)

    return answer


async def read(answer: ReplicaAnswer | None) -> bytes:
    assert answer is not None
    try:
        return b"".join([chunk async for chunk in answer.chunks])
    finally:
        await answer.close()


async def test_a_prompt_keeps_its_replica_until_that_has_too_much_to_do() -> None:
    async with served(*map(saying, (b"1", b"2", b"3"))) as replicas:
        names = {prompt: await read(await replicas.send(asked(prompt), set())) for prompt in map(str, range(20))}
        assert set(names.values()) == {b"1", b"2", b"3"}
        for prompt, name in names.items():
            assert await read(await replicas.send(asked(prompt), set())) == name
        busy = [await replicas.send(asked("0"), set()) for _ in range(9)]
        reported = [await read(answer) for answer in busy]
    assert reported[:5] == [names["0"]] * 5
    assert reported[5:] != [names["0"]] * 4


async def test_each_is_asked_once() -> None:
    async with served(saying(b"1"), saying(b"2")) as replicas:
        tried: set[str] = set()
        reported = {await read(await replicas.send(asked(), tried)) for _ in range(2)}
        assert await replicas.send(asked(), tried) is None
    assert reported == {b"1", b"2"}


async def test_what_belongs_to_a_connection_stays_there() -> None:
    heads = []

    async def answer(head: bytes, writer: asyncio.StreamWriter) -> None:
        heads.append(head)
        await saying(b"1")(head, writer)

    async with served(answer) as replicas:
        found = await replicas.send(asked(), set())
        assert found is not None
        assert await read(found) == b"1"
    assert found.headers == ((b"x-a", b"b"),)
    assert b"host: me\r\n" in heads[0].lower()


async def test_one_that_is_not_there_has_not_taken_a_request() -> None:
    replicas = HttpReplicas(["http://127.0.0.1:1"], stall_seconds=5.0)
    with pytest.raises(Unreachable) as raised:
        await replicas.send(asked(), set())
    assert not isinstance(raised.value, Broken)
    await replicas.close()


async def test_one_that_says_nothing_is_asked_whether_it_lives() -> None:
    probes = 0

    async def slow(head: bytes, writer: asyncio.StreamWriter) -> None:
        nonlocal probes
        if b"/livez" in head:
            probes += 1
            await saying(b"1")(head, writer)
        else:
            while probes < 2:
                await asyncio.sleep(0.01)
            await saying(b"2")(head, writer)

    over = asyncio.Event()

    async def dead(head: bytes, writer: asyncio.StreamWriter) -> None:
        if b"/livez" not in head:
            await over.wait()

    async with served(slow, stall_seconds=0.05) as replicas:
        assert await read(await replicas.send(asked(), set())) == b"2"
    async with served(dead, stall_seconds=0.05) as replicas:
        with pytest.raises(Broken, match="no response, and its probe failed"):
            await replicas.send(asked(), set())
        over.set()


async def test_one_whose_probe_cannot_be_read_is_broken() -> None:
    over = asyncio.Event()

    async def strange(head: bytes, writer: asyncio.StreamWriter) -> None:
        if b"/livez" in head:
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\ncontent-length: 4\r\n\r\nlive")
        else:
            await over.wait()

    async with served(strange, stall_seconds=0.05) as replicas:
        with pytest.raises(Broken, match="no response, and its probe failed"):
            await replicas.send(asked(), set())
        over.set()


async def test_one_that_did_not_answer_is_asked_last_until_it_lives() -> None:
    is_sick, probed = True, asyncio.Event()

    async def sick(head: bytes, writer: asyncio.StreamWriter) -> None:
        if not is_sick:
            await saying(b"1")(head, writer)
        if b"/livez" in head:
            probed.set()

    async with served(sick, saying(b"2")) as replicas:
        (prompt, *_) = [one for one in map(str, range(50)) if await answers(replicas, one) is None]
        assert [await answers(replicas, prompt) for _ in range(3)] == [b"2"] * 3
        is_sick = False
        probed.clear()
        await asyncio.wait_for(probed.wait(), 10)
        while await answers(replicas, prompt) != b"1":
            await asyncio.sleep(0.01)


async def answers(replicas: HttpReplicas, prompt: str) -> bytes | None:
    try:
        return await read(await replicas.send(asked(prompt), set()))
    except Broken:
        return None


async def test_an_answer_that_ends_too_early_is_broken() -> None:
    async def half(head: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n")
        await writer.drain()

    async with served(half) as replicas:
        with pytest.raises(Broken):
            await read(await replicas.send(asked(), set()))


@pytest.mark.parametrize("url", ["", "127.0.0.1:8000", "ftp://a", "http://", "http://a/v1", "http://a:x"])
async def test_an_address_that_is_none_stops_the_start(url: str) -> None:
    with pytest.raises(StartupError, match="--replicas"):
        HttpReplicas([url], stall_seconds=1.0)


# Whose address a server sees, over sockets; on Linux all of 127.0.0.0/8 is this machine.


@asynccontextmanager
async def serving(app: ASGIApp) -> AsyncIterator[str]:
    """The URL of a server of this application."""
    server = uvicorn.Server(server_config(app, "127.0.0.1", 0, shutdown_seconds=1))
    running = asyncio.create_task(server.serve([listen("127.0.0.1", 0)]))
    assert await started(server, running)
    try:
        yield url_of(server)
    finally:
        server.should_exit = True
        await running


@asynccontextmanager
async def two_ways() -> AsyncIterator[tuple[str, str]]:
    """The URL of an application that tells address and account of each sender, and that of an ingress before it."""
    server = Server(runtime_of(ScriptedEngine(say("x"))), SETTINGS)

    async def tell(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            reported = [scope["client"][0], server.scope_of(Request(scope)).account]
            await JSONResponse(reported)(scope, receive, send)

    async with serving(tell) as url, serving(create_ingress(HttpReplicas([url], stall_seconds=5.0))) as front:
        yield url, front


async def seen(url: str, address: str, claims: str = "") -> tuple[str, str]:
    transport = httpx.AsyncHTTPTransport(local_address=address)
    async with httpx.AsyncClient(transport=transport) as client:
        answer = await client.post(url + TEXT, json={}, headers={"x-forwarded-for": claims} if claims else {})
    host, account = answer.json()
    return host, account


async def test_a_client_has_the_account_of_its_address_and_no_other() -> None:
    async with two_ways() as urls:
        for url in urls:
            (one, account), (two, other) = [await seen(url, address) for address in ("127.0.0.2", "127.0.0.3")]
            assert (one, two) == ("127.0.0.2", "127.0.0.3")
            assert account != other
            for claims in ("127.0.0.3", "127.0.0.3, 127.0.0.2", "10.0.0.1, 127.0.0.1"):
                assert await seen(url, "127.0.0.2", claims) == (one, account)


async def test_a_trusted_proxy_says_whose_request_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of several addresses the last one that is no trusted proxy's: those before it anybody may have written."""
    monkeypatch.setenv("FORWARDED_ALLOW_IPS", "127.0.0.1,127.0.0.2")
    async with two_ways() as urls:
        for url in urls:
            assert (await seen(url, "127.0.0.2", "10.0.0.1, 10.0.0.2, 127.0.0.2"))[0] == "10.0.0.2"
            assert (await seen(url, "127.0.0.4", "10.0.0.1"))[0] == "127.0.0.4"
