"""Against a real listener: whoever is slow to say what it wants is closed, and so is a connection too many."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest
import uvicorn

from service.api.connections import GuardedProtocol
from tests.service.api.client import app_of
from tests.service.scripted import ScriptedEngine, runtime_of, say

pytestmark = pytest.mark.anyio

PROBE = b"GET /livez HTTP/1.1\r\nhost: test\r\n\r\n"
Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Impatient(GuardedProtocol):
    header_seconds = 0.3


@asynccontextmanager
async def listening(most: int | None = None) -> AsyncIterator[int]:
    app = app_of(runtime_of(ScriptedEngine(say("x"))))
    config = uvicorn.Config(app, http=Impatient, ws="none", port=0, log_config=None, limit_concurrency=most)
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    yield server.servers[0].sockets[0].getsockname()[1]
    server.should_exit = True
    await serving


async def open_to(port: int, sends: bytes = b"") -> Connection:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(sends)
    return reader, writer


async def told(connection: Connection) -> bytes:
    """Everything until the server closes."""
    reader, writer = connection
    found = await asyncio.wait_for(reader.read(), 3)
    writer.close()
    return found


@pytest.mark.parametrize("sends", [b"", b"GET /livez HTTP/1.1\r\nhost: te"])
async def test_headers_must_come_in_time(sends: bytes) -> None:
    async with listening() as port:
        answer = await told(await open_to(port, sends))
    assert answer.startswith(b"HTTP/1.1 408 Request Timeout\r\n")
    assert b'"code": "request_timeout"' in answer


async def trickle(connection: Connection) -> bytes:
    """Send a byte now and then until the server closes, and return what it said."""
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
        assert b" 408 " in await told((reader, writer))


async def test_one_connection_too_many_is_refused_and_the_others_stay() -> None:
    async with listening(most=2) as port:
        first, second = await open_to(port), await open_to(port)
        await asyncio.sleep(0.05)
        refused = await told(await open_to(port))
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


async def test_headers_are_bounded_and_what_is_no_http_is_told_so() -> None:
    async with listening() as port:
        answer = await told(await open_to(port, b"GET /livez HTTP/1.1\r\nx: " + b"a" * 70_000))
        assert answer.startswith(b"HTTP/1.1 431 Request Header Fields Too Large\r\n")
        assert b'"code": "headers_too_large"' in answer
        answer = await told(await open_to(port, b"nonsense\r\n\r\n"))
        assert answer.startswith(b"HTTP/1.1 400 Bad Request\r\n")
        assert b'"code": "invalid_http"' in answer


async def test_nothing_is_put_into_an_answer_that_has_begun() -> None:
    head = b"POST /nowhere HTTP/1.1\r\nhost: test\r\ntransfer-encoding: chunked\r\n\r\n"
    async with listening() as port:
        reader, writer = await open_to(port, head)
        answer = await reader.readuntil(b"}}")
        writer.write(b"no length of a chunk\r\n")
        assert answer.startswith(b"HTTP/1.1 404 ")
        assert await told((reader, writer)) == b""
