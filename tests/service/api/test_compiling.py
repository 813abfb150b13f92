"""Schemas that take long to compile delay no one else, end with their client, and are refused in the end."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from service.text.grammars import GrammarCompiler
from tests.service.api.client import ASK, CHAT, RESPONSES, Body, Message, app_of, call_raw, client_of, error_of
from tests.service.scripted import CARD, ScriptedEngine, runtime_of, say

DEPTH = 100


@pytest.fixture(autouse=True)
def long_context(monkeypatch: pytest.MonkeyPatch) -> None:
    """Room for the functions that are sent: a prompt that is too long is refused before anything is compiled."""
    monkeypatch.setattr("tests.service.scripted.CARD", replace(CARD, max_model_len=2**15))


def hostile(name: str) -> Body:
    """Functions of schemas with parts that nothing can enforce, at each of many levels; no two requests' are equal."""
    schema: Body = {"title": name}
    for _ in range(DEPTH):
        schema = {"allOf": schema}
    functions = [{"name": f"f{n}", "parameters": {"properties": {f"p{n}": schema}}} for n in range(2)]
    return {**ASK, "tools": [{"type": "function", "function": function} for function in functions]}


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is compiled, as it comes."""
    compile_one: Callable[..., Any] = GrammarCompiler._matcher_of
    seen: list[str] = []

    def counted(self: GrammarCompiler, kind: str, value: Any) -> Any:
        seen.append(kind)
        return compile_one(self, kind, value)

    monkeypatch.setattr(GrammarCompiler, "_matcher_of", counted)
    return seen


async def until(reached: Callable[[], bool]) -> None:
    while not reached():
        await asyncio.sleep(0.001)


async def test_a_plain_request_is_answered_while_others_compile(compilations: list[str]) -> None:
    async with client_of(ScriptedEngine(say("ok")), api_keys=("a", "b", "c", "honest")) as client:

        async def status(key: str, body: Body) -> int:
            return (await client.post(CHAT, json=body, headers={"authorization": f"Bearer {key}"})).status_code

        posts = [asyncio.create_task(status(key, hostile(key + number))) for key in "abc" for number in "123"]
        await until(lambda: len(compilations) > 100)
        assert await status("honest", ASK) == 200
        assert await status("honest", {**ASK, "regex": "[a-c]"}) == 200
        assert not any(post.done() for post in posts)
        for post in posts:
            post.cancel()
        await asyncio.wait(posts)


@pytest.mark.parametrize("path", [CHAT, RESPONSES])
async def test_a_client_that_leaves_ends_the_work(path: str, compilations: list[str]) -> None:
    async def leave() -> Message:
        await until(lambda: len(compilations) > 10)
        return {"type": "http.disconnect"}

    runtime, sent = runtime_of(ScriptedEngine(say("ok"))), list[Message]()
    app, body = app_of(runtime), hostile("a")
    if path == RESPONSES:
        body["input"] = "hello"
        body["tools"] = [{"type": "function", **tool["function"]} for tool in body["tools"]]
        del body["messages"]
    async with app.router.lifespan_context(app):
        await runtime.wait_until_loaded()
        await call_raw(app, path, body, leave, sent)
        count = len(compilations)
        await asyncio.sleep(0.2)
    assert not [message for message in sent if message.get("status") == 200]
    assert len(compilations) == count


async def test_work_beyond_the_budget_is_refused_with_the_field(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.text.grammar_pool._REQUEST_SECONDS", 0.2)
    async with client_of(ScriptedEngine(say("ok"))) as client:
        answer = await client.post(CHAT, json=hostile("a"))
    assert answer.status_code == 400, answer.text
    assert error_of(answer)["param"] == "tools.0.function.parameters"
    assert "seconds" in error_of(answer)["message"]


async def test_an_equal_form_is_compiled_once_for_each_key(compilations: list[str]) -> None:
    body = {**ASK, "tools": [{"type": "function", "function": {"name": "now"}}]}
    counts = []
    async with client_of(ScriptedEngine(say("ok")), api_keys=("a", "b")) as client:
        for key in "aab":
            answer = await client.post(CHAT, json=body, headers={"authorization": f"Bearer {key}"})
            assert answer.status_code == 200
            counts.append(len(compilations))
    assert 0 < counts[0] == counts[1] < counts[2]
