"""Files of JSON lines: prompts to bench or to train with, and a target's answers. Bad lines are named."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, Field, ValidationError

from service.errors import StartupError

_Line = TypeVar("_Line", bound=BaseModel)


class Message(BaseModel):
    """One message of a conversation."""

    role: str
    content: str


class _PromptLine(BaseModel):
    id: str = Field(min_length=1)
    task: str = ""
    messages: list[Message] = Field(min_length=1)


@dataclass(frozen=True, slots=True)
class Prompt:
    """One conversation to be answered."""

    id: str
    task: str
    messages: tuple[dict[str, str], ...]


def read_prompts(files: Sequence[Path]) -> list[Prompt]:
    """Prompts to train with, in the order of the files. Raises StartupError naming file and line."""
    found: dict[str, Prompt] = {}
    for file in files:
        before = len(found)
        for place, line in read_lines(file, _PromptLine, "prompt file"):
            if line.id in found:
                raise StartupError(f"{place}: the id {line.id!r} stands here again")
            found[line.id] = Prompt(line.id, line.task, tuple(message.model_dump() for message in line.messages))
        if len(found) == before:
            raise StartupError(f"prompt file {file} holds no prompt: give lines with id, task and messages")
    return list(found.values())


def source_of(prompt_id: str) -> str:
    """The source a prompt was taken from: its id without the number at the end."""
    source, dash, number = prompt_id.rpartition("-")
    return source if dash and number.isdigit() else prompt_id


def read_lines(file: Path, kind: type[_Line], what: str) -> Iterator[tuple[str, _Line]]:
    """Name of the place and content of each line that is not blank. Raises StartupError naming file and line."""
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise StartupError(f"{what} {file} cannot be read: {error}") from error
    # Only line feeds end a line of JSON: other separators may stand inside a string.
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            place = f"{what} {file}, line {number}"
            yield place, _parsed(line, kind, place)


def _parsed(line: str, kind: type[_Line], place: str) -> _Line:
    try:
        return kind.model_validate_json(line)
    except ValidationError as error:
        problems = "; ".join(_problem(found["loc"], found["msg"]) for found in error.errors())
        raise StartupError(f"{place}: {problems}") from None


def _problem(place: tuple[int | str, ...], message: str) -> str:
    return f"{'.'.join(map(str, place))}: {message}" if place else message
