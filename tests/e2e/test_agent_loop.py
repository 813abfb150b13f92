"""An agent with two functions, whose schemas are as zod and MCP servers send them, by both routes of the official
client: the same calls and texts whether answers are streamed and whether they are drafted, and arguments by the
schemas."""

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any, NamedTuple

import openai
import pytest
from jsonschema import Draft202012Validator
from openai.lib.streaming.chat import ChatCompletionStreamState

from service.api.request_builder import RELAXED_HEADER
from tests.processes import Process, serving_tiny
from tests.tiny_models import tiny_model

DRAFT = "https://json-schema.org/draft/2020-12/schema"
MAIL = r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$"
ITEM: dict[str, Any] = {
    "type": "object",
    "properties": {
        "sku": {"type": "string", "pattern": r"^[A-Z]{2}-\d{4}$"},
        "count": {"type": "integer", "exclusiveMinimum": 0, "maximum": 99},
    },
    "required": ["sku", "count"],
    "additionalProperties": False,
}
PARCEL: dict[str, Any] = {
    "$schema": "http://json-schema.org/draft-07/schema#",
    "type": "object",
    "properties": {
        "origin": {"type": "string", "enum": ["DE", "FR", "IT"]},
        "target": {"$ref": "#/properties/origin"},
        "items": {"type": "array", "items": ITEM, "minItems": 1, "maxItems": 2},
        "insured": {"anyOf": [{"type": "boolean"}, {"type": "null"}], "default": None},
    },
    "required": ["origin", "target", "items", "insured"],
    "additionalProperties": False,
}


def orders(**mail: str) -> dict[str, Any]:
    """The parameters of a function that asks for an address with these keywords."""
    return {
        "$schema": DRAFT,
        "type": "object",
        "properties": {
            "email": {"type": "string", **mail, "maxLength": 40, "description": "Whose orders"},
            "status": {"type": "string", "enum": ["open", "sent", "paid"], "default": "open"},
            "since": {"anyOf": [{"type": "string", "format": "date"}, {"type": "null"}], "default": None},
            "limit": {"type": "integer", "exclusiveMinimum": 0, "maximum": 50, "default": 10},
        },
        "required": ["email", "since"],
        "additionalProperties": False,
    }


class Function(NamedTuple):
    """One that the model may call; `held_to`: what of its parameters a grammar can say."""

    description: str
    parameters: dict[str, Any]
    held_to: dict[str, Any]
    run: Callable[[dict[str, Any]], str]
    strict: bool = True

    def answer(self, arguments: str) -> str:
        """Its own, to arguments that are by its schema."""
        asked = json.loads(arguments)
        checker = Draft202012Validator.FORMAT_CHECKER
        Draft202012Validator(self.held_to, format_checker=checker).validate(asked)
        return self.run(asked)


FUNCTIONS = {
    "find_orders": Function(
        "Finds the orders of a customer.",
        orders(format="email", pattern=MAIL),
        orders(format="email"),
        lambda asked: f"{asked['email']} has {asked.get('limit', 10)} orders, {asked.get('status', 'open')}.",
        strict=False,
    ),
    "send_parcel": Function(
        "Sends a parcel.",
        PARCEL,
        PARCEL,
        lambda asked: json.dumps({"sent": len(asked["items"]), "from": asked["origin"], "to": asked["target"]}),
    ),
}
TURNS = ("find_orders", "required", "send_parcel", "required", "none")
"""What the model must call in each turn: a function, any one, none."""
LENGTH = 8192


class Speaker(NamedTuple):
    """What the model wrote in one turn."""

    text: str
    calls: list[tuple[str, str]]  # function and arguments
    call_ids: list[str]


class Agent(ABC):
    """It asks, runs the functions that the model calls, tells what they answered, and asks again."""

    def __init__(self, client: openai.OpenAI, temperature: float, *, streams: bool, drafts: bool) -> None:
        self._client = client
        self._streams = streams
        self._fields = {"model": "tiny", "temperature": temperature, "stream": streams, "parallel_tool_calls": False}
        self._drafts = drafts
        self._items: list[Any] = [{"role": "user", "content": "Send Ada what she ordered."}]

    def run(self) -> list[tuple[str, list[tuple[str, str]]]]:
        """Text and calls of each turn."""
        turns = []
        for number, choice in enumerate(TURNS):
            extra = {"seed": number, "speculation": {"enabled": self._drafts}}
            spoken = self._ask(choice, 24 if choice == "none" else 600, {**self._fields, "extra_body": extra})
            assert bool(spoken.calls) == (choice != "none")
            turns.append((spoken.text, spoken.calls))
            for call_id, (name, arguments) in zip(spoken.call_ids, spoken.calls, strict=True):
                self._items.append(self._result(call_id, FUNCTIONS[name].answer(arguments)))
        return turns

    @abstractmethod
    def _ask(self, choice: str, limit: int, fields: dict[str, Any]) -> Speaker:
        """One turn of the model's, which the conversation holds then."""

    @abstractmethod
    def _result(self, call_id: str, text: str) -> dict[str, Any]:
        """What a function answered, as the conversation holds it: in parts, as MCP servers answer."""


class ChatAgent(Agent):
    """By chat completions."""

    def _ask(self, choice: str, limit: int, fields: dict[str, Any]) -> Speaker:
        tools = [{"type": "function", "function": function} for function in signatures()]
        named = {"type": "function", "function": {"name": choice}} if choice in FUNCTIONS else choice
        fields = {**fields, "messages": self._items, "tools": tools, "tool_choice": named, "max_tokens": limit}
        raw = self._client.chat.completions.with_raw_response.create(**fields)
        check_relaxed(raw.headers.get(RELAXED_HEADER), choice, "tools.0.function.")
        state, answer = ChatCompletionStreamState(), raw.parse()
        if self._streams:
            for chunk in answer:
                state.handle_chunk(chunk)
            answer = state.current_completion_snapshot  # the last one is cut, and no error
        message = answer.choices[0].message
        self._items.append(message.to_dict())
        calls = message.tool_calls or []
        called = [(call.function.name, call.function.arguments) for call in calls]
        return Speaker(message.content or "", called, [call.id for call in calls])

    def _result(self, call_id: str, text: str) -> dict[str, Any]:
        return {"role": "tool", "tool_call_id": call_id, "content": [{"type": "text", "text": text}]}


class ResponsesAgent(Agent):
    """By responses: the server remembers the conversation, or the client sends all of it where it streams."""

    _previous: str | None = None

    def _ask(self, choice: str, limit: int, fields: dict[str, Any]) -> Speaker:
        tools = [{"type": "function", **function} for function in signatures()]
        named = {"type": "function", "name": choice} if choice in FUNCTIONS else choice
        fields = {**fields, "input": self._items, "tools": tools, "tool_choice": named, "max_output_tokens": limit}
        fields |= {"store": not self._streams, "previous_response_id": self._previous}
        raw = self._client.responses.with_raw_response.create(**fields)
        check_relaxed(raw.headers.get(RELAXED_HEADER), choice, "tools.0.")
        response = raw.parse()
        if self._streams:
            *_, last = response
            response = last.response
            self._items += [item.to_dict() for item in response.output]
        else:
            self._items, self._previous = [], response.id
        calls = [item for item in response.output if item.type == "function_call"]
        called = [(call.name, call.arguments) for call in calls]
        return Speaker(response.output_text, called, [call.call_id for call in calls])

    def _result(self, call_id: str, text: str) -> dict[str, Any]:
        return {"type": "function_call_output", "call_id": call_id, "output": [{"type": "input_text", "text": text}]}


def signatures() -> list[dict[str, Any]]:
    return [
        {"name": name, "description": one.description, "parameters": one.parameters, "strict": one.strict}
        for name, one in FUNCTIONS.items()
    ]


def check_relaxed(reported: str | None, choice: str, where: str) -> None:
    """The server says what it does not hold calls to."""
    assert reported == (None if choice == "none" else f"{where}parameters.properties.email.pattern")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    root = tmp_path_factory.mktemp("agent")
    model = tiny_model("llama", root / "model", max_position_embeddings=LENGTH)
    running = serving_tiny(root, model=str(model), max_model_len=LENGTH)
    yield running
    running.end()


@pytest.fixture(scope="module")
def embedded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    settings = {"model": "smollm2-135m", "load_dtype": "auto", "drafter": "auto", "kv_cache": "1GiB"}
    running = serving_tiny(tmp_path_factory.mktemp("agent"), max_model_len=LENGTH, **settings)
    yield running
    running.end()


@pytest.mark.parametrize("temperature", [0.7, pytest.param(0.0, marks=pytest.mark.slow)])
@pytest.mark.parametrize("server", ["tiny", pytest.param("embedded", marks=pytest.mark.slow)])
def test_an_agent_does_the_same_by_each_way(server: str, temperature: float, request: pytest.FixtureRequest) -> None:
    running: Process = request.getfixturevalue(server)
    with running.official() as client:
        expected = ChatAgent(client, temperature, streams=False, drafts=False).run()
        for agent, streams in product((ChatAgent, ResponsesAgent), (False, True)):
            assert agent(client, temperature, streams=streams, drafts=True).run() == expected, (agent, streams)
