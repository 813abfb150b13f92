"""`POST /v1/chat/completions` and `POST /v1/completions`: the shapes of their answers, whole and in chunks."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Protocol

from fastapi import APIRouter
from pydantic import JsonValue
from starlette.requests import Request
from starlette.responses import Response

from service.api.body import read_body
from service.api.logprobs import chat_logprobs, legacy_length, legacy_logprobs
from service.api.reply import Body, Choice, Reply
from service.api.request_builder import build_chat, build_completion
from service.api.schemas import ChatCompletionRequest, CompletionRequest
from service.api.settings import Server
from service.api.sse import EventStream, StreamForm, collect, events, whole
from service.engine.requests import SequenceOutput
from service.runtime import OutputStream


class Form(StreamForm, Protocol):
    """How one route words its answers."""

    def body(self, choices: Sequence[Choice]) -> Body: ...


def completions_router(server: Server) -> APIRouter:
    router = APIRouter()
    runtime = server.runtime

    @router.post("/v1/chat/completions")
    async def create_chat_completion(request: Request) -> Response:
        body = await read_body(request, ChatCompletionRequest, server)
        job = await build_chat(body, server, client=server.client_of(request.scope, body))
        reply = Reply(job, body, runtime.card, runtime.tokenizer, chunk_object="chat.completion.chunk")
        form = ChatForm(reply, body.top_logprobs or 0)
        return await _answer(request, runtime.generate(*job.requests), form, reply, stream=body.stream)

    @router.post("/v1/completions")
    async def create_completion(request: Request) -> Response:
        body = await read_body(request, CompletionRequest, server)
        job = await build_completion(body, server, client=server.client_of(request.scope, body))
        reply = Reply(job, body, runtime.card, runtime.tokenizer, chunk_object="text_completion")
        form = TextForm(reply, body.logprobs or 0)
        return await _answer(request, runtime.generate(*job.requests), form, reply, stream=body.stream)

    return router


async def _answer(
    request: Request, outputs: OutputStream, form: Form, reply: Reply, *, stream: bool | None
) -> Response:
    if stream:
        return EventStream(events(outputs, form), outputs)
    return whole(form.body(reply.gather(await collect(request, outputs))))


class ChatForm:
    """In chunks: the role first, then content, then the reason of the end in a chunk of its own."""

    def __init__(self, reply: Reply, num_top: int) -> None:
        self._reply = reply
        self._num_top = num_top
        self._begun: set[int] = set()
        self.trailer = reply.trailer

    def body(self, choices: Sequence[Choice]) -> Body:
        numbered: list[JsonValue] = [self._choice(number, choice) for number, choice in enumerate(choices)]
        body = self._reply.body("chat.completion", numbered)
        if self._reply.return_token_ids:
            body["prompt_token_ids"] = self._reply.prompt_of(0)
        return body

    def _choice(self, number: int, choice: Choice) -> Body:
        return {
            "index": number,
            "message": {"role": "assistant", "content": choice.text, "refusal": None},
            "logprobs": chat_logprobs(choice.logprobs, self._reply.tokenizer, num_top=self._num_top),
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
            **self._reply.tokens(choice.token_ids),
        }

    def chunks(self, output: SequenceOutput) -> Iterator[Body]:
        # The role goes out with the first output and not before, so that clients measure the true time to it.
        if output.index not in self._begun:
            yield self._opening(output.index)
        number = self._reply.count(output)
        if output.text or self._reply.tells_tokens(output):
            choice = _delta(number, {"content": output.text})
            choice["logprobs"] = chat_logprobs(output.logprobs, self._reply.tokenizer, num_top=self._num_top)
            choice |= self._reply.tokens(output.token_ids) | self._reply.trace(number, output)
            yield self._reply.chunk(choice)
        if output.finish_reason is not None:
            end: Body = {"finish_reason": output.finish_reason, "stop_reason": output.stop_reason}
            yield self._reply.chunk(_delta(number, {}) | end)

    def _opening(self, number: int) -> Body:
        chunk = self._reply.chunk(_delta(number, {"role": "assistant", "content": ""}))
        if self._reply.return_token_ids and not self._begun:
            chunk["prompt_token_ids"] = self._reply.prompt_of(0)
        self._begun.add(number)
        return chunk


def _delta(number: int, delta: Body) -> Body:
    return {"index": number, "delta": delta, "logprobs": None, "finish_reason": None}


class TextForm:
    """In chunks: one for each output; the last one of a choice also says why it ended."""

    def __init__(self, reply: Reply, num_top: int) -> None:
        self._reply = reply
        self._num_top = num_top
        self._begun: set[int] = set()
        self._text_offset: dict[int, int] = defaultdict(int)
        self.trailer = reply.trailer

    def body(self, choices: Sequence[Choice]) -> Body:
        return self._reply.body("text_completion", [self._piece(n, choice) for n, choice in enumerate(choices)])

    def chunks(self, output: SequenceOutput) -> Iterator[Body]:
        number = self._reply.count(output)
        if output.text or self._reply.tells_tokens(output) or output.finish_reason is not None:
            yield self._reply.chunk(self._piece(number, output) | self._reply.trace(number, output))

    def _piece(self, number: int, part: Choice | SequenceOutput) -> Body:
        tokenizer, offset = self._reply.tokenizer, self._text_offset[number]
        self._text_offset[number] += legacy_length(part.logprobs, tokenizer)
        piece: Body = {
            "index": number,
            "text": part.text,
            "logprobs": legacy_logprobs(part.logprobs, tokenizer, num_top=self._num_top, text_offset=offset),
            "finish_reason": part.finish_reason,
            "stop_reason": part.stop_reason,
            **self._reply.tokens(part.token_ids),
        }
        if self._reply.return_token_ids and number not in self._begun:
            piece["prompt_token_ids"] = self._reply.prompt_of(number)
        self._begun.add(number)
        return piece
