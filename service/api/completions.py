"""`POST /v1/completions`: plain continuation of one or several prompts, whole and in chunks."""

from collections import defaultdict
from collections.abc import Iterator

from fastapi import APIRouter
from pydantic import JsonValue
from starlette.requests import Request
from starlette.responses import Response

from service.api.body import read_body
from service.api.logprobs import legacy_length, legacy_logprobs
from service.api.reply import Body, Choice, Reply, gather
from service.api.request_builder import build_completion
from service.api.schemas import CompletionRequest
from service.api.settings import Server
from service.api.sse import EventStream, collect, events, whole
from service.api.trace import Trace, is_traced
from service.engine.requests import SequenceOutput
from service.tokenizer import ChatTokenizer

_OBJECT = "text_completion"


def completions_router(server: Server) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/completions")
    async def create_completion(request: Request) -> Response:
        body = await read_body(request, CompletionRequest, server)
        job = await build_completion(body, server, client=server.client_of(request.scope, body))
        runtime = server.runtime
        reply, tokenizer, num_top = Reply(job, body, runtime.card), runtime.tokenizer, body.logprobs or 0
        generation = runtime.generate(*job.requests)
        if body.stream:
            return EventStream(events(generation, CompletionStream(reply, tokenizer, num_top)), generation)
        choices = gather(await collect(request, generation), reply)
        return whole(_completion(choices, reply, tokenizer, num_top))

    return router


def _completion(choices: list[Choice], reply: Reply, tokenizer: ChatTokenizer, num_top: int) -> Body:
    return {
        **reply.head(_OBJECT),
        "choices": [_choice(number, choice, reply, tokenizer, num_top) for number, choice in enumerate(choices)],
        "usage": reply.usage(),
        "metrics": reply.metrics(),
    }


def _choice(number: int, choice: Choice, reply: Reply, tokenizer: ChatTokenizer, num_top: int) -> JsonValue:
    body: Body = {
        "index": number,
        "text": choice.text,
        "logprobs": legacy_logprobs(choice.logprobs, tokenizer, num_top=num_top, text_offset=0),
        "finish_reason": choice.finish_reason,
        "stop_reason": choice.stop_reason,
    }
    if reply.return_token_ids:
        body["token_ids"] = list[JsonValue](choice.token_ids)
        body["prompt_token_ids"] = reply.prompt_of(number)
    return body


class CompletionStream:
    """Words each output as one chunk; the last one of a choice also says why it ended."""

    def __init__(self, reply: Reply, tokenizer: ChatTokenizer, num_top: int) -> None:
        self._reply = reply
        self._tokenizer = tokenizer
        self._num_top = num_top
        self._trace = Trace(tokenizer, skip_special_tokens=reply.skip_special_tokens)
        self._begun: set[int] = set()
        self._text_offset: dict[int, int] = defaultdict(int)

    def chunks(self, output: SequenceOutput) -> Iterator[Body]:
        number = self._reply.count(output)
        tells_tokens = self._reply.return_token_ids or output.logprobs or is_traced(output)
        wants_tokens = output.token_ids and tells_tokens
        if output.text or wants_tokens or output.finish_reason is not None:
            yield self._reply.chunk(_OBJECT, self._piece(number, output))

    def trailer(self) -> Iterator[Body]:
        if self._reply.include_usage:
            yield self._reply.usage_chunk(_OBJECT)

    def _piece(self, number: int, output: SequenceOutput) -> Body:
        piece: Body = {
            "index": number,
            "text": output.text,
            "logprobs": self._logprobs(number, output),
            "finish_reason": output.finish_reason,
            "stop_reason": output.stop_reason,
        }
        if self._reply.return_token_ids:
            piece["token_ids"] = list[JsonValue](output.token_ids)
            if number not in self._begun:
                piece["prompt_token_ids"] = self._reply.prompt_of(number)
        if is_traced(output):
            piece["speculation"] = self._trace.of(number, output)
        self._begun.add(number)
        return piece

    def _logprobs(self, number: int, output: SequenceOutput) -> JsonValue:
        offset = self._text_offset[number]
        self._text_offset[number] += legacy_length(output.logprobs, self._tokenizer)
        return legacy_logprobs(output.logprobs, self._tokenizer, num_top=self._num_top, text_offset=offset)
