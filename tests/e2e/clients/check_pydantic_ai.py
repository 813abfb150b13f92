"""pydantic-ai: agents with structured outputs, tools, streams."""

import asyncio
from typing import Literal

from checks import BASE_URL, Note, model_name, run
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.exceptions import ModelHTTPError
from pydantic_ai.models import Model
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

name = model_name()
provider = OpenAIProvider(base_url=BASE_URL, api_key="unused")
models = [OpenAIChatModel(name, provider=provider), OpenAIResponsesModel(name, provider=provider)]
settings = {"max_tokens": 200, "temperature": 0.0}


def check_text() -> None:
    for model in models:
        agent = Agent(model, instructions="Be brief.", model_settings=settings)
        first = agent.run_sync("Say something.")
        assert first.output
        assert agent.run_sync("More.", message_history=first.all_messages()).output


def check_outputs() -> None:
    for model in models:
        for output in (Note, ToolOutput(Note), NativeOutput(Note)):
            agent = Agent(model, output_type=output, model_settings=settings)
            assert isinstance(agent.run_sync("A note.").output, Note)


def calls_of(model: Model) -> list[str]:
    """Cities asked for on the way to a note."""
    called = []
    agent = Agent(model, output_type=Note, model_settings={**settings, "temperature": 1.0})

    @agent.tool_plain
    def weather(city: Literal["Rome", "Paris"], days: Literal[1, 2, 3]) -> str:
        """The weather of a city."""
        called.append(city)
        return f"It rains for {days} days."

    try:
        assert isinstance(agent.run_sync("How is the weather?").output, Note)
    except ModelHTTPError as error:  # random weights may call on until the context is full, which is reported to them
        if "maximum context length" not in str(error):
            raise
    return called


def check_tools() -> None:
    """A model of random weights calls this and that until it answers."""
    for model in models:
        assert any(calls_of(model) for _ in range(20))


async def stream() -> None:
    async with Agent(models[0], model_settings=settings).run_stream("Say something.") as answer:
        pieces = [piece async for piece in answer.stream_text(delta=True)]
    assert "".join(pieces)
    async with Agent(models[0], output_type=NativeOutput(Note), model_settings=settings).run_stream(
        "A note."
    ) as answer:
        assert isinstance(await answer.get_output(), Note)


def check_streams() -> None:
    asyncio.run(stream())


run(check_text, check_outputs, check_tools, check_streams)
