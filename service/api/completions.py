"""`POST /v1/chat/completions` and `POST /v1/completions`: routes and response formats, whole and streamed."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

from fastapi import APIRouter
from pydantic import JsonValue
from starlette.requests import Request
from starlette.responses import Response

from service.api.body import read_body
from service.api.reply import Json, Reply
from service.api.request_builder import Completion, Job, build, start
from service.api.resumption import HEADER, resumable, resume_point
from service.api.schemas import ChatCompletionRequest, CompletionRequest
from service.api.settings import Server
from service.api.sse import STREAMED, EventStream, collect, events, json_response, unless_client_gone
from service.engine.requests import FinishReason, SequenceOutput, TokenLogprob
from service.runtime import ModelCard
from service.text.answers import AnswerReader, Piece
from service.text.tokenizer import ChatTokenizer, IncrementalDetokenizer

# JSON has no infinity; OpenAI's servers send this number instead.
_LOWEST_LOGPROB = -9999.0


def completions_router(server: Server) -> APIRouter:
    """Build the router of chat completions and text completions."""
    router = APIRouter()

    @router.post("/v1/chat/completions", responses=STREAMED)
    async def create_chat_completion(request: Request) -> Response:
        return await _answer(request, await read_body(request, ChatCompletionRequest, server), server, ChatReply)

    @router.post("/v1/completions", responses=STREAMED)
    async def create_completion(request: Request) -> Response:
        return await _answer(request, await read_body(request, CompletionRequest, server), server, TextReply)

    return router


async def _answer(request: Request, body: Completion, server: Server, form: type[Reply]) -> Response:
    runtime, resumed = server.runtime, resume_point(body, request.headers.get(HEADER))
    origin = None if resumed is None else resumed.origin
    scope = server.scope_of(request, body.safety_identifier or body.user)
    job = await unless_client_gone(request.receive, build(body, server, scope=scope, origin=origin))
    if not body.stream:
        reply, outputs = form(job, runtime.card, runtime.tokenizer), start(job, server, request)
        return json_response(reply.whole(await collect(request, outputs, job.release)), headers=job.headers)
    job, ids = await resumable(job, body, resumed, runtime)
    reply, outputs = form(job, runtime.card, runtime.tokenizer), start(job, server, request)
    frames = events(outputs, reply, ids, pads=job.release.pads)
    return EventStream(frames, outputs, seconds=job.release.seconds, headers=job.headers)


class ChatReply(Reply):
    """Response format of chat completions. A stream has a chunk with the role, chunks of content, and a chunk with the
    finish reason."""

    whole_object, chunk_object = "chat.completion", "chat.completion.chunk"

    def __init__(self, job: Job, card: ModelCard, tokenizer: ChatTokenizer) -> None:
        super().__init__(job, card, tokenizer)
        self._readers = defaultdict[int, AnswerReader](job.reader)  # parsers of streamed answers, by choice

    def whole(self, outputs: Iterable[SequenceOutput]) -> Json:
        body = super().whole(outputs)
        return {**body, "prompt_token_ids": [*self._job.prompt_of(0)]} if self._job.return_token_ids else body

    def _choice(self, number: int, output: SequenceOutput) -> Json:
        reader = self._job.reader()
        thought, text, calls = reader.whole(output.text, is_cut=output.is_cut)
        message: Json = {"role": "assistant", "content": text, "refusal": None}
        if thought:
            message["reasoning_content"] = thought
        if calls:
            message["tool_calls"] = [
                {**self._begun_call(number, index, call.name), "function": call._asdict()}
                for index, call in enumerate(calls)
            ]
        if thought or calls:
            message["content"] = text or None
        return {
            "index": number,
            "message": message,
            "logprobs": self._logprobs(output.logprobs),
            "finish_reason": _finish_reason(output.finish_reason, reader),
            "stop_reason": output.stop_reason,
            **self._tokens(output.token_ids),
        }

    def chunks(self, output: SequenceOutput) -> Iterator[Json]:
        # The role is sent with the first output, not before, so that clients measure the true time to first token.
        if output.index not in self._begun:
            yield self._opening(output.index)
        number = self._totals.add(output)
        ends = output.finish_reason is not None
        pieces = self._readers[number].read(output.text, ends=ends, is_cut=output.is_cut)
        deltas = [self._delta_of(number, piece) for piece in pieces]
        if not deltas and self._reports_tokens(output):
            deltas = [{"content": ""}]
        for index, delta in enumerate(deltas):
            choice = _delta(number, delta)
            if index == 0:
                choice["logprobs"] = self._logprobs(output.logprobs)
                choice |= self._tokens(output.token_ids) | self._trace(number, output)
            yield self._chunk(choice)
        if ends:
            reason = _finish_reason(output.finish_reason, self._readers[number])
            end: Json = {"finish_reason": reason, "stop_reason": output.stop_reason}
            yield self._chunk(_delta(number, {}) | end)

    def _delta_of(self, number: int, piece: Piece) -> Json:
        if piece.kind == "thought":
            return {"reasoning_content": piece.text}
        if piece.kind == "text":
            return {"content": piece.text}
        if piece.kind == "name":
            return {"tool_calls": [{"index": piece.call, **self._begun_call(number, piece.call, piece.text)}]}
        return {"tool_calls": [{"index": piece.call, "function": {"arguments": piece.text}}]}

    def _begun_call(self, number: int, call: int, name: str) -> Json:
        """Build a call without its arguments."""
        function: Json = {"name": name, "arguments": ""}
        return {"id": self._job.call_id(number, call), "type": "function", "function": function}

    def _opening(self, number: int) -> Json:
        chunk = self._chunk(_delta(number, {"role": "assistant", "content": ""}))
        if self._job.return_token_ids and not self._begun:
            chunk["prompt_token_ids"] = [*self._job.prompt_of(0)]
        self._begun.add(number)
        return chunk

    def _logprobs(self, tokens: Sequence[TokenLogprob] | None) -> Json | None:
        return None if tokens is None else {"content": [self._record(token) for token in tokens], "refusal": None}

    def _record(self, token: TokenLogprob) -> JsonValue:
        top: list[JsonValue] = [self._entry(*entry) for entry in token.top[: self._job.sampling.num_logprobs]]
        return {**self._entry(token.token_id, token.logprob), "top_logprobs": top}

    def _entry(self, token_id: int, logprob: float) -> Json:
        raw = self._tokenizer.token_bytes(token_id)
        return {"token": raw.decode(errors="replace"), "logprob": _finite(logprob), "bytes": list(raw)}


def _finish_reason(reason: FinishReason | None, reader: AnswerReader) -> str | None:
    return "tool_calls" if reader.num_calls and reason == "stop" else reason


def _delta(number: int, delta: Json) -> Json:
    return {"index": number, "delta": delta, "logprobs": None, "finish_reason": None}


class _LogprobRecord(NamedTuple):
    """Log-probabilities of one token of a text completion and its alternatives. An answer has a list of each field."""

    tokens: str
    token_logprobs: float | None
    top_logprobs: JsonValue  # of alternatives, by text
    text_offset: int  # position of the token in the sent text, in characters


def _in_parallel(records: Sequence[_LogprobRecord]) -> Json:
    return {field: [getattr(record, field) for record in records] for field in _LogprobRecord._fields}


class TextReply(Reply):
    """Response format of text completions. A stream has one chunk per output; the last chunk of a choice has the finish
    reason."""

    whole_object = chunk_object = "text_completion"

    def __init__(self, job: Job, card: ModelCard, tokenizer: ChatTokenizer) -> None:
        super().__init__(job, card, tokenizer)
        self._echoes = isinstance(job.body, CompletionRequest) and job.body.echo is True
        self._text_length: Counter[int] = Counter()  # characters of tokens sent with log-probabilities, by choice
        self._offsets: dict[int, IncrementalDetokenizer] = {}  # detokenizers that count these characters, by choice

    def chunks(self, output: SequenceOutput) -> Iterator[Json]:
        output = self._shown(output)
        number = self._totals.add(output)
        if output.text or self._reports_tokens(output) or output.finish_reason is not None:
            yield self._chunk(self._choice(number, output) | self._trace(number, output))

    def _choice(self, number: int, output: SequenceOutput) -> Json:
        is_first = number not in self._begun
        self._begun.add(number)
        prompt = self._prompt_text(number) if is_first and self._echoes else ""
        piece: Json = {
            "index": number,
            "text": prompt + output.text,
            "logprobs": None,
            "finish_reason": output.finish_reason,
            "stop_reason": output.stop_reason,
            **self._tokens(output.token_ids),
        }
        if output.logprobs is not None:
            before = self._prompt_records(number, output.prompt_logprobs) if is_first and self._echoes else []
            self._text_length[number] += len(prompt)
            piece["logprobs"] = _in_parallel([*before, *(self._record(number, token) for token in output.logprobs)])
        if self._job.return_token_ids and is_first:
            piece["prompt_token_ids"] = [*self._job.prompt_of(number)]
        return piece

    def _prompt_text(self, number: int) -> str:
        return self._tokenizer.decode(
            self._job.prompt_of(number), skip_special_tokens=self._job.sampling.skip_special_tokens
        )

    def _prompt_records(self, number: int, scores: Sequence[TokenLogprob]) -> list[_LogprobRecord]:
        """Build the records of the prompt's tokens; the first token has no log-probability."""
        first, *others = self._job.prompt_of(number)
        detokenizer = self._tokenizer.detokenizer(self._job.sampling.skip_special_tokens)
        records = [_LogprobRecord(self._tokenizer.token_text(first, at_start=True), None, None, 0)]
        offset = len(detokenizer.push(first))
        for token_id, score in zip(others, scores, strict=True):
            records.append(self._scored(score, detokenizer, offset))
            offset += len(detokenizer.push(token_id))
        return records

    def _record(self, number: int, token: TokenLogprob) -> _LogprobRecord:
        """Build the record of the next token. Its offset points to the first character that the token contributes
        to."""
        if number not in self._offsets:
            self._offsets[number] = self._detokenizer(number)
        record = self._scored(token, self._offsets[number], self._text_length[number])
        self._text_length[number] += len(self._offsets[number].push(token.token_id))
        return record

    def _scored(self, token: TokenLogprob, before: IncrementalDetokenizer, length: int) -> _LogprobRecord:
        """Build the record of a token. `before`: detokenizer of the preceding tokens, which may hold back characters;
        `length`: number of characters before those."""
        text_of = partial(self._tokenizer.token_text, at_start=before.is_at_start)
        top: dict[str, JsonValue] = {}
        # The sampled token is always included, in addition to the most likely ones.
        for token_id, logprob in (*token.top[: self._job.sampling.num_logprobs], (token.token_id, token.logprob)):
            # Tokens for different parts of characters have the same text: keep the most likely one.
            top.setdefault(text_of(token_id), _finite(logprob))
        offset = length + before.num_held_before(token.token_id)
        return _LogprobRecord(text_of(token.token_id), _finite(token.logprob), top, offset)


def _finite(logprob: float) -> float:
    return max(logprob, _LOWEST_LOGPROB)
