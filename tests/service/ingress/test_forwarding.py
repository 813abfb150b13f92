"""A stream through the ingress is the undisturbed one, wherever replicas break off; and what befalls other requests."""

import asyncio
import gzip
import json
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import httpx2
import openai
import pytest

from service.api.errors import error_event
from service.api.sse import PING, frame, padded
from service.assembly import Assembly
from service.errors import NotReady, QueueFull, RequestError
from service.ingress.app import create_ingress
from service.ingress.forwarding import Forwarding, WholeAnswer
from service.ingress.replicas import Broken, ForwardedRequest, ReplicaAnswer, Unreachable
from tests.service.api.client import CHAT, RESPONSES, TEXT, Body, call_raw, client_for, error_of
from tests.service.api.test_resumption import (
    CASES,
    RESPONSE_CASES,
    SAY,
    USUAL,
    Event,
    event_of,
    reported,
    response_events,
    serving,
    spoken,
)
from tests.service.api.test_resumption import assembly as assembly  # a fixture

JSON = ((b"content-type", b"application/json"),)
STREAM = ((b"content-type", b"text/event-stream; charset=utf-8"), (b"x-ratelimit-limit-requests", b"7"))
DONE = b"data: [DONE]\n\n"
BODY: Body = {"model": "tiny", **SAY}
STREAMED: Body = {**BODY, "stream": True}
ASKED = ForwardedRequest("POST", CHAT, (), json.dumps(STREAMED).encode(), "a")
Reported = (
    WholeAnswer | tuple[bytes | float | Exception, ...]
)  # an answer; or pieces of a stream, silence in seconds, an end


@dataclass
class Scripted:
    """Replicas that answer as scripted, one after the other; the last one for ever."""

    reported: Sequence[Reported | Exception]
    size: int = 3
    asked: list[ForwardedRequest] = field(default_factory=list)
    names: list[str] = field(default_factory=list)  # of those asked
    num_open: int = 0

    async def send(self, asked: ForwardedRequest, tried: set[str]) -> ReplicaAnswer | None:
        name = next((name for name in map(str, range(self.size)) if name not in tried), None)
        if name is None:
            return None
        tried.add(name)
        self.names.append(name)
        reported = self.reported[min(len(self.asked), len(self.reported) - 1)]
        self.asked.append(asked)
        if isinstance(reported, Exception):
            raise reported
        self.num_open += 1
        if isinstance(reported, WholeAnswer):
            return ReplicaAnswer(reported.status, reported.headers, self._chunks((reported.body,)), self._closed)
        headers = STREAM if b'"stream"' in asked.body else JSON
        return ReplicaAnswer(200, headers, self._chunks(reported), self._closed)

    async def _chunks(self, pieces: Sequence[bytes | float | Exception]) -> AsyncGenerator[bytes, None]:
        for piece in pieces:
            if isinstance(piece, Exception):
                raise piece
            if isinstance(piece, float):
                await asyncio.sleep(piece)
            else:
                yield piece

    async def _closed(self) -> None:
        self.num_open -= 1

    async def close(self) -> None: ...


@asynccontextmanager
async def ingress(replicas: Scripted, **limits: float) -> AsyncIterator[httpx2.AsyncClient]:
    app = create_ingress(replicas, **{"stall_seconds": 5.0, "patience_seconds": 0.0, **limits})
    async with client_for(app) as client:
        yield client
    assert replicas.num_open == 0


def event(number: int) -> bytes:
    return b'id: head.%d\ndata: {"n": %d}\n\n' % (number, number)


def failed(error: RequestError) -> bytes:
    return b"data: " + WholeAnswer.of(error).body + b"\n\n" + DONE


def numbers(text: str) -> list[int]:
    """Of the events of a stream that ended as it should."""
    return [chunk["n"] for _, chunk in events_in(text)]


def events_in(text: str) -> list[Event]:
    """Of a stream that ended as it should."""
    spoken = "\n".join(line for line in text.split("\n") if not line.startswith(":"))
    frames = spoken.split("\n\n")
    assert frames[-2:] == ["data: [DONE]", ""]
    return list(map(event_of, frames[:-2]))


class Cut:
    """One real server in the place of several, whose streams break off behind more and more bytes."""

    def __init__(self, server: httpx2.AsyncClient, step: int) -> None:
        self.whole = ""  # what the first one would have reported undisturbed
        self.num_asked = 0
        self._server = server
        self._step = step

    async def send(self, asked: ForwardedRequest, tried: set[str]) -> ReplicaAnswer | None:
        headers = [(name, value) for name, value in asked.headers if name != b"host"]
        answer = await self._server.request(asked.method, asked.path, headers=headers, content=asked.body, timeout=60)
        assert answer.status_code == 200, answer.text
        self.whole = self.whole or answer.text
        self.num_asked += 1
        return ReplicaAnswer(200, STREAM, self._chunks(answer.content), self.close)

    async def _chunks(self, content: bytes) -> AsyncGenerator[bytes, None]:
        first = content.find(b"\n\n") + 2  # at least one event each time, so that it comes to an end
        kept = content[: first + self._step * self.num_asked]
        for begin in range(0, len(kept), 97):
            yield kept[begin : begin + 97]
        if len(kept) < len(content):
            raise Broken("killed")

    async def close(self) -> None: ...


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("step", [31, 977])
async def test_a_stream_that_breaks_off_again_and_again_is_the_undisturbed_one(
    assembly: Assembly, name: str, step: int
) -> None:
    path, body = CASES[name][0], {"model": "tiny", "stream": True, **USUAL, **CASES[name][1]}
    async with serving(assembly) as server:
        replicas = Cut(server, step)
        async with client_for(create_ingress(replicas)) as client:
            answer = await client.post(path, json=body, timeout=60)
    assert spoken(events_in(answer.text)) == spoken(events_in(replicas.whole))
    comment = ": goes on elsewhere\n"
    assert answer.text.count(comment) == replicas.num_asked - 1
    assert answer.text.replace(comment, "").endswith("\n\ndata: [DONE]\n\n")  # it may be cut before its last event
    assert replicas.num_asked > 1


@pytest.mark.parametrize("name", RESPONSE_CASES)
async def test_so_is_a_response(assembly: Assembly, name: str) -> None:
    body = {"model": "tiny", "stream": True, **RESPONSE_CASES[name]}
    async with serving(assembly) as server:
        replicas = Cut(server, 977)
        async with client_for(create_ingress(replicas)) as client:
            answer = await client.post(RESPONSES, json=body, timeout=60)
    assert reported(response_events(answer.text)) == reported(response_events(replicas.whole))
    assert replicas.num_asked > 1


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("name", ["resume_from", "resume\\u005ffrom"])
async def test_what_a_client_has_already_counts_once(assembly: Assembly, name: str, is_packed: bool) -> None:
    """A body that says where to go on is sent on without that once more has been passed on."""
    body = {"model": "tiny", "stream": True, **SAY, **USUAL, "seed": 3, "return_token_ids": True, "ignore_eos": True}
    reported = json.dumps({**body, "resume_from": 4}).replace("resume_from", name).encode()
    async with serving(assembly) as server:
        async with client_for(create_ingress(Cut(server, 10**6))) as client:
            whole = spoken(events_in((await client.post(CHAT, json=body)).text))
        async with client_for(create_ingress(Cut(server, 31))) as client:
            content, headers = (gzip.compress(reported), PACKED) if is_packed else (reported, PLAIN)
            answer = await client.post(CHAT, content=content, headers=headers)
    rest = spoken(events_in(answer.text))
    assert rest["0 token_ids"] == whole["0 token_ids"][4:]


def nested(depth: int) -> bytes:
    return b"[" * depth + b"]" * depth


PROMPT = b'{"model": "tiny", "prompt": "%s"}'
PLAIN = {"content-type": "application/json"}
PACKED = {**PLAIN, "content-encoding": "gzip"}


async def test_packed_prompts_go_where_plain_ones_go() -> None:
    replicas = Scripted([WHOLE])
    bodies = [PROMPT % text for text in (b"a", b"b", b"c" * 100_000)]
    async with ingress(replicas) as client:
        for body in bodies:
            await client.post(TEXT, content=body)
            await client.post(TEXT, content=gzip.compress(body), headers=PACKED)
    plain, packed = replicas.asked[::2], replicas.asked[1::2]
    assert [one.affinity for one in packed] == [one.affinity for one in plain]
    assert len({one.affinity for one in plain}) == len(bodies)
    assert [gzip.decompress(one.body) for one in packed] == [one.body for one in plain] == bodies


NO_BODIES = {
    "deep": nested(5000),
    "deep within": b'{"model": "tiny", "messages": %s}' % nested(5000),
    "no UTF-8": PROMPT % b"\xff",
    "packed, deep": gzip.compress(PROMPT[:-5] + nested(5000) + b"}"),
    "packed, too short": gzip.compress(PROMPT % b"a")[:-9],
    "packed, too large": gzip.compress(PROMPT % (b"a" * 10**7)),
    "not packed": b"no gzip",
}


@pytest.mark.parametrize("name", NO_BODIES)
async def test_what_is_no_body_is_refused_by_a_replica(assembly: Assembly, name: str) -> None:
    refusal = WholeAnswer(400, JSON, b'{"error": {"code": "wrong", "param": %s}}' % nested(5000))
    replicas = Scripted([refusal])
    body, headers = NO_BODIES[name], PACKED if "packed" in name else PLAIN
    async with ingress(replicas) as client, serving(assembly) as server:
        answer = await client.post(TEXT, content=body, headers=headers)
        assert (answer.status_code, answer.content) == (400, refusal.body)
        assert (await server.post(TEXT, content=body, headers=headers)).status_code in (400, 413)
    assert [asked.body for asked in replicas.asked] == [body]


async def test_an_event_that_cannot_be_read_is_passed_on() -> None:
    deep = b'data: {"error": %s}\n\n' % nested(5000)
    async with ingress(Scripted([(event(1), deep, DONE)])) as client:
        assert (await client.post(CHAT, json=STREAMED)).content == event(1) + deep + DONE


NOT_READY = NotReady("It is shutting down.", code="not_ready")
BEHIND: dict[str, tuple[bytes | float | Exception, ...]] = {
    "dies": (Broken("killed"),),
    "dies within an event": (event(3)[:9], Broken("killed")),
    "ends within an event": (event(3)[:9],),
    "drains": (failed(NOT_READY),),
    "is silent": (b": ping\n", 60.0),
    "pings, but does nothing": tuple(piece for _ in range(60) for piece in (0.05, b": ping\n")),
}


@pytest.mark.parametrize("name", BEHIND)
async def test_another_replica_goes_on(name: str) -> None:
    replicas = Scripted([(event(1), event(2), *BEHIND[name]), Unreachable("gone"), (event(3), DONE)])
    async with ingress(replicas, stall_seconds=0.2) as client:
        answer = await client.post(CHAT, json=STREAMED, headers={"authorization": "Bearer k", "x-request-id": "mine"})
    assert numbers(answer.text) == [1, 2, 3]
    assert (answer.headers["x-request-id"], answer.headers["x-ratelimit-limit-requests"]) == ("mine", "7")
    first, *_, last = (dict(asked.headers) for asked in replicas.asked)
    assert (first[b"authorization"], first[b"x-request-id"]) == (b"Bearer k", b"mine")
    assert last == {**first, b"last-event-id": b"head.2"}
    assert b"last-event-id" not in first


async def test_so_it_does_where_a_response_breaks_off() -> None:
    drains = frame({**error_event(NOT_READY), "sequence_number": 3})
    replicas = Scripted([(event(1), event(2), drains), (event(3),)])
    async with ingress(replicas) as client:
        answer = await client.post(RESPONSES, json=STREAMED)
    assert [line for line in answer.text.split("\n") if line.startswith("data: ")] == [
        f'data: {{"n": {number}}}' for number in (1, 2, 3)
    ]


async def test_openai_s_client_hears_one_stream_whatever_comes_between_events() -> None:
    """It takes an empty line for an event where an id has come before."""
    choice = {"index": 0, "delta": {"content": "x"}, "finish_reason": None}
    chunk = {"id": "a", "object": "chat.completion.chunk", "created": 0, "model": "tiny", "choices": [choice]}

    def reported(number: int) -> bytes:
        return b"id: head.%d\ndata: %s\n\n" % (number, json.dumps(chunk).encode())

    first = (PING, reported(1), PING[:3], PING[3:] + reported(2)[:9], reported(2)[9:] + PING + PING, Broken("killed"))
    tick = padded(b"")
    async with ingress(Scripted([first, (reported(3), tick, reported(4), b"\n" + tick, padded(DONE))])) as client:
        answer = await client.post(CHAT, json=STREAMED)
    assert answer.text.count(": ping") == 4
    replay = httpx2.MockTransport(lambda _: httpx2.Response(200, headers=STREAM, content=answer.content))
    with (
        httpx2.Client(transport=replay) as http,
        openai.OpenAI(api_key="k", base_url="http://a/v1", http_client=http) as asking,
    ):
        heard = list(asking.chat.completions.create(model="tiny", messages=[], stream=True))
    assert [one.choices[0].delta.content for one in heard] == ["x"] * 4


async def test_what_ids_say_of_tokens_is_passed_to_the_next_one() -> None:
    """As far as headers have room."""

    def event_saying(number: int, spoken: bytes) -> bytes:
        return event(number).replace(b"\n", spoken + b"\n", 1)

    long = [event_saying(number, b"~0@%d:%s" % (number, b"1," * 400 + b"1")) for number in range(3, 100)]
    reported = (event_saying(1, b"~0@0:5"), event_saying(2, b"~1@0:6~0@1:7"), Broken("killed"))
    replicas = Scripted([reported, (*long, Broken("killed")), (event(100), DONE)])
    async with ingress(replicas) as client:
        await client.post(CHAT, json=STREAMED)
    _, second, third = (dict(asked.headers).get(b"last-event-id", b"") for asked in replicas.asked)
    assert second == b"head.2~0@0:5~1@0:6~0@1:7"
    assert third.startswith(b"head.99~0@0:5~1@0:6~0@1:7~0@3:1,1,")
    assert 30 * 1024 < len(third) < 34 * 1024
    assert third.endswith(b",1")


async def test_a_stream_of_which_nothing_came_begins_again() -> None:
    replicas = Scripted([(b": ping\n", Broken("killed")), (event(1), DONE)])
    async with ingress(replicas) as client:
        assert numbers((await client.post(CHAT, json=STREAMED)).text) == [1]
    assert b"last-event-id" not in dict(replicas.asked[1].headers)


async def test_a_queue_may_be_long_before_the_first_event() -> None:
    pings = tuple(piece for _ in range(6) for piece in (0.1, b": ping\n"))
    async with ingress(Scripted([(*pings, event(1), DONE)]), stall_seconds=0.3) as client:
        assert numbers((await client.post(CHAT, json=STREAMED)).text) == [1]


OTHER = WholeAnswer(409, JSON, b'{"error": {"message": "another model", "code": "other_system_fingerprint"}}')
FULL = WholeAnswer.of(QueueFull("Full.", code="queue_full", retry_after_seconds=3))


@pytest.mark.parametrize(
    ("path", "reported", "num_asked"),
    [
        (CHAT, [(event(1), Broken("killed")), OTHER], 3),
        (CHAT, [(event(1), Broken("killed")), Unreachable("gone")], 3),
        (CHAT, [(event(1), Broken("killed")), (Broken("killed"),)], 3),
        (CHAT, [(b'data: {"traced": true}\n\n', Broken("killed"))], 1),
        ("/v1/responses", [(b'event: a\ndata: {"type": "a"}\n\n', Broken("killed"))], 1),
    ],
    ids=["other model", "no one", "each one dies of it", "no ids", "responses"],
)
async def test_a_stream_that_no_one_takes_up_ends_with_an_error(
    path: str, reported: list[Reported | Exception], num_asked: int
) -> None:
    replicas = Scripted(reported)
    async with ingress(replicas) as client:
        answer = await client.post(path, json=STREAMED)
    frames = answer.text.removesuffix("data: [DONE]\n\n").split("\n\n")
    error = json.loads(frames[-2].partition("data: ")[2])
    assert error.get("error", error)["code"] == "replica_lost"
    assert answer.text.endswith("[DONE]\n\n") is (path == CHAT)
    assert len(replicas.asked) == num_asked


async def test_errors_of_a_request_are_passed_on() -> None:
    error = b'data: {"error": {"message": "no", "type": "server_error", "param": null, "code": "engine_error"}}\n\n'
    replicas = Scripted([(event(1), error, DONE)])
    async with ingress(replicas) as client:
        assert '"engine_error"' in (await client.post(CHAT, json=STREAMED)).text
    assert len(replicas.asked) == 1


STOPPED = WholeAnswer(500, JSON, b'{"error": {"code": "engine_stopped"}}')


@pytest.mark.parametrize("sick", [Broken("is silent"), (event(1), 60.0), STOPPED], ids=["before", "within", "engine"])
@pytest.mark.parametrize(("size", "names"), [(2, ["0", "1"]), (1, ["0", "0"])])
async def test_one_that_broke_off_is_asked_again_only_where_there_is_no_other(
    sick: Reported | Exception, size: int, names: list[str]
) -> None:
    replicas = Scripted([sick, (event(2), DONE)], size)
    async with ingress(replicas, stall_seconds=0.1, patience_seconds=10.0) as client:
        answer = await client.post(CHAT, json=STREAMED)
    assert numbers(answer.text)[-1] == 2
    assert replicas.names == names


async def test_a_slow_client_is_no_silent_replica() -> None:
    forwarding = Forwarding(
        Scripted([(event(1), event(2), 0.15, event(3), DONE)]), ASKED, stall_seconds=0.3, patience_seconds=0.0
    )
    assert isinstance(await forwarding.begin(), ReplicaAnswer)
    reported = []
    async for one in forwarding.frames():
        reported.append(one)
        await asyncio.sleep(0.4)
    await forwarding.close()
    assert reported == [event(1), event(2), event(3), DONE]


WHOLE = WholeAnswer(200, JSON, b'{"id": 1}')


@pytest.mark.parametrize(
    ("reported", "status", "code"),
    [
        ([Unreachable("gone"), WHOLE], 200, None),
        ([WholeAnswer.of(NOT_READY), WHOLE], 200, None),
        ([FULL, WHOLE], 200, None),
        ([(b'{"id"', Broken("killed")), WHOLE], 200, None),
        ([Broken("killed"), Broken("killed"), WHOLE], 200, None),
        ([Broken("killed")], 500, "replica_lost"),
        ([FULL], 429, "queue_full"),
        ([Unreachable("gone")], 503, "no_replica"),
        ([WholeAnswer(400, JSON, b'{"error": {"code": "wrong"}}')], 400, "wrong"),
    ],
)
async def test_a_whole_answer_comes_from_a_replica_that_gives_one(
    reported: list[Reported | Exception], status: int, code: str | None
) -> None:
    async with ingress(Scripted(reported)) as client:
        answer = await client.post(TEXT, json={"model": "tiny", "prompt": "a"})
    assert answer.status_code == status
    if code is None:
        assert answer.json() == {"id": 1}
    else:
        assert answer.json()["error"]["code"] == code


async def test_a_replica_is_waited_for() -> None:
    reported: list[Reported | Exception] = [*[Unreachable("gone")] * 3, WholeAnswer.of(NOT_READY), WHOLE]
    async with ingress(Scripted(reported), patience_seconds=10.0) as client:
        assert (await client.post(TEXT, json={"model": "tiny", "prompt": "a"})).json() == {"id": 1}


async def test_probes_do_not_wait() -> None:
    async with ingress(Scripted([WholeAnswer.of(NOT_READY)]), patience_seconds=60.0) as client:
        assert (await client.get("/readyz")).status_code == 503
        assert (await client.get("/livez")).json() == {"status": "alive"}


async def test_what_is_of_one_process_is_not_passed_on() -> None:
    replicas = Scripted([WHOLE])
    async with ingress(replicas) as client:
        for path in ("/metrics", "/v1/adaptation", "/", "/v1/audio/speech"):
            assert error_of(await client.get(path))["code"] == "unknown_url"
        assert (await client.get("/v1/models/org/tiny?x=a%20b")).status_code == 200
    assert [asked.path for asked in replicas.asked] == ["/v1/models/org/tiny?x=a%20b"]


async def test_a_client_that_leaves_takes_its_answer_with_it() -> None:
    replicas = Scripted([(event(1), 60.0)])
    reported: list[object] = []
    sent = asyncio.Event()

    async def leave() -> dict[str, str]:
        await asyncio.wait_for(sent.wait(), 10)
        return {"type": "http.disconnect"}

    class Sent(list):  # type: ignore[type-arg]
        def append(self, message: object) -> None:
            reported.append(message)
            if len(reported) == 2:
                sent.set()

    await asyncio.wait_for(call_raw(create_ingress(replicas), CHAT, STREAMED, leave, Sent()), 10)
    assert replicas.num_open == 0
    assert len(reported) >= 2
