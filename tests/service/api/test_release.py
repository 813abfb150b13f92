"""Tokens that leave at a constant rate: one event at a time, of one size, whatever steps bring."""

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from service.api.schemas import LEAST_RELEASE_SECONDS, ChatCompletionRequest
from service.api.sse import EVENT_BYTES, Release, at_constant_rate, release_of
from tests.service.api.client import ASK, client_of, error_of
from tests.service.scripted import ScriptedEngine, say

FAST = 0.002
RESPONSE = {"model": "tiny", "input": "hello", "stream": True}


async def frames_of(path: str, body: dict[str, Any], engine: ScriptedEngine, **settings: Any) -> list[bytes]:
    async with client_of(engine, **settings) as client:
        response = await client.post(path, json=body)
        assert response.status_code == 200, response.text
        return [frame + b"\n\n" for frame in response.content.split(b"\n\n")[:-1]]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {**ASK, "stream": True, "n": 2, "stream_options": {"include_usage": True}}),
        ("/v1/completions", {"model": "tiny", "prompt": ["a", "b"], "stream": True}),
        ("/v1/responses", RESPONSE),
    ],
)
async def test_every_event_has_one_size_and_as_many_tokens_are_asked_for_one_by_one(path: str, body: Any) -> None:
    engine = ScriptedEngine(say("a", "bc", "defgh", "é🙂"))
    frames = await frames_of(path, body, engine, release_seconds=FAST)
    assert {len(frame) % EVENT_BYTES for frame in frames} == {0}
    if path != "/v1/responses":  # whose first and last events repeat the request and the answer
        assert {len(frame) for frame in frames} <= {EVENT_BYTES, 2 * EVENT_BYTES}
    assert {request.single_token_outputs == request.sampling.max_tokens for request in engine.submitted} == {True}
    chunks = [json.loads(line[6:]) for frame in frames for line in frame.split(b"\n") if line.startswith(b"data: {")]
    assert all(chunk["obfuscation"].isascii() for chunk in chunks)
    spoken = "".join(c.get("text") or c["delta"].get("content") or "" for one in chunks for c in one.get("choices", ()))
    spoken += "".join(one["delta"] for one in chunks if one.get("type") == "response.output_text.delta")
    assert sorted(spoken) == sorted("abcdefghé🙂" * (1 if path == "/v1/responses" else 2))


async def test_what_comes_at_once_leaves_one_by_one_and_gaps_are_filled() -> None:
    async def frames() -> AsyncGenerator[bytes, None]:
        for number in range(3):
            yield b"%d" % number
        opened.set()
        await release.wait()
        yield b"last"

    opened, release = asyncio.Event(), asyncio.Event()
    found = []
    async for frame in at_constant_rate(frames(), FAST):
        found.append(frame)
        if len(found) == 8:
            assert opened.is_set()
            release.set()
    reported = [frame for frame in found if not frame.startswith(b":")]
    assert reported == [b"0", b"1", b"2", b"last"]
    fillings = [frame for frame in found if frame.startswith(b": ")]
    assert len(fillings) >= 4
    assert {len(frame) for frame in fillings} == {EVENT_BYTES}
    assert all(frame.endswith(b"\n") and frame.count(b"\n") == 1 for frame in fillings)


async def test_a_stream_that_is_not_read_to_its_end_ends_what_it_reads() -> None:
    ended = False

    async def frames() -> AsyncGenerator[bytes, None]:
        nonlocal ended
        try:
            while True:
                yield b"x"
        finally:
            ended = True

    released = at_constant_rate(frames(), FAST)
    await anext(released)
    await released.aclose()
    assert ended


async def test_a_request_may_ask_for_it_and_for_sizes_alone() -> None:
    engine = ScriptedEngine(say("a", "bcd"))
    body = {**ASK, "stream": True, "stream_options": {"release_seconds": FAST}}
    frames = await frames_of("/v1/chat/completions", body, engine)
    assert {len(frame) for frame in frames} == {EVENT_BYTES}
    padded = {**ASK, "stream": True, "stream_options": {"include_obfuscation": True}}
    frames = await frames_of("/v1/chat/completions", padded, engine)
    assert {len(frame) for frame in frames} == {EVENT_BYTES}
    assert [request.single_token_outputs for request in engine.submitted] == [
        engine.submitted[0].sampling.max_tokens,
        0,
    ]


def test_the_slower_rate_holds() -> None:
    """Each choice has its own share of the ticks."""
    asked = ChatCompletionRequest.model_validate_json(
        json.dumps({**ASK, "stream": True, "stream_options": {"release_seconds": 0.5}})
    )
    plain = ChatCompletionRequest.model_validate_json(json.dumps(ASK))
    assert release_of(asked, choices=2, server_seconds=0.1) == Release(0.25, pads=True)
    assert release_of(asked, choices=2048, server_seconds=None) == Release(LEAST_RELEASE_SECONDS, pads=True)
    assert release_of(asked, choices=1, server_seconds=2.0) == Release(2.0, pads=True)
    assert release_of(plain, choices=1, server_seconds=2.0) == Release(2.0, pads=True)
    assert release_of(plain, choices=1, server_seconds=None) == Release()


async def test_an_answer_that_is_sent_whole_takes_as_long() -> None:
    async with client_of(ScriptedEngine(say("abcdefgh")), release_seconds=0.02) as client:
        loop = asyncio.get_running_loop()
        began = loop.time()
        body = (await client.post("/v1/chat/completions", json=ASK)).json()
        assert loop.time() - began >= 0.02 * body["usage"]["completion_tokens"] > 0.1


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"stream_options": {"include_obfuscation": False}}, "stream_options.include_obfuscation"),
        ({"speculation": {"trace": True}}, "speculation.trace"),
        ({"speculation": {"detailed": True}}, "speculation.detailed"),
        ({"stream_options": {"release_seconds": 0}}, "stream_options.release_seconds"),
        ({"stream_options": {"release_seconds": 1e-9}}, "stream_options.release_seconds"),
    ],
)
async def test_what_would_tell_is_refused(fields: dict[str, Any], param: str) -> None:
    async with client_of(ScriptedEngine(say("x")), release_seconds=FAST) as client:
        response = await client.post("/v1/chat/completions", json={**ASK, "stream": True, **fields})
    assert (response.status_code, error_of(response)["param"]) == (400, param)
