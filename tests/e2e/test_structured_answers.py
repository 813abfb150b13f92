"""Structured answers and calls of functions, as the official client sends and reads them, from a real server: what a
grammar says holds at any temperature, and speculation changes no token of it."""

import json
from collections.abc import Iterator
from typing import Any, Literal

import jsonschema
import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam, ChatCompletionToolParam
from pydantic import BaseModel, Field

from tests.processes import Process, serving_tiny

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


class Note(BaseModel):
    title: str = Field(max_length=12)
    kind: Literal["question", "answer"]
    marks: list[Literal[1, 20, 300]] = Field(min_length=1, max_length=3)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    running = serving_tiny(tmp_path_factory.mktemp("structured"))
    yield running
    running.end()


@pytest.fixture(scope="module")
def client(server: Process) -> openai.OpenAI:
    return server.official()


def answer(client: openai.OpenAI, **fields: Any) -> Any:
    asked = {"model": "tiny", "messages": MESSAGES, "max_tokens": 300, "seed": 5, "temperature": 0.0, **fields}
    return client.chat.completions.create(**asked).choices[0]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_parsed_answers(client: openai.OpenAI, temperature: float, seed: int) -> None:
    parsed = client.chat.completions.parse(
        model="tiny", messages=MESSAGES, response_format=Note, temperature=temperature, seed=seed, max_tokens=300
    )
    choice = parsed.choices[0]
    assert (choice.finish_reason, type(choice.message.parsed)) == ("stop", Note)


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


def test_a_named_function_is_called(client: openai.OpenAI) -> None:
    choice = answer(client, tools=[WEATHER, NOW], tool_choice={"type": "function", "function": {"name": "get_weather"}})
    (call,) = choice.message.tool_calls
    assert (choice.finish_reason, choice.message.content, call.type) == ("tool_calls", None, "function")
    assert (call.function.name, set(json.loads(call.function.arguments))) == ("get_weather", {"city", "days"})


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
def test_what_no_grammar_can_say_is_left_out_and_told(
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


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "a", "schema": {"enum": ["a<|end|>b"]}},
                }
            },
            '"a<|end|>b"',
        ),
        ({"extra_body": {"guided_choice": ["<|end|>x"]}}, "<|end|>x"),
        ({"extra_body": {"guided_regex": r"a<\|start\|>"}}, "a<|start|>"),
        ({"extra_body": {"ebnf": 'root ::= "<|end|>" "b"'}}, "<|end|>b"),
        (
            {"extra_body": {"response_format": {"type": "json_object", "schema": {"const": {"<|end|>": 1}}}}},
            '{"<|end|>": 1}',
        ),
    ],
    ids=str,
)
def test_names_of_special_tokens_are_text(
    client: openai.OpenAI, fields: dict[str, Any], expected: str, temperature: float
) -> None:
    for speculates in (True, False):
        extra = {**fields.get("extra_body", {}), "speculation": {"enabled": speculates}}
        choice = answer(client, **{**fields, "temperature": temperature, "extra_body": extra})
        assert (choice.message.content, choice.finish_reason, choice.stop_reason) == (expected, "stop", None)


def test_names_of_special_tokens_are_text_in_arguments(client: openai.OpenAI) -> None:
    parameters = {"type": "object", "properties": {"<|end|>": {"const": "<|start|>"}}, "required": ["<|end|>"]}
    arguments, _ = called_as(client, {**parameters, "additionalProperties": False}, strict=True)
    assert arguments == {"<|end|>": "<|start|>"}


def test_stops_cut_within_a_form_and_say_so(client: openai.OpenAI) -> None:
    form = {"guided_regex": "ab+c"}
    assert answer(client, extra_body=form, max_tokens=2, stop=None).stop_reason is None
    cut = answer(client, extra_body=form, stop=["b"])
    assert (cut.message.content, cut.finish_reason, cut.stop_reason) == ("a", "stop", "b")
    whole = answer(client, extra_body={"guided_regex": "ab{2}c"})
    assert (whole.message.content, whole.finish_reason, whole.stop_reason) == ("abbc", "stop", None)


def test_calls_are_streamed_as_they_are_sent_whole(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"tools": [WEATHER], "tool_choice": "required", "parallel_tool_calls": False, "seed": 7}
    (whole,) = answer(client, **fields).message.tool_calls
    with client.chat.completions.stream(
        model="tiny", messages=MESSAGES, temperature=0.0, max_tokens=300, **fields
    ) as stream:
        kinds = [event.type for event in stream]
        choice = stream.get_final_completion().choices[0]
    assert choice.message.tool_calls is not None
    (streamed,) = choice.message.tool_calls
    assert streamed.function.arguments == whole.function.arguments
    assert "tool_calls.function.arguments.delta" in kinds
    assert choice.finish_reason == "tool_calls"


def test_a_conversation_goes_on_behind_a_call(client: openai.OpenAI) -> None:
    called: ChatCompletionMessageParam = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "a", "type": "function", "function": {"name": "now", "arguments": "{}"}}],
    }
    result: ChatCompletionMessageParam = {"role": "tool", "tool_call_id": "a", "content": "noon"}
    for fields in ({}, {"tools": [NOW]}, {"tools": [NOW], "tool_choice": "none"}):
        assert answer(client, messages=[*MESSAGES, called, result], max_tokens=5, **fields).finish_reason == "length"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "a", "schema": {"items": {"not": {"pattern": "a"}}}},
                }
            },
            "response_format.json_schema.schema.items",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "x"}, "strict": True}}]},
            "tools.0.function.parameters",
        ),
        ({"tools": [NOW, NOW]}, "tools.1.function.name"),
        ({"tools": [NOW], "tool_choice": {"type": "function", "function": {"name": "then"}}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": []}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "no spaces"}}]}, "tools.0.function.name"),
        ({"extra_body": {"guided_regex": "(", "guided_choice": ["a"]}}, "guided_choice"),
        ({"extra_body": {"guided_json": "{"}}, "guided_json"),
        ({"extra_body": {"guided_choice": ["a"], "min_tokens": 3}}, "min_tokens"),
        ({"extra_body": {"guided_choice": ["a"]}, "tools": [NOW]}, "guided_choice"),
        ({"messages": [{"role": "user", "content": None}]}, "messages.0.content"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.tool_call_id"),
        (
            {
                "messages": [
                    {
                        "role": "assistant",
                        "tool_calls": [{"id": "a", "type": "function", "function": {"name": "f", "arguments": "{"}}],
                    }
                ]
            },
            "messages.0.tool_calls.0.function.arguments",
        ),
    ],
    ids=str,
)
def test_refusals_name_the_field(client: openai.OpenAI, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        answer(client, **fields)
    assert raised.value.param == param
