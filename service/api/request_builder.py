"""Convert a request body to engine requests: check the fields, encode the texts, compile the grammar (`build`).

Work that may take long leaves the event loop twice: to encode, one request of an account at a time, and to compile,
unless the grammar is cached.
"""

import hashlib
import secrets
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple
from urllib.parse import quote

from pydantic import JsonValue
from starlette.requests import Request

from service.api.prompts import check_token_ids, encode_begun, encode_prompts, gap_ends, render
from service.api.schemas import ChatCompletionRequest, CompletionFields, CompletionRequest
from service.api.settings import Server
from service.api.sse import Release, release_of
from service.api.structured import AnswerForm, compiled, form_of_answer
from service.api.tenants import AdmittedRequest
from service.door import OutputStream
from service.engine.requests import GenerationRequest, Scope, SequenceOutput, SpeculationParams
from service.errors import InvalidRequest, NotFound
from service.sampling_params import SamplingParams, sampling_params
from service.text.answers import AnswerReader, CallReader, Thinking, thinks
from service.text.chat_template import short_id

_SEED_RANGE = 2**63  # range of randomly drawn seeds
RELAXED_HEADER = "x-adaptree-relaxed"
"""Response header that lists paths of unenforced constraints, such as
tools.0.function.parameters.properties.mail.pattern."""
_MAX_RELAXED_PATHS = 8
_TAG_TOKENS = 16  # upper bound for the length of a trailing tag with white space

# Known but unsupported fields, each with the values that have no effect; other values are refused.
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
    """Id, creation time and seed of an answer. A resumed answer keeps them."""

    uid: str  # 32 hexadecimal digits
    created: int  # seconds since the epoch
    seed: int

    @staticmethod
    def drawn(seed: int | None) -> "AnswerIdentity":
        """Create the identity of a new answer. Draws a random seed if `seed` is None."""
        seed = secrets.randbelow(_SEED_RANGE) if seed is None else seed
        return AnswerIdentity(uuid.uuid4().hex, int(time.time()), seed)


@dataclass(frozen=True, slots=True)
class Job:
    """Request ready to run: one engine request per prompt, each with the same number of choices."""

    origin: AnswerIdentity
    body: Completion
    requests: tuple[GenerationRequest, ...]
    release: Release
    form: AnswerForm
    relaxed: tuple[str, ...] = ()  # paths of constraints that the grammar does not enforce

    @property
    def id(self) -> str:
        """Id of the answer, as the client sees it."""
        return f"{'chatcmpl' if isinstance(self.body, ChatCompletionRequest) else 'cmpl'}-{self.origin.uid}"

    @property
    def sampling(self) -> SamplingParams:
        """Sampling parameters of the first prompt. Other prompts differ in seed and `max_tokens` only."""
        return self.requests[0].sampling

    @property
    def num_choices(self) -> int:
        """Number of choices over all prompts."""
        return len(self.requests) * self.requests[0].n

    @property
    def first_choice(self) -> dict[str, int]:
        """Index of each request's first choice, by request id."""
        return {request.request_id: index * request.n for index, request in enumerate(self.requests)}

    def choice_of(self, output: SequenceOutput) -> int:
        """Return the index of the choice that an output belongs to."""
        return self.first_choice[output.request_id] + output.index

    def prompt_of(self, choice: int) -> Sequence[int]:
        """Return the prompt of a choice, as token ids."""
        return self.requests[choice // self.requests[0].n].prompt

    @property
    def return_token_ids(self) -> bool:
        """Whether the answer reports token ids."""
        return self.body.return_token_ids is True

    @property
    def headers(self) -> dict[str, str]:
        """Response headers that list the first unenforced paths of function schemas; empty if all are enforced."""
        return {RELAXED_HEADER: ", ".join(map(quote, self.relaxed[:_MAX_RELAXED_PATHS]))} if self.relaxed else {}

    def id_of(self, prefix: str, *part: object) -> str:
        """Derive the id of a part of the answer. Deterministic, so that a resumed answer has the same ids."""
        named = " ".join(map(str, (self.id, *part)))
        return f"{prefix}_{hashlib.blake2b(named.encode(), digest_size=12).hexdigest()}"

    def call_id(self, choice: int, call: int) -> str:
        """Return the id of a call, in the form that the chat template requires."""
        made, calling = self.id_of("call", choice, call), self.form.calling
        return short_id(made) if calling is not None and calling.short_ids else made

    def reader(self) -> AnswerReader:
        """Create a parser for one choice."""
        thinking, calling = self.form.thinking, self.form.calling
        if calling is None:
            return AnswerReader(thinking, None)
        stops = bool(self.sampling.stop or self.sampling.stop_token_ids)
        return AnswerReader(thinking, CallReader(calling.form, must=calling.must, holds_calls=stops))


async def build(
    body: Completion,
    server: Server,
    *,
    scope: Scope,
    origin: AnswerIdentity | None = None,
    described: Mapping[str, str] | None = None,
) -> Job:
    """Check a request and prepare it to run. `origin`: identity of a resumed answer; `described`: Lark grammars by path
    that are checked but not enforced. Raises RequestError."""
    runtime, origin = server.runtime, origin or AnswerIdentity.drawn(body.seed)
    runtime.check_room(scope.account)
    _check_fields(body, server)
    encode = partial(_encoded, body, server, scope, origin, described or {})
    form, source, requests = await runtime.in_turn(scope.account, encode)
    grammar, relaxed = None, tuple[str, ...]()
    if not form.is_free:
        steps = partial(compiled, form, special_ids=runtime.tokenizer.special_ids)
        grammar, relaxed = await runtime.grammars.result(scope.account, scope.cache_namespace, source, steps)
    for path in relaxed:
        server.note_relaxed(path)
    num_choices = len(requests) * (body.n or 1)
    release = release_of(body, choices=num_choices, server_seconds=server.settings.release_seconds)
    arrival_seconds = time.monotonic()  # waiting for the engine begins when the grammar is compiled
    whole = (replace(request, grammar=grammar, arrival_seconds=arrival_seconds) for request in requests)
    return Job(origin, body, tuple(map(release.apply, whole)), release, form, relaxed)


def _encoded(
    body: Completion, server: Server, scope: Scope, origin: AnswerIdentity, described: Mapping[str, str]
) -> tuple[AnswerForm, str, tuple[GenerationRequest, ...]]:
    """Encode the texts of a body and read the form of its answer. Returns the form, the cache key of its grammar, and a
    request per prompt, without grammar. Raises InvalidRequest."""
    tokenizer, most = server.runtime.tokenizer, server.runtime.card.max_model_len
    form = form_of_answer(body, tokenizer, described)
    if isinstance(body, ChatCompletionRequest):
        prompts = [render(body.messages, body, tokenizer, body.callable_tools, most)]
        if thinks(tokenizer.chat_template):
            form = form._replace(thinking=Thinking.after(tokenizer.decode(prompts[0][-_TAG_TOKENS:])))
    else:
        prompts = encode_prompts(body, tokenizer, most, control=server.settings.control_in_prompts)
    return form, repr(form), tuple(_requests(body, prompts, form, server, scope, origin))


def _requests(
    body: Completion,
    prompts: Sequence[Sequence[int]],
    form: AnswerForm,
    server: Server,
    scope: Scope,
    origin: AnswerIdentity,
) -> Iterator[GenerationRequest]:
    """Build the engine request of each prompt, without grammar. Raises InvalidRequest."""
    tokenizer, card = server.runtime.tokenizer, server.runtime.card
    n, run = body.n or 1, secrets.token_hex(8)  # the interrupted run of a resumed answer may still be active
    kind, source = ("chatcmpl", "messages") if isinstance(body, ChatCompletionRequest) else ("cmpl", "prompt")
    lengths = [_max_tokens(body, len(prompt), server, source=source) for prompt in prompts]
    prediction: tuple[int, ...] = ()
    if body.prediction is not None and card.reads_predictions:
        prediction = tuple(encode_begun(body.prediction, tokenizer, max(lengths)))
    keep_tags = any(tag in tokenizer.special_ids for tag in form.tags)
    ends, num_logprobs = gap_ends(body, tokenizer), _num_logprobs(body)
    for index, (prompt, max_tokens) in enumerate(zip(prompts, lengths, strict=True)):
        check_token_ids(prompt, card, param=source)
        # A seed of the request applies to all prompts; drawn seeds differ, within the range that a request may send.
        seed = origin.seed if body.seed is not None else (origin.seed + index * n) % _SEED_RANGE
        sampling = sampling_params(
            body, seed=seed, max_tokens=max_tokens, num_logprobs=num_logprobs, keep_special_tokens=keep_tags
        )
        yield GenerationRequest(
            request_id=f"{kind}-{origin.uid}-{run}-{index}",
            prompt=tuple(prompt),
            sampling=replace(sampling, stop_token_ids=sampling.stop_token_ids | ends) if ends else sampling,
            n=n,
            prediction=prediction,
            messages_end=tokenizer.messages_end(prompt) if isinstance(body, ChatCompletionRequest) else None,
            scores_prompt=isinstance(body, CompletionRequest) and body.echo is True and num_logprobs is not None,
            speculation=_speculation(body),
            store=body.store is not False,
            scope=scope,
            priority=body.priority or 0,
        )


def start(job: Job, server: Server, request: Request) -> OutputStream:
    """Reserve the job's prompt tokens and maximum output tokens against the limits of its API key, and submit it to the
    engine. Raises RequestError."""
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
    """Return the name of the field that limits the answer's length: the one in the request, otherwise the current
    name."""
    is_older = body.max_tokens is not None or isinstance(body, CompletionRequest)
    return "max_tokens" if is_older and body.max_completion_tokens is None else "max_completion_tokens"


def check_model(model: str | None, server: Server) -> None:
    """Raise NotFound for an unknown model name."""
    if model is not None and model not in server.settings.served_model_names:
        raise NotFound(f"The model '{model}' does not exist.", param="model", code="model_not_found")


def _check_fields(body: Completion, server: Server) -> None:
    """Refuse unsupported fields, and log unknown ones once. Raises RequestError."""
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
        raise InvalidRequest("This server supports 'best_of' only if it equals 'n'.", param="best_of")
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("'stream_options' is only allowed when 'stream' is true.", param="stream_options")
    card = server.runtime.card
    check_token_ids(body.stop_token_ids or [], card, param="stop_token_ids")
    for token_id in body.logit_bias or {}:
        if not 0 <= token_id < card.vocab_size:
            message = f"Invalid value for 'logit_bias': token {token_id} is outside of the vocabulary."
            raise InvalidRequest(message, param=f"logit_bias.{token_id}")


def refuse(extra: Mapping[str, JsonValue], harmless: Mapping[str, tuple[JsonValue, ...]], *, prefix: str = "") -> None:
    """Raise InvalidRequest for the first field whose value has an unsupported effect. `harmless`: unsupported fields,
    each with the values that have no effect."""
    for name, value in extra.items():
        if value is None or name not in harmless or value in harmless[name]:
            continue
        path = prefix + name
        if name == "tools" and value == []:
            raise InvalidRequest("Invalid value for 'tools': the list is too short.", param=path)
        other = " with this value" if harmless[name] else ""
        raise InvalidRequest(f"This server does not support '{path}'{other}.", param=path)


def _num_logprobs(body: Completion) -> int | None:
    """Return the number of alternatives to report per token, or None if no log-probabilities are requested."""
    if isinstance(body, ChatCompletionRequest):
        return (body.top_logprobs or 0) if body.logprobs else None
    return body.logprobs


def _speculation(body: CompletionFields) -> SpeculationParams:
    wanted = body.speculation
    if wanted is None:
        return SpeculationParams()
    # Only streamed chunks can report single steps.
    trace = wanted.trace is True and body.stream is True
    return SpeculationParams(enabled=wanted.enabled is not False, max_budget=wanted.max_budget, trace=trace)


def _max_tokens(body: CompletionFields, prompt_tokens: int, server: Server, *, source: str) -> int:
    """Return the maximum number of generated tokens: the request's limit, but at most the rest of the context and the
    server's limit. Raises InvalidRequest for an empty prompt or one that leaves no room."""
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
    # Agents request more than any context holds, so this is no error: finish_reason reports a cut answer.
    return min(room, cap) if requested is None else max(1, min(room, cap, requested))
