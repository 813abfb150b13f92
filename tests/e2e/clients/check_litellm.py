"""LiteLLM: completions, streams, functions, structured answers, responses."""

import json

import litellm
from checks import BASE_URL, Note, model_name, run

name = model_name()
place = {"model": f"openai/{name}", "api_base": BASE_URL, "api_key": "unused", "max_retries": 0}
messages = [{"role": "user", "content": "Say something."}]
options = {**place, "messages": messages, "temperature": 0.0, "max_tokens": 200}
tools = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"enum": ["Rome", "Paris"]}},
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    }
]


def check_completions() -> None:
    answer = litellm.completion(**options)
    chunks = list(litellm.completion(**options, stream=True, stream_options={"include_usage": True}))
    whole = litellm.stream_chunk_builder(chunks, messages=messages)
    assert whole.choices[0].message.content == answer.choices[0].message.content
    assert whole.usage.completion_tokens == answer.usage.completion_tokens


def check_structured_answers() -> None:
    answer = litellm.completion(**options, response_format=Note)
    assert Note.model_validate_json(answer.choices[0].message.content)


def check_functions() -> None:
    answer = litellm.completion(**options, tools=tools, tool_choice="required", parallel_tool_calls=False)
    (call,) = answer.choices[0].message.tool_calls
    assert json.loads(call.function.arguments)["city"] in ("Rome", "Paris")
    result = {"role": "tool", "tool_call_id": call.id, "content": "It rains."}
    history = [*messages, answer.choices[0].message.model_dump(), result]
    assert litellm.completion(**{**options, "messages": history}, tools=tools).choices


def check_responses() -> None:
    answer = litellm.responses(**place, input="Say something.", temperature=0.0, max_output_tokens=60)
    assert answer.output
    kinds = [
        event.type for event in litellm.responses(**place, input="Say something.", stream=True, max_output_tokens=60)
    ]
    assert kinds[-1] in ("response.completed", "response.incomplete")


def refusal() -> str:
    try:
        litellm.completion(**{**options, "temperature": 9})
    except litellm.BadRequestError as error:
        return str(error)
    raise AssertionError("temperature 9 was not refused")


def check_errors() -> None:
    assert "temperature" in refusal()


run(check_completions, check_structured_answers, check_functions, check_responses, check_errors)
