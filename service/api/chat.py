"""`POST /v1/chat/completions`: the shapes of its answer, whole and in chunks."""

from collections.abc import Iterator

from fastapi import APIRouter
from pydantic import JsonValue
from starlette.requests import Request
from starlette.responses import Response

from service.api.body import read_body
from service.api.logprobs import chat_logprobs
from service.api.reply import Body, Choice, Reply, gather
from service.api.request_builder import build_chat
from service.api.schemas import ChatCompletionRequest
from service.api.settings import Server
from service.api.sse import EventStream, collect, events, whole
from service.api.trace import Trace, is_traced
from service.engine.requests import SequenceOutput
from service.tokenizer import ChatTokenizer

_CHUNK = "chat.completion.chunk"


def chat_router(server: Server) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/chat/completions")
    async def create_chat_completion(request: Request) -> Response:
        body = await read_body(request, ChatCompletionRequest, server)
        job = await build_chat(body, server, client=server.client_of(request.scope, body))
        runtime = server.runtime
        reply, tokenizer, num_top = Reply(job, body, runtime.card), runtime.tokenizer, body.top_logprobs or 0
        generation = runtime.generate(*job.requests)
        if body.stream:
            return EventStream(events(generation, ChatStream(reply, tokenizer, num_top)), generation)
        choices = gather(await collect(request, generation), reply)
        return whole(_completion(choices, reply, tokenizer, num_top))

    return router


def _completion(choices: list[Choice], reply: Reply, tokenizer: ChatTokenizer, num_top: int) -> Body:
    body: Body = {
        **reply.head("chat.completion"),
        "choices": [_choice(number, choice, reply, tokenizer, num_top) for number, choice in enumerate(choices)],
        "usage": reply.usage(),
        "metrics": reply.metrics(),
    }
    if reply.return_token_ids:
        body["prompt_token_ids"] = reply.prompt_of(0)
    return body


def _choice(number: int, choice: Choice, reply: Reply, tokenizer: ChatTokenizer, num_top: int) -> JsonValue:
    body: Body = {
        "index": number,
        "message": {"role": "assistant", "content": choice.text, "refusal": None},
        "logprobs": chat_logprobs(choice.logprobs, tokenizer, num_top=num_top),
        "finish_reason": choice.finish_reason,
        "stop_reason": choice.stop_reason,
    }
    if reply.return_token_ids:
        body["token_ids"] = list[JsonValue](choice.token_ids)
    return body


class ChatStream:
    """Words each output as chunks: the role first, then content, then the reason of the end in a chunk of its own."""

    def __init__(self, reply: Reply, tokenizer: ChatTokenizer, num_top: int) -> None:
        self._reply = reply
        self._tokenizer = tokenizer
        self._num_top = num_top
        self._trace = Trace(tokenizer, skip_special_tokens=reply.skip_special_tokens)
        self._begun: set[int] = set()

    def chunks(self, output: SequenceOutput) -> Iterator[Body]:
        # The role goes out with the first output and not before, so that clients measure the true time to it.
        if (opening := self._opening(output)) is not None:
            yield opening
        number = self._reply.count(output)
        tells_tokens = self._reply.return_token_ids or output.logprobs or is_traced(output)
        if output.text or (output.token_ids and tells_tokens):
            yield self._reply.chunk(_CHUNK, self._content(number, output))
        if output.finish_reason is not None:
            yield self._reply.chunk(_CHUNK, _finish(number, output))

    def trailer(self) -> Iterator[Body]:
        if self._reply.include_usage:
            yield self._reply.usage_chunk(_CHUNK)

    def _opening(self, output: SequenceOutput) -> Body | None:
        if output.index in self._begun:
            return None
        chunk = self._reply.chunk(_CHUNK, _delta(output.index, {"role": "assistant", "content": ""}))
        if self._reply.return_token_ids and not self._begun:
            chunk["prompt_token_ids"] = self._reply.prompt_of(0)
        self._begun.add(output.index)
        return chunk

    def _content(self, number: int, output: SequenceOutput) -> Body:
        choice = _delta(number, {"content": output.text})
        choice["logprobs"] = chat_logprobs(output.logprobs, self._tokenizer, num_top=self._num_top)
        if self._reply.return_token_ids:
            choice["token_ids"] = list[JsonValue](output.token_ids)
        if is_traced(output):
            choice["speculation"] = self._trace.of(number, output)
        return choice


def _finish(number: int, output: SequenceOutput) -> Body:
    return {**_delta(number, {}), "finish_reason": output.finish_reason, "stop_reason": output.stop_reason}


def _delta(number: int, delta: Body) -> Body:
    return {"index": number, "delta": delta, "logprobs": None, "finish_reason": None}
