"""An application is asked in this process as it is over a socket."""

import json
from collections.abc import Iterator
from contextlib import aclosing

import pytest
from starlette.types import Message, Receive, Scope, Send

from service.engine.requests import GenerationRequest, SequenceOutput
from service.ingress.replicas import ForwardedRequest, answer_locally
from tests.service.api.client import ASK, CHAT, Body, app_of, client_for
from tests.service.scripted import ScriptedEngine, runtime_of, say, step

HEADERS = ((b"content-type", b"application/json"), (b"host", b"test"), (b"x-request-id", b"mine"))


def asked(body: Body, path: str = CHAT) -> ForwardedRequest:
    return ForwardedRequest("POST", path, HEADERS, json.dumps(body).encode(), "a")


@pytest.mark.parametrize("fields", [{}, {"stream": True}, {"temperature": 9}])
async def test_it_answers_alike(fields: Body) -> None:
    body = {**ASK, "seed": 1, "temperature": 0.0, **fields}
    runtime = runtime_of(ScriptedEngine(say("x", "y")))
    app = app_of(runtime)
    async with app.router.lifespan_context(app), client_for(app) as client:
        await runtime.wait_until_loaded()
        over_http = await client.post(CHAT, json=body, headers={"x-request-id": "mine"})
        (status, headers), *pieces = [piece async for piece in answer_locally(app, asked(body))]
    assert isinstance(headers, tuple)
    assert status == over_http.status_code
    assert dict(headers)[b"x-request-id"] == b"mine"
    reported = b"".join(piece for piece in pieces if isinstance(piece, bytes)).decode()
    assert reported.count('"x') == over_http.text.count('"x')
    assert len(reported) == len(over_http.text)


async def test_a_client_that_leaves_is_given_up() -> None:
    def script(request: GenerationRequest) -> Iterator[list[SequenceOutput]]:
        yield [step(request, 0, "x")]

    engine = ScriptedEngine(script)
    runtime = runtime_of(engine)
    app = app_of(runtime)
    async with app.router.lifespan_context(app):
        await runtime.wait_until_loaded()
        async with aclosing(answer_locally(app, asked({**ASK, "stream": True}))) as pieces:
            assert (await anext(pieces))[0] == 200
            assert b'"x"' in await anext(pieces)
        assert engine.aborted


BEGUN: Message = {"type": "http.response.start", "status": 500, "headers": []}


@pytest.mark.parametrize(
    "sent", [[], [BEGUN], [BEGUN, {"type": "http.response.body", "body": b"x", "more_body": True}]]
)
@pytest.mark.parametrize("raises", [True, False])
async def test_half_an_answer_is_none(sent: list[Message], raises: bool) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        for message in sent:
            await send(message)
        if raises:
            raise ValueError("a bug")

    with pytest.raises(ValueError if raises else RuntimeError):
        _ = [piece async for piece in answer_locally(app, asked({}))]


async def test_an_answer_tells_of_a_bug_itself(caplog: pytest.LogCaptureFixture) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send(BEGUN)
        await send({"type": "http.response.body", "body": b"sorry"})
        raise ValueError("a bug")

    assert [piece async for piece in answer_locally(app, asked({}))] == [(500, ()), b"sorry"]
    assert "a bug" in caplog.text
