"""From a request body to engine requests: defaults, and the checks that need the model or several fields."""

import hashlib
import secrets
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple
from urllib.parse import quote

from pydantic import JsonValue
from starlette.requests import Request

from service.api.raw_prompts import check_token_ids, encode_begun, encode_prompts, gap_ends
from service.api.schemas import (
    ChatCompletionRequest,
    ChatMessage,
    ChatTemplateFields,
    CompletionFields,
    CompletionRequest,
    ToolCall,
    ToolDefinition,
    text_of,
)
from service.api.settings import Server
from service.api.sse import Release, release_of
from service.api.structured import calling_of, grammar_of
from service.api.tenants import AdmittedRequest
from service.door import OutputStream
from service.engine.requests import GenerationRequest, Scope, SequenceOutput, SpeculationParams
from service.errors import InvalidRequest, NotFound
from service.sampling_params import SamplingParams, sampling_params
from service.text.chat_template import Traits, past_arguments, short_id
from service.text.grammar_pool import Compilations
from service.text.thinking import BEGIN, END, Thinking, thinks
from service.text.tokenizer import ChatTokenizer
from service.text.tools import AnswerReader, Calling, CallReader

_SEED_RANGE = 2**63  # of seeds drawn at random
RELAXED_HEADER = "x-adaptree-relaxed"
"""Paths of the request that are not enforced, such as tools.0.function.parameters.properties.mail.pattern."""
_MAX_RELAXED_PATHS = 8
_TAG_TOKENS = 16  # more than a tag at the end of a prompt has, with the white space after it

# Known fields that cannot be honoured, each with the values that have no effect; other values are refused.
_HARMLESS: dict[str, tuple[JsonValue, ...]] = {
    **dict.fromkeys(("tools", "functions", "audio", "web_search_options", "allowed_token_ids", "prompt_logprobs"), ()),
    **dict.fromkeys(("truncate_prompt_tokens", "prompt_embeds", "documents", "chat_template", "conversation"), ()),
    **dict.fromkeys(
        ("use_beam_search", "return_tokens_as_token_ids", "echo", "add_special_tokens", "background"), (False,)
    ),
    **dict.fromkeys(("structural_tag", "guided_whitespace_pattern", "grammar_triggers", "prompt"), ()),
    **dict.fromkeys(("guided_json_object", "grammar_lazy"), (False,)),
    **dict.fromkeys(("tool_choice", "function_call"), ("none",)),
    **dict.fromkeys(("bad_words", "logits_processors"), ([],)),
    "modalities": (["text"],),
    **dict.fromkeys(("typical_p", "tfs_z"), (1, 1.0)),
    **dict.fromkeys(("mirostat", "dry_multiplier", "xtc_probability", "dynatemp_range", "top_a"), (0, 0.0)),
    "length_penalty": (1.0,),
    "suffix": ("",),
}
_HARMLESS_IN_MESSAGES: dict[str, tuple[JsonValue, ...]] = {"function_call": (), "audio": ()}
_IGNORED_ON_PURPOSE = frozenset({"best_of", "reasoning_effort", "verbosity", "thinking"})


Completion = ChatCompletionRequest | CompletionRequest


class AnswerIdentity(NamedTuple):
    """What is drawn at random when an answer begins. A resumed answer has the same identity."""

    uid: str  # 32 hexadecimal digits
    created: int  # seconds since the epoch
    seed: int

    @staticmethod
    def drawn(seed: int | None) -> "AnswerIdentity":
        """A new identity; `seed`: the request's own, if it has one."""
        seed = secrets.randbelow(_SEED_RANGE) if seed is None else seed
        return AnswerIdentity(uuid.uuid4().hex, int(time.time()), seed)


@dataclass(frozen=True, slots=True)
class Job:
    """A request ready to run: one engine request per prompt, all with the same number of choices."""

    id: str
    origin: AnswerIdentity
    body: Completion
    requests: tuple[GenerationRequest, ...]
    release: Release
    calling: Calling | None = None  # the functions that the answer may call
    thinking: Thinking | None = None  # for models that think

    @property
    def sampling(self) -> SamplingParams:
        """The sampling parameters of the first prompt; those of the others differ in seed and `max_tokens` only."""
        return self.requests[0].sampling

    @property
    def num_choices(self) -> int:
        """Choices of all prompts."""
        return len(self.requests) * self.requests[0].n

    @property
    def first_choice(self) -> dict[str, int]:
        """The number of each request's first choice, by the id of the request."""
        return {request.request_id: index * request.n for index, request in enumerate(self.requests)}

    def choice_of(self, output: SequenceOutput) -> int:
        """The number of the choice that an output belongs to."""
        return self.first_choice[output.request_id] + output.index

    def prompt_of(self, choice: int) -> Sequence[int]:
        """Token ids of the prompt that a choice continues."""
        return self.requests[choice // self.requests[0].n].prompt

    @property
    def return_token_ids(self) -> bool:
        """Whether the answer reports token ids."""
        return self.body.return_token_ids is True

    @property
    def headers(self) -> dict[str, str]:
        """Response headers: the parts of function schemas that are not enforced, as many as a header holds."""
        relaxed = () if self.calling is None else self.calling.relaxed
        return {RELAXED_HEADER: ", ".join(map(quote, relaxed[:_MAX_RELAXED_PATHS]))} if relaxed else {}

    def id_of(self, prefix: str, *part: object) -> str:
        """The id of a part of the answer; the same one when the answer is generated again."""
        named = " ".join(map(str, (self.id, *part)))
        return f"{prefix}_{hashlib.blake2b(named.encode(), digest_size=12).hexdigest()}"

    def call_id(self, choice: int, call: int) -> str:
        """The id of a call, in the form that the chat template takes."""
        made = self.id_of("call", choice, call)
        return short_id(made) if self.calling is not None and self.calling.short_ids else made

    def reader(self) -> AnswerReader:
        """A reader of one choice."""
        if self.calling is None:
            return AnswerReader(self.thinking, None)
        stops = bool(self.sampling.stop or self.sampling.stop_token_ids)
        return AnswerReader(self.thinking, CallReader(self.calling.form, must=self.calling.must, holds_calls=stops))


async def build(
    body: Completion,
    server: Server,
    *,
    scope: Scope,
    origin: AnswerIdentity | None = None,
    compilations: Compilations | None = None,
) -> Job:
    """Check a request and prepare it to run. `origin`: the identity of an answer that is resumed; `compilations`: of
    this request, if it has compiled something already. Raises RequestError."""
    runtime, n = server.runtime, body.n or 1
    runtime.check_room(scope.account)
    compilations = compilations or runtime.grammars.of_request(scope.account, scope.cache_namespace)
    _check_fields(body, server)
    calling, thinking, most = None, None, runtime.card.max_model_len
    if isinstance(body, ChatCompletionRequest):
        kind, source, num_logprobs = "chatcmpl", "messages", (body.top_logprobs or 0) if body.logprobs else None
        calling = await calling_of(body, runtime.tokenizer, compilations)
        tools = [] if calling is None else body.tools or []
        for path in () if calling is None else calling.relaxed:
            server.note_relaxed(path)
        prompts = [
            await runtime.in_turn(scope.account, partial(render, body.messages, body, runtime.tokenizer, tools, most))
        ]
        if thinks(runtime.tokenizer.chat_template):
            thinking = Thinking.after(runtime.tokenizer.decode(prompts[0][-_TAG_TOKENS:]))
    else:
        kind, source, num_logprobs = "cmpl", "prompt", body.logprobs
        control = server.settings.control_in_prompts
        encode = partial(encode_prompts, body, runtime.tokenizer, most, control=control)
        prompts = await runtime.in_turn(scope.account, encode)
    run, origin = secrets.token_hex(8), origin or AnswerIdentity.drawn(body.seed)
    job_id = f"{kind}-{origin.uid}"
    release = release_of(body, choices=len(prompts) * n, server_seconds=server.settings.release_seconds)
    shared = GenerationRequest(
        request_id=f"{job_id}-{run}",  # the interrupted run of a resumed answer may still be going on
        prompt=(),
        sampling=sampling_params(
            body,
            seed=origin.seed,
            max_tokens=0,
            num_logprobs=num_logprobs,
            keep_special_tokens=any(tag in runtime.tokenizer.special_ids for tag in _tags(calling, thinking)),
        ),
        n=n,
        grammar=await grammar_of(body, calling, thinking, runtime.tokenizer, compilations),
        prediction=await _encode_prediction(body, prompts, server, source=source),
        scores_prompt=isinstance(body, CompletionRequest) and body.echo is True and num_logprobs is not None,
        speculation=_speculation(body),
        store=body.store is not False,
        scope=scope,
        priority=body.priority or 0,
    )
    requests = [_of_prompt(shared, index, prompt, body, server, source) for index, prompt in enumerate(prompts)]
    return Job(job_id, origin, body, tuple(map(release.apply, requests)), release, calling, thinking)


def _of_prompt(
    shared: GenerationRequest, index: int, prompt: Sequence[int], body: Completion, server: Server, source: str
) -> GenerationRequest:
    """The engine request of one prompt."""
    check_token_ids(prompt, server.runtime.card, param=source)
    max_tokens = _max_tokens(body, len(prompt), server, source=source)
    seed = shared.sampling.seed
    if body.seed is None:  # a given seed is the same for each prompt; a drawn one differs, within what can be sent back
        seed = (seed + index * shared.n) % _SEED_RANGE
    min_tokens = min(body.min_tokens or 0, max_tokens)
    stops = shared.sampling.stop_token_ids
    if ends := gap_ends(body, server.runtime.tokenizer):  # else all prompts have the same set
        stops |= ends
    sampling = replace(shared.sampling, seed=seed, max_tokens=max_tokens, min_tokens=min_tokens, stop_token_ids=stops)
    return replace(shared, request_id=f"{shared.request_id}-{index}", prompt=tuple(prompt), sampling=sampling)


def start(job: Job, server: Server, request: Request) -> OutputStream:
    """Reserve the most tokens that a job may use in the limits of its key, and submit it to the engine. Raises
    RequestError."""
    admission: AdmittedRequest | None = getattr(request.state, "admission", None)
    if admission is None:
        return server.runtime.generate(*job.requests)
    prompts = sum(len(request.prompt) for request in job.requests)
    answers = sum(request.n * request.sampling.max_tokens for request in job.requests)
    admission.reserve(prompts, answers, param=_length_field(job.body))
    try:
        outputs = server.runtime.generate(*job.requests, meter=admission)
    except BaseException:
        admission.release()
        raise
    admission.use(prompts)
    return outputs


def _length_field(body: CompletionFields) -> str:
    """The name of the field that bounds the answer's length: the one that was sent, or the current one."""
    is_older = body.max_tokens is not None or isinstance(body, CompletionRequest)
    return "max_tokens" if is_older and body.max_completion_tokens is None else "max_completion_tokens"


def _tags(calling: Calling | None, thinking: Thinking | None) -> list[str]:
    """The strings that separate the parts of an answer."""
    return [*([] if calling is None else [calling.form.trigger]), *([] if thinking is None else [BEGIN, END])]


def check_model(model: str | None, server: Server) -> None:
    """Raise NotFound for a model that is not served."""
    if model is not None and model not in server.settings.served_model_names:
        raise NotFound(f"The model '{model}' does not exist.", param="model", code="model_not_found")


def render(
    messages: list[ChatMessage],
    body: ChatTemplateFields,
    tokenizer: ChatTokenizer,
    tools: Sequence[ToolDefinition] = (),
    most_tokens: int | None = None,
) -> list[int]:
    """The tokens of a conversation by the model's chat template, refused early beyond `most_tokens`. Raises
    InvalidRequest."""
    if body.continue_final_message and body.add_generation_prompt:
        reason = "'continue_final_message' and 'add_generation_prompt' cannot both be true."
        raise InvalidRequest(reason, param="continue_final_message")
    traits = tokenizer.traits(with_tools=bool(tools))
    return tokenizer.render_chat(
        [_for_template(message, f"messages.{index}", traits) for index, message in enumerate(messages)],
        tools=[tool.model_dump(exclude_none=True, mode="json") for tool in tools],
        add_generation_prompt=not body.continue_final_message and body.add_generation_prompt is not False,
        continue_final_message=body.continue_final_message is True,
        chat_template_kwargs=body.chat_template_kwargs,
        most_tokens=most_tokens,
    )


def _for_template(message: ChatMessage, param: str, traits: Traits) -> dict[str, JsonValue]:
    """A message in the form of chat templates. Raises InvalidRequest."""
    content = message.content if message.content is not None else message.refusal
    thought = message.reasoning_content if message.reasoning_content is not None else message.reasoning
    if content is None and not (message.role == "assistant" and (message.tool_calls or thought is not None)):
        param = f"{param}.content"
        raise InvalidRequest(f"Invalid value for '{param}': it must be a string, not null.", param=param)
    if message.tool_calls and message.role != "assistant":
        param = f"{param}.tool_calls"
        raise InvalidRequest(f"Invalid value for '{param}': only an assistant calls.", param=param)
    if message.role == "tool" and message.tool_call_id is None:
        param = f"{param}.tool_call_id"
        raise InvalidRequest(f"Missing required parameter: '{param}'.", param=param)
    # 'developer' is OpenAI's newer name of 'system'; templates know the older one.
    plain: dict[str, JsonValue] = {"role": "system" if message.role == "developer" else message.role}
    plain["content"] = "" if content is None else text_of(content)
    optional = {"name": message.name, "tool_call_id": message.tool_call_id, "reasoning_content": thought}
    plain |= {name: value for name, value in optional.items() if value is not None}
    if message.tool_calls:
        plain["tool_calls"] = [
            _past_call(call, f"{param}.tool_calls.{n}.function.arguments", traits)
            for n, call in enumerate(message.tool_calls)
        ]
    return plain


def _past_call(call: ToolCall, param: str, traits: Traits) -> JsonValue:
    """A call of an earlier turn, with its arguments in the form that the template takes. Raises InvalidRequest."""
    text, parsed = past_arguments(call.function.arguments, param)
    arguments = parsed if traits.arguments == "object" else text
    return {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": arguments}}


def _check_fields(body: Completion, server: Server) -> None:
    """Refuse fields that cannot be honoured, and log unknown ones once. Raises RequestError."""
    check_model(body.model, server)
    extra = body.model_extra or {}
    refuse(extra, _HARMLESS)
    if isinstance(body, ChatCompletionRequest):
        for position, turn in enumerate(body.messages):
            refuse(turn.model_extra or {}, _HARMLESS_IN_MESSAGES, prefix=f"messages.{position}.")
    for name in extra.keys() - _HARMLESS.keys() - _IGNORED_ON_PURPOSE:
        server.note_ignored(name)
    if isinstance(body, ChatCompletionRequest) and body.top_logprobs is not None and not body.logprobs:
        raise InvalidRequest("'top_logprobs' needs 'logprobs' to be true.", param="top_logprobs")
    if body.max_tokens == 0 and not (isinstance(body, CompletionRequest) and body.echo):
        raise InvalidRequest("'max_tokens' may be 0 only with 'echo'.", param="max_tokens")
    if extra.get("best_of") not in (None, body.n or 1):
        raise InvalidRequest("This server does not support 'best_of' other than 'n'.", param="best_of")
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("'stream_options' is only allowed when 'stream' is true.", param="stream_options")
    card = server.runtime.card
    check_token_ids(body.stop_token_ids or [], card, param="stop_token_ids")
    for token_id in body.logit_bias or {}:
        if not 0 <= token_id < card.vocab_size:
            message = f"Invalid value for 'logit_bias': token {token_id} is outside of the vocabulary."
            raise InvalidRequest(message, param=f"logit_bias.{token_id}")


def refuse(extra: Mapping[str, JsonValue], harmless: Mapping[str, tuple[JsonValue, ...]], *, prefix: str = "") -> None:
    """Raise InvalidRequest for the first field with an effect that is not supported."""
    for name, value in extra.items():
        if value is None or name not in harmless or value in harmless[name]:
            continue
        path = prefix + name
        if name == "tools" and value == []:
            raise InvalidRequest("Invalid value for 'tools': the list is too short.", param=path)
        other = " with this value" if harmless[name] else ""
        raise InvalidRequest(f"This server does not support '{path}'{other}.", param=path)


async def _encode_prediction(
    body: CompletionFields, prompts: Sequence[Sequence[int]], server: Server, *, source: str
) -> tuple[int, ...]:
    """The predicted tokens, as many as an answer may have; none where nothing drafts from them. Raises
    InvalidRequest."""
    if body.prediction is None or not server.runtime.card.reads_predictions:
        return ()
    most = max(_max_tokens(body, len(prompt), server, source=source) for prompt in prompts)
    return tuple(await server.runtime.off_loop(partial(encode_begun, body.prediction, server.runtime.tokenizer, most)))


def _speculation(body: CompletionFields) -> SpeculationParams:
    wanted = body.speculation
    if wanted is None:
        return SpeculationParams()
    # Only chunks report single steps; an unstreamed answer has no field for it.
    trace = wanted.trace is True and body.stream is True
    return SpeculationParams(enabled=wanted.enabled is not False, max_budget=wanted.max_budget, trace=trace)


def _max_tokens(body: CompletionFields, prompt_tokens: int, server: Server, *, source: str) -> int:
    """How many tokens may be generated: as many as requested, within the rest of the context and the server's cap.
    Raises InvalidRequest for a prompt that leaves no room."""
    context = server.runtime.card.max_model_len
    room, cap = context - prompt_tokens, server.settings.max_output_tokens or context
    if prompt_tokens == 0:
        raise InvalidRequest(f"'{source}' must not be empty.", param=source)
    if room < 1:
        raise InvalidRequest(
            f"This model's maximum context length is {context} tokens. However, your {source} resulted in "
            f"{prompt_tokens} tokens. Please reduce the length of the {source}.",
            param=source,
            code="context_length_exceeded",
        )
    requested = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    if requested is not None and (body.min_tokens or 0) > requested:
        raise InvalidRequest(f"'min_tokens' must not exceed the {requested} tokens allowed.", param="min_tokens")
    # Agents request more than any context holds; the finish_reason reports where an answer was cut.
    return min(room, cap) if requested is None else max(1, min(room, cap, requested))
