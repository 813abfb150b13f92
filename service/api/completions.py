"""`POST /v1/chat/completions` and `POST /v1/completions`: the shapes of their answers, whole and in chunks."""

from collections import defaultdict
from collections.abc import Iterable, Iterator

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from service.api.body import read_body
from service.api.logprobs import chat_logprobs, legacy_length, legacy_logprobs
from service.api.reply import Body, Choice, Reply
from service.api.request_builder import Job, build_chat, build_completion
from service.api.schemas import ChatCompletionRequest, CompletionRequest
from service.api.settings import Server
from service.api.sse import EventStream, collect, events, whole
from service.engine.requests import SequenceOutput
from service.runtime import ModelCard
from service.tokenizer import ChatTokenizer


def completions_router(server: Server) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/chat/completions")
    async def create_chat_completion(request: Request) -> Response:
        body = await read_body(request, ChatCompletionRequest, server)
        job = await build_chat(body, server, client=server.client_of(request.scope, body))
        return await _answer(request, job, server, ChatReply)

    @router.post("/v1/completions")
    async def create_completion(request: Request) -> Response:
        body = await read_body(request, CompletionRequest, server)
        job = await build_completion(body, server, client=server.client_of(request.scope, body))
        return await _answer(request, job, server, TextReply)

    return router


async def _answer(request: Request, job: Job, server: Server, form: type[Reply]) -> Response:
    runtime = server.runtime
    reply, outputs = form(job, runtime.card, runtime.tokenizer), runtime.generate(*job.requests)
    if job.body.stream:
        return EventStream(events(outputs, reply), outputs)
    return whole(reply.whole(await collect(request, outputs)))


class ChatReply(Reply):
    """In chunks: the role first, then content, then the reason of the end in a chunk of its own."""

    whole_object, chunk_object = "chat.completion", "chat.completion.chunk"

    def whole(self, outputs: Iterable[SequenceOutput]) -> Body:
        body = super().whole(outputs)
        return {**body, "prompt_token_ids": self._prompt_of(0)} if self._return_token_ids else body

    def _choice(self, number: int, choice: Choice) -> Body:
        return {
            "index": number,
            "message": {"role": "assistant", "content": choice.text, "refusal": None},
            "logprobs": chat_logprobs(choice.logprobs, self._tokenizer, num_top=self._num_top),
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
            **self._tokens(choice.token_ids),
        }

    def chunks(self, output: SequenceOutput) -> Iterator[Body]:
        # The role goes out with the first output and not before, so that clients measure the true time to it.
        if output.index not in self._begun:
            yield self._opening(output.index)
        number = self._count(output)
        if output.text or self._tells_tokens(output):
            choice = _delta(number, {"content": output.text})
            choice["logprobs"] = chat_logprobs(output.logprobs, self._tokenizer, num_top=self._num_top)
            choice |= self._tokens(output.token_ids) | self._trace(number, output)
            yield self._chunk(choice)
        if output.finish_reason is not None:
            end: Body = {"finish_reason": output.finish_reason, "stop_reason": output.stop_reason}
            yield self._chunk(_delta(number, {}) | end)

    def _opening(self, number: int) -> Body:
        chunk = self._chunk(_delta(number, {"role": "assistant", "content": ""}))
        if self._return_token_ids and not self._begun:
            chunk["prompt_token_ids"] = self._prompt_of(0)
        self._begun.add(number)
        return chunk


def _delta(number: int, delta: Body) -> Body:
    return {"index": number, "delta": delta, "logprobs": None, "finish_reason": None}


class TextReply(Reply):
    """In chunks: one for each output; the last one of a choice also says why it ended."""

    whole_object = chunk_object = "text_completion"

    def __init__(self, job: Job, card: ModelCard, tokenizer: ChatTokenizer) -> None:
        super().__init__(job, card, tokenizer)
        self._text_offset: dict[int, int] = defaultdict(int)

    def chunks(self, output: SequenceOutput) -> Iterator[Body]:
        number = self._count(output)
        if output.text or self._tells_tokens(output) or output.finish_reason is not None:
            yield self._chunk(self._choice(number, output) | self._trace(number, output))

    def _choice(self, number: int, choice: Choice | SequenceOutput) -> Body:
        offset = self._text_offset[number]
        self._text_offset[number] += legacy_length(choice.logprobs, self._tokenizer)
        piece: Body = {
            "index": number,
            "text": choice.text,
            "logprobs": legacy_logprobs(choice.logprobs, self._tokenizer, num_top=self._num_top, text_offset=offset),
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
            **self._tokens(choice.token_ids),
        }
        if self._return_token_ids and number not in self._begun:
            piece["prompt_token_ids"] = self._prompt_of(number)
        self._begun.add(number)
        return piece
