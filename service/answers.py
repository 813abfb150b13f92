"""What an answer says, read while it is written: a thought, text, and calls of functions."""

from typing import NamedTuple

from service.thinking import Thinking, ThoughtReader
from service.tools import Call, CallReader, Piece


class Answer(NamedTuple):
    """A whole one."""

    thought: str
    text: str
    calls: list[Call]


class AnswerReader:
    """Reads one answer of a model that may think, where `thinking` is given, and call, where `calls` reads them."""

    def __init__(self, thinking: Thinking | None, calls: CallReader | None) -> None:
        self._thoughts = None if thinking is None else ThoughtReader(thinking)
        self._calls = calls

    @property
    def num_calls(self) -> int:
        """Calls that are whole."""
        return 0 if self._calls is None else self._calls.num_calls

    def read(self, text: str, *, ends: bool, is_cut: bool = False) -> list[Piece]:
        """What more of the answer says; `ends`: it was the last of it; `is_cut`: it would have gone on."""
        thought, rest = ("", text) if self._thoughts is None else self._thoughts.read(text, ends=ends)
        pieces = [Piece("thought", thought)] if thought else []
        if self._calls is not None:
            return pieces + self._calls.read(rest, ends=ends, is_cut=is_cut)
        return [*pieces, Piece("text", rest)] if rest else pieces

    def whole(self, text: str, *, is_cut: bool = False) -> Answer:
        """The answer of which this is all."""
        pieces = self.read(text, ends=True, is_cut=is_cut)
        thought, content = ("".join(p.text for p in pieces if p.kind == kind) for kind in ("thought", "text"))
        names = [piece.text for piece in pieces if piece.kind == "name"]
        arguments = [
            "".join(p.text for p in pieces if p.kind == "arguments" and p.call == n) for n in range(len(names))
        ]
        return Answer(thought, content, [Call(*both) for both in zip(names, arguments, strict=True)])
