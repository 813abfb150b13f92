"""What an answer says, read while it is written: a thought, text, and calls of functions."""

from typing import NamedTuple

from service.thinking import Thinking, ThoughtReader
from service.tools import Call, CallReader, Piece, ToolForm


class Answer(NamedTuple):
    """A whole one."""

    thought: str
    text: str
    calls: list[Call]


class AnswerReader:
    """Reads one answer of a model that may think, where `thinking` is given, and call, where a form is."""

    def __init__(self, thinking: Thinking | None, form: ToolForm | None) -> None:
        self._thoughts = None if thinking is None else ThoughtReader(thinking)
        self._calls = None if form is None else CallReader(form)

    @property
    def num_calls(self) -> int:
        return 0 if self._calls is None else self._calls.num_calls

    def read(self, text: str, *, ends: bool) -> list[Piece]:
        """What more of the answer says; `ends`: it was the last of it."""
        thought, rest = ("", text) if self._thoughts is None else self._thoughts.read(text, ends=ends)
        pieces = [Piece("thought", thought)] if thought else []
        if self._calls is not None:
            return pieces + self._calls.read(rest, ends=ends)
        return [*pieces, Piece("text", rest)] if rest else pieces

    def whole(self, text: str) -> Answer:
        """The answer of which this is all."""
        pieces = self.read(text, ends=True)
        thought, content = ("".join(p.text for p in pieces if p.kind == kind) for kind in ("thought", "text"))
        names = [piece.text for piece in pieces if piece.kind == "name"]
        arguments = [
            "".join(p.text for p in pieces if p.kind == "arguments" and p.call == n) for n in range(len(names))
        ]
        return Answer(thought, content, [Call(*both) for both in zip(names, arguments, strict=True)])
