"""`POST /v1/responses`: the same completions under the form that OpenAI's clients ask for first, with conversations
that the server remembers."""

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pydantic_core
from fastapi import APIRouter
from pydantic import JsonValue, TypeAdapter
from starlette.requests import Request
from starlette.responses import Response

from service.api.body import parse_body, read_body
from service.api.reply import Body
from service.api.request_builder import Job, build, refuse, start
from service.api.response_store import ResponseStore, Stored
from service.api.responses_reply import ResponseReply
from service.api.responses_schemas import (
    CallOutput,
    InputMessage,
    Item,
    NamedTool,
    PastCall,
    PastCustomCall,
    Reasoning,
    ResponsesRequest,
)
from service.api.responses_tools import INPUT, ClientTools, function_name
from service.api.resumption import HEADER, Unmarked, marked, taken_by
from service.api.schemas import ChatCompletionRequest, text_of
from service.api.settings import Server
from service.api.sse import EventStream, Marks, collect, events, whole
from service.api.structured import Wish, compiled
from service.errors import InvalidRequest
from service.sampling_params import SamplingFields

_ITEMS: TypeAdapter[list[Item]] = TypeAdapter(list[Item])
_RENAMED = (
    (r"^messages", "input"),
    (r"^response_format(\.json_schema)?", "text.format"),
    (r"^max_completion_tokens", "max_output_tokens"),
)
"""Fields by how completions call them."""
_SAME_AS_CHAT = ("stream", "store", "resume_from", "parallel_tool_calls", "metadata")
_HARMLESS: dict[str, tuple[JsonValue, ...]] = {
    "n": (1,),
    **dict.fromkeys(("logprobs", "return_token_ids"), (False,)),
    "top_logprobs": (0,),
    "prompt": (),
}
"""What chat completions can do and a response has no place for, with the values that ask for nothing."""


def responses_router(server: Server) -> APIRouter:
    router, store = APIRouter(), ResponseStore()

    @router.post("/v1/responses")
    async def create_response(request: Request) -> Response:
        body, runtime = await read_body(request, ResponsesRequest, server), server.runtime
        scope = server.scope_of(request, body)
        items, tools = _conversation(body, store, scope.owner), ClientTools(body.tools or ())
        num_stored = len(items) - (1 if isinstance(body.input, str) else len(body.input))
        with _by_our_names(tools):
            for place, definition in tools.grammars.items():
                await compiled(Wish(place, "lark", definition), runtime)
            chat = _as_chat(body, items, num_stored, tools)
            taken = taken_by(chat, request.headers.get(HEADER))
            origin = None if taken is None else taken.origin
            job = _told_by(tools, await build(chat, server, scope=scope, origin=origin), server)
            marks: Marks = Unmarked()
            if chat.stream:
                job, marks = await marked(job, body, taken, runtime)

        def keep(response: Body) -> None:
            if body.store is not False:
                output = response["output"]
                assert isinstance(output, list)
                store.keep(scope.owner, Stored(response, [*items, *output]))

        reply = ResponseReply(job, runtime.card, runtime.tokenizer, body, tools, keep)
        with _by_our_names(tools):
            outputs = start(job, server, request)
        if body.stream:
            frames = events(outputs, reply, marks, done=b"", pads=job.release.pads)
            return EventStream(frames, outputs, release=job.release, headers=job.headers)
        return whole(reply.whole(await collect(request, outputs, job.release)), headers=job.headers)

    @router.get("/v1/responses/{response_id}")
    async def retrieve_response(request: Request, response_id: str) -> Response:
        if request.query_params.get("stream") in ("true", "1"):
            how = f"send the request that made it again, with '{HEADER}'"
            raise InvalidRequest(f"Stored responses are not streamed; to go on with a stream {how}.", param="stream")
        return whole(store.get(server.scope_of(request).owner, response_id).response)

    @router.delete("/v1/responses/{response_id}")
    async def delete_response(request: Request, response_id: str) -> Response:
        store.delete(server.scope_of(request).owner, response_id)
        return whole({"id": response_id, "object": "response", "deleted": True})

    return router


def _conversation(body: ResponsesRequest, store: ResponseStore, owner: str) -> list[JsonValue]:
    """All items so far, the new ones last. Raises InvalidRequest."""
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
    """The same as a chat completion; the first `num_stored` items are of the server's. Raises InvalidRequest, by that
    one's names."""
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
    if isinstance(choice, NamedTool):
        fields["tool_choice"] = {"type": "function", "function": {"name": function_name(choice)}}
    elif body.tools or choice != "auto":  # clients send it where there is nothing to call, too
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
    """What the assistant says and the calls behind it are one message. Raises InvalidRequest.

    A call that a length cut off is left out: chat templates cannot write half an object.
    """
    turn: dict[str, Any] | None = None  # of the assistant's, which may go on
    for place, item in enumerate(items, start=-num_stored):
        if isinstance(item, PastCall | PastCustomCall):
            if item.status != "incomplete":
                turn = turn or {"role": "assistant", "content": None}
                turn.setdefault("tool_calls", []).append(_past_call(item, place))
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


def _past_call(item: PastCall | PastCustomCall, place: int) -> dict[str, Any]:
    """`place`: among the items of the request. Raises InvalidRequest."""
    arguments = json.dumps({INPUT: item.input}) if isinstance(item, PastCustomCall) else item.arguments
    try:
        json.loads(arguments or "{}")
    except ValueError as error:
        param = f"input.{place}.arguments"
        raise InvalidRequest(f"Invalid value for '{param}': no valid JSON: {error}.", param=param) from error
    function = {"name": function_name(item), "arguments": arguments}
    return {"id": item.call_id, "type": "function", "function": function}


def _told_by(tools: ClientTools, job: Job, server: Server) -> Job:
    """The job with the places that it is not held to by their names on this route."""
    if job.calling is None:
        return job
    for place in tools.grammars:
        server.note_relaxed(place)
    relaxed = (*map(tools.renamed, job.calling.relaxed), *tools.grammars)
    return replace(job, calling=replace(job.calling, relaxed=relaxed))


@contextmanager
def _by_our_names(tools: ClientTools) -> Iterator[None]:
    try:
        yield
    except InvalidRequest as error:
        raise _renamed(error, tools) from error


def _renamed(error: InvalidRequest, tools: ClientTools) -> InvalidRequest:
    """With the field's name on this route."""
    param = error.param or ""
    renamed = tools.renamed(param)
    for theirs, ours in _RENAMED:
        renamed = re.sub(theirs, ours, renamed)
    if renamed == param:
        return error
    return InvalidRequest(error.message.replace(f"'{param}'", f"'{renamed}'"), param=renamed, code=error.code)
