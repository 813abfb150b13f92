"""The body of `POST /v1/responses`, as strict as the other ones."""

from typing import Annotated, Literal

from pydantic import Field, JsonValue

from service.api.schemas import Body, FunctionName, Seed, Speculation, TokenCount


class Part(Body):
    type: Literal["input_text", "output_text", "text"]
    text: str


class InputMessage(Body):
    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[Part], Field(fail_fast=True, min_length=1)]


class PastCall(Body):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class CallOutput(Body):
    type: Literal["function_call_output"]
    call_id: str
    output: str | Annotated[list[Part], Field(fail_fast=True)]


class Reasoning(Body):
    """Of models that think; nothing of it is told again."""

    type: Literal["reasoning"]


Item = InputMessage | PastCall | CallOutput | Reasoning


class TextFormat(Body):
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


class NamedFunctionTool(Body):
    type: Literal["function"]
    name: str


class ResponsesRequest(Body):
    """`POST /v1/responses`."""

    model: str
    input: str | Annotated[list[Item], Field(fail_fast=True, min_length=1)]
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    stream: bool | None = None
    max_output_tokens: TokenCount | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    seed: Seed | None = None
    text: TextOptions | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedFunctionTool | None = None
    parallel_tool_calls: bool | None = None
    metadata: dict[str, JsonValue] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    speculation: Speculation | None = None
    resume_from: str | None = None  # the id of an event
