"""Structured answers and calls of functions, as the official client sends and reads them, from a real server: what a
grammar says holds at any temperature, and speculation changes no token of it."""

import json
from typing import Any

import jsonschema
import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam, ChatCompletionToolParam

MESSAGES: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Say it as JSON."}]
WEATHER: ChatCompletionToolParam = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"enum": ["Rome", "Paris"]},
                "days": {"type": "integer", "minimum": 1, "maximum": 9},
            },
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
MAIL = r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$"
RELAXED: list[tuple[dict[str, Any], str]] = [
    ({"type": "string", "format": "email", "pattern": MAIL}, "pattern"),
    ({"type": "array", "items": {"type": "integer"}, "uniqueItems": True}, "uniqueItems"),
    ({"oneOf": [{"type": "string", "pattern": "a"}, {"type": "string", "pattern": "b"}]}, "oneOf"),
    ({"type": "string", "not": {"pattern": "a"}}, "not"),
    ({"type": "string", "if": {"pattern": "a"}, "then": {"pattern": "b"}}, "if"),
]
SIBLING = {
    "type": "object",
    "properties": {"a": {"enum": ["x", "y"]}, "b": {"$ref": "#/properties/a"}},
    "required": ["b"],
}
ROUND = {"type": "object", "properties": {"a": {"$ref": "#"}}, "additionalProperties": False}
NOW: ChatCompletionToolParam = {"type": "function", "function": {"name": "now"}}


def answer(client: openai.OpenAI, **fields: Any) -> Any:
    asked = {"model": "tiny", "messages": MESSAGES, "max_tokens": 300, "seed": 5, "temperature": 0.0, **fields}
    return client.chat.completions.create(**asked).choices[0]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_object"}, "max_tokens": 60},
        {"extra_body": {"guided_regex": "[a-f]{3}-[0-9]{2,9}"}},
        {"extra_body": {"structured_outputs": {"choice": ["first of all", "first", "second"]}}},
        {"tools": [WEATHER, NOW], "tool_choice": "required", "parallel_tool_calls": False},
        {"tools": [WEATHER], "max_tokens": 40},
    ],
    ids=str,
)
def test_speculation_changes_no_token(client: openai.OpenAI, fields: dict[str, Any], temperature: float) -> None:
    extra = fields.get("extra_body", {})
    plain, drafted = (
        answer(
            client,
            **{**fields, "temperature": temperature, "extra_body": {**extra, **more, "return_token_ids": True}},
        )
        for more in ({"speculation": {"enabled": False}}, {})
    )
    assert plain.token_ids == drafted.token_ids
    assert plain.message.content == drafted.message.content


def called_as(client: openai.OpenAI, parameters: dict[str, Any], **more: Any) -> tuple[Any, str | None]:
    """The arguments of a call of such a function, and the places that it was not held to."""
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters, **more}}
    asked: dict[str, Any] = {"tools": [NOW, tool], "tool_choice": {"type": "function", "function": {"name": "f"}}}
    raw = client.chat.completions.with_raw_response.create(
        model="tiny", messages=MESSAGES, max_tokens=400, seed=3, temperature=1.0, **asked
    )
    (call,) = raw.parse().choices[0].message.tool_calls or [None]
    assert call is not None
    assert call.type == "function"
    return json.loads(call.function.arguments), raw.headers.get("x-adaptree-relaxed")


@pytest.mark.parametrize(("schema", "keyword"), RELAXED, ids=str)
def test_what_no_grammar_can_say_is_left_out_and_reported(
    client: openai.OpenAI, schema: dict[str, Any], keyword: str
) -> None:
    parameters = {"type": "object", "properties": {"a": {"enum": [1]}, "b": schema}, "required": ["a"]}
    arguments, relaxed = called_as(client, {**parameters, "additionalProperties": False})
    assert arguments["a"] == 1
    assert relaxed == f"tools.1.function.parameters.properties.b.{keyword}"
    with pytest.raises(openai.BadRequestError) as raised:
        called_as(client, parameters, strict=True)
    assert str(raised.value.param).startswith("tools.1.function.parameters.properties.b")
    auto = answer(
        client, tools=[{"type": "function", "function": {"name": "f", "parameters": parameters}}], max_tokens=4
    )
    assert auto.finish_reason == "length"


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("parameters", [SIBLING, ROUND], ids=["sibling", "itself"])
def test_references_into_the_schema_itself_are_honoured(
    client: openai.OpenAI, parameters: dict[str, Any], strict: bool
) -> None:
    arguments, relaxed = called_as(client, parameters, strict=strict)
    jsonschema.validate(arguments, parameters)
    assert relaxed is None
