"""Prompt files for training: one JSON object per line with `id`, `task` and `messages`.

Checks lines and names the bad one. Knows nothing of tokens or models.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, Field, ValidationError

from service.errors import StartupError


class _Message(BaseModel):
    role: str
    content: str


class _Line(BaseModel):
    id: str = Field(min_length=1)
    task: str = ""
    messages: list[_Message] = Field(min_length=1)


@dataclass(frozen=True, slots=True)
class Prompt:
    """One conversation to be answered."""

    id: str
    task: str
    messages: tuple[dict[str, str], ...]


def read_prompts(files: Sequence[Path]) -> list[Prompt]:
    """All prompts in the order of the files. Raises StartupError naming file and line."""
    found: dict[str, Prompt] = {}
    for file in files:
        before = len(found)
        for number, line in enumerate(_text(file).split("\n"), start=1):
            if line.strip():
                prompt = _prompt(line, f"prompt file {file}, line {number}")
                if prompt.id in found:
                    raise StartupError(f"prompt file {file}, line {number}: the id {prompt.id!r} stands here again")
                found[prompt.id] = prompt
        if len(found) == before:
            raise StartupError(f"prompt file {file} holds no prompt: give lines with id, task and messages")
    return list(found.values())


def source_of(prompt_id: str) -> str:
    """The source a prompt was taken from: its id without the number at the end."""
    source, dash, number = prompt_id.rpartition("-")
    return source if dash and number.isdigit() else prompt_id


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise StartupError(f"prompt file {file} cannot be read: {error}") from error


def _prompt(line: str, place: str) -> Prompt:
    try:
        parsed = _Line.model_validate_json(line)
    except ValidationError as error:
        problem = error.errors()[0]
        where = ".".join(map(str, problem["loc"]))
        raise StartupError(f"{place}: {where + ': ' if where else ''}{problem['msg']}") from None
    return Prompt(parsed.id, parsed.task, tuple(message.model_dump() for message in parsed.messages))
