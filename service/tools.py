"""Calls of a client's functions: how families of models write them, the grammar of an answer that may hold them, and
how they are read while they are written.

    opening {"name": "NAME", "KEY": ARGUMENTS} (between {...})* closing
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from pydantic import JsonValue

from service.grammars import json_rule
from service.json_schemas import DEFINITIONS
from service.thinking import overlap

_NAME = '{"name": "'  # in the form of grammars of JSON
_TEXT = "TEXT: /(.|\\n)*/"


@dataclass(frozen=True, slots=True)
class ToolForm:
    """How a family of models writes calls."""

    marker: str  # in the chat templates of those who write so
    trigger: str  # with which calls begin, anywhere in an answer; empty: at its beginning or nowhere
    lead: str  # between trigger and first call
    between: str
    closing: str
    key: str = "arguments"

    @property
    def opening(self) -> str:
        return self.trigger + self.lead

    def written(self, calls: Iterable["Call"]) -> str:
        """Calls of the past, as the model would have written them."""
        objects = (f'{_NAME}{call.name}", "{self.key}": {call.arguments}}}' for call in calls)
        return self.opening + self.between.join(objects) + self.closing


HERMES = ToolForm("<tool_call>", "<tool_call>", "\n", "\n</tool_call>\n<tool_call>\n", "\n</tool_call>")
"""Of Hermes and Qwen, and of models that were taught none."""
MISTRAL = ToolForm("[TOOL_CALLS]", "[TOOL_CALLS]", " [", ", ", "]")
LLAMA_3 = ToolForm('"parameters"', "", "", "; ", "", key="parameters")


def form_of(template: str | None) -> ToolForm | None:
    """The form that a chat template teaches; None: it knows no tools."""
    if template is None or "tools" not in template:
        return None
    return next((form for form in (HERMES, MISTRAL, LLAMA_3) if form.marker in template), HERMES)


class Call(NamedTuple):
    """One call of a function."""

    name: str
    arguments: str  # JSON


@dataclass(frozen=True, slots=True)
class Calling:
    """What an answer may call, and whether it must."""

    form: ToolForm
    schemas: Mapping[str, Mapping[str, JsonValue]]  # of the arguments, by function
    must: bool = False
    parallel: bool = True
    relaxed: tuple[str, ...] = ()  # places of the request where the grammar allows more than a schema

    def grammar(self, answer: Mapping[str, JsonValue] | None, special_ids: Mapping[str, int]) -> str:
        """In Lark. `answer`: the schema of an answer that calls nothing, which is any text otherwise; `special_ids`: of
        strings that are tokens outside of the text."""
        form = self.form
        calls = " ".join(filter(None, ("call", f"({_literal(form.between)} call)*" * self.parallel)))
        rest = " ".join(filter(None, (_literal(form.lead), calls, _literal(form.closing))))
        trigger = f"<[{special_ids[form.trigger]}]>" if form.trigger in special_ids else _literal(form.trigger)
        objects = [json_rule(self._call_of(name, schema)) for name, schema in self.schemas.items()]
        lines = [f"call: {' | '.join(objects)}", f"calls: {rest}", _TEXT]
        if self.must:
            return "\n".join((f"start: {trigger} calls", *lines))
        if answer is not None:
            return "\n".join((f"start: {trigger} calls | answer", f"answer: {json_rule(dict(answer))}", *lines))
        if not form.trigger:
            return "\n".join(("start: calls | other", "other: /([^{](.|\\n)*)?/", *lines))
        if form.trigger in special_ids:
            return "\n".join((f"start: TEXT | TEXT {trigger} calls", *lines))
        return "\n".join(("start: TEXT | head calls", f"head[lazy]: TEXT {trigger}", *lines))

    def _call_of(self, name: str, schema: Mapping[str, JsonValue]) -> dict[str, JsonValue]:
        """A call as a schema; what the arguments' schema refers to stands where references look for it."""
        return {
            **{beside: schema[beside] for beside in DEFINITIONS if beside in schema},
            "type": "object",
            "properties": {"name": {"const": name}, self.form.key: dict(schema)},
            "required": ["name", self.form.key],
            "additionalProperties": False,
        }


def _literal(text: str) -> str:
    return json.dumps(text) if text else ""


class Piece(NamedTuple):
    """A part of an answer: a thought, text beside calls, the name with which a call begins, or more of its
    arguments."""

    kind: Literal["thought", "text", "name", "arguments"]
    text: str
    call: int = 0  # number of the call


class CallReader:
    """Reads an answer while it is written. What looks like the beginning of a call is held back until it is known."""

    def __init__(self, form: ToolForm, *, must: bool = False, holds_calls: bool = False) -> None:
        """`must`: the answer is nothing but calls; `holds_calls`: each is told when it is whole, for the answer may be
        cut anywhere."""
        self._form = form
        self._must = must
        self._holds_calls = holds_calls
        self._held = ""
        self._state: Literal["text", "name", "arguments", "behind"] = "text"
        self._depth, self._in_string, self._is_escaped = 0, False, False
        self._was_text = False
        self._pending: list[Piece] = []  # of the present call
        self.num_calls = 0  # that are whole

    def read(self, text: str, *, ends: bool, is_cut: bool = False) -> list[Piece]:
        """What more of the answer says; `ends`: it was the last of it; `is_cut`: it would have gone on."""
        return [*self._push(text), *(self._finish(is_cut) if ends else ())]

    def _push(self, text: str) -> Iterator[Piece]:
        self._held += text
        before = None
        while before != (self._state, self._held):
            before = self._state, self._held
            yield from getattr(self, f"_read_{self._state}")()

    def _finish(self, is_cut: bool) -> Iterator[Piece]:
        """What was held back, where it turned out to be text and not the beginning of a call."""
        begins_call = self._must or (is_cut and self._held.startswith(self._form.trigger))
        if self._state == "text" and self._held and not begins_call:
            yield Piece("text", self._held)
        self._held, self._pending = "", []

    def _read_text(self) -> Iterator[Piece]:
        start = self._form.opening + _NAME
        text, found, rest = self._held.partition(start)
        if not self._form.trigger and (self._was_text or (text and not start.startswith(text))):
            text, found, rest = self._held, "", ""  # calls stand at the beginning or nowhere
        elif not found:
            certain = len(text) - overlap(text, start)
            text, rest = text[:certain], text[certain:]
        self._held = rest
        if text:
            self._was_text = True
            yield Piece("text", text)
        if found:
            self._enter("name", rest)

    def _read_name(self) -> Iterator[Piece]:
        name, found, rest = self._held.partition(f'", "{self._form.key}": ')
        if found:
            self._enter("arguments", rest)
            self._pending.append(Piece("name", name, self.num_calls))
            yield from self._told(is_whole=False)

    def _read_arguments(self) -> Iterator[Piece]:
        end = self._end_of_value(self._held)
        if end:
            self._pending.append(Piece("arguments", self._held[:end], self.num_calls))
        self._held = self._held[end:]
        is_whole = end > 0 and not self._depth
        if is_whole:
            self.num_calls += 1
            self._enter("behind", self._held)
        yield from self._told(is_whole=is_whole)

    def _told(self, *, is_whole: bool) -> Iterator[Piece]:
        """What may be told of the present call by now."""
        if is_whole or not self._holds_calls:
            yield from self._pending
            self._pending = []

    def _read_behind(self) -> Iterator[Piece]:
        """Behind the arguments: the object's end, and another call or none."""
        start = "}" + self._form.between + _NAME
        if self._held.startswith(start):
            self._enter("name", self._held[len(start) :])
        yield from ()

    def _enter(self, state: Literal["name", "arguments", "behind"], held: str) -> None:
        self._state, self._held = state, held

    def _end_of_value(self, text: str) -> int:
        """How many characters belong to an object, which may go on."""
        for place, character in enumerate(text):
            if self._is_escaped:
                self._is_escaped = False
            elif self._in_string:
                self._is_escaped, self._in_string = character == "\\", character != '"'
            elif character == '"':
                self._in_string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if not self._depth:
                    return place + 1
        return len(text)


_TOLD = """# Tools

You may call one or more functions to assist with the user query. Here are their signatures:
<tools>
{tools}
</tools>

For each call answer with a JSON object with the function's name and arguments within <tool_call> tags:
<tool_call>
{{"name": "function-name", "arguments": {{"argument": "value"}}}}
</tool_call>"""


def told(messages: Sequence[Mapping[str, JsonValue]], tools: Sequence[JsonValue]) -> list[dict[str, JsonValue]]:
    """Messages for a template that knows no tools: what there is to call stands in the system message, calls in the
    text of whoever called, results in one of the user's."""
    plain: list[dict[str, JsonValue]] = []
    for message in messages:
        calls = message.get("tool_calls")
        if isinstance(calls, list) and calls:
            written = HERMES.written(_past_calls(calls))
            text = str(message["content"] or "")
            break_before = "\n" if text and not text.endswith("\n") else ""
            plain.append({"role": "assistant", "content": text + break_before + written})
        elif message["role"] == "tool":
            result = f"<tool_response>\n{message['content']}\n</tool_response>"
            if plain and plain[-1].get("is_result"):
                plain[-1]["content"] = f"{plain[-1]['content']}\n{result}"
            else:
                plain.append({"role": "user", "content": result, "is_result": True})
        else:
            plain.append(dict(message))
    if tools:
        words = _TOLD.format(tools="\n".join(json.dumps(tool) for tool in tools))
        system = plain.pop(0)["content"] if plain and plain[0]["role"] == "system" else ""
        plain.insert(0, {"role": "system", "content": f"{system}\n\n{words}".lstrip("\n")})
    return [{name: value for name, value in message.items() if name != "is_result"} for message in plain]


def _past_calls(calls: Sequence[JsonValue]) -> Iterator[Call]:
    for call in calls:
        assert isinstance(call, dict)
        function = call["function"]
        assert isinstance(function, dict)
        yield Call(str(function["name"]), json.dumps(function["arguments"]))
