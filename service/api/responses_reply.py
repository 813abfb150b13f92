"""Response format of `/v1/responses`: output items (reasoning, messages, calls), whole or as a stream of events."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

from pydantic import JsonValue

from service.api.errors import error_event
from service.api.reply import Json, Totals
from service.api.request_builder import Job
from service.api.responses_schemas import INPUT, ClientTools, ResponsesRequest
from service.engine.requests import FinishReason, SequenceOutput
from service.errors import RequestError
from service.runtime import ModelCard
from service.text.answers import Piece
from service.text.tokenizer import ChatTokenizer


class _ItemType(NamedTuple):
    """Field and event names of one type of output item."""

    name: str
    prefix: str  # prefix of ids
    events: str  # name of the events that extend an item
    part: Json | None  # fixed fields of the content part; None for calls, which have none
    field: str = "text"  # name of the field that is streamed


_DUMPED = {"metadata", "text", "tool_choice", "tools"}
_NO_LOGPROBS: Json = {"logprobs": []}
_MESSAGE = _ItemType("message", "msg", "output_text", {"type": "output_text", "annotations": [], **_NO_LOGPROBS})
_THOUGHT = _ItemType("reasoning", "rs", "reasoning_text", {"type": "reasoning_text"})
_CALL = _ItemType("function_call", "fc", "function_call_arguments", None, "arguments")
_CUSTOM = _ItemType("custom_tool_call", "ctc", "custom_tool_call_input", None, "input")


class _Item(NamedTuple):
    """Output item that is being streamed."""

    kind: _ItemType
    position: int  # index among the output items
    head: Json  # fields that are complete from the start

    @property
    def location(self) -> Json:
        """Fields by which events refer to the item."""
        inside: Json = {} if self.kind.part is None else {"content_index": 0}
        return {"item_id": self.head["id"], "output_index": self.position, **inside}

    @property
    def extra(self) -> Json:
        """Additional fields of the item's text events."""
        return _NO_LOGPROBS if self.kind is _MESSAGE else {}

    def part(self, text: str) -> Json:
        """Build the item's content part with this text."""
        return {**(self.kind.part or {}), "text": text}

    def whole(self, text: str, status: str) -> Json:
        """Build the item with this text and status."""
        if self.kind.part is None:
            return {**self.head, "status": status, self.kind.field: text}
        content: list[JsonValue] = [] if status == "in_progress" else [self.part(text)]
        return {**self.head, "status": status, "content": content}


class ResponseReply:
    """Builds the response of a job, whole or as events, and passes the finished response to `keep`."""

    def __init__(
        self,
        job: Job,
        card: ModelCard,
        tokenizer: ChatTokenizer,
        tools: ClientTools,
        echo: Json,
        keep: Callable[[Json], None],
    ) -> None:
        """`echo`: the fields that repeat the request (`echo_of`)."""
        self._job = job
        self._card = card
        self._totals = Totals(job, card, tokenizer)
        self._tools = tools
        self._echo = echo
        self._keep = keep
        self._reader = job.reader()
        self._done: list[JsonValue] = []
        self._open: _Item | None = None
        self._text = ""  # text of the open item
        self._reason: FinishReason | None = None
        self._has_begun = False

    def whole(self, outputs: Iterable[SequenceOutput]) -> Json:
        """Build the body of an unstreamed answer."""
        for output in outputs:
            for _ in self.chunks(output):
                pass
        return self._finished()

    def chunks(self, output: SequenceOutput) -> Iterator[Json]:
        """Yield the events of one engine output."""
        self._totals.add(output)
        if not self._has_begun:
            self._has_begun = True
            yield self._event("response.created", response=self._response("in_progress"))
            yield self._event("response.in_progress", response=self._response("in_progress"))
        for piece in self._reader.read(output.text, ends=output.finish_reason is not None, is_cut=output.is_cut):
            yield from self._events_of(piece)
        if output.finish_reason is not None:
            self._reason = output.finish_reason
            if not self._done and self._open is None:  # an empty answer has an empty message
                yield from self._begin(_MESSAGE, role="assistant")
            yield from self._close("completed" if self._reason == "stop" else "incomplete")

    def trailer(self) -> Iterator[Json]:
        """Yield the event that holds the finished response."""
        response = self._finished()
        yield self._event(f"response.{response['status']}", response=response)

    def failure(self, error: RequestError) -> Json:
        """Build the event that ends a failed stream."""
        return {**error_event(error)}

    def numbered(self, chunk: Mapping[str, JsonValue], number: int) -> Mapping[str, JsonValue]:
        """Return the event with its sequence number."""
        return {**chunk, "sequence_number": number}

    def _events_of(self, piece: Piece) -> Iterator[Json]:
        """Yield the events of one piece of the answer. A piece may end an item and begin another."""
        if piece.kind == "name":
            yield from self._close("completed")
            tool, call_id = self._tools.find(piece.text), self._job.call_id(0, piece.call)
            within: Json = {} if tool.namespace is None else {"namespace": tool.namespace}
            kind = _CUSTOM if tool.type == "custom" else _CALL
            yield from self._begin(kind, call_id=call_id, name=tool.name, **within)
            return
        if piece.kind == "thought" and self._open is None:
            yield from self._begin(_THOUGHT, summary=[])
        elif piece.kind == "text" and (self._open is None or self._open.kind is not _MESSAGE):
            yield from self._close("completed")
            yield from self._begin(_MESSAGE, role="assistant")
        assert self._open is not None, "an item has begun"
        self._text += piece.text
        if self._open.kind is not _CUSTOM:  # a custom call's text is known only when its JSON is complete
            yield self._delta(self._open, piece.text)

    def _delta(self, item: _Item, text: str) -> Json:
        return self._event(f"response.{item.kind.events}.delta", **item.location, delta=text, **item.extra)

    def _begin(self, kind: _ItemType, **more: JsonValue) -> Iterator[Json]:
        head: Json = {"id": self._job.id_of(kind.prefix, len(self._done)), "type": kind.name, **more}
        self._open, self._text = _Item(kind, len(self._done), head), ""
        item = self._open
        yield self._event("response.output_item.added", output_index=item.position, item=item.whole("", "in_progress"))
        if kind.part is not None:
            yield self._event("response.content_part.added", **item.location, part=item.part(""))

    def _close(self, status: str) -> Iterator[Json]:
        if self._open is None:
            return
        item, text, self._open = self._open, self._text, None
        if item.kind.part is None:
            arguments = _parsed(text)
            status = "incomplete" if arguments is None else "completed"
            if item.kind is _CUSTOM:
                text = "" if arguments is None else str(arguments[INPUT])
                yield self._delta(item, text)
        whole = item.whole(text, status)
        self._done.append(whole)
        named: Json = {"name": item.head["name"]} if item.kind is _CALL else {}
        whole_text: Json = {item.kind.field: text, **item.extra, **named}
        yield self._event(f"response.{item.kind.events}.done", **item.location, **whole_text)
        if item.kind.part is not None:
            yield self._event("response.content_part.done", **item.location, part=item.part(text))
        yield self._event("response.output_item.done", output_index=item.position, item=whole)

    def _finished(self) -> Json:
        response = self._response("completed" if self._reason == "stop" else "incomplete")
        self._keep(response)
        return response

    def _event(self, kind: str, /, **fields: JsonValue) -> Json:
        return {"type": kind, **fields}

    def _response(self, status: str) -> Json:
        ends = status != "in_progress"
        return {
            "id": f"resp_{self._job.origin.uid}",
            "object": "response",
            "created_at": self._job.origin.created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "output": list(self._done) if ends else [],
            "reasoning": {"effort": None, "summary": None},
            "truncation": "disabled",
            "usage": self._usage() if ends else None,
            "system_fingerprint": self._card.system_fingerprint,
            "seed": self._job.sampling.seed,
            **self._echo,
        }

    def _usage(self) -> Json:
        usage = self._totals.usage()
        return {
            "input_tokens": usage["prompt_tokens"],
            # Clients' types require `cache_write_tokens`, the tokens billed for being cached.
            "input_tokens_details": {"cached_tokens": self._totals.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": self._totals.reasoning_tokens},
            "total_tokens": usage["total_tokens"],
        }


def echo_of(request: ResponsesRequest) -> Json:
    """Build the response fields that repeat the request, with defaults for omitted fields."""
    sent: Json = request.model_dump(mode="json", by_alias=True, exclude_none=True, include=_DUMPED)
    return {
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "metadata": sent.get("metadata", {}),
        "model": request.model,
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "previous_response_id": request.previous_response_id,
        "store": request.store is not False,
        "temperature": 1.0 if request.temperature is None else request.temperature,
        "text": sent.get("text", {"format": {"type": "text"}}),
        "tool_choice": sent.get("tool_choice", "auto"),
        "tools": sent.get("tools", []),
        "top_p": 1.0 if request.top_p is None else request.top_p,
        "user": request.user,
    }


def _parsed(arguments: str) -> dict[str, JsonValue] | None:
    """Parse the arguments of a call. Returns None if they are truncated."""
    try:
        found: dict[str, JsonValue] = json.loads(arguments)
    except ValueError:
        return None
    return found
