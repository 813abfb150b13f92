"""`/v1/responses`: chat completions in the form of OpenAI's newer API, and the store of conversations that it keeps."""

import json
import re
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pydantic_core
from fastapi import APIRouter
from pydantic import JsonValue, TypeAdapter
from starlette.requests import Request
from starlette.responses import Response

from service.api.body import parse_body, read_body
from service.api.reply import Json
from service.api.request_builder import Job, build, refuse, start
from service.api.responses_reply import ResponseReply
from service.api.responses_schemas import (
    INPUT,
    CallOutput,
    ClientTools,
    InputMessage,
    Item,
    PastCall,
    PastCustomCall,
    Reasoning,
    ResponsesRequest,
    ToolReference,
    function_name,
)
from service.api.resumption import HEADER, resumable, resume_point
from service.api.schemas import ChatCompletionRequest, text_of
from service.api.settings import Server
from service.api.sse import EventIds, EventStream, collect, events, json_response
from service.api.structured import Constraint, compiled
from service.chat_template import past_arguments
from service.errors import InvalidRequest, NotFound
from service.sampling_params import SamplingFields

_MAX_STORED_BYTES = 64 * 1024**2
_ITEMS: TypeAdapter[list[Item]] = TypeAdapter(list[Item])
_RENAMED = (
    (r"^messages", "input"),
    (r"^response_format(\.json_schema)?", "text.format"),
    (r"^max_completion_tokens", "max_output_tokens"),
)
"""Fields of chat completions, and their names on this route."""
_SAME_AS_CHAT = ("stream", "store", "resume_from", "parallel_tool_calls", "metadata")
_HARMLESS: dict[str, tuple[JsonValue, ...]] = {
    "n": (1,),
    **dict.fromkeys(("logprobs", "return_token_ids"), (False,)),
    "top_logprobs": (0,),
    "prompt": (),
}
"""Fields of chat completions that a response cannot report, with the values that have no effect."""


@dataclass(frozen=True, slots=True)
class Stored:
    """A stored response, and the items of its conversation so far."""

    response: Mapping[str, JsonValue]
    items: Sequence[JsonValue]


class ResponseStore:
    """Responses of each owner (`Scope.owner`) by id, invisible to other owners; the least recently used are evicted.

    Used on the event loop only.
    """

    def __init__(self, *, max_bytes: int = _MAX_STORED_BYTES) -> None:
        self._max_bytes = max_bytes
        self._held: OrderedDict[tuple[str, str], tuple[Stored, int]] = OrderedDict()
        self._num_bytes = 0

    def keep(self, owner: str, stored: Stored) -> None:
        """Store a response under its id; replaces the owner's one with the same id."""
        key, size = (owner, str(stored.response["id"])), len(pydantic_core.to_json([stored.response, stored.items]))
        _, replaced = self._held.pop(key, (None, 0))
        self._held[key] = stored, size
        self._num_bytes += size - replaced
        while self._num_bytes > self._max_bytes:
            _, (_, freed) = self._held.popitem(last=False)
            self._num_bytes -= freed

    def find(self, owner: str, response_id: str) -> Stored | None:
        """The owner's response with this id; None: there is none."""
        found, _ = self._held.get((owner, response_id), (None, 0))
        if found is not None:
            self._held.move_to_end((owner, response_id))
        return found

    def get(self, owner: str, response_id: str) -> Stored:
        """The owner's response with this id. Raises NotFound."""
        found = self.find(owner, response_id)
        if found is None:
            message = f"Response with id '{response_id}' not found."
            raise NotFound(message, param="response_id", code="response_not_found")
        return found

    def delete(self, owner: str, response_id: str) -> None:
        """Delete the owner's response. Raises NotFound."""
        self.get(owner, response_id)
        self._num_bytes -= self._held.pop((owner, response_id))[1]


def responses_router(server: Server) -> APIRouter:
    """The routes of responses, with a store of their own."""
    router, store = APIRouter(), ResponseStore()

    @router.post("/v1/responses")
    async def create_response(request: Request) -> Response:
        body, runtime = await read_body(request, ResponsesRequest, server), server.runtime
        scope = server.scope_of(request, body.safety_identifier or body.user)
        items, tools = _conversation(body, store, scope.owner), ClientTools(body.tools or ())
        num_stored = len(items) - (1 if isinstance(body.input, str) else len(body.input))
        with _renamed_errors(tools):
            for path, definition in tools.grammars.items():
                await compiled(Constraint(path, "lark", definition), runtime)
            chat = _as_chat(body, items, num_stored, tools)
            resumed = resume_point(chat, request.headers.get(HEADER))
            origin = None if resumed is None else resumed.origin
            job = _with_relaxed(tools, await build(chat, server, scope=scope, origin=origin), server)
            ids = EventIds()
            if chat.stream:
                job, ids = await resumable(job, body, resumed, runtime)

        def keep(response: Json) -> None:
            if body.store is not False:
                output = response["output"]
                assert isinstance(output, list)
                store.keep(scope.owner, Stored(response, [*items, *output]))

        reply = ResponseReply(job, runtime.card, runtime.tokenizer, body, tools, keep)
        with _renamed_errors(tools):
            outputs = start(job, server, request)
        if body.stream:
            frames = events(outputs, reply, ids, done=b"", pads=job.release.pads)
            return EventStream(frames, outputs, release=job.release, headers=job.headers)
        return json_response(reply.whole(await collect(request, outputs, job.release)), headers=job.headers)

    @router.get("/v1/responses/{response_id}")
    async def retrieve_response(request: Request, response_id: str) -> Response:
        if request.query_params.get("stream") in ("true", "1"):
            how = f"send the request that made it again, with '{HEADER}'"
            raise InvalidRequest(f"Stored responses are not streamed; to go on with a stream {how}.", param="stream")
        return json_response(store.get(server.scope_of(request).owner, response_id).response)

    @router.delete("/v1/responses/{response_id}")
    async def delete_response(request: Request, response_id: str) -> Response:
        store.delete(server.scope_of(request).owner, response_id)
        return json_response({"id": response_id, "object": "response", "deleted": True})

    return router


def _conversation(body: ResponsesRequest, store: ResponseStore, owner: str) -> list[JsonValue]:
    """All items of the conversation, the new ones last. Raises InvalidRequest."""
    new: list[JsonValue]
    if isinstance(body.input, str):
        new = [{"type": "message", "role": "user", "content": body.input}]
    else:
        new = [item.model_dump(mode="json", exclude_none=True) for item in body.input]
    if body.previous_response_id is None:
        return new
    found = store.find(owner, body.previous_response_id)
    if found is None:
        raise InvalidRequest(
            f"Previous response with id '{body.previous_response_id}' not found.",
            param="previous_response_id",
            code="previous_response_not_found",
        )
    return [*found.items, *new]


def _as_chat(
    body: ResponsesRequest, items: Sequence[JsonValue], num_stored: int, tools: ClientTools
) -> ChatCompletionRequest:
    """The request as a chat completion; the first `num_stored` items come from the store. Raises InvalidRequest with
    the field names of chat completions."""
    messages = [{"role": "system", "content": body.instructions}] if body.instructions else []
    messages += _messages(_ITEMS.validate_python(items), num_stored)
    fields: dict[str, Any] = {
        "model": body.model,
        "messages": messages,
        "max_completion_tokens": body.max_output_tokens,
        **{name: getattr(body, name) for name in (*SamplingFields.model_fields, *_SAME_AS_CHAT)},
        "speculation": None if body.speculation is None else body.speculation.model_dump(),
    }
    if body.tools:
        fields["tools"] = tools.functions
    choice = body.tool_choice
    if isinstance(choice, ToolReference):
        fields["tool_choice"] = {"type": "function", "function": {"name": function_name(choice)}}
    elif body.tools or choice != "auto":  # clients send 'auto' without tools, too
        fields["tool_choice"] = choice
    form = None if body.text is None else body.text.format
    if form is not None and form.type == "json_schema":
        schema = {"name": form.name or "answer", "schema": form.schema_, "strict": form.strict}
        fields["response_format"] = {"type": "json_schema", "json_schema": schema}
    elif form is not None:
        fields["response_format"] = {"type": form.type}
    extra = body.model_extra or {}
    refuse(extra, _HARMLESS)
    return parse_body(pydantic_core.to_json({**extra, **fields}), ChatCompletionRequest)


def _messages(items: Sequence[Item], num_stored: int) -> Iterator[dict[str, Any]]:
    """Items as chat messages: a text of the assistant and the calls after it are one message. Raises InvalidRequest.

    A truncated call is left out, because chat templates cannot write half an object.
    """
    turn: dict[str, Any] | None = None  # a message of the assistant, to which calls may be added
    for index, item in enumerate(items, start=-num_stored):
        if isinstance(item, PastCall | PastCustomCall):
            if item.status != "incomplete":
                turn = turn or {"role": "assistant", "content": None}
                turn.setdefault("tool_calls", []).append(_past_call(item, index))
            continue
        if turn is not None and not isinstance(item, Reasoning):
            yield turn
            turn = None
        if isinstance(item, InputMessage):
            message = {"role": item.role, "content": text_of(item.content)}
            if item.role == "assistant":
                turn = message
            else:
                yield message
        elif isinstance(item, CallOutput):
            yield {"role": "tool", "tool_call_id": item.call_id, "content": text_of(item.output)}
    if turn is not None:
        yield turn


def _past_call(item: PastCall | PastCustomCall, index: int) -> dict[str, Any]:
    """A call in the form of chat completions; `index`: of the item in the request. Raises InvalidRequest."""
    if isinstance(item, PastCustomCall):
        arguments = json.dumps({INPUT: item.input}, ensure_ascii=False)
    else:
        arguments, _ = past_arguments(item.arguments, f"input.{index}.arguments")
    function = {"name": function_name(item), "arguments": arguments}
    return {"id": item.call_id, "type": "function", "function": function}


def _with_relaxed(tools: ClientTools, job: Job, server: Server) -> Job:
    """The job with the paths of unenforced constraints as this route names them."""
    if job.calling is None:
        return job
    for path in tools.grammars:
        server.note_relaxed(path)
    relaxed = (*map(tools.renamed, job.calling.relaxed), *tools.grammars)
    return replace(job, calling=replace(job.calling, relaxed=relaxed))


@contextmanager
def _renamed_errors(tools: ClientTools) -> Iterator[None]:
    """Raise errors of the block under the names that fields have on this route."""
    try:
        yield
    except InvalidRequest as error:
        param = error.param or ""
        renamed = tools.renamed(param)
        for pattern, name in _RENAMED:
            renamed = re.sub(pattern, name, renamed)
        message = error.message.replace(f"'{param}'", f"'{renamed}'")
        raise InvalidRequest(message, param=renamed or None, code=error.code) from error
