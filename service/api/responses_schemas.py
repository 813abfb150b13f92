"""Body of `POST /v1/responses`, and the conversion of its tools to functions, which models call: the function of a
custom tool takes one string, and the function of a namespace's tool is named after both."""

import json
import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, JsonValue, Tag

from service.api.schemas import Function, FunctionName, InputText, MaxTokens, RefusalPart, Speculation, StrictBody
from service.sampling_params import Body, SamplingFields
from service.text.chat_template import past_arguments

InputPart = Annotated[InputText | RefusalPart, Field(discriminator="type")]


class InputMessage(Body):
    """A message of the conversation."""

    type: Literal["message"] | None = None
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[InputPart], Field(fail_fast=True, min_length=1)]


class _PastCall(Body):
    """What calls of an earlier turn have in common."""

    call_id: str
    name: str
    namespace: str | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None


class PastCall(_PastCall):
    """A function call of an earlier turn."""

    type: Literal["function_call"]
    arguments: str


class PastCustomCall(_PastCall):
    """A call of a custom tool in an earlier turn."""

    type: Literal["custom_tool_call"]
    input: str


class CallOutput(Body):
    """The result of a call."""

    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: str
    output: str | Annotated[list[InputPart], Field(fail_fast=True)]


class Reasoning(Body):
    """Reasoning of an earlier turn; it is not sent to the model."""

    type: Literal["reasoning"]


class ItemReference(Body):
    """Reference to an item of a stored response."""

    type: Literal["item_reference"] | None = None
    id: str


_MAX_TYPE_CHARACTERS = 80  # longest unknown type that an error's message quotes


def item_type(item: object) -> str:
    """Return the type of an item, which clients may leave out of messages and references."""
    if not isinstance(item, dict):
        return "message"
    if item.get("type") is not None:
        return str(item["type"])[:_MAX_TYPE_CHARACTERS]
    return "item_reference" if "id" in item and item.keys() <= {"id", "type"} else "message"


Item = Annotated[
    Annotated[InputMessage, Tag("message")]
    | Annotated[PastCall, Tag("function_call")]
    | Annotated[PastCustomCall, Tag("custom_tool_call")]
    | Annotated[CallOutput, Tag("function_call_output")]
    | Annotated[CallOutput, Tag("custom_tool_call_output")]
    | Annotated[Reasoning, Tag("reasoning")]
    | Annotated[ItemReference, Tag("item_reference")],
    Discriminator(item_type),
]


class TextFormat(StrictBody):
    """Required format of the answer's text."""

    type: Literal["text", "json_object", "json_schema"]
    name: FunctionName | None = None
    description: str | None = None
    schema_: Annotated[dict[str, JsonValue] | None, Field(alias="schema")] = None
    strict: bool | None = None


class TextOptions(Body):
    """Options of the answer's text."""

    format: TextFormat | None = None
    verbosity: str | None = None


class FunctionTool(Function):
    """A function that the client runs."""

    type: Literal["function"]


class AnyInput(StrictBody):
    """Format of a custom tool's input: any text."""

    type: Literal["text"]


class GrammarInput(StrictBody):
    """Format of a custom tool's input: text that matches a grammar."""

    type: Literal["grammar"]
    syntax: Literal["lark", "regex"]
    definition: str


class CustomTool(Body):
    """A tool whose input is text and not JSON."""

    type: Literal["custom"]
    name: FunctionName
    description: str | None = None
    format: Annotated[AnyInput | GrammarInput, Field(discriminator="type")] | None = None


ClientTool = Annotated[FunctionTool | CustomTool, Field(discriminator="type")]


class Namespace(Body):
    """A group of tools under a common name."""

    type: Literal["namespace"]
    name: FunctionName
    description: str | None = None
    tools: list[ClientTool]


class ToolReference(Body):
    """Kind and name of a tool, as a `tool_choice` gives them."""

    type: Literal["function", "custom"]
    name: str
    namespace: str | None = None


Includable = Literal[
    "reasoning.encrypted_content",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
]
"""Values of `include` that have no effect, because responses never have these contents. Log-probabilities of text are
refused."""


class ResponsesRequest(SamplingFields):
    """`POST /v1/responses`."""

    model: str
    input: str | Annotated[list[Item], Field(fail_fast=True, min_length=1)]
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    stream: bool | None = None
    max_output_tokens: MaxTokens | None = None
    text: TextOptions | None = None
    include: list[Includable] | None = None
    tools: list[Annotated[FunctionTool | CustomTool | Namespace, Field(discriminator="type")]] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolReference | None = None
    parallel_tool_calls: bool | None = None
    metadata: dict[str, JsonValue] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    speculation: Speculation | None = None
    resume_from: str | None = None  # an event id


INPUT = "input"
"""Name of the one argument of a custom tool's function."""


def function_name(item: ToolReference | PastCall | PastCustomCall) -> str:
    """Return the name of the function that represents a tool."""
    return item.name if item.namespace is None else f"{item.namespace}__{item.name}"


def past_call(item: PastCall | PastCustomCall, index: int) -> dict[str, Any]:
    """Convert a call to the format of chat completions. `index`: position of the item in the request. Raises
    InvalidRequest."""
    if isinstance(item, PastCustomCall):
        arguments = json.dumps({INPUT: item.input}, ensure_ascii=False)
    else:
        arguments, _ = past_arguments(item.arguments, f"input.{index}.arguments")
    function = {"name": function_name(item), "arguments": arguments}
    return {"id": item.call_id, "type": "function", "function": function}


class ClientTools:
    """Tools of a request, converted to functions."""

    def __init__(self, tools: Sequence[FunctionTool | CustomTool | Namespace]) -> None:
        self.functions: list[dict[str, Any]] = []
        """The tools in the format of chat completions."""
        self.grammars: dict[str, str] = {}
        """Lark grammars of custom inputs, by path in the request. They are not enforced, because calls are JSON."""
        self._tools: dict[str, ToolReference] = {}
        self._paths: list[str] = []
        for index, tool in enumerate(tools):
            if isinstance(tool, Namespace):
                for inner_index, inner in enumerate(tool.tools):
                    self._add(inner, f"tools.{index}.tools.{inner_index}", tool)
            else:
                self._add(tool, f"tools.{index}", None)

    def find(self, function: str) -> ToolReference:
        """Return the tool that this function represents."""
        return self._tools[function]

    def renamed(self, param: str) -> str:
        """Convert the path of a field in `functions` to its path in the tools of this route."""
        if not (found := re.match(r"tools\.(\d+)(\.function)?", param)):
            return param
        return self._paths[int(found[1])] + param[found.end() :]

    def _add(self, tool: FunctionTool | CustomTool, path: str, within: Namespace | None) -> None:
        described = ToolReference(type=tool.type, name=tool.name, namespace=within.name if within else None)
        texts = (within.description if within else None, tool.description)
        function: dict[str, Any] = {
            "name": function_name(described),
            "description": "\n".join(filter(None, texts)) or None,
        }
        if isinstance(tool, FunctionTool):
            function |= {"parameters": tool.parameters, "strict": tool.strict}
        else:
            function |= {"parameters": self._input_of(tool, path), "strict": True}
        kept = {key: value for key, value in function.items() if value is not None}
        self.functions.append({"type": "function", "function": kept})
        self._tools[function["name"]] = described
        self._paths.append(path)

    def _input_of(self, tool: CustomTool, path: str) -> dict[str, Any]:
        """Build the schema of a custom tool's arguments. A Lark grammar is described to the model, but not enforced."""
        text: dict[str, Any] = {"type": "string"}
        if isinstance(tool.format, GrammarInput) and tool.format.syntax == "regex":
            text["pattern"] = f"^(?:{tool.format.definition})$"
        elif isinstance(tool.format, GrammarInput):
            text["description"] = f"In this grammar:\n{tool.format.definition}"
            self.grammars[f"{path}.format.definition"] = tool.format.definition
        return {"type": "object", "properties": {INPUT: text}, "required": [INPUT], "additionalProperties": False}
