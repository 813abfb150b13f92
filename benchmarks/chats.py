"""Prompt files as messages, for what asks a server over HTTP."""

from itertools import islice
from pathlib import Path

from service.errors import StartupError
from service.prompts import PromptLine, read_lines


def read_chats(file: Path, *, limit: int | None = None) -> list[list[dict[str, str]]]:
    """The first `limit` prompts of a file as messages; plain text is what a user says.

    Raises StartupError naming file and line.
    """
    lines = [line for _, line in islice(read_lines(file, PromptLine, "prompt file"), limit)]
    if not lines:
        raise StartupError(f"prompt file {file} holds no prompt")
    return [line.chat or [{"role": "user", "content": line.prompt}] for line in lines]
