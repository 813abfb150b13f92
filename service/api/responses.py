"""`/v1/responses`: chat completions in the format of OpenAI's Responses API, with conversations that the server stores.

A stored response holds the items that its turn added to the conversation, and a reference to the previous turn.
"""

import re
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple, TypeVar

import pydantic_core
from fastapi import APIRouter
from pydantic import JsonValue, TypeAdapter
from starlette.requests import Request
from starlette.responses import Response

from service.api.body import LARGE_BODY_BYTES, parse_body, read_body
from service.api.reply import Json
from service.api.request_builder import Job, build, refuse, start
from service.api.responses_reply import ResponseReply, echo_of
from service.api.responses_schemas import (
    CallOutput,
    ClientTools,
    InputMessage,
    Item,
    ItemReference,
    PastCall,
    PastCustomCall,
    Reasoning,
    ResponsesRequest,
    ToolReference,
    function_name,
    past_call,
)
from service.api.resumption import HEADER, resumable, resume_point
from service.api.schemas import ChatCompletionRequest, text_of
from service.api.settings import Server
from service.api.sse import STREAMED, EventIds, EventStream, collect, events, json_response, unless_client_gone
from service.errors import InvalidRequest, NotFound, RequestTooLarge
from service.sampling_params import SamplingFields

Result = TypeVar("Result")

_MAX_QUOTED_CHARACTERS = 80
_MAX_STORED_BYTES = 64 * 1024**2
_ITEMS: TypeAdapter[list[Item]] = TypeAdapter(list[Item])
_RENAMED = (
    (r"^messages", "input"),
    (r"^response_format(\.json_schema)?", "text.format"),
    (r"^max_completion_tokens", "max_output_tokens"),
)
"""Patterns for field names of chat completions, with the names on this route."""
_SAME_AS_CHAT = ("stream", "store", "resume_from", "parallel_tool_calls", "metadata")
_HARMLESS: dict[str, tuple[JsonValue, ...]] = {
    "n": (1,),
    **dict.fromkeys(("logprobs", "return_token_ids"), (False,)),
    "top_logprobs": (0,),
    "prompt": (),
}
"""Fields of chat completions that this route does not support, with the values that are accepted as without effect."""


@dataclass(slots=True, eq=False)
class Turn:
    """Stored response and the items that its turn added to the conversation, as encoded JSON: its memory use is known,
    and reading it back needs no encoding."""

    previous: "Turn | None"
    items: tuple[bytes, ...]  # items that later turns read; an entry may hold several, joined by commas
    head: bytes  # the response, without braces and without `output`
    outputs: Mapping[str, bytes]  # output items of the response, by id
    num_holders: int = field(default=0, init=False)  # references: by the shelf of its owner, and by later turns
    item_bytes: int = field(init=False)  # bytes that are held while num_holders > 0
    other_bytes: int = field(init=False)  # bytes that are held while the owner can find the response
    conversation_bytes: int = field(init=False)  # size of the conversation's items up to this turn

    def __post_init__(self) -> None:
        read = {id(item) for item in self.items}
        self.item_bytes = sum(map(len, self.items))
        self.other_bytes = len(self.head) + sum(len(one) for one in self.outputs.values() if id(one) not in read)
        self.conversation_bytes = self.item_bytes + (self.previous.conversation_bytes if self.previous else 0)

    def conversation(self) -> bytes:
        """Return the items of the conversation up to this turn, in order, joined by commas. May be called from any
        thread."""
        turns = [self]
        while turns[-1].previous is not None:
            turns.append(turns[-1].previous)
        return b",".join(item for turn in reversed(turns) for item in turn.items)

    def response(self) -> bytes:
        """Return the whole response as JSON."""
        return b'{%b,"output":[%b]}' % (self.head, b",".join(self.outputs.values()))


class _Shelf:
    """Stored responses of one owner. The items of a turn are kept while it or a later turn of its conversation is
    stored."""

    def __init__(self) -> None:
        self.found: OrderedDict[str, Turn] = OrderedDict()  # keys: response ids, least recently used first
        self.items: dict[str, bytes] = {}  # items of these responses, by id
        self.num_bytes = 0

    def add(self, response_id: str, turn: Turn) -> None:
        self.found[response_id] = turn
        self.items.update(turn.outputs)
        self.num_bytes += turn.other_bytes
        self._hold(turn, 1)

    def forget(self, response_id: str) -> None:
        turn = self.found.pop(response_id)
        for item_id in turn.outputs:
            del self.items[item_id]
        turn.head, turn.outputs = b"", {}
        self.num_bytes -= turn.other_bytes
        self._hold(turn, -1)

    def _hold(self, turn: Turn | None, change: int) -> None:
        """Add (1) or remove (-1) a reference to a turn. A referenced turn itself holds a reference to its previous
        turn."""
        while turn is not None:
            turn.num_holders += change
            if turn.num_holders != (1 if change > 0 else 0):
                return
            self.num_bytes += change * turn.item_bytes
            turn = turn.previous


class ResponseStore:
    """Stores the responses of each owner (`Scope.owner`) by id, invisible to other owners.

    If all together exceed `max_bytes`, the owner with the most bytes loses its least recently used response: each of n
    owners can hold 1/n of the memory, and more while others use less. The last turn of a conversation outlives the
    earlier ones, because clients continue from it, and it keeps their items. Used on the event loop only, except
    `item`.
    """

    def __init__(self, *, max_bytes: int = _MAX_STORED_BYTES) -> None:
        self._max_bytes = max_bytes
        self._shelves: defaultdict[str, _Shelf] = defaultdict(_Shelf)

    def keep(self, owner: str, response_id: str, turn: Turn) -> None:
        """Store a response in place of any with the same id. Its previous turn may have been deleted."""
        shelf = self._shelves[owner]
        if response_id in shelf.found:
            shelf.forget(response_id)
        shelf.add(response_id, turn)
        while sum(one.num_bytes for one in self._shelves.values()) > self._max_bytes:
            fullest = max(self._shelves.values(), key=lambda one: one.num_bytes)
            fullest.forget(next(iter(fullest.found)))

    def find(self, owner: str, response_id: str) -> Turn | None:
        """Return the owner's response with this id, or None if there is none."""
        found = self._shelves[owner].found
        if response_id in found:
            found.move_to_end(response_id)
        return found.get(response_id)

    def get(self, owner: str, response_id: str) -> Turn:
        """Return the owner's response with this id. Raises NotFound."""
        turn = self.find(owner, response_id)
        if turn is None:
            message = f"Response with id '{response_id}' not found."
            raise NotFound(message, param="response_id", code="response_not_found")
        return turn

    def delete(self, owner: str, response_id: str) -> None:
        """Delete the owner's response. Raises NotFound."""
        self.get(owner, response_id)
        self._shelves[owner].forget(response_id)

    def item(self, owner: str, item_id: str) -> bytes | None:
        """Return the item with this id from the owner's responses, or None. May be called from any thread."""
        shelf = self._shelves.get(owner)
        return None if shelf is None else shelf.items.get(item_id)


class _Prepared(NamedTuple):
    """Request converted to a chat completion, with the parts that a stored response repeats."""

    chat: ChatCompletionRequest
    items: bytes  # JSON of this turn's new items, joined by commas
    echo: Json
    echo_text: bytes


def responses_router(server: Server) -> APIRouter:
    """Build the router of `/v1/responses`, with its own response store."""
    router, store = APIRouter(), ResponseStore()

    @router.post("/v1/responses", responses=STREAMED)
    async def create_response(request: Request) -> Response:
        body, runtime = await read_body(request, ResponsesRequest, server), server.runtime
        scope = server.scope_of(request, body.safety_identifier or body.user)
        previous = _previous(body, store, scope.owner)
        is_large = await _is_large(request, body, previous)

        async def away(call: Callable[[], Result]) -> Result:
            return await runtime.in_turn(scope.account, call) if is_large else call()

        async def built() -> Job:
            origin = None if resumed is None else resumed.origin
            job = await build(prepared.chat, server, scope=scope, origin=origin, described=tools.grammars)
            return _with_relaxed(tools, job, server)

        tools = await away(partial(ClientTools, body.tools or ()))
        with _renamed_errors(tools):
            find, max_bytes = partial(store.item, scope.owner), server.settings.max_request_bytes
            prepared = await away(partial(_prepared, body, tools, previous, find, max_bytes))
            resumed = resume_point(prepared.chat, request.headers.get(HEADER))
            job, ids = await unless_client_gone(request.receive, built()), EventIds()
            if body.stream:
                job, ids = await resumable(job, body, resumed, runtime)

        def keep(response: Json) -> None:
            if body.store is not False:
                store.keep(scope.owner, str(response["id"]), _turn(response, prepared, previous))

        reply = ResponseReply(job, runtime.card, runtime.tokenizer, tools, prepared.echo, keep)
        with _renamed_errors(tools):
            outputs = start(job, server, request)
        if body.stream:
            frames = events(outputs, reply, ids, done=b"", pads=job.release.pads)
            return EventStream(frames, outputs, seconds=job.release.seconds, headers=job.headers)
        response = reply.whole(await collect(request, outputs, job.release))
        return await away(partial(json_response, response, headers=job.headers))

    @router.get("/v1/responses/{response_id}")
    async def retrieve_response(request: Request, response_id: str) -> Response:
        if request.query_params.get("stream") in ("true", "1"):
            how = f"repeat its request with the header '{HEADER}'"
            raise InvalidRequest(f"Stored responses are not streamed; to resume a stream, {how}.", param="stream")
        turn = store.get(server.scope_of(request).owner, response_id)
        return Response(turn.response(), media_type="application/json")

    @router.delete("/v1/responses/{response_id}")
    async def delete_response(request: Request, response_id: str) -> Response:
        store.delete(server.scope_of(request).owner, response_id)
        return json_response({"id": response_id, "object": "response", "deleted": True})

    return router


def _previous(body: ResponsesRequest, store: ResponseStore, owner: str) -> Turn | None:
    """Return the stored turn before this one, or None if the conversation begins here. Raises InvalidRequest."""
    if body.previous_response_id is None:
        return None
    turn = store.find(owner, body.previous_response_id)
    if turn is None:
        raise InvalidRequest(
            f"Previous response with id '{body.previous_response_id}' not found.",
            param="previous_response_id",
            code="previous_response_not_found",
        )
    return turn


async def _is_large(request: Request, body: ResponsesRequest, previous: Turn | None) -> bool:
    """Whether preparing the conversation may take milliseconds; compressed bodies and references count as large."""
    num_bytes = len(await request.body()) + (0 if previous is None else previous.conversation_bytes)
    if num_bytes >= LARGE_BODY_BYTES or "content-encoding" in request.headers:
        return True
    return not isinstance(body.input, str) and any(isinstance(item, ItemReference) for item in body.input)


def _prepared(
    body: ResponsesRequest,
    tools: ClientTools,
    previous: Turn | None,
    find: Callable[[str], bytes | None],
    max_bytes: int,
) -> _Prepared:
    """Read and validate the conversation. `find`: looks up a stored item by id; `max_bytes`: limit for all stored
    items, equal to the limit of a body. Raises RequestError."""
    sent: Sequence[Item]
    sent = [InputMessage(role="user", content=body.input)] if isinstance(body.input, str) else body.input
    found = {index: _found(item, find, index) for index, item in enumerate(sent) if isinstance(item, ItemReference)}
    num_bytes = sum(map(len, found.values())) + (0 if previous is None else previous.conversation_bytes)
    if num_bytes > max_bytes:
        message = f"The stored items of this conversation are larger than {max_bytes} bytes."
        raise RequestTooLarge(message, param="input", code="request_too_large")
    new = [_parsed(found[index])[0] if index in found else item for index, item in enumerate(sent)]
    stored = [] if previous is None else _parsed(previous.conversation())
    chat, echo = _as_chat(body, [*stored, *new], len(stored), tools), echo_of(body)
    read_again = [item for item in new if not isinstance(item, Reasoning)]
    return _Prepared(
        chat, pydantic_core.to_json(read_again, exclude_none=True)[1:-1], echo, pydantic_core.to_json(echo)[1:-1]
    )


def _found(reference: ItemReference, find: Callable[[str], bytes | None], index: int) -> bytes:
    """Return the stored item that a reference names. Raises InvalidRequest."""
    found = find(reference.id)
    if found is None:
        quoted, what = reference.id[:_MAX_QUOTED_CHARACTERS], "an output item of a stored response"
        message = f"Item with id '{quoted}' not found: an 'item_reference' stands for {what}."
        raise InvalidRequest(message, param=f"input.{index}", code="item_not_found")
    return found


def _parsed(items: bytes) -> list[Item]:
    """Parse stored items, which are joined by commas."""
    return _ITEMS.validate_json(b"[%b]" % items)


def _turn(response: Json, prepared: _Prepared, previous: Turn | None) -> Turn:
    """Build the stored form of a finished response. It encodes only the answer; the rest is encoded already."""
    output: Any = response["output"]
    rest = {name: value for name, value in response.items() if name != "output" and name not in prepared.echo}
    outputs = {item["id"]: pydantic_core.to_json(item) for item in output}
    read = (outputs[item["id"]] for item in output if item["type"] != "reasoning")  # reasoning is not sent again
    head = b"%b,%b" % (pydantic_core.to_json(rest)[1:-1], prepared.echo_text)
    return Turn(previous, (*filter(None, [prepared.items]), *read), head, outputs)


def _as_chat(
    body: ResponsesRequest, items: Sequence[Item], num_stored: int, tools: ClientTools
) -> ChatCompletionRequest:
    """Convert the request to a chat completion. The first `num_stored` items are stored ones. Raises InvalidRequest."""
    messages = [{"role": "system", "content": body.instructions}] if body.instructions else []
    messages += _messages(items, num_stored)
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
    elif body.tools or choice != "auto":  # clients also send 'auto' without tools
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
    """Convert items to chat messages; a text of the assistant and the calls after it are one message. Raises
    InvalidRequest.

    A truncated call is left out, because chat templates cannot render an incomplete object.
    """
    turn: dict[str, Any] | None = None  # assistant message to which calls may be added
    for index, item in enumerate(items, start=-num_stored):
        if isinstance(item, PastCall | PastCustomCall):
            if item.status != "incomplete":
                turn = turn or {"role": "assistant", "content": None}
                turn.setdefault("tool_calls", []).append(past_call(item, index))
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


def _with_relaxed(tools: ClientTools, job: Job, server: Server) -> Job:
    """Return the job with the paths of unenforced constraints as this route names them."""
    if job.form.calling is None:
        return job
    for path in tools.grammars:
        server.note_relaxed(path)
    return replace(job, relaxed=(*map(tools.renamed, job.relaxed), *tools.grammars))


@contextmanager
def _renamed_errors(tools: ClientTools) -> Iterator[None]:
    """Raise InvalidRequest errors of the block with the field names of this route."""
    try:
        yield
    except InvalidRequest as error:
        param = error.param or ""
        renamed = tools.renamed(param)
        for pattern, name in _RENAMED:
            renamed = re.sub(pattern, name, renamed)
        message = error.message.replace(f"'{param}'", f"'{renamed}'")
        raise InvalidRequest(message, param=renamed or None, code=error.code) from error
