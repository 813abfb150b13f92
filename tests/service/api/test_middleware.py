import asyncio
import gzip
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx2
import pytest

from service.api.middleware import BodyMiddleware
from service.api_keys import digest_of
from service.text.tokenizer import ChatTokenizer
from tests.service.api.client import ASK, Message, app_of, bearer, call_raw, client_for, client_of, error_of
from tests.service.scripted import ScriptedEngine, fill, runtime_of, say

PATHS = (
    "/v1/models",
    "/version",
    "/tokenize",
    "/v1/chat/completions",
    "/docs",
    "/nowhere",
    "http://test//livez",
)


@pytest.mark.parametrize(
    "offered", [{}, bearer("wrong"), bearer(""), bearer("key-on"), {"authorization": "Basic key-one"}]
)
async def test_without_a_valid_key_only_the_probes_answer(offered: dict[str, str]) -> None:
    async with client_of(ScriptedEngine(say("x")), api_keys=("key-one",)) as client:
        for path in PATHS:
            response = await client.get(path, headers=offered)
            assert (response.status_code, error_of(response)["code"]) == (401, "invalid_api_key"), path
        for path in ("/livez", "/readyz", "/health", "/metrics"):
            assert (await client.get(path, headers=offered)).status_code == 200


@pytest.mark.parametrize("key", ["key-one", "schlüssel"])
async def test_every_valid_key_opens(key: str) -> None:
    async with client_of(
        ScriptedEngine(say("x")), api_keys=("key-one", f"sha256:{digest_of('schlüssel'.encode()).hex()}")
    ) as client:
        response = await client.get("/v1/models", headers={b"authorization": b"Bearer " + key.encode()})
    assert response.status_code == 200


async def test_metrics_can_be_closed() -> None:
    async with client_of(ScriptedEngine(say("x")), api_keys=("key",), open_metrics=False) as client:
        assert (await client.get("/metrics")).status_code == 401
        assert (await client.get("/metrics", headers=bearer("key"))).content == b"lag 1\n"


async def test_the_host_header_has_no_say_in_who_is_let_in() -> None:
    async with client_of(ScriptedEngine(say("x")), api_keys=("key",)) as client:
        for host in ("test/livez", "test/livez?", "livez"):
            assert (await client.get("/v1/models", headers={"host": host})).status_code == 401


OURS = ("localhost", "LOCALHOST:8000", "127.0.0.1:8000", "[::1]:8000", "mine.example", "Mine.example.:80")
FOREIGN = ("evil.example", "evil.example:8000", "localhost.evil.example", "evil@localhost", "", "127.0.0.1.nip.io")


async def test_only_a_request_under_a_known_name_is_answered() -> None:
    async with client_of(ScriptedEngine(say("x")), allowed_hosts=frozenset({"mine.example"})) as client:
        for host in OURS:
            assert (await client.get("/v1/models", headers={"host": host})).status_code == 200, host
        for host in FOREIGN:
            for path in ("/v1/models", "/livez", "/", "/metrics"):
                response = await client.get(path, headers={"host": host})
                assert (response.status_code, error_of(response)["code"]) == (403, "host_not_allowed"), host


async def test_a_page_of_another_host_can_change_nothing() -> None:
    async with client_of(ScriptedEngine(say("x")), allowed_hosts=frozenset()) as client:
        for origin in ("http://evil.example", "null", "http://localhost.evil.example:8000", "localhost"):
            headers = {"host": "localhost", "origin": origin}
            response = await client.post("/v1/chat/completions", json=ASK, headers=headers)
            assert (response.status_code, error_of(response)["code"]) == (403, "origin_not_allowed"), origin
            assert (await client.get("/livez", headers=headers)).status_code == 200
        headers = {"host": "localhost:8000", "origin": "http://127.0.0.1:3000"}
        assert (await client.post("/v1/chat/completions", json=ASK, headers=headers)).status_code == 200


async def test_websockets_are_closed() -> None:
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    async def receive() -> Message:
        return {"type": "websocket.connect"}

    scope = {"type": "websocket", "path": "/v1/models", "headers": [], "query_string": b""}
    await app_of(runtime_of(ScriptedEngine(say("x"))), api_keys=("key",))(scope, receive, send)
    assert sent == [{"type": "websocket.close", "code": 1008}]


@pytest.mark.parametrize(
    ("offered", "kept"), [("abc-1", True), ("a" * 129, False), ("a b", False), ("é", False), (None, False)]
)
async def test_request_ids(offered: str | None, kept: bool) -> None:
    headers = {} if offered is None else {b"x-request-id": offered.encode("latin-1")}
    async with client_of(ScriptedEngine(say("x")), api_keys=("key",)) as client:
        for path in ("/livez", "/v1/models", "/nowhere"):
            response = await client.get(path, headers=headers)
            answered = response.headers["x-request-id"]
            assert (answered == offered) is kept
            assert kept or answered.startswith("req-")


async def test_a_request_id_comes_with_streams_and_with_our_own_bugs(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "service.api.middleware")
    async with client_of(ScriptedEngine(say("x"))) as client:
        response = await client.post(
            "/v1/chat/completions", json={**ASK, "stream": True}, headers={"x-request-id": "a"}
        )
        assert response.headers["x-request-id"] == "a"
    app = app_of(runtime_of(ScriptedEngine(say("x"))))

    @app.get("/broken")
    async def break_down() -> None:
        raise RuntimeError("bug")

    async with client_for(app) as client:
        response = await client.get("/broken", headers={"x-request-id": "a"})
    assert (response.status_code, response.headers["x-request-id"]) == (500, "a")
    assert error_of(response)["message"] == "The server had an error while processing this request."
    assert [vars(record)["status"] for record in caplog.records if "/broken" in record.getMessage()] == [500]


async def test_one_line_for_each_answer_and_nothing_secret_in_it(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "service.api.middleware")
    async with client_of(ScriptedEngine(say("x")), api_keys=("key-one",)) as client:
        headers = {**bearer("key-one"), "x-request-id": "mine"}
        await client.post("/v1/chat/completions?secret=1", json={**ASK, "stream": True}, headers=headers)
        await client.get("/%0aforged%20line", headers={"x-request-id": "other"})
        await client.get("/livez")
        await client.get("/")
    lines = [record for record in caplog.records if record.name == "service.api.middleware"]
    reported = [tuple(vars(line)[name] for name in ("request_id", "method", "path", "status")) for line in lines]
    assert reported == [("mine", "POST", "/v1/chat/completions", 200), ("other", "GET", "/%0Aforged%20line", 401)]
    assert all(0 <= vars(line)["seconds"] < 60 for line in lines)
    assert not any(word in caplog.text for word in ("key-one", "secret", "hello", "\nforged"))


async def test_a_client_that_leaves_in_the_middle_of_its_body_is_a_quiet_499(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    sent: list[Message] = []

    async def leave() -> Message:
        return {"type": "http.disconnect"}

    app = app_of(runtime_of(ScriptedEngine(say("x"))))
    await call_raw(app, "/v1/chat/completions", ASK, leave, sent, more_body=True)
    lines = [record for record in caplog.records if record.name == "service.api.middleware"]
    assert [(vars(line)["status"], line.levelname) for line in lines] == [(499, "INFO")]
    assert not any(record.exc_info for record in caplog.records)


@pytest.mark.parametrize("trickles", [False, True])
async def test_a_body_that_does_not_arrive_in_time_is_refused(trickles: bool) -> None:
    sent: list[Message] = []

    async def late() -> Message:
        await asyncio.sleep(0.01 if trickles else 60)
        return {"type": "http.request", "body": b" ", "more_body": True}

    runtime = runtime_of(ScriptedEngine(say("x")))
    app = BodyMiddleware(app_of(runtime), max_bytes=10_000, seconds=0.1)
    await call_raw(app, "/v1/chat/completions", ASK, late, sent, more_body=True)
    assert [message.get("status") for message in sent] == [408, None]
    assert json.loads(sent[1]["body"])["error"]["code"] == "request_timeout"
    assert (b"connection", b"close") in sent[0]["headers"]


async def test_time_runs_for_the_body_only() -> None:
    async with client_of(ScriptedEngine(say("x"))) as client:
        app = BodyMiddleware(client._transport.app, max_bytes=10_000, seconds=0.1)  # type: ignore[attr-defined]
        sent: list[Message] = []

        async def stay() -> Message:
            await asyncio.sleep(0.3)
            return {"type": "http.disconnect"}

        await call_raw(app, "/v1/chat/completions", ASK, stay, sent)
    assert sent[0]["status"] == 200


async def test_a_body_over_the_limit_is_refused_with_and_without_a_length() -> None:
    async def trickle() -> Any:
        for _ in range(30):
            yield b"x" * 100

    headers = {"content-type": "application/json"}
    async with client_of(ScriptedEngine(say("x")), max_request_bytes=1000) as client:
        for content in (b"x" * 1001, trickle()):
            response = await client.post("/v1/chat/completions", content=content, headers=headers)
            assert (response.status_code, error_of(response)["code"]) == (413, "request_too_large")
        huge = {**headers, "content-length": "9" * 400}
        assert (await client.post("/tokenize", content=b"", headers=huge)).status_code == 413
        assert (await client.post("/tokenize", content=b"x" * 1000, headers=headers)).status_code == 400


@pytest.mark.parametrize("media_type", ["text/plain", "application/x-www-form-urlencoded", "", "application/jsonx"])
async def test_only_json_is_taken(media_type: str) -> None:
    async with client_of(ScriptedEngine(say("x"))) as client:
        response = await client.post("/tokenize", content=b"{}", headers={"content-type": media_type})
        assert (response.status_code, "Content-Type" in error_of(response)["message"]) == (400, True)


async def test_unknown_routes_and_methods() -> None:
    async with client_of(ScriptedEngine(say("x"))) as client:
        response = await client.get("/nowhere")
        assert (response.status_code, error_of(response)["message"]) == (404, "Invalid URL (GET /nowhere)")
        response = await client.get("/v1/chat/completions")
        assert (response.status_code, response.headers["allow"]) == (405, "POST")
        assert error_of(response)["code"] == "method_not_allowed"


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b"5", b'{"a": "\\ud800"}', b"\xff", b'{"n": ' + b"9" * 5000 + b"}"])
async def test_bodies_that_are_not_what_they_should_be(raw: bytes) -> None:
    async with client_of(ScriptedEngine(say("x"))) as client:
        headers = {"content-type": "application/json; charset=utf-8"}
        response = await client.post("/v1/chat/completions", content=raw, headers=headers)
    assert response.status_code == 400
    assert error_of(response)["type"] == "invalid_request_error"


async def test_large_bodies_are_read_as_well() -> None:
    async with client_of(ScriptedEngine(say("x"))) as client:
        response = await client.post("/tokenize", json={"prompt": "a" * 150_000})
        assert response.json()["count"] == 150_001
        response = await client.post("/tokenize", json={"prompt": 5, "x": "a" * 150_000})
        assert error_of(response)["param"] == "prompt"


@asynccontextmanager
async def full() -> AsyncIterator[httpx2.AsyncClient]:
    """A client of a server whose queue others have filled."""
    engine = ScriptedEngine(say("x"))
    runtime = runtime_of(engine)
    app = app_of(runtime)
    async with app.router.lifespan_context(app), client_for(app) as client:
        await runtime.wait_until_loaded()
        fill(runtime, engine)
        yield client


async def test_a_full_queue_and_a_loading_model_say_when_to_come_back() -> None:
    async with full() as client:
        for stream in (False, True):
            response = await client.post("/v1/chat/completions", json={**ASK, "stream": stream})
            assert (response.status_code, response.headers["retry-after"]) == (429, "5")
            assert error_of(response)["type"] == "rate_limit_error"
    async with client_for(app_of(runtime_of(ScriptedEngine(say("x"))))) as client:
        await _expect_loading(client)


async def _expect_loading(client: httpx2.AsyncClient) -> None:
    assert (await client.get("/livez")).status_code == 200
    for path in ("/readyz", "/health", "/v1/models"):
        response = await client.get(path)
        assert (response.status_code, response.headers["retry-after"]) == (503, "5")
    response = await client.post("/v1/chat/completions", json=ASK)
    assert (response.status_code, error_of(response)["message"]) == (503, "The model is still loading.")


async def test_a_packed_body_of_very_many_members_is_refused() -> None:
    async with client_of(ScriptedEngine(say("x"))) as client:
        headers = {"content-type": "application/json", "content-encoding": "gzip"}
        for count, status in ((1000, 200), (1100, 400)):
            content = gzip.compress(b"") * count + gzip.compress(json.dumps(ASK).encode())
            response = await client.post("/v1/chat/completions", content=content, headers=headers)
            assert response.status_code == status, response.text
        assert "at most 1024 members" in error_of(response)["message"]


async def test_a_full_queue_refuses_before_anything_is_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    async with full() as client:
        monkeypatch.setattr(ChatTokenizer, "render_chat", None)
        assert (await client.post("/v1/chat/completions", json=ASK)).status_code == 429
