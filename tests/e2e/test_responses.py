"""`/v1/responses` with the official client and a real server: text, calls, structured answers, events in order, and
conversations that the server remembers."""

from typing import Any

import openai
import pytest
from openai.types.responses import FunctionToolParam, ResponseFunctionToolCall

WEATHER: FunctionToolParam = {
    "type": "function",
    "name": "get_weather",
    "strict": True,
    "parameters": {
        "type": "object",
        "properties": {"city": {"enum": ["Rome", "Paris"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


def create(client: openai.OpenAI, **fields: Any) -> Any:
    asked = {"model": "tiny", "input": "so it is", "max_output_tokens": 200, "temperature": 0.0}
    return client.responses.create(**{**asked, "extra_body": {"seed": 5}, **fields})


def test_text_is_that_of_a_chat_completion(client: openai.OpenAI) -> None:
    response = create(client, instructions="Be brief.", max_output_tokens=12)
    chat = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "system", "content": "Be brief."}, {"role": "user", "content": "so it is"}],
        temperature=0.0,
        max_tokens=12,
        seed=5,
    )
    assert response.output_text == chat.choices[0].message.content
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert response.usage.output_tokens == 12
    assert response.usage.input_tokens == chat.usage.prompt_tokens  # type: ignore[union-attr]


def test_a_conversation_with_a_call_is_remembered(client: openai.OpenAI) -> None:
    called = create(client, tools=[WEATHER], tool_choice="required", parallel_tool_calls=False)
    (call,) = called.output
    assert isinstance(call, ResponseFunctionToolCall)
    assert (call.name, call.status, called.status) == ("get_weather", "completed", "completed")
    result: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}]
    reported = create(client, input=result, previous_response_id=called.id, max_output_tokens=5)
    past: Any = [{"role": "user", "content": "so it is"}, call.model_dump(), *result]
    again = create(client, input=past, max_output_tokens=5)
    assert reported.output_text == again.output_text
    assert reported.usage.input_tokens == again.usage.input_tokens > called.usage.output_tokens
    assert reported.previous_response_id == called.id


def test_a_response_is_kept_until_it_is_deleted(client: openai.OpenAI) -> None:
    kept, forgotten = create(client, max_output_tokens=4), create(client, max_output_tokens=4, store=False)
    assert client.responses.retrieve(kept.id).output_text == kept.output_text
    client.responses.delete(kept.id)
    for gone in (kept, forgotten):
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(gone.id)
        with pytest.raises(openai.BadRequestError) as raised:
            create(client, previous_response_id=gone.id)
        assert (raised.value.param, raised.value.code) == ("previous_response_id", "previous_response_not_found")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("fields", [{}, {"tools": [WEATHER], "tool_choice": "required"}], ids=["text", "call"])
def test_a_reference_stands_for_an_item_of_a_stored_response(
    client: openai.OpenAI, fields: dict[str, Any], stream: bool
) -> None:
    def made(**more: Any) -> Any:
        answer = create(client, stream=stream, **{"parallel_tool_calls": False, **fields, **more})
        return list(answer)[-1].response if stream else answer

    (item,) = made().output
    asked, rest = {"role": "user", "content": "so it is"}, {"role": "user", "content": "Again."}
    if fields:
        rest = {"type": "function_call_output", "call_id": item.call_id, "output": "sunny"}
    whole = made(input=[asked, item.model_dump(), rest])
    referred = made(input=[asked, {"type": "item_reference", "id": item.id}, rest])
    assert [one.model_dump(exclude={"id", "call_id"}) for one in referred.output] == [
        one.model_dump(exclude={"id", "call_id"}) for one in whole.output
    ]
    assert referred.usage.input_tokens == whole.usage.input_tokens
    (unknown,) = made(store=False).output
    with pytest.raises(openai.BadRequestError, match=unknown.id) as raised:
        made(input=[asked, {"id": unknown.id}, rest])
    assert (raised.value.param, raised.value.code) == ("input.1", "item_not_found")


@pytest.mark.parametrize("fields", [{}, {"tools": [WEATHER], "tool_choice": "required"}], ids=["text", "call"])
def test_events_come_in_order_and_add_up(client: openai.OpenAI, fields: dict[str, Any]) -> None:
    fields = {"parallel_tool_calls": False, "max_output_tokens": 200 if fields else 60, **fields}
    whole, events = create(client, **fields), list(create(client, stream=True, **fields))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    of_call = "tools" in fields
    delta = "response.function_call_arguments.delta" if of_call else "response.output_text.delta"
    before = ["response.created", "response.in_progress", "response.output_item.added"]
    before += [] if of_call else ["response.content_part.added"]
    after = ["response.function_call_arguments.done"] if of_call else []
    after += [] if of_call else ["response.output_text.done", "response.content_part.done"]
    after += ["response.output_item.done", "response.completed" if of_call else "response.incomplete"]
    assert kinds == [*before, *[delta] * kinds.count(delta), *after]
    deltas = "".join(event.delta for event in events if event.type == delta)
    last = events[-1].response
    assert deltas == (last.output[0].arguments if of_call else last.output_text)
    assert deltas == (whole.output[0].arguments if of_call else whole.output_text)
    assert last.usage == whole.usage


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": [{"type": "reasoning"}]}, "input"),
        ({"extra_body": {"stop": [5]}}, "stop.0"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input.0.content.0.type",
        ),
        (
            {"tools": [{"type": "function", "name": "f", "parameters": {"type": "x"}, "strict": True}]},
            "tools.0.parameters",
        ),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": "x"}}}}, "text.format.schema"),
        ({"input": "x " * 2500}, "input"),
        ({"background": True}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"extra_body": {"n": 2}}, "n"),
        ({"extra_body": {"logprobs": True}}, "logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"extra_body": {"return_token_ids": True}}, "return_token_ids"),
    ],
)
def test_refusals_name_the_field(client: openai.OpenAI, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        create(client, **fields)
    assert raised.value.param == param
