"""LangChain: messages, streams, bound tools, structured outputs, an agent."""

from typing import Literal

from checks import BASE_URL, Note, model_name, run
from langchain.agents import create_agent
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI


@tool
def weather(city: Literal["Rome", "Paris"], days: Literal[1, 2, 3]) -> str:
    """The weather of a city."""
    return f"It rains in {city} for {days} days."


name = model_name()
settings = {"model": name, "base_url": BASE_URL, "api_key": "unused", "temperature": 0.0, "max_retries": 0}
models = [ChatOpenAI(**settings, max_tokens=200, use_responses_api=by_responses) for by_responses in (False, True)]


def check_messages() -> None:
    for model in models:
        answer = model.invoke("Say something.")
        assert answer.text
        assert "".join(piece.text for piece in model.stream("Say something.")) == answer.text
        assert answer.usage_metadata["output_tokens"] > 0


def check_structured_outputs() -> None:
    for model in models:
        for method in ("json_schema", "function_calling"):
            assert isinstance(model.with_structured_output(Note, method=method).invoke("A note."), Note), method


def check_tools() -> None:
    for model in models:
        asked = HumanMessage("How is the weather?")
        called = model.bind_tools([weather], tool_choice="any", parallel_tool_calls=False).invoke([asked])
        (call,) = called.tool_calls
        result = weather.invoke(call)
        assert isinstance(result, ToolMessage)
        assert model.bind_tools([weather]).invoke([asked, called, result]).response_metadata
        pieces = list(model.bind_tools([weather], tool_choice="any", parallel_tool_calls=False).stream([asked]))
        whole = pieces[0]
        for piece in pieces[1:]:
            whole += piece
        assert whole.tool_calls[0]["args"] == call["args"]


def check_agent() -> None:
    agent = create_agent(models[0], tools=[weather], response_format=Note)
    assert isinstance(agent.invoke({"messages": [HumanMessage("A note.")]})["structured_response"], Note)


run(check_messages, check_structured_outputs, check_tools, check_agent)
