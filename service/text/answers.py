"""Parts of an answer: reasoning between tags, function calls, and text. Builds their grammars and parses them from
streamed text."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from pydantic import JsonValue

from service.text.chat_template import CALL_BEGINS, Call, ToolForm
from service.text.grammars import Steps, json_rule
from service.text.schema_keywords import DEFINITIONS

BEGIN, END = "<think>", "</think>"
"""Reasoning tags of Qwen 3, DeepSeek R1, SmolLM3 and similar models."""
_TEXT = "TEXT: /(.|\\n)*/"


def thinks(template: str | None) -> bool:
    """Whether a chat template belongs to a reasoning model."""
    return template is not None and END in template


@dataclass(frozen=True, slots=True)
class Thinking:
    """Start of a reasoning model's answer, which determines its grammar and its parsing."""

    has_begun: bool
    """Whether the prompt ends with an open tag; otherwise the answer may begin with one."""

    @staticmethod
    def after(prompt: str) -> "Thinking":
        """Detect from the end of a rendered prompt how the answer begins."""
        return Thinking(prompt.rstrip().endswith(BEGIN))

    def grammar(self, answer: str, special_ids: Mapping[str, int]) -> str:
        """Build the Lark grammar of unconstrained reasoning followed by `answer`, a grammar in Lark syntax.
        `special_ids`: ids of special tokens by name."""
        rules = [f"thought[lazy]: ANY {json.dumps(END)}", "ANY: /(.|\\n)*/", "rest: GAP answer", "GAP: /\\n*/"]
        if END in special_ids:
            rules[0] = f"thought: ANY <[{special_ids[END]}]>"
        begin = f"<[{special_ids[BEGIN]}]>" if BEGIN in special_ids else json.dumps(BEGIN)
        start = "start: thought rest" if self.has_begun else f"start: {begin} thought rest | answer"
        return "\n".join((start, *rules, f"answer: %lark {{\n{answer}\n}}"))


class ThoughtReader:
    """Separates reasoning from the answer in streamed text. Text that may be part of a tag is held back."""

    def __init__(self, thinking: Thinking) -> None:
        self._held = ""
        self._state: Literal["before", "thought", "answer"] = "thought" if thinking.has_begun else "before"
        self.thinks = thinking.has_begun  # whether reasoning has begun
        self._is_after_tag = thinking.has_begun  # whether only line breaks came since the tag

    @property
    def answers(self) -> bool:
        """Whether the reasoning, if any, is complete."""
        return self._state == "answer"

    def read(self, text: str, *, ends: bool) -> tuple[str, str]:
        """Parse more text. Returns new reasoning and new answer text; `ends`: `text` is the last piece."""
        self._held += text
        thought = answer = ""
        if self._state == "before":
            self._begin(ends=ends)
        if self._state == "thought":
            thought = self._think(ends=ends)
        if self._state == "answer":
            answer = self._take(len(self._held))
        return thought, answer

    def _begin(self, *, ends: bool) -> None:
        """Detect the opening tag, which can only be at the beginning."""
        text = self._held.lstrip()
        if text.startswith(BEGIN):
            self._held, self._state, self._is_after_tag = text[len(BEGIN) :], "thought", True
            self.thinks = True
        elif ends or not BEGIN.startswith(text):
            self._state = "answer"

    def _think(self, *, ends: bool) -> str:
        thought, found, rest = self._held.partition(END)
        if not found:
            return self._take(len(thought) if ends else len(thought) - _undecided(thought))
        text = self._take(len(thought)).rstrip("\n")
        self._held, self._state, self._is_after_tag = rest, "answer", True
        return text

    def _take(self, count: int) -> str:
        """Take the next characters, without line breaks that follow a tag."""
        text, self._held = self._held[:count], self._held[count:]
        if self._is_after_tag:
            text = text.lstrip("\n")
            self._is_after_tag = not text
        return text


def _undecided(text: str) -> int:
    """Return the length of the suffix that may belong to the closing tag: line breaks and a prefix of the tag."""
    return len(text) - len(text[: len(text) - overlap(text, END)].rstrip("\n"))


class ThoughtTokens:
    """Counts reasoning tokens, tags included. A token that spans the end of the reasoning is counted."""

    def __init__(self, thinking: Thinking, text_of: Callable[[int], str]) -> None:
        """`text_of`: maps the next token to the text that it adds."""
        self._reader, self._text_of = ThoughtReader(thinking), text_of
        self._seen = 0
        self.count = 0

    def read(self, tokens: Iterable[int]) -> None:
        """Process further tokens of the answer."""
        for token in tokens:
            if self._reader.answers:
                return
            self._seen += 1
            self._reader.read(self._text_of(token), ends=False)
            if self._reader.thinks:
                self.count = self._seen


def overlap(text: str, start: str) -> int:
    """Return the length of the longest suffix of `text` that is a proper prefix of `start`."""
    return next((n for n in range(min(len(text), len(start) - 1), 0, -1) if text.endswith(start[:n])), 0)


@dataclass(frozen=True, slots=True)
class Calling:
    """Rules for the function calls of an answer: their syntax, whether there must be one, and whether there may be
    several."""

    form: ToolForm
    must: bool = False
    parallel: bool = True
    short_ids: bool = False  # call ids must have nine letters and digits

    def grammar(
        self,
        schemas: Mapping[str, Mapping[str, JsonValue]],
        answer: Mapping[str, JsonValue] | None,
        special_ids: Mapping[str, int],
    ) -> Steps[str]:
        """Build the answer's Lark grammar, one function per step. `schemas`: argument schemas by function name;
        `answer`: schema of an answer without calls, or None if it may be any text; `special_ids`: ids of special tokens
        by name."""
        form = self.form
        calls = " ".join(filter(None, ("call", f"({_literal(form.between)} call)*" * self.parallel)))
        rest = " ".join(filter(None, (_literal(form.lead), calls, _literal(form.closing))))
        trigger = f"<[{special_ids[form.trigger]}]>" if form.trigger in special_ids else _literal(form.trigger)
        objects = []
        for name, schema in schemas.items():
            yield
            objects.append(json_rule(self._call_of(name, schema)))
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
        """Build the schema of a call. Definitions move from the arguments' schema to the top level, where references
        expect them."""
        return {
            **{group: schema[group] for group in DEFINITIONS if group in schema},
            "type": "object",
            "properties": {"name": {"const": name}, self.form.key: dict(schema)},
            "required": ["name", self.form.key],
            "additionalProperties": False,
        }


def _literal(text: str) -> str:
    return json.dumps(text) if text else ""


class Piece(NamedTuple):
    """Piece of an answer: reasoning, text outside calls, the name of a new call, or more of its arguments."""

    kind: Literal["thought", "text", "name", "arguments"]
    text: str
    call: int = 0  # index of the call


class CallReader:
    """Splits a streamed answer into text and calls. Text that may be the start of a call is held back."""

    def __init__(self, form: ToolForm, *, must: bool = False, holds_calls: bool = False) -> None:
        """`must`: the answer consists of calls only; `holds_calls`: report each call only when complete, because a stop
        string may cut the answer anywhere."""
        self._form = form
        self._must = must
        self._holds_calls = holds_calls
        self._held = ""
        self._state: Literal["text", "name", "arguments", "after"] = "text"
        self._depth, self._in_string, self._is_escaped = 0, False, False
        self._was_text = False
        self._pending: list[Piece] = []  # pieces of the current call that are not reported yet
        self.num_calls = 0  # complete calls

    def read(self, text: str, *, ends: bool, is_cut: bool = False) -> list[Piece]:
        """Parse more text. `ends`: it is the last piece; `is_cut`: a limit or stop string ended the answer."""
        return [*self._push(text), *(self._finish(is_cut) if ends else ())]

    def _push(self, text: str) -> Iterator[Piece]:
        self._held += text
        before = None
        while before != (self._state, self._held):
            before = self._state, self._held
            yield from getattr(self, f"_read_{self._state}")()

    def _finish(self, is_cut: bool) -> Iterator[Piece]:
        """Release held-back text if it did not begin a call."""
        begins_call = self._must or (is_cut and self._held.startswith(self._form.trigger))
        if self._state == "text" and self._held and not begins_call:
            yield Piece("text", self._held)
        self._held, self._pending = "", []

    def _read_text(self) -> Iterator[Piece]:
        start = self._form.opening + CALL_BEGINS
        text, found, rest = self._held.partition(start)
        if not self._form.trigger and (self._was_text or (text and not start.startswith(text))):
            text, found, rest = self._held, "", ""  # calls can only be at the beginning
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
            yield from self._released(is_whole=False)

    def _read_arguments(self) -> Iterator[Piece]:
        end = self._end_of_value(self._held)
        if end:
            self._pending.append(Piece("arguments", self._held[:end], self.num_calls))
        self._held = self._held[end:]
        is_whole = end > 0 and not self._depth
        if is_whole:
            self.num_calls += 1
            self._enter("after", self._held)
        yield from self._released(is_whole=is_whole)

    def _released(self, *, is_whole: bool) -> Iterator[Piece]:
        """Yield the pieces of the current call that can be reported now."""
        if is_whole or not self._holds_calls:
            yield from self._pending
            self._pending = []

    def _read_after(self) -> Iterator[Piece]:
        """Read the end of the call's object, and the beginning of the next call."""
        start = "}" + self._form.between + CALL_BEGINS
        if self._held.startswith(start):
            self._enter("name", self._held[len(start) :])
        yield from ()

    def _enter(self, state: Literal["name", "arguments", "after"], held: str) -> None:
        self._state, self._held = state, held

    def _end_of_value(self, text: str) -> int:
        """Return the number of characters up to the end of the current JSON object, or of all if it is incomplete."""
        for index, character in enumerate(text):
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
                    return index + 1
        return len(text)


class AnswerReader:
    """Splits a streamed answer into reasoning, text and calls. `thinking` is None for models without reasoning, `calls`
    if the request allows no calls."""

    def __init__(self, thinking: Thinking | None, calls: CallReader | None) -> None:
        self._thoughts = None if thinking is None else ThoughtReader(thinking)
        self._calls = calls

    @property
    def num_calls(self) -> int:
        """Number of complete calls."""
        return 0 if self._calls is None else self._calls.num_calls

    def read(self, text: str, *, ends: bool, is_cut: bool = False) -> list[Piece]:
        """Parse more text. `ends`: it is the last piece; `is_cut`: a limit or stop string ended the answer."""
        thought, rest = ("", text) if self._thoughts is None else self._thoughts.read(text, ends=ends)
        pieces = [Piece("thought", thought)] if thought else []
        if self._calls is not None:
            return pieces + self._calls.read(rest, ends=ends, is_cut=is_cut)
        return [*pieces, Piece("text", rest)] if rest else pieces

    def whole(self, text: str, *, is_cut: bool = False) -> tuple[str, str, list[Call]]:
        """Parse a complete answer. Returns its reasoning, its text and its calls."""
        pieces = self.read(text, ends=True, is_cut=is_cut)
        thought, content = ("".join(p.text for p in pieces if p.kind == kind) for kind in ("thought", "text"))
        names = [piece.text for piece in pieces if piece.kind == "name"]
        arguments = [
            "".join(p.text for p in pieces if p.kind == "arguments" and p.call == n) for n in range(len(names))
        ]
        return thought, content, [Call(*both) for both in zip(names, arguments, strict=True)]
