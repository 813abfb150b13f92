"""The body of `POST /v1/responses`, as strict as the other ones."""

from typing import Annotated, Literal

from pydantic import Field, JsonValue

from service.api.schemas import Form, FunctionName, MaxTokens, RefusalPart, Speculation
from service.sampling_params import Body, SamplingFields


class InputText(Body):
    type: Literal["input_text", "output_text", "text"]
    text: str


Part = Annotated[InputText | RefusalPart, Field(discriminator="type")]


class InputMessage(Body):
    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[Part], Field(fail_fast=True, min_length=1)]


class PastCall(Body):
    type: Literal["function_call"]
    call_id: str
    name: str
    namespace: str | None = None
    arguments: str
    status: Literal["in_progress", "completed", "incomplete"] | None = None


class PastCustomCall(Body):
    type: Literal["custom_tool_call"]
    call_id: str
    name: str
    namespace: str | None = None
    input: str
    status: Literal["in_progress", "completed", "incomplete"] | None = None


class CallOutput(Body):
    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: str
    output: str | Annotated[list[Part], Field(fail_fast=True)]


class Reasoning(Body):
    """Of models that think; nothing of it is told again."""

    type: Literal["reasoning"]


Item = InputMessage | PastCall | PastCustomCall | CallOutput | Reasoning


class TextFormat(Form):
    type: Literal["text", "json_object", "json_schema"]
    name: FunctionName | None = None
    description: str | None = None
    schema_: Annotated[dict[str, JsonValue] | None, Field(alias="schema")] = None
    strict: bool | None = None


class TextOptions(Body):
    format: TextFormat | None = None
    verbosity: str | None = None


class FunctionTool(Body):
    type: Literal["function"]
    name: FunctionName
    description: str | None = None
    parameters: dict[str, JsonValue] | None = None
    strict: bool | None = None


class AnyInput(Form):
    type: Literal["text"]


class GrammarInput(Form):
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
    """Tools of one origin."""

    type: Literal["namespace"]
    name: FunctionName
    description: str | None = None
    tools: list[ClientTool]


class NamedTool(Body):
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
"""What a response has none of, so that all of it is included. Log-probabilities of text are refused."""


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
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    metadata: dict[str, JsonValue] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    speculation: Speculation | None = None
    resume_from: str | None = None  # the id of an event
