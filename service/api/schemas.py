"""Request bodies: types and ranges only. The request builder checks what depends on the model or on several fields."""

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import ConfigDict, Field, JsonValue

from service.sampling_params import Body, SamplingFields, TokenCount, TokenIds

MOST_CHOICES = 8
MOST_PROMPTS = 256
_MOST_LOGPROBS = 20
_MOST_TOOLS = 128

MaxTokens = Annotated[int, Field(ge=1, lt=2**31)]
EventId = Annotated[str, Field(min_length=1)]
FunctionName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
ResumeFrom = TokenCount | Annotated[list[TokenCount], Field(fail_fast=True, min_length=1)] | EventId
Choices = Annotated[list[str], Field(fail_fast=True, min_length=1)]


LEAST_RELEASE_SECONDS = 0.001  # minimum time between two events


class StrictBody(Body):
    """Part of a body that constrains the answer. Unknown fields are refused: a constraint must not be ignored."""

    model_config = ConfigDict(extra="forbid")


class StreamOptions(Body):
    """`stream_options` of OpenAI, with extensions of vLLM and of this server."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None
    release_seconds: Annotated[float, Field(ge=LEAST_RELEASE_SECONDS, le=10)] | None = None


class Speculation(Body):
    """Options of speculative decoding; they change the speed of an answer, never its text."""

    enabled: bool | None = None
    max_budget: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    detailed: bool | None = None
    trace: bool | None = None


class TextPart(Body):
    """Text part of a message's content."""

    type: Literal["text"]
    text: str


class RefusalPart(Body):
    """Refusal in the content of an assistant message."""

    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        """Text of the refusal."""
        return self.refusal


Part = Annotated[TextPart | RefusalPart, Field(discriminator="type")]
Content = str | Annotated[list[Part], Field(fail_fast=True, min_length=1)]


class InputText(Body):
    """Text part of a message's content in `/v1/responses`."""

    type: Literal["input_text", "output_text", "text"]
    text: str


def text_of(content: str | Sequence[TextPart | RefusalPart | InputText]) -> str:
    """Return content as one string. Parts are joined by line breaks, so that no word forms across two parts."""
    return content if isinstance(content, str) else "\n".join(part.text for part in content)


class Prediction(Body):
    """OpenAI's predicted output, used as a source of drafts."""

    type: Literal["content"]
    content: Content


class FunctionCall(Body):
    """Name of a called function, and its arguments as JSON text."""

    name: str
    arguments: str


class ToolCall(Body):
    """Function call in an assistant message."""

    id: str
    type: Literal["function"]
    function: FunctionCall


class ChatMessage(Body):
    """A message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None  # alternative name of reasoning_content
    refusal: str | None = None
    tool_call_id: str | None = None


class Function(Body):
    """Function that the client runs, with the schema of its arguments."""

    name: FunctionName
    description: str | None = None
    parameters: dict[str, JsonValue] | None = None
    strict: bool | None = None


class ToolDefinition(Body):
    """A tool that the answer may call."""

    type: Literal["function"]
    function: Function


class ChosenFunction(Body):
    """Function named by a `ToolChoice`."""

    name: str


class ToolChoice(Body):
    """A `tool_choice` that names a function."""

    type: Literal["function"]
    function: ChosenFunction


Messages = Annotated[list[ChatMessage], Field(fail_fast=True, min_length=1)]


class JsonSchema(StrictBody):
    """The `json_schema` object of OpenAI's `response_format`: a schema with its name."""

    name: FunctionName
    description: str | None = None
    schema_: Annotated[dict[str, JsonValue] | None, Field(alias="schema")] = None
    strict: bool | None = None


class ResponseFormat(StrictBody):
    """OpenAI's `response_format`; `schema` with the type `json_object` is llama.cpp's extension."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    schema_: Annotated[dict[str, JsonValue] | None, Field(alias="schema")] = None


class StructuredOutputs(StrictBody):
    """vLLM's `structured_outputs`; exactly one of its constraints may be set."""

    json_: Annotated[str | dict[str, JsonValue] | None, Field(alias="json")] = None
    json_object: bool | None = None
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None
    disable_fallback: bool | None = None  # accepted without effect: there is no fallback
    disable_any_whitespace: bool | None = None  # accepted without effect: JSON is always on one line


class ChatTemplateFields(Body):
    """Fields that control how a conversation is rendered to a prompt."""

    tools: Annotated[list[ToolDefinition], Field(fail_fast=True, min_length=1, max_length=_MOST_TOOLS)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, JsonValue] | None = None


class CompletionFields(SamplingFields):
    """Fields that both completion routes accept."""

    model: str
    n: Annotated[int, Field(ge=1, le=MOST_CHOICES)] | None = None
    max_tokens: TokenCount | None = None
    max_completion_tokens: MaxTokens | None = None
    return_token_ids: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    resume_from: ResumeFrom | None = None
    speculation: Speculation | None = None
    prediction: Prediction | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: str | dict[str, JsonValue] | None = None
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None
    grammar: str | None = None
    json_schema: str | dict[str, JsonValue] | None = None
    regex: str | None = None
    ebnf: str | None = None
    store: bool | None = None
    user: str | None = None
    metadata: dict[str, JsonValue] | None = None
    service_tier: str | None = None
    priority: int | None = Field(default=None, ge=-(2**31), lt=2**31)
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None


class ChatCompletionRequest(CompletionFields, ChatTemplateFields):
    """`POST /v1/chat/completions`."""

    messages: Messages
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=_MOST_LOGPROBS)] | None = None

    @property
    def callable_tools(self) -> list[ToolDefinition]:
        """Tools that the prompt lists and the answer may call."""
        return [] if self.tools is None or self.tool_choice == "none" else self.tools


class CompletionRequest(CompletionFields):
    """`POST /v1/completions`."""

    prompt: (
        str
        | Annotated[list[str], Field(fail_fast=True, min_length=1, max_length=MOST_PROMPTS)]
        | TokenIds
        | Annotated[list[TokenIds], Field(fail_fast=True, min_length=1, max_length=MOST_PROMPTS)]
    )
    suffix: str | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=_MOST_LOGPROBS)] | None = None
    add_special_tokens: bool | None = None


class TokenizeRequest(ChatTemplateFields):
    """`POST /tokenize`, of a prompt or of a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Body):
    """`POST /detokenize`."""

    model: str | None = None
    tokens: TokenIds


class UpdateWeightsRequest(Body):
    """`POST /update_weights_from_disk`."""

    model_path: Annotated[str, Field(min_length=1)]
