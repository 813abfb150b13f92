import asyncio
import time
from collections.abc import Iterable

import pytest
from fastapi import FastAPI

from service.api.sse import Chunk, EventIds, EventStream, events
from service.engine.requests import GenerationRequest, SamplingParams, SequenceOutput
from tests.service.api.client import ASK, Message, app_of, call_raw
from tests.service.scripted import Endless, Held, ScriptedEngine, runtime_of, step


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_aborts_its_answer_at_once(stream: bool) -> None:
    engine = Endless()
    runtime = runtime_of(engine)
    app, sent = app_of(runtime), list[Message]()

    async def leave() -> Message:
        await asyncio.sleep(0.1)
        return {"type": "http.disconnect"}

    async with app.router.lifespan_context(app):
        await runtime.wait_until_loaded()
        await asyncio.wait_for(call_raw(app, "/v1/chat/completions", {**ASK, "stream": stream}, leave, sent), 10)
    assert engine.stopped_speaking.is_set()
    if stream:
        assert sum(b"content" in message.get("body", b"") for message in sent) > 2
        assert not any(b"[DONE]" in message.get("body", b"") for message in sent)
    else:
        assert sent[0]["status"] == 499


async def test_pings_come_when_nothing_else_does() -> None:
    engine = Held("x", "y")
    frames = await _frames_of(engine, ping_seconds=0.05, then=engine.go_on.set)
    assert frames[0].startswith(b"data: ")
    assert frames[1:4] == [b": ping\n"] * 3
    assert frames[-1] == b"data: [DONE]\n\n"


async def test_no_ping_while_chunks_come() -> None:
    def script(request: GenerationRequest) -> Iterable[list[SequenceOutput]]:
        for _ in range(10):
            time.sleep(0.02)
            yield [step(request, 0, "x")]
        yield [step(request, 0, "y", "stop")]

    assert b": ping\n" not in await _frames_of(ScriptedEngine(script), ping_seconds=0.2, then=lambda: None)


class _Plain:
    """The smallest form of a stream: one chunk per output."""

    def chunks(self, output: SequenceOutput):  # type: ignore[no-untyped-def]
        yield {"text": output.text}

    def numbered(self, chunk: Chunk, number: int) -> Chunk:
        return chunk

    def trailer(self):  # type: ignore[no-untyped-def]
        yield from ()

    def failure(self, error):  # type: ignore[no-untyped-def]
        return {"failed": error.message}


async def _frames_of(engine, *, ping_seconds, then) -> list[bytes]:  # type: ignore[no-untyped-def]
    """Frames of a stream; `then` is called after the fourth."""
    runtime, sent = runtime_of(engine), list[bytes]()
    await runtime.start()
    await runtime.wait_until_loaded()
    request = GenerationRequest(request_id="a", prompt=(1,), sampling=SamplingParams(seed=0, max_tokens=9))
    generation = runtime.generate(request)

    async def send(message: Message) -> None:
        if message["type"] == "http.response.body" and message["body"]:
            sent.append(message["body"])
        if len(sent) == 4:
            then()

    async def receive() -> Message:
        await asyncio.sleep(60)
        return {"type": "http.disconnect"}

    response = EventStream(events(generation, _Plain(), EventIds()), generation, ping_seconds=ping_seconds)
    await response({"type": "http"}, receive, send)
    await runtime.stop()
    return sent


async def test_a_client_that_stops_reading_delays_no_other() -> None:
    engine = Endless()
    runtime = runtime_of(engine)
    app: FastAPI = app_of(runtime)
    stuck, sent = asyncio.Event(), list[Message]()

    async def stall(message: Message) -> None:
        await stuck.wait()

    async def forever() -> Message:
        await stuck.wait()
        return {"type": "http.disconnect"}

    async with app.router.lifespan_context(app):
        await runtime.wait_until_loaded()
        request = GenerationRequest(request_id="slow", prompt=(1,), sampling=SamplingParams(seed=0, max_tokens=9))
        generation = runtime.generate(request)
        slow = asyncio.create_task(
            EventStream(events(generation, _Plain(), EventIds()), generation)({"type": "http"}, forever, stall)
        )

        async def leave() -> Message:
            await asyncio.sleep(0.2)
            return {"type": "http.disconnect"}

        await call_raw(app, "/v1/chat/completions", {**ASK, "stream": True}, leave, sent)
        assert sum(b"content" in message.get("body", b"") for message in sent) > 10
        stuck.set()
        await slow
        engine.stopped_speaking.set()
