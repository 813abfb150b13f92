"""Prompt files for training: one JSON object per line with `id`, `task` and `messages`.

Checks lines and names the bad one. Knows nothing of tokens or models.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, Field

from service.errors import StartupError
from service.prompts import read_lines


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
        for place, line in read_lines(file, _Line, "prompt file"):
            if line.id in found:
                raise StartupError(f"{place}: the id {line.id!r} stands here again")
            messages = tuple(message.model_dump() for message in line.messages)
            found[line.id] = Prompt(line.id, line.task, messages)
        if len(found) == before:
            raise StartupError(f"prompt file {file} holds no prompt: give lines with id, task and messages")
    return list(found.values())


def source_of(prompt_id: str) -> str:
    """The source a prompt was taken from: its id without the number at the end."""
    source, dash, number = prompt_id.rpartition("-")
    return source if dash and number.isdigit() else prompt_id
