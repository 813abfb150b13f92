"""Models that think between tags before they answer: the grammar of a thought, and its parser during generation."""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

BEGIN, END = "<think>", "</think>"
"""The tags of Qwen 3, DeepSeek R1, SmolLM3 and similar models."""


def thinks(template: str | None) -> bool:
    """Whether a chat template belongs to a model that thinks."""
    return template is not None and END in template


@dataclass(frozen=True, slots=True)
class Thinking:
    """How the answer of a model that thinks begins."""

    has_begun: bool
    """Whether the prompt ends inside a thought; if not, the answer may begin with one."""

    @staticmethod
    def after(prompt: str) -> "Thinking":
        """How the answer to a rendered prompt begins."""
        return Thinking(prompt.rstrip().endswith(BEGIN))

    def grammar(self, answer: str, special_ids: Mapping[str, int]) -> str:
        """The Lark grammar of a free thought followed by an answer of the grammar `answer`. `special_ids`: token ids of
        strings that are special tokens."""
        rules = [f"thought[lazy]: ANY {json.dumps(END)}", "ANY: /(.|\\n)*/", "rest: GAP answer", "GAP: /\\n*/"]
        if END in special_ids:
            rules[0] = f"thought: ANY <[{special_ids[END]}]>"
        begin = f"<[{special_ids[BEGIN]}]>" if BEGIN in special_ids else json.dumps(BEGIN)
        start = "start: thought rest" if self.has_begun else f"start: {begin} thought rest | answer"
        return "\n".join((start, *rules, f"answer: %lark {{\n{answer}\n}}"))


class ThoughtReader:
    """Separates a thought from the answer after it. What may be a tag is held back until it is known."""

    def __init__(self, thinking: Thinking) -> None:
        self._held = ""
        self._state: Literal["before", "thought", "answer"] = "thought" if thinking.has_begun else "before"
        self.thinks = thinking.has_begun  # whether there is a thought
        self._is_after_tag = thinking.has_begun  # with nothing but line breaks in between

    @property
    def answers(self) -> bool:
        """Whether the thought, if any, is complete."""
        return self._state == "answer"

    def read(self, text: str, *, ends: bool) -> tuple[str, str]:
        """The new text of the thought and of the answer; `ends`: `text` is the last of it."""
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
        """A thought is at the beginning or absent."""
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
        """The next characters, without the line breaks after a tag."""
        text, self._held = self._held[:count], self._held[count:]
        if self._is_after_tag:
            text = text.lstrip("\n")
            self._is_after_tag = not text
        return text


def _undecided(text: str) -> int:
    """Length of the end of `text` that may belong to the closing tag: line breaks, and the beginning of the tag."""
    return len(text) - len(text[: len(text) - overlap(text, END)].rstrip("\n"))


class ThoughtTokens:
    """Counts the tokens of a thought with its tags, and a token that both ends it and begins the answer."""

    def __init__(self, thinking: Thinking, text_of: Callable[[int], str]) -> None:
        """`text_of`: the text that a token adds."""
        self._reader, self._text_of = ThoughtReader(thinking), text_of
        self._seen = 0
        self.count = 0

    def read(self, tokens: Iterable[int]) -> None:
        """Count further tokens of the answer."""
        for token in tokens:
            if self._reader.answers:
                return
            self._seen += 1
            self._reader.read(self._text_of(token), ends=False)
            if self._reader.thinks:
                self.count = self._seen


def overlap(text: str, start: str) -> int:
    """Length of the longest end of `text` that is a proper prefix of `start`."""
    return next((n for n in range(min(len(text), len(start) - 1), 0, -1) if text.endswith(start[:n])), 0)
