"""Limits of keys over the application: who is let in, what answers say, and what is given back."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
from fastapi import FastAPI
from pydantic import SecretStr

from service.api.tenants import Tenants
from service.api_keys import ApiKey, digest_of
from service.errors import RequestError
from service.observability.metric_tables import LIMITS
from service.runtime import Runtime
from tests.service.api.client import ASK, CHAT, RESPONSES, TEXT, Message, app_of, call_raw, client_for, error_of, until
from tests.service.scripted import Held, ScriptedEngine, fill, runtime_of, say

PROMPT = {"model": "tiny", "prompt": [1, 2, 3, 4, 5]}  # 5 tokens
UNUSED = Path("nowhere")


@asynccontextmanager
async def limited(
    *keys: object, engine: ScriptedEngine | None = None, folder: Path = UNUSED, **changes: Any
) -> AsyncIterator[httpx2.AsyncClient]:
    """A client with the first of these keys, before a server whose clock stands still."""
    app, runtime = serving(*keys, engine=engine, folder=folder, **changes)
    async with app.router.lifespan_context(app), client_for(app) as client:
        await runtime.wait_until_loaded()
        client.headers["authorization"] = "Bearer key"
        yield client


def serving(
    *keys: object, engine: ScriptedEngine | None = None, folder: Path = UNUSED, **changes: Any
) -> tuple[FastAPI, Runtime]:
    runtime = runtime_of(engine or ScriptedEngine(say("ab", "c")))
    return app_of(runtime, api_keys=keys, folder=folder, clock=lambda: 0.0, **changes), runtime


def left(response: httpx2.Response) -> dict[str, str]:
    prefix = "x-ratelimit-"
    return {name[len(prefix) :]: value for name, value in response.headers.items() if name.startswith(prefix)}


async def test_answers_say_what_is_left() -> None:
    async with limited({"key": "key", "requests_per_minute": 60, "tokens_per_minute": 600}) as client:
        first = await client.post(TEXT, json={**PROMPT, "max_tokens": 20})
        used = first.json()["usage"]["total_tokens"]
        assert left(first) == {
            "limit-requests": "60",
            "remaining-requests": "59",
            "reset-requests": "1s",
            "limit-tokens": "600",
            "remaining-tokens": str(600 - used),
            "reset-tokens": f"{used * 100}ms",
        }
        for body in ({**PROMPT, "max_tokens": 20, "stream": True}, {**PROMPT, "max_tokens": 1}):
            last = await client.post(TEXT, json=body)
        # What a stream may take is held when its head is sent, and was given back when the next request came.
        assert left(last)["remaining-tokens"] == str(600 - 3 * used)
        assert left(last)["remaining-requests"] == "57"


async def test_a_stream_holds_the_most_it_may_take() -> None:
    async with limited({"key": "key", "tokens_per_minute": 600}) as client:
        response = await client.post(TEXT, json={**PROMPT, "max_tokens": 20, "n": 3, "stream": True})
        assert left(response) == {"limit-tokens": "600", "remaining-tokens": "535", "reset-tokens": "6.5s"}


@pytest.mark.parametrize(
    ("path", "body", "most"),
    [
        (TEXT, {**PROMPT, "max_tokens": 7}, 12),
        (TEXT, {**PROMPT, "max_tokens": 7, "n": 3}, 26),
        (TEXT, {**PROMPT, "prompt": [[1, 2], [3]], "max_tokens": 7, "n": 2}, 31),
        (TEXT, PROMPT, 45),  # 40 is the longest answer of the server
        (CHAT, {**ASK, "max_completion_tokens": 7}, None),
        (RESPONSES, {"model": "tiny", "input": "hello", "max_output_tokens": 7}, None),
    ],
)
async def test_every_route_is_admitted_with_the_most_it_may_take(
    path: str, body: dict[str, Any], most: int | None, tmp_path: Path
) -> None:
    most = most or await _prompt_tokens(path, body) + 7
    async with limited({"key": "key", "budget_tokens": most - 1}, folder=tmp_path) as client:
        refused = await client.post(path, json=body)
        error = error_of(refused)
        assert (refused.status_code, error["code"]) == (400, "rate_limit_exceeded")
        assert error["param"] == {CHAT: "max_completion_tokens", RESPONSES: "max_output_tokens"}.get(path, "max_tokens")
        assert f"answers are {most} tokens" in error["message"]
        assert f"limited to {most - 1} tokens per month" in error["message"]
        assert f"lower '{error['param']}'" in error["message"]
    async with limited({"key": "key", "tokens_per_minute": most}) as client:
        assert (await client.post(path, json=body)).status_code == 200


async def test_longer_answers_than_a_minute_has_hold_the_minute() -> None:
    engine = Held()
    async with limited({"key": "key", "tokens_per_minute": 20}, engine=engine) as client:
        running = asyncio.create_task(client.post(TEXT, json={**PROMPT, "max_tokens": 40, "n": 8}))
        await until(lambda: len(engine.submitted) == 1)
        refused = await client.post(TEXT, json={**PROMPT, "max_tokens": 1})
        assert (refused.status_code, left(refused)["remaining-tokens"]) == (429, "0")
        engine.go_on.set()
        used = (await running).json()["usage"]["total_tokens"]
        assert used > 20
        owed = await client.post(TEXT, json={**PROMPT, "max_tokens": 1})
        assert (owed.status_code, owed.headers["retry-after"]) == (429, str((used - 20 + 6) * 3))
        endless = await client.post(TEXT, json={**PROMPT, "prompt": "a" * 21, "max_tokens": 1})
        assert (endless.status_code, error_of(endless)["param"]) == (400, "prompt")
        assert "its prompt is 22 tokens, and this API key is limited to 20 tokens per minute" in endless.text


async def _prompt_tokens(path: str, body: dict[str, Any]) -> int:
    async with limited("key") as client:
        usage = (await client.post(path, json=body)).json()["usage"]
    return int(usage.get("prompt_tokens") or usage["input_tokens"])


async def test_the_request_beyond_a_limit_learns_when_to_come_back() -> None:
    async with limited({"key": "key", "requests_per_minute": 2}, "other") as client:
        for _ in range(2):
            assert (await client.post(CHAT, json=ASK)).status_code == 200
        refused = await client.post(CHAT, json=ASK)
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "30")
        assert error_of(refused) == {
            "message": "Rate limit reached for this API key on requests per min (RPM): Limit 2, Used 2, Requested 1. "
            "Please try again in 30s.",
            "type": "requests",
            "param": None,
            "code": "rate_limit_exceeded",
        }
        assert left(refused) == {"limit-requests": "2", "remaining-requests": "0", "reset-requests": "1m0s"}
        other = await client.post(CHAT, json=ASK, headers={"authorization": "Bearer other"})
        assert (other.status_code, left(other)) == (200, {})


async def test_tokens_beyond_the_minute_are_refused_until_they_are_there() -> None:
    async with limited({"key": "key", "tokens_per_minute": 60}) as client:
        used = (await client.post(TEXT, json={**PROMPT, "max_tokens": 30})).json()["usage"]["total_tokens"]
        refused = await client.post(TEXT, json={**PROMPT, "n": 2, "max_tokens": 27})
        assert (refused.status_code, refused.headers["retry-after"]) == (429, str(used - 1))
        error = error_of(refused)
        assert (error["type"], error["code"]) == ("tokens", "rate_limit_exceeded")
        assert f"tokens per min (TPM): Limit 60, Used {used}, Requested 59. " in error["message"]
        assert left(refused)["remaining-tokens"] == str(60 - used)


async def test_a_bad_request_costs_a_request_and_no_tokens() -> None:
    async with limited({"key": "key", "requests_per_minute": 9, "tokens_per_minute": 600}) as client:
        for body in ({**ASK, "n": 99}, {**ASK, "model": "none"}, {}):
            response = await client.post(CHAT, json=body)
            assert response.status_code in (400, 404)
        assert (left(response)["remaining-requests"], left(response)["remaining-tokens"]) == ("6", "600")


async def test_a_full_queue_costs_no_tokens() -> None:
    engine = ScriptedEngine(say("x"))
    app, runtime = serving({"key": "key", "tokens_per_minute": 600}, engine=engine)
    async with app.router.lifespan_context(app), client_for(app) as client:
        await runtime.wait_until_loaded()
        fill(runtime, engine)
        response = await client.post(CHAT, json=ASK, headers={"authorization": "Bearer key"})
        assert (error_of(response)["code"], left(response)["remaining-tokens"]) == ("queue_full", "600")


async def test_what_is_only_looked_at_is_free() -> None:
    key = {"key": "key", "requests_per_minute": 1, "tokens_per_minute": 1, "max_concurrent": 1}
    async with limited(key, admin_key="admin") as client:
        for path in ("/v1/models", "/readyz", "/metrics", "/", "/v1/models", "/v1/responses/none"):
            response = await client.get(path)
            assert (response.status_code in (200, 404), left(response)) == (True, {}), path
        for _ in range(3):
            response = await client.post("/v1/adaptation/pause", headers={"authorization": "Bearer admin"})
            assert (error_of(response)["code"], left(response)) == ("adaptation_off", {})
        assert left(await client.post("/tokenize", json={"prompt": "a"}))["remaining-requests"] == "0"


@pytest.mark.parametrize("stream", [False, True])
async def test_no_more_run_at_the_same_time_than_may(stream: bool) -> None:
    engine = Held()
    async with limited({"key": "key", "max_concurrent": 2}, engine=engine) as client:
        running = [asyncio.create_task(client.post(CHAT, json={**ASK, "stream": stream})) for _ in range(2)]
        await until(lambda: len(engine.submitted) == 2)
        refused = await client.post(CHAT, json=ASK)
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        error = error_of(refused)
        assert (error["type"], error["code"]) == ("requests", "rate_limit_exceeded")
        assert "concurrent requests: Limit 2, Running 2, Requested 1" in error["message"]
        engine.go_on.set()
        assert [(await task).status_code for task in running] == [200, 200]
        assert (await client.post(CHAT, json=ASK)).status_code == 200


async def test_requests_side_by_side_hold_what_they_may_take() -> None:
    engine = Held()
    async with limited({"key": "key", "tokens_per_minute": 60}, engine=engine) as client:
        running = asyncio.create_task(client.post(TEXT, json={**PROMPT, "max_tokens": 40}))
        await until(lambda: len(engine.submitted) == 1)
        refused = await client.post(TEXT, json={**PROMPT, "max_tokens": 11})
        assert (refused.status_code, left(refused)["remaining-tokens"]) == (429, "15")
        assert "Used 45, Requested 16" in error_of(refused)["message"]
        engine.go_on.set()
        assert left(await running)["remaining-tokens"] == "53"


@pytest.mark.parametrize("stream", [False, True])
async def test_who_leaves_pays_for_the_prompt_and_what_was_written(stream: bool) -> None:
    engine, spoken = Held(), asyncio.Event()
    key = {"key": "key", "tokens_per_minute": 100, "max_concurrent": 1}
    app, runtime = serving(key, engine=engine)
    async with app.router.lifespan_context(app), client_for(app) as client:
        await runtime.wait_until_loaded()
        sent: list[Message] = []

        async def leave() -> Message:
            await spoken.wait()
            return {"type": "http.disconnect"}

        body = {**PROMPT, "max_tokens": 40, "n": 2, "stream": stream}
        leaving = asyncio.create_task(call_raw(app, TEXT, body, leave, sent, key="key"))
        await until(lambda: len(engine.submitted) == 1)
        await asyncio.sleep(0.05)  # for what is reported first
        spoken.set()
        await leaving
        assert engine.aborted
        response = await client.post("/tokenize", json={"prompt": "a"}, headers={"authorization": "Bearer key"})
        assert (response.status_code, left(response)["remaining-tokens"]) == (200, str(100 - 5 - 2))


async def test_a_budget_is_used_up_and_outlives_the_server(tmp_path: Path) -> None:
    key = {"key": "key", "name": "acme", "budget_tokens": 24}
    async with limited(key, folder=tmp_path) as client:
        for used in (8, 16):
            response = await client.post(TEXT, json={**PROMPT, "max_tokens": 24 - used})
            assert (response.status_code, response.json()["usage"]["total_tokens"]) == (200, 8)
    async with limited(key, folder=tmp_path) as client:
        refused = await client.post(TEXT, json={**PROMPT, "max_tokens": 4})
        error = error_of(refused)
        assert (refused.status_code, error["type"], error["code"]) == (429, "insufficient_quota", "insufficient_quota")
        assert "tokens per month: Limit 24, Used 16, Requested 9. It resets at 20" in error["message"]
        assert int(refused.headers["retry-after"]) >= 1
        refused = await client.post(TEXT, json={**PROMPT, "max_tokens": 20})
        assert (refused.status_code, "limited to 24 tokens per month" in error_of(refused)["message"]) == (400, True)
        assert (await client.post(TEXT, json={**PROMPT, "max_tokens": 3})).status_code == 200


async def test_what_running_requests_hold_of_a_budget_may_come_back(tmp_path: Path) -> None:
    engine = Held()
    async with limited({"key": "key", "budget_tokens": 50}, engine=engine, folder=tmp_path) as client:
        running = asyncio.create_task(client.post(TEXT, json={**PROMPT, "max_tokens": 40}))
        await until(lambda: len(engine.submitted) == 1)
        refused = await client.post(TEXT, json={**PROMPT, "max_tokens": 1})
        assert (refused.status_code, error_of(refused)["type"], refused.headers["retry-after"]) == (429, "tokens", "1")
        engine.go_on.set()
        assert (await running).status_code == 200
        assert (await client.post(TEXT, json={**PROMPT, "max_tokens": 38})).status_code == 200


@pytest.mark.parametrize("offered", ["key", digest_of(b"key").hex(), f"sha256:{digest_of(b'key').hex()}", "kez", ""])
async def test_a_key_opens_and_its_hash_does_not(offered: str) -> None:
    async with limited(f"sha256:{digest_of(b'key').hex()}") as client:
        response = await client.get("/v1/models", headers={"authorization": f"Bearer {offered}"})
        assert response.status_code == (200 if offered == "key" else 401)


async def test_a_response_belongs_to_its_key() -> None:
    async with limited("key", "other") as client:
        mine = (await client.post(RESPONSES, json={"model": "tiny", "input": "hello"})).json()["id"]
        other = {"authorization": "Bearer other"}
        for method in ("GET", "DELETE"):
            refused = await client.request(method, f"{RESPONSES}/{mine}", headers=other)
            assert (refused.status_code, error_of(refused)["code"]) == (404, "response_not_found")
        body = {"model": "tiny", "input": "and?", "previous_response_id": mine}
        refused = await client.post(RESPONSES, json=body, headers=other)
        assert (refused.status_code, error_of(refused)["code"]) == (400, "previous_response_not_found")
        assert (await client.get(f"{RESPONSES}/{mine}")).status_code == 200


async def test_another_key_does_not_replace_a_response_by_taking_up_its_stream() -> None:
    body, other = {"model": "tiny", "input": "hello", "stream": True}, {"authorization": "Bearer other"}
    async with limited("key", "other") as client:
        event = (await client.post(RESPONSES, json=body)).text.split("\n\n")[0]
        event_id, reported = (event.partition(f"{field}: ")[2].partition("\n")[0] for field in ("id", "data"))
        taken_up = await client.post(RESPONSES, json=body, headers={**other, "last-event-id": event_id})
        assert taken_up.status_code == 200
        mine = f"{RESPONSES}/{json.loads(reported)['response']['id']}"
        assert (await client.get(mine)).status_code == (await client.get(mine, headers=other)).status_code == 200
        assert (await client.delete(mine, headers=other)).status_code == 200
        assert (await client.get(mine)).status_code == 200


async def test_refusals_are_counted_by_limit_and_name(tmp_path: Path) -> None:
    limits = {"requests_per_minute": 3, "tokens_per_minute": 9, "max_concurrent": 2, "budget_tokens": 8}
    keys = [{"key": "a", "name": "acme", **limits}, {"key": "b", "max_concurrent": 1}]
    tenants = Tenants([ApiKey.model_validate(key) for key in keys], tmp_path, clock=lambda: 0.0)
    acme, nameless = (tenants.find(digest_of(key)) for key in (b"a", b"b"))
    assert acme is not None
    assert nameless is not None
    first, second = acme.admit(), acme.admit()
    nameless.admit()
    first.reserve(4, 4, param="max_tokens")
    first.use(4)
    first.release()
    second.reserve(2, 2, param="max_tokens")
    second.use(2)
    for refused in (
        acme.admit,
        nameless.admit,
        lambda: first.reserve(1, 2, param="x"),
        lambda: first.reserve(1, 8, param="x"),
    ):
        with pytest.raises(RequestError):
            refused()
    second.end()
    third = acme.admit()
    third.reserve(1, 1, param="max_tokens")  # what was left, for the second one has let go of what it held
    third.end()
    with pytest.raises(RequestError, match="requests per min"):
        acme.admit()
    assert tenants.refusals == {"concurrency:acme": 1, "concurrency:": 1, "budget:acme": 2, "requests:acme": 1}


async def test_a_refusal_for_tokens_is_counted_and_every_limit_has_a_series() -> None:
    tenants = Tenants([ApiKey(key=SecretStr("a"), tokens_per_minute=9)], UNUSED, clock=lambda: 0.0)
    tenant = tenants.find(digest_of(b"a"))
    assert tenant is not None
    with pytest.raises(RequestError, match="too large"):
        tenant.admit().reserve(10, 0, param="max_tokens")
    assert tenants.refusals == {"tokens:": 1}
    assert set(LIMITS) == {"requests", "tokens", "concurrency", "budget"}
