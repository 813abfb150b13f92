"""`POST /v1/chat/completions` and `POST /v1/completions`: the shapes of their answers, whole and in chunks."""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from fastapi import APIRouter
from pydantic import JsonValue
from starlette.requests import Request
from starlette.responses import Response

from service.answers import AnswerReader
from service.api.body import read_body
from service.api.reply import Body, Choice, Reply
from service.api.request_builder import Completion, Job, build, start
from service.api.resumption import HEADER, marked, taken_by
from service.api.schemas import ChatCompletionRequest, CompletionRequest
from service.api.settings import Server
from service.api.sse import EventStream, collect, events, whole
from service.engine.requests import FinishReason, SequenceOutput, TokenLogprob
from service.runtime import ModelCard
from service.tokenizer import ChatTokenizer
from service.tools import Piece

# JSON knows no infinity; this is what OpenAI's servers send instead.
_LOWEST_LOGPROB = -9999.0


def completions_router(server: Server) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/chat/completions")
    async def create_chat_completion(request: Request) -> Response:
        return await _answer(request, await read_body(request, ChatCompletionRequest, server), server, ChatReply)

    @router.post("/v1/completions")
    async def create_completion(request: Request) -> Response:
        return await _answer(request, await read_body(request, CompletionRequest, server), server, TextReply)

    return router


async def _answer(request: Request, body: Completion, server: Server, form: type[Reply]) -> Response:
    runtime, taken = server.runtime, taken_by(body, request.headers.get(HEADER))
    origin = None if taken is None else taken.origin
    job = await build(body, server, scope=server.scope_of(request, body), origin=origin)
    if not body.stream:
        reply, outputs = form(job, runtime.card, runtime.tokenizer), start(job, server, request)
        return whole(reply.whole(await collect(request, outputs, job.release)), headers=job.headers)
    job, marks = await marked(job, body, taken, runtime)
    reply, outputs = form(job, runtime.card, runtime.tokenizer), start(job, server, request)
    frames = events(outputs, reply, marks, pads=job.release.pads)
    return EventStream(frames, outputs, release=job.release, headers=job.headers)


class ChatReply(Reply):
    """In chunks: the role first, then content, then the reason of the end in a chunk of its own."""

    whole_object, chunk_object = "chat.completion", "chat.completion.chunk"

    def __init__(self, job: Job, card: ModelCard, tokenizer: ChatTokenizer) -> None:
        super().__init__(job, card, tokenizer)
        self._readers: dict[int, AnswerReader] = {}  # of streamed answers, by choice

    def whole(self, outputs: Iterable[SequenceOutput]) -> Body:
        body = super().whole(outputs)
        return {**body, "prompt_token_ids": self._prompt_of(0)} if self._return_token_ids else body

    def _choice(self, number: int, choice: Choice) -> Body:
        reader = self._job.reader()
        thought, text, calls = reader.whole(choice.text, is_cut=choice.is_cut)
        message: Body = {"role": "assistant", "content": text, "refusal": None}
        if thought:
            message["reasoning_content"] = thought
        if calls:
            message["tool_calls"] = [
                {**self._begun_call(number, place, call.name), "function": call._asdict()}
                for place, call in enumerate(calls)
            ]
        if thought or calls:
            message["content"] = text or None
        return {
            "index": number,
            "message": message,
            "logprobs": self._logprobs(choice.logprobs),
            "finish_reason": _end(choice.finish_reason, reader),
            "stop_reason": choice.stop_reason,
            **self._tokens(choice.token_ids),
        }

    def chunks(self, output: SequenceOutput) -> Iterator[Body]:
        # The role goes out with the first output and not before, so that clients measure the true time to it.
        if output.index not in self._begun:
            yield self._opening(output.index)
        number = self._count(output)
        deltas = self._deltas(number, output)
        if not deltas and self._tells_tokens(output):
            deltas = [{"content": ""}]
        for place, delta in enumerate(deltas):
            choice = _delta(number, delta)
            if place == 0:
                choice["logprobs"] = self._logprobs(output.logprobs)
                choice |= self._tokens(output.token_ids) | self._trace(number, output)
            yield self._chunk(choice)
        if output.finish_reason is not None:
            reason = _end(output.finish_reason, self._readers[number])
            end: Body = {"finish_reason": reason, "stop_reason": output.stop_reason}
            yield self._chunk(_delta(number, {}) | end)

    def _deltas(self, number: int, output: SequenceOutput) -> list[Body]:
        """What an output says."""
        if number not in self._readers:
            self._readers[number] = self._job.reader()
        pieces = self._readers[number].read(output.text, ends=output.finish_reason is not None, is_cut=output.is_cut)
        return [self._told(number, piece) for piece in pieces]

    def _told(self, number: int, piece: Piece) -> Body:
        """A piece of an answer as a delta."""
        if piece.kind == "thought":
            return {"reasoning_content": piece.text}
        if piece.kind == "text":
            return {"content": piece.text}
        if piece.kind == "name":
            return {"tool_calls": [{"index": piece.call, **self._begun_call(number, piece.call, piece.text)}]}
        return {"tool_calls": [{"index": piece.call, "function": {"arguments": piece.text}}]}

    def _begun_call(self, number: int, call: int, name: str) -> Body:
        """A call whose arguments are to come."""
        told: Body = {"name": name, "arguments": ""}
        return {"id": self._job.call_id(number, call), "type": "function", "function": told}

    def _opening(self, number: int) -> Body:
        chunk = self._chunk(_delta(number, {"role": "assistant", "content": ""}))
        if self._return_token_ids and not self._begun:
            chunk["prompt_token_ids"] = self._prompt_of(0)
        self._begun.add(number)
        return chunk

    def _logprobs(self, tokens: Sequence[TokenLogprob] | None) -> Body | None:
        """A list of records."""
        return None if tokens is None else {"content": [self._record(token) for token in tokens], "refusal": None}

    def _record(self, token: TokenLogprob) -> JsonValue:
        top: list[JsonValue] = [self._entry(*entry) for entry in token.top[: self._num_top]]
        return {**self._entry(token.token_id, token.logprob), "top_logprobs": top}

    def _entry(self, token_id: int, logprob: float) -> Body:
        raw = self._tokenizer.token_bytes(token_id)
        return {"token": raw.decode(errors="replace"), "logprob": _finite(logprob), "bytes": list(raw)}


def _end(reason: FinishReason | None, reader: AnswerReader) -> str | None:
    return "tool_calls" if reader.num_calls and reason == "stop" else reason


def _delta(number: int, delta: Body) -> Body:
    return {"index": number, "delta": delta, "logprobs": None, "finish_reason": None}


class _Record(NamedTuple):
    """What is told of one token of a completion."""

    text: str
    logprob: float | None
    top: JsonValue  # by text
    offset: int  # into the text that is sent


def _in_parallel(records: Sequence[_Record]) -> Body:
    return {
        "tokens": [record.text for record in records],
        "token_logprobs": [record.logprob for record in records],
        "top_logprobs": [record.top for record in records],
        "text_offset": [record.offset for record in records],
    }


class TextReply(Reply):
    """In chunks: one for each output; the last one of a choice also says why it ended."""

    whole_object = chunk_object = "text_completion"

    def __init__(self, job: Job, card: ModelCard, tokenizer: ChatTokenizer) -> None:
        super().__init__(job, card, tokenizer)
        self._echoes = isinstance(job.body, CompletionRequest) and job.body.echo is True

    def chunks(self, output: SequenceOutput) -> Iterator[Body]:
        output = self._shown(output)
        number = self._count(output)
        if output.text or self._tells_tokens(output) or output.finish_reason is not None:
            yield self._chunk(self._choice(number, output) | self._trace(number, output))

    def _choice(self, number: int, choice: Choice | SequenceOutput) -> Body:
        is_first = number not in self._begun
        self._begun.add(number)
        prompt = self._prompt_text(number) if is_first and self._echoes else ""
        piece: Body = {
            "index": number,
            "text": prompt + choice.text,
            "logprobs": None,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
            **self._tokens(choice.token_ids),
        }
        if choice.logprobs is not None:
            before = self._prompt_records(number, choice.prompt_logprobs) if is_first and self._echoes else []
            self._text_length[number] += len(prompt)
            piece["logprobs"] = _in_parallel([*before, *(self._record(number, token) for token in choice.logprobs)])
        if self._return_token_ids and is_first:
            piece["prompt_token_ids"] = self._prompt_of(number)
        return piece

    def _prompt_text(self, number: int) -> str:
        """The prompt of a choice, for those who want to read it again."""
        prompt = self._job.requests[number // self._n].prompt
        return self._tokenizer.decode(prompt, skip_special_tokens=self._skip_special_tokens)

    def _prompt_records(self, number: int, scores: Sequence[TokenLogprob]) -> list[_Record]:
        """Of the prompt's tokens; the first one has no score, for nothing stands before it."""
        detokenizer = self._tokenizer.detokenizer(self._skip_special_tokens)
        records, offset = list[_Record](), 0
        for token_id, score in zip(self._job.requests[number // self._n].prompt, (None, *scores), strict=True):
            top, logprob = (None, None) if score is None else (self._top_by_text(score), _finite(score.logprob))
            records.append(_Record(self._text(token_id), logprob, top, offset))
            offset += len(detokenizer.push(token_id))
        return records

    def _record(self, number: int, token: TokenLogprob) -> _Record:
        """Of the next token; its offset is where the character begins that it is a part of, or begins with."""
        if number not in self._offsets:
            self._offsets[number] = self._tokenizer.detokenizer(self._skip_special_tokens)
        offset = self._text_length[number]
        self._text_length[number] += len(self._offsets[number].push(token.token_id))
        return _Record(self._text(token.token_id), _finite(token.logprob), self._top_by_text(token), offset)

    def _top_by_text(self, token: TokenLogprob) -> JsonValue:
        by_text: dict[str, JsonValue] = {}
        # The token that was drawn is always there, as an additional one where it is none of the likeliest.
        for token_id, logprob in (*token.top[: self._num_top], (token.token_id, token.logprob)):
            # Different parts of characters look alike as text: the likeliest one keeps the place.
            by_text.setdefault(self._text(token_id), _finite(logprob))
        return by_text

    def _text(self, token_id: int) -> str:
        return self._tokenizer.token_bytes(token_id).decode(errors="replace")


def _finite(logprob: float) -> float:
    return max(logprob, _LOWEST_LOGPROB)
