"""openai-python: chat, streams, structured answers, functions, responses, errors."""

from typing import Literal

import openai
from checks import Note, official, run
from pydantic import BaseModel


class Weather(BaseModel):
    """The weather of a city."""

    city: Literal["Rome", "Paris"]
    days: Literal[1, 2, 3]


client = official()
model = client.models.list().data[0].id
messages = [{"role": "user", "content": "Say something."}]
options = {"model": model, "messages": messages, "max_tokens": 60, "temperature": 0.0, "seed": 1}


def check_chat() -> None:
    answer = client.chat.completions.create(**options)
    chunks = list(client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}))
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert text == answer.choices[0].message.content
    assert chunks[-1].usage.completion_tokens == answer.usage.completion_tokens
    with client.chat.completions.stream(**options) as stream:
        events = list(stream)
    assert "".join(event.delta for event in events if event.type == "content.delta") == text
    assert {"chunk", "content.delta", "content.done"} <= {event.type for event in events}
    assert client.completions.create(model=model, prompt=["a", "b"], max_tokens=3).choices[1].text


def check_structured_answers() -> None:
    parsed = client.chat.completions.parse(**options, response_format=Note).choices[0]
    assert isinstance(parsed.message.parsed, Note)
    with client.chat.completions.stream(**options, response_format=Note) as stream:
        assert stream.until_done().get_final_completion().choices[0].message.parsed == parsed.message.parsed


def check_functions() -> None:
    tool = openai.pydantic_function_tool(Weather)
    asked = {**options, "tools": [tool], "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 200}
    first = client.chat.completions.parse(**asked).choices[0]
    assert first.finish_reason == "tool_calls"
    (call,) = first.message.tool_calls
    assert isinstance(call.function.parsed_arguments, Weather)
    with client.chat.completions.stream(**asked) as stream:
        streamed = stream.get_final_completion().choices[0].message.tool_calls[0]
    assert streamed.function.arguments == call.function.arguments
    result = {"role": "tool", "tool_call_id": call.id, "content": "It rains."}
    history = [*messages, first.message.to_dict(), result]
    assert client.chat.completions.create(**{**options, "messages": history, "tools": [tool]}).choices


def check_responses() -> None:
    asked = {"model": model, "max_output_tokens": 60, "temperature": 0.0}
    first = client.responses.create(**asked, input="Say something.")
    again = client.responses.create(**asked, input="And more.", previous_response_id=first.id)
    assert again.usage.input_tokens > first.usage.input_tokens
    assert client.responses.retrieve(first.id).output_text == first.output_text
    client.responses.delete(first.id)
    parsed = client.responses.parse(**asked, input="A note.", text_format=Note)
    assert isinstance(parsed.output_parsed, Note)
    with client.responses.stream(**asked, input="A note.", text_format=Note) as stream:
        kinds = [event.type for event in stream]
        assert stream.get_final_response().output_parsed == parsed.output_parsed
    assert (kinds[0], kinds[-1]) == ("response.created", "response.completed")
    events = list(client.responses.create(**asked, input="Say something.", stream=True))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == first.output_text
    function = {"type": "function", "name": "now", "parameters": {"type": "object", "properties": {}}, "strict": False}
    called = client.responses.create(
        **asked, input="Now?", tools=[function], tool_choice={"type": "function", "name": "now"}
    )
    (item,) = called.output
    assert (item.type, item.name) == ("function_call", "now")
    output = {"type": "function_call_output", "call_id": item.call_id, "output": "Noon."}
    assert client.responses.create(**asked, input=[output], previous_response_id=called.id).output


def refused_for(**fields: object) -> tuple[type, str]:
    try:
        client.chat.completions.create(**{**options, **fields})
    except openai.APIStatusError as error:
        return type(error), error.param
    raise AssertionError(f"{fields} was not refused")


def check_errors() -> None:
    assert refused_for(model="other") == (openai.NotFoundError, "model")
    assert refused_for(temperature=9) == (openai.BadRequestError, "temperature")
    nameless = {"type": "function", "function": {"name": "a b"}}
    assert refused_for(tools=[nameless]) == (openai.BadRequestError, "tools.0.function.name")


run(check_chat, check_structured_answers, check_functions, check_responses, check_errors)
