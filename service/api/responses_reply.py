"""How `/v1/responses` words an answer: items of text and of calls, whole or as events in order."""

import secrets
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from pydantic import JsonValue

from service.api.errors import error_body
from service.api.reply import Body, Choice, Reply
from service.api.request_builder import Job
from service.api.responses_schemas import ResponsesRequest
from service.engine.requests import FinishReason, SequenceOutput
from service.errors import RequestError
from service.runtime import ModelCard
from service.tokenizer import ChatTokenizer
from service.tools import CallReader, Piece, new_call_id


class _Item(NamedTuple):
    """An item of the output while it grows."""

    kind: str  # message or function_call
    id: str
    place: int  # among the items
    head: Body  # what does not grow

    def whole(self, text: str, status: str) -> Body:
        if self.kind == "message":
            content: list[JsonValue] = [] if status == "in_progress" else [_part(text)]
            return {**self.head, "status": status, "content": content}
        return {**self.head, "status": status, "arguments": text}


class ResponseReply(Reply):
    """One answer; `keep` is told the finished response."""

    whole_object = chunk_object = "response"

    def __init__(
        self,
        job: Job,
        card: ModelCard,
        tokenizer: ChatTokenizer,
        asked: ResponsesRequest,
        keep: Callable[[Body], None],
    ) -> None:
        super().__init__(job, card, tokenizer)
        self._asked = asked
        self._keep = keep
        self._id = f"resp_{secrets.token_hex(24)}"
        self._reader = None if job.calling is None else CallReader(job.calling.form)
        self._done: list[JsonValue] = []
        self._open: _Item | None = None
        self._text = ""  # of the open item
        self._sequence = 0
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
        for piece in self._pieces(output):
            yield from self._told(piece)
        if output.finish_reason is not None:
            self._reason = output.finish_reason
            if not self._done and self._open is None:  # an answer of no words is one, too
                yield from self._begin("message")
            yield from self._close("completed" if self._reason == "stop" else "incomplete")

    def trailer(self) -> Iterator[Body]:
        response = self._finished()
        yield self._event(f"response.{response['status']}", response=response)

    def failure(self, error: RequestError) -> Body:
        return self._event("error", **error_body(error)["error"])

    def _choice(self, number: int, choice: Choice) -> Body:
        raise AssertionError("a response has items, no choices")

    def _pieces(self, output: SequenceOutput) -> list[Piece]:
        if self._reader is None:
            return [Piece("text", output.text)] if output.text else []
        return self._reader.read(output.text, ends=output.finish_reason is not None)

    def _told(self, piece: Piece) -> Iterator[Body]:
        """What a piece of the answer makes of the items."""
        if piece.kind == "name":
            yield from self._close("completed")
            yield from self._begin("function_call", name=piece.text)
            return
        if self._open is None:
            yield from self._begin("message")
        assert self._open is not None, "an item has just begun"
        self._text += piece.text
        where: Body = {"item_id": self._open.id, "output_index": self._open.place, "delta": piece.text}
        if piece.kind == "arguments":
            yield self._event("response.function_call_arguments.delta", **where)
        else:
            yield self._event("response.output_text.delta", **where, content_index=0, logprobs=[])

    def _begin(self, kind: str, *, name: str = "") -> Iterator[Body]:
        head: Body = {"id": f"{'msg' if kind == 'message' else 'fc'}_{secrets.token_hex(12)}", "type": kind}
        more: Body = {"call_id": new_call_id(), "name": name}
        head |= {"role": "assistant"} if kind == "message" else more
        self._open, self._text = _Item(kind, str(head["id"]), len(self._done), head), ""
        item = self._open
        yield self._event("response.output_item.added", output_index=item.place, item=item.whole("", "in_progress"))
        if kind == "message":
            yield self._event("response.content_part.added", **_of_part(item), part=_part(""))

    def _close(self, status: str) -> Iterator[Body]:
        if self._open is None:
            return
        item, text, self._open = self._open, self._text, None
        whole = item.whole(text, status)
        self._done.append(whole)
        if item.kind == "message":
            yield self._event("response.output_text.done", **_of_part(item), text=text, logprobs=[])
            yield self._event("response.content_part.done", **_of_part(item), part=_part(text))
        else:
            where: Body = {"item_id": item.id, "output_index": item.place, "name": item.head["name"]}
            yield self._event("response.function_call_arguments.done", **where, arguments=text)
        yield self._event("response.output_item.done", output_index=item.place, item=whole)

    def _finished(self) -> Body:
        response = self._response("completed" if self._reason == "stop" else "incomplete")
        self._keep(response)
        return response

    def _event(self, kind: str, /, **fields: JsonValue) -> Body:
        self._sequence += 1
        return {"type": kind, "sequence_number": self._sequence - 1, **fields}

    def _response(self, status: str) -> Body:
        asked, ends = self._asked, status != "in_progress"
        told: Body = asked.model_dump(mode="json", by_alias=True, exclude_none=True)
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._job.created,
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
            "input_tokens_details": usage["prompt_tokens_details"],
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage["total_tokens"],
        }


def _part(text: str) -> Body:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _of_part(item: _Item) -> Body:
    return {"item_id": item.id, "output_index": item.place, "content_index": 0}
