"""Against a real listener: a client that is slow to say what it wants, or to take what it gets, is closed, and so is a
connection too many; half-closed ones are answered, what is no HTTP is refused, and a server that ends tells."""

import asyncio
import json
import signal
import socket
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import replace
from typing import Any

import pytest
import uvicorn

from service.api.connections import GuardedProtocol
from service.engine.requests import GenerationRequest, SequenceOutput
from service.serve import _DrainingServer
from tests.service.api.client import ASK, app_of, until
from tests.service.scripted import Endless, Held, ScriptedEngine, runtime_of, say
from tests.service.scripted import step as step_of

PROBE = b"GET /livez HTTP/1.1\r\nhost: test\r\n\r\n"
Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Impatient(GuardedProtocol):
    header_seconds = 0.3
    read_seconds = 0.3
    probe_seconds = 0.05


class Quiet(_DrainingServer):
    """Leaves the signals of the process alone."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@asynccontextmanager
async def serving(
    engine: ScriptedEngine, most: int | None = None, *, drain_seconds: float = 0.0
) -> AsyncIterator[Quiet]:
    runtime = runtime_of(engine)
    config = uvicorn.Config(app_of(runtime), http=Impatient, ws="none", port=0, log_config=None, limit_concurrency=most)
    server = Quiet(config, runtime, drain_seconds)
    running = asyncio.create_task(server.serve())
    while not server.started or runtime.state == "loading":
        await asyncio.sleep(0.01)
    yield server
    server.should_exit = True
    await running


@asynccontextmanager
async def listening(most: int | None = None, engine: ScriptedEngine | None = None) -> AsyncIterator[int]:
    async with serving(engine or ScriptedEngine(say("x")), most) as server:
        yield port_of(server)


def port_of(server: uvicorn.Server) -> int:
    port: int = server.servers[0].sockets[0].getsockname()[1]
    return port


async def open_to(port: int, sends: bytes = b"") -> Connection:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(sends)
    return reader, writer


async def reported(connection: Connection) -> bytes:
    """Everything until the server closes."""
    reader, writer = connection
    found = await asyncio.wait_for(reader.read(), 3)
    writer.close()
    return found


@pytest.mark.parametrize("sends", [b"", b"GET /livez HTTP/1.1\r\nhost: te"])
async def test_headers_must_come_in_time(sends: bytes) -> None:
    async with listening() as port:
        answer = await reported(await open_to(port, sends))
    assert answer.startswith(b"HTTP/1.1 408 Request Timeout\r\n")
    assert b'"code": "request_timeout"' in answer


async def trickle(connection: Connection) -> bytes:
    """Send a byte now and then until the server closes, and return what it sent."""
    reader, writer = connection
    listening_to = asyncio.create_task(reader.read())
    deadline = asyncio.get_running_loop().time() + 3
    while not listening_to.done() and asyncio.get_running_loop().time() < deadline:
        with suppress(ConnectionError):
            writer.write(b"a")
            await asyncio.sleep(0.05)
    writer.close()
    assert listening_to.done()
    with suppress(ConnectionError):
        return await listening_to
    return b""


async def test_trickling_does_not_help() -> None:
    async with listening() as port:
        assert b" 408 " in (await trickle(await open_to(port, b"GET /livez HTTP/1.1\r\nx: ")))[:20]


async def test_a_request_that_is_answered_early_cannot_be_sent_for_ever() -> None:
    head = b"POST /nowhere HTTP/1.1\r\nhost: test\r\ncontent-length: 100000\r\n\r\n"
    async with listening() as port:
        connection = await open_to(port, head)
        assert b" 404 " in await connection[0].readline()
        await trickle(connection)


async def test_a_connection_lives_through_several_requests_and_no_longer_than_the_headers_of_the_next() -> None:
    async with listening() as port:
        reader, writer = await open_to(port, PROBE)
        assert b" 200 " in await reader.readline()
        await asyncio.sleep(0.5)  # idle between requests is uvicorn's to limit
        writer.write(PROBE)
        assert (await reader.readuntil(b"HTTP/1.1 200")).endswith(b"200")
        await asyncio.sleep(0.1)
        writer.write(PROBE[:-2])
        assert b" 408 " in await reported((reader, writer))


async def test_one_connection_too_many_is_refused_and_the_others_stay() -> None:
    async with listening(most=2) as port:
        first, second = await open_to(port), await open_to(port)
        await asyncio.sleep(0.05)
        refused = await reported(await open_to(port))
        assert refused.startswith(b"HTTP/1.1 503 Service Unavailable\r\n")
        assert b"too_many_connections" in refused
        first[1].write(PROBE)
        assert b" 200 " in await first[0].readline()
        first[1].close()
        second[1].close()
        await asyncio.sleep(0.05)
        third = await open_to(port, PROBE)
        assert b" 200 " in await third[0].readline()
        third[1].close()


async def test_headers_are_bounded() -> None:
    async with listening() as port:
        answer = await reported(await open_to(port, b"GET /livez HTTP/1.1\r\nx: " + b"a" * 70_000))
        assert answer.startswith(b"HTTP/1.1 431 Request Header Fields Too Large\r\n")
        assert b'"code": "headers_too_large"' in answer


async def test_nothing_is_put_into_an_answer_that_has_begun() -> None:
    head = b"POST /nowhere HTTP/1.1\r\nhost: test\r\ntransfer-encoding: chunked\r\n\r\n"
    async with listening() as port:
        reader, writer = await open_to(port, head)
        answer = await reader.readuntil(b"}}")
        writer.write(b"no length of a chunk\r\n")
        assert answer.startswith(b"HTTP/1.1 404 ")
        assert await reported((reader, writer)) == b""


def asking(**fields: Any) -> bytes:
    """A chat completion, as bytes of a connection."""
    body = json.dumps({**ASK, **fields}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: test\r\ncontent-length: {len(body)}\r\n"
    return head.encode() + b"content-type: application/json\r\n\r\n" + body


async def half_closing(port: int, sends: bytes) -> bytes:
    connection = await open_to(port, sends)
    connection[1].write_eof()
    return await reported(connection)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_has_sent_all_is_answered_whole(stream: bool) -> None:
    """The first answer of two that were asked for at once takes longer than the client's half of the connection."""
    engine = Held("he", "llo")
    async with listening(engine=engine) as port:
        reader, writer = connection = await open_to(port, asking(stream=stream) * 2)
        writer.write_eof()
        first = await asyncio.wait_for(reader.readuntil(b'"he"' if stream else b"100 Continue"), 3)
        engine.go_on.set()
        found = first + await reported(connection)
    assert found.count(b"HTTP/1.1 200 OK") == 2
    assert (b"100 Continue" in found) is not stream
    assert found.count(b"data: [DONE]" if stream else b'"content":"hello"') == 2


async def test_a_client_that_has_left_for_good_is_noticed_while_nothing_is_sent() -> None:
    endless = Endless()
    async with listening(engine=endless) as port:
        _, writer = await open_to(port, asking())
        await until(lambda: endless.submitted)
        writer.close()
        await until(endless.stopped_speaking.is_set)


HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: test\r\n"


@pytest.mark.parametrize(
    "sends",
    [
        b"hello\r\n\r\n",
        b"GET /livez\r\n\r\n",
        b"GET /livez HTTP/1.1\r\n\r\n",
        b"GET /livez HTTP/1.1\r\nhost: a\r\ncontent-length: -1\r\n\r\n",
        HEAD + b"transfer-encoding: chunked\r\ncontent-type: application/json\r\n\r\nzz\r\n",
        PROBE[:-2],
    ],
    ids=["words", "version", "host", "length", "chunk", "half"],
)
async def test_what_is_no_http_is_refused_as_everything_else(sends: bytes) -> None:
    async with listening() as port:
        head, _, body = (await half_closing(port, sends)).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 Bad Request\r\n")
    assert b"content-type: application/json" in head
    error = json.loads(body)["error"]
    assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_http")


async def test_a_body_that_breaks_off_is_no_request() -> None:
    engine = ScriptedEngine(say("x"))
    async with listening(engine=engine) as port:
        assert await half_closing(port, asking()[:-1]) == b""
    assert engine.submitted == []


def connected(port: int) -> socket.socket:
    """A client whose own system takes little for it."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect(("127.0.0.1", port))
    return client


async def test_a_client_that_takes_nothing_of_its_answer_is_given_up() -> None:
    endless = Endless("x" * 100_000)
    async with listening(engine=endless) as port:
        with connected(port) as client:
            client.sendall(asking(stream=True))
            await until(endless.stopped_speaking.is_set)


async def test_a_client_that_takes_its_answer_slowly_gets_it() -> None:
    def script(request: GenerationRequest) -> Iterable[list[SequenceOutput]]:
        for number in range(8):
            finish = "stop" if number == 7 else None
            yield [replace(step_of(request, 0, "x", finish), text="x" * 300_000)]

    engine, loop = ScriptedEngine(script), asyncio.get_running_loop()
    async with listening(engine=engine) as port:
        with connected(port) as client:
            client.sendall(asking(stream=True))
            client.setblocking(False)
            pieces = [b""]
            while b"[DONE]" not in pieces[-1]:
                await asyncio.sleep(0.1 if len(pieces) < 10 else 0)
                pieces.append(await asyncio.wait_for(loop.sock_recv(client, 300_000), 3))
                assert pieces[-1]
    assert b"".join(pieces).count(b"x") >= 2_400_000
    assert engine.aborted == []


@pytest.mark.parametrize(("drain_seconds", "ends"), [(10.0, b"[DONE]"), (0.1, b'"code":"not_ready"')])
async def test_a_server_that_ends_lets_streams_end_or_tells_them(drain_seconds: float, ends: bytes) -> None:
    engine = Held("x", "the end")
    engine.stop = engine.go_on.set  # type: ignore[method-assign]
    async with serving(engine, drain_seconds=drain_seconds) as server:
        connection = await open_to(port_of(server), asking(stream=True))
        await until(lambda: engine.submitted)
        server.handle_exit(signal.SIGTERM, None)
        await asyncio.sleep(0.05)
        assert b" 503 " in (await half_closing(port_of(server), asking()))[:20]
        if drain_seconds > 1:
            engine.go_on.set()
        found = await reported(connection)
    assert ends in found
    assert (b"the end" in found) is (drain_seconds > 1)
    assert found.count(b"data: [DONE]") == 1
