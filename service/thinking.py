"""Models that think between tags before they answer: where a thought begins and ends, and how it is read while it is
written."""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

BEGIN, END = "<think>", "</think>"
"""As Qwen 3, DeepSeek R1, SmolLM3 and their like write them."""


def thinks(template: str | None) -> bool:
    """Whether a chat template is one of a model that thinks."""
    return template is not None and END in template


@dataclass(frozen=True, slots=True)
class Thinking:
    """How an answer to a prompt begins."""

    has_begun: bool
    """The prompt ends within a thought; otherwise the answer may begin with one."""

    @staticmethod
    def behind(prompt: str) -> "Thinking":
        return Thinking(prompt.rstrip().endswith(BEGIN))

    def before(self, grammar: str, special_ids: Mapping[str, int]) -> str:
        """In Lark: a thought as it comes, and then what a grammar says. `special_ids`: of strings that are tokens
        outside of the text."""
        rules = [f"thought[lazy]: ANY {json.dumps(END)}", "ANY: /(.|\\n)*/", "rest: GAP answer", "GAP: /\\n*/"]
        if END in special_ids:
            rules[0] = f"thought: ANY <[{special_ids[END]}]>"
        begin = f"<[{special_ids[BEGIN]}]>" if BEGIN in special_ids else json.dumps(BEGIN)
        start = "start: thought rest" if self.has_begun else f"start: {begin} thought rest | answer"
        return "\n".join((start, *rules, f"answer: %lark {{\n{grammar}\n}}"))


class ThoughtReader:
    """Parts a thought from the answer behind it. What looks like a tag is held back until it is known."""

    def __init__(self, thinking: Thinking) -> None:
        self._held = ""
        self._state: Literal["before", "thought", "answer"] = "thought" if thinking.has_begun else "before"
        self.thinks = thinking.has_begun  # or has thought
        self._is_behind_tag = thinking.has_begun  # and nothing but line breaks since

    @property
    def answers(self) -> bool:
        """Whether nothing more of a thought can come."""
        return self._state == "answer"

    def read(self, text: str, *, ends: bool) -> tuple[str, str]:
        """What more there is of the thought, and of the answer; `ends`: it was the last of it."""
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
        """A thought stands at the beginning or nowhere."""
        text = self._held.lstrip()
        if text.startswith(BEGIN):
            self._held, self._state, self._is_behind_tag = text[len(BEGIN) :], "thought", True
            self.thinks = True
        elif ends or not BEGIN.startswith(text):
            self._state = "answer"

    def _think(self, *, ends: bool) -> str:
        thought, found, rest = self._held.partition(END)
        if not found:
            return self._take(len(thought) if ends else len(thought) - _undecided(thought))
        told = self._take(len(thought)).rstrip("\n")
        self._held, self._state, self._is_behind_tag = rest, "answer", True
        return told

    def _take(self, count: int) -> str:
        """The next characters, without line breaks behind a tag."""
        text, self._held = self._held[:count], self._held[count:]
        if self._is_behind_tag:
            text = text.lstrip("\n")
            self._is_behind_tag = not text
        return text


def _undecided(text: str) -> int:
    """Length of the end of a thought that may belong to the tag behind it: line breaks, and the tag's beginning."""
    return len(text) - len(text[: len(text) - overlap(text, END)].rstrip("\n"))


class ThoughtTokens:
    """Counts the tokens of a thought, its tags among them; a token that ends it and begins the answer is one."""

    def __init__(self, thinking: Thinking, text_of: Callable[[int], str]) -> None:
        """`text_of`: what a token adds to the text."""
        self._reader, self._text_of = ThoughtReader(thinking), text_of
        self._seen = 0
        self.count = 0

    def read(self, tokens: Iterable[int]) -> None:
        for token in tokens:
            if self._reader.answers:
                return
            self._seen += 1
            self._reader.read(self._text_of(token), ends=False)
            if self._reader.thinks:
                self.count = self._seen


def overlap(text: str, start: str) -> int:
    """Length of the longest end of the text with which `start` begins, and is longer."""
    return next((n for n in range(min(len(text), len(start) - 1), 0, -1) if text.endswith(start[:n])), 0)
