"""Files of JSON lines: prompts to bench or to train with, and a target's answers. Bad lines are named."""

from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from service.errors import StartupError

_Line = TypeVar("_Line", bound=BaseModel)


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
