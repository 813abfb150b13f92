"""How `/v1/responses` words an answer: items of text and of calls, whole or as events in order."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

from pydantic import JsonValue

from service.api.errors import error_event
from service.api.reply import Body, Choice, Reply
from service.api.request_builder import Job
from service.api.responses_schemas import ResponsesRequest
from service.api.responses_tools import INPUT, ClientTools
from service.engine.requests import FinishReason, SequenceOutput
from service.errors import RequestError
from service.runtime import ModelCard
from service.tokenizer import ChatTokenizer
from service.tools import Piece


class _Kind(NamedTuple):
    """Of items."""

    name: str
    prefix: str  # of ids
    events: str  # of how one grows
    part: Body | None  # what its content is one of; None: it is a call
    says: str = "text"  # where it has what grows


_NO_LOGPROBS: Body = {"logprobs": []}
_MESSAGE = _Kind("message", "msg", "output_text", {"type": "output_text", "annotations": [], **_NO_LOGPROBS})
_THOUGHT = _Kind("reasoning", "rs", "reasoning_text", {"type": "reasoning_text"})
_CALL = _Kind("function_call", "fc", "function_call_arguments", None, "arguments")
_CUSTOM = _Kind("custom_tool_call", "ctc", "custom_tool_call_input", None, "input")


class _Item(NamedTuple):
    """An item of the output while it grows."""

    kind: _Kind
    place: int  # among the items
    head: Body  # what does not grow

    @property
    def where(self) -> Body:
        """It, in events."""
        inside: Body = {} if self.kind.part is None else {"content_index": 0}
        return {"item_id": self.head["id"], "output_index": self.place, **inside}

    @property
    def beside(self) -> Body:
        """What events of its text hold, too."""
        return _NO_LOGPROBS if self.kind is _MESSAGE else {}

    def part(self, text: str) -> Body:
        return {**(self.kind.part or {}), "text": text}

    def whole(self, text: str, status: str) -> Body:
        if self.kind.part is None:
            return {**self.head, "status": status, self.kind.says: text}
        content: list[JsonValue] = [] if status == "in_progress" else [self.part(text)]
        return {**self.head, "status": status, "content": content}


class ResponseReply(Reply):
    """One answer; `keep` is told the finished response."""

    whole_object = chunk_object = "response"

    def __init__(
        self,
        job: Job,
        card: ModelCard,
        tokenizer: ChatTokenizer,
        asked: ResponsesRequest,
        tools: ClientTools,
        keep: Callable[[Body], None],
    ) -> None:
        super().__init__(job, card, tokenizer)
        self._asked = asked
        self._tools = tools
        self._keep = keep
        self._id = f"resp_{job.origin.uid}"
        self._reader = job.reader()
        self._done: list[JsonValue] = []
        self._open: _Item | None = None
        self._text = ""  # of the open item
        self._reason: FinishReason | None = None
        self._has_begun = False

    def whole(self, outputs: Iterable[SequenceOutput]) -> Body:
        for output in outputs:
            for _ in self.chunks(output):
                pass
        return self._finished()

    def chunks(self, output: SequenceOutput) -> Iterator[Body]:
        self._count(output)
        if not self._has_begun:
            self._has_begun = True
            yield self._event("response.created", response=self._response("in_progress"))
            yield self._event("response.in_progress", response=self._response("in_progress"))
        for piece in self._reader.read(output.text, ends=output.finish_reason is not None, is_cut=output.is_cut):
            yield from self._told(piece)
        if output.finish_reason is not None:
            self._reason = output.finish_reason
            if not self._done and self._open is None:  # an answer of no words is one, too
                yield from self._begin(_MESSAGE, role="assistant")
            yield from self._close("completed" if self._reason == "stop" else "incomplete")

    def trailer(self) -> Iterator[Body]:
        response = self._finished()
        yield self._event(f"response.{response['status']}", response=response)

    def failure(self, error: RequestError) -> Body:
        return {**error_event(error)}

    def numbered(self, chunk: Mapping[str, JsonValue], number: int) -> Mapping[str, JsonValue]:
        return {**chunk, "sequence_number": number}

    def _choice(self, number: int, choice: Choice) -> Body:
        raise AssertionError("a response has items, no choices")

    def _told(self, piece: Piece) -> Iterator[Body]:
        """What a piece of the answer makes of the items."""
        if piece.kind == "name":
            yield from self._close("completed")
            tool, call_id = self._tools.find(piece.text), self._job.call_id(0, piece.call)
            within: Body = {} if tool.namespace is None else {"namespace": tool.namespace}
            yield from self._begin(_CUSTOM if tool.is_custom else _CALL, call_id=call_id, name=tool.name, **within)
            return
        if piece.kind == "thought" and self._open is None:
            yield from self._begin(_THOUGHT, summary=[])
        elif piece.kind == "text" and (self._open is None or self._open.kind is not _MESSAGE):
            yield from self._close("completed")
            yield from self._begin(_MESSAGE, role="assistant")
        assert self._open is not None, "an item has begun"
        self._text += piece.text
        if self._open.kind is not _CUSTOM:  # whose text is known when it is whole
            yield self._delta(self._open, piece.text)

    def _delta(self, item: _Item, text: str) -> Body:
        return self._event(f"response.{item.kind.events}.delta", **item.where, delta=text, **item.beside)

    def _begin(self, kind: _Kind, **more: JsonValue) -> Iterator[Body]:
        head: Body = {"id": self._job.id_of(kind.prefix, len(self._done)), "type": kind.name, **more}
        self._open, self._text = _Item(kind, len(self._done), head), ""
        item = self._open
        yield self._event("response.output_item.added", output_index=item.place, item=item.whole("", "in_progress"))
        if kind.part is not None:
            yield self._event("response.content_part.added", **item.where, part=item.part(""))

    def _close(self, status: str) -> Iterator[Body]:
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
        named: Body = {"name": item.head["name"]} if item.kind is _CALL else {}
        whole_text: Body = {item.kind.says: text, **item.beside, **named}
        yield self._event(f"response.{item.kind.events}.done", **item.where, **whole_text)
        if item.kind.part is not None:
            yield self._event("response.content_part.done", **item.where, part=item.part(text))
        yield self._event("response.output_item.done", output_index=item.place, item=whole)

    def _finished(self) -> Body:
        response = self._response("completed" if self._reason == "stop" else "incomplete")
        self._keep(response)
        return response

    def _event(self, kind: str, /, **fields: JsonValue) -> Body:
        return {"type": kind, **fields}

    def _response(self, status: str) -> Body:
        asked, ends = self._asked, status != "in_progress"
        told: Body = asked.model_dump(mode="json", by_alias=True, exclude_none=True)
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._job.origin.created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": asked.instructions,
            "max_output_tokens": asked.max_output_tokens,
            "metadata": told.get("metadata", {}),
            "model": asked.model,
            "output": list(self._done) if ends else [],
            "parallel_tool_calls": asked.parallel_tool_calls is not False,
            "previous_response_id": asked.previous_response_id,
            "reasoning": {"effort": None, "summary": None},
            "store": asked.store is not False,
            "temperature": 1.0 if asked.temperature is None else asked.temperature,
            "text": told.get("text", {"format": {"type": "text"}}),
            "tool_choice": told.get("tool_choice", "auto"),
            "tools": told.get("tools", []),
            "top_p": 1.0 if asked.top_p is None else asked.top_p,
            "truncation": "disabled",
            "usage": self._response_usage() if ends else None,
            "user": asked.user,
            "system_fingerprint": self._card.system_fingerprint,
            "seed": self._job.requests[0].sampling.seed,
        }

    def _response_usage(self) -> Body:
        usage = self._usage()
        return {
            "input_tokens": usage["prompt_tokens"],
            # Clients' types ask for the second one: tokens that one would pay for to have them kept.
            "input_tokens_details": {"cached_tokens": sum(self._cached_tokens.values()), "cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": self._reasoning_tokens},
            "total_tokens": usage["total_tokens"],
        }


def _parsed(arguments: str) -> dict[str, JsonValue] | None:
    """Of a call; None: a length cut it off."""
    try:
        found: dict[str, JsonValue] = json.loads(arguments)
    except ValueError:
        return None
    return found
