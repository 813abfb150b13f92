"""Whatever a client sends, the answer is never our fault."""

import json
from typing import Any

import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from service.api.responses_schemas import ResponsesRequest
from service.api.schemas import ChatCompletionRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from tests.service.api.client import ASK, CHAT, RESPONSES, Body, client_of, error_of
from tests.service.scripted import ScriptedEngine, say

scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5)
values = st.recursive(
    scalars | st.sampled_from(["text", "content", "user", "<|im_end|>", "tiny"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
parts = st.lists(
    st.fixed_dictionaries({"type": st.just("text") | values, "text": st.text(max_size=5) | values}), max_size=2
)
messages = st.lists(
    st.fixed_dictionaries(
        {
            "role": st.sampled_from(["system", "user", "assistant", "tool"]),
            "content": st.text(max_size=5) | parts | values,
        },
        optional={"name": values, "tool_calls": values},
    ),
    max_size=3,
)
GOOD: dict[str, Any] = {
    "model": st.just("tiny"),
    "messages": messages,
    "prompt": st.text(max_size=5)
    | st.lists(st.integers(-1, 300), max_size=4)
    | st.lists(st.text(max_size=3), max_size=3),
    "tokens": st.lists(st.integers(-1, 300), max_size=5),
    "n": st.integers(0, 9),
    "stream": st.booleans(),
    "seed": st.integers(-(2**64), 2**64),
    "logit_bias": st.dictionaries(st.integers(-5, 300).map(str), st.floats(-200, 200), max_size=3),
    "stop": st.text(max_size=3) | st.lists(st.text(max_size=3), max_size=3),
    "chat_template_kwargs": st.dictionaries(st.text(max_size=8) | st.just("greeting"), values, max_size=2),
}
ROUTES: dict[str, type[BaseModel]] = {
    "/v1/chat/completions": ChatCompletionRequest,
    "/v1/completions": CompletionRequest,
    "/v1/responses": ResponsesRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}


BASE = {**ASK, "prompt": "hello", "input": "hello", "tokens": [1, 2]}


@st.composite
def requests(draw: st.DrawFn) -> tuple[str, bytes]:
    """A route with a good body, of which some fields are replaced: by sensible values, by anything, by unknown ones."""
    path = draw(st.sampled_from(sorted(ROUTES)))
    names = sorted(ROUTES[path].model_fields)
    body: dict[str, object] = {
        name: BASE[name] for name in names if name in BASE and (path, name) != ("/tokenize", "messages")
    }
    sensible = st.sampled_from([name for name in names if name in GOOD])
    for name in draw(st.lists(sensible, max_size=3)):
        body[name] = draw(GOOD[name])
    for name in draw(st.lists(st.sampled_from([*names, "tools", "echo", "best_of", "unknown"]), max_size=2)):
        body[name] = draw(values)
    return path, json.dumps(body).encode()


@settings(max_examples=150)
@given(st.lists(requests(), min_size=5, max_size=5) | st.just([("/tokenize", b"nonsense")]))
def test_random_bodies_never_cause_a_5xx(calls: list[tuple[str, bytes]]) -> None:
    async def post_all() -> None:
        async with client_of(ScriptedEngine(say("he", "llo"))) as client:
            for path, body in calls:
                response = await client.post(path, content=body, headers={"content-type": "application/json"})
                assert response.status_code in (200, 400, 404), (path, body, response.text)
                assert "server_error" not in response.text, (path, body, response.text)

    anyio.run(post_all)


def nested(depth: int, kind: str) -> str:
    """JSON of so many levels, as text: Python's encoder does not write thousands."""
    before, after = {"lists": ("[", "]"), "objects": ('{"not":', "}"), "schemas": ('{"anyOf":[', "]}")}[kind]
    depth = depth // 2 if kind == "schemas" else depth
    return before * depth + "{}" + after * depth


FUNCTION: Body = {"type": "function", "function": {"name": "f", "parameters": "@"}}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "@text"}}
DEEP: dict[str, list[Body]] = {
    CHAT: [
        {"tools": [FUNCTION]},
        {"tools": [{**FUNCTION, "function": {**FUNCTION["function"], "strict": True}}]},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "f", "schema": "@"}}},
        {"structured_outputs": {"json": "@"}},
        {"structured_outputs": {"json": "@text"}},
        {"guided_json": "@text"},
        {"json_schema": "@text"},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "more": "@"}]}]},
        {"messages": [*ASK["messages"], {"role": "assistant", "tool_calls": [CALL]}]},
    ],
    RESPONSES: [
        {"input": [{"type": "function_call", "call_id": "1", "name": "f", "arguments": "@text"}]},
        {"tools": [{"type": "function", "name": "f", "parameters": "@"}]},
        {"text": {"format": {"type": "json_schema", "name": "f", "schema": "@"}}},
    ],
    "/tokenize": [{"prompt": None, "messages": [*ASK["messages"], {"role": "assistant", "tool_calls": [CALL]}]}],
}
"""Fields with a value that is nested deeply (@), or its text (@text), beside those of each route's schema."""


@pytest.mark.parametrize("path", sorted(ROUTES))
@pytest.mark.parametrize("kind", ["lists", "objects", "schemas"])
async def test_deeply_nested_values_are_refused_with_their_field(path: str, kind: str) -> None:
    base = {name: BASE[name] for name in ROUTES[path].model_fields if name in BASE}
    if path == "/tokenize":
        del base["messages"]
    changes: list[Body] = [{name: "@"} for name in [*ROUTES[path].model_fields, "unknown"]] + DEEP.get(path, [])
    async with client_of(ScriptedEngine(say("ok"))) as client:
        for change in changes:
            (field,) = list(change)[-1:]
            for depth in (120, 190, 5000):
                value = nested(depth, kind)
                body = json.dumps({**base, **change}).replace('"@text"', json.dumps(value)).replace('"@"', value)
                answer = await client.post(path, content=body, headers={"content-type": "application/json"})
                assert answer.status_code in ((200, 400) if depth < 128 else (400,)), (change, depth, answer.text)
                if depth > 128:
                    assert str(error_of(answer)["param"]).startswith(field), (change, depth, answer.text)
