"""The live state over HTTP: the past, then moments; many readers, slow ones, and ones that leave."""

import asyncio
import json
import threading
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from adaptation.records import AdaptationError, AdaptationStatus
from service.api.page import FEED_PATH, Feed
from service.observability.live import Live
from service.runtime import Runtime
from tests.service.api.client import Message, app_of, client_of
from tests.service.scripted import STATUS, ScriptedAdaptation, ScriptedEngine, runtime_of, say
from tests.service.test_metrics import LOAD, STEP

PATIENCE_SECONDS = 10
TICK_SECONDS = 0.01


@asynccontextmanager
async def feeding(runtime: Runtime, live: Live) -> AsyncIterator[Feed]:
    feed = Feed(live, runtime, tick_seconds=TICK_SECONDS)
    async with feed.running():
        await runtime.start()
        await runtime.wait_until_loaded()
        yield feed
        await runtime.stop()


def runtime_with(adaptation: ScriptedAdaptation | None = None) -> Runtime:
    return runtime_of(ScriptedEngine(say("x")), adaptation=adaptation)


async def next_of(frames: AsyncGenerator[bytes, None]) -> tuple[str, Any]:
    frame = (await asyncio.wait_for(anext(frames), PATIENCE_SECONDS)).decode()
    assert frame.endswith("\n\n")
    *names, data = frame.rstrip().split("\n")
    return (names[0].removeprefix("event: ") if names else "moment"), json.loads(data.removeprefix("data: "))


async def test_the_past_comes_first_and_then_each_moment() -> None:
    live = Live()
    live.observe_load(LOAD)
    live.observe_step(STEP)
    live.tick()
    async with feeding(runtime_with(), live) as feed:
        frames = feed.frames()
        name, past = await next_of(frames)
        assert name == "past"
        assert past["points"][0]["tau"] == 3.0
        last = past["points"][-1]["unix_seconds"]
        for _ in range(3):
            name, moment = await next_of(frames)
            assert (name, moment["state"], moment["running"], moment["learning"]) == ("moment", "ready", 3, None)
            assert moment["learns"] == "off"
            assert moment["unix_seconds"] > last
            last = moment["unix_seconds"]


async def test_learning_is_asked_and_infinities_are_words() -> None:
    async with feeding(runtime_with(ScriptedAdaptation()), Live()) as feed:
        frames = feed.frames()
        await next_of(frames)
        while (moment := (await next_of(frames))[1])["learning"] is None:
            pass
        assert moment["learning"]["version"] == STATUS.version
        assert moment["learning"]["values"] == {"head": 0.5, "full": "Infinity"}
        assert moment["learning"]["events"] == []


async def test_an_update_under_way_holds_nothing_up_and_is_asked_about_once() -> None:
    opened, num_drafting = threading.Event(), 0

    class Busy(ScriptedAdaptation):
        def status(self) -> AdaptationStatus:
            nonlocal num_drafting
            num_drafting += 1
            assert opened.wait(PATIENCE_SECONDS)
            return STATUS

    async with feeding(runtime_with(Busy()), Live()) as feed:
        frames = feed.frames()
        await next_of(frames)
        for _ in range(10):
            assert (await next_of(frames))[1]["learning"] is None
        assert num_drafting == 1
        opened.set()
        while (await next_of(frames))[1]["learning"] is None:
            pass


async def test_learning_that_breaks_leaves_the_feed_running(caplog: pytest.LogCaptureFixture) -> None:
    refusing = ScriptedAdaptation(AdaptationError("broken"))
    async with feeding(runtime_with(refusing), Live()) as feed:
        frames = feed.frames()
        for _ in range(4):
            await next_of(frames)
    assert "could not read the status of learning" in caplog.text


async def test_a_slow_reader_gets_the_newest_and_delays_no_one() -> None:
    async with feeding(runtime_with(), Live()) as feed:
        slow, quick = feed.frames(), feed.frames()
        await next_of(slow)
        await next_of(quick)
        times = [(await next_of(quick))[1]["unix_seconds"] for _ in range(10)]
        assert (await next_of(slow))[1]["unix_seconds"] == times[-1]


async def test_the_feed_ends_when_the_server_is_about_to() -> None:
    runtime = runtime_with()
    async with feeding(runtime, Live()) as feed:
        frames = feed.frames()
        await next_of(frames)
        await runtime.drain(1)
        reported = [json.loads(frame.split(b"data: ")[1]) async for frame in frames]
    assert [moment["state"] for moment in reported][-1] == "draining"


async def call(path: str, sent: list[Message], leave: asyncio.Event, **changes: Any) -> None:
    """A GET at the level of ASGI, by a client that leaves when asked to."""
    app = app_of(runtime_with(), **changes)
    asked = False

    async def receive() -> Message:
        nonlocal asked
        if not asked:
            asked = True
            return {"type": "http.request", "body": b"", "more_body": False}
        await leave.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        sent.append(message)
        if len(sent) == 2:
            leave.set()

    scope = {"type": "http", "method": "GET", "path": path, "query_string": b"", "headers": [], "asgi": {}}
    await asyncio.wait_for(app(scope, receive, send), PATIENCE_SECONDS)


async def test_a_reader_that_leaves_ends_the_stream() -> None:
    sent: list[Message] = []
    await call(FEED_PATH, sent, asyncio.Event())
    headers = dict(sent[0]["headers"])
    assert sent[0]["status"] == 200
    assert headers[b"content-type"].startswith(b"text/event-stream")
    assert headers[b"cache-control"] == b"no-cache"
    assert sent[1]["body"].startswith(b"event: past\n")


async def test_the_feed_is_as_open_as_the_metrics() -> None:
    sent: list[Message] = []
    await call(FEED_PATH, sent, asyncio.Event(), api_keys=("key",))
    assert sent[0]["status"] == 200
    async with client_of(ScriptedEngine(say("x")), api_keys=("key",), open_metrics=False) as client:
        assert (await client.get(FEED_PATH)).status_code == 401
