"""Prompt files: one JSON object per line, with `messages`, or `turns` (the first is used), or `prompt` as plain text.

Turns lines into prompt tokens. Knows nothing of what is done with them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, Field, model_validator

from service.errors import RequestError, StartupError
from service.prompts import Message, read_lines
from service.tokenizer import ChatTokenizer


@dataclass(frozen=True, slots=True)
class PromptSet:
    """The prompts of one file, as tokens."""

    name: str
    prompts: tuple[tuple[int, ...], ...]


class _Line(BaseModel):
    """What is read of a line; other keys, such as `id` and `task`, are for people."""

    messages: list[Message] = Field(default_factory=list)
    turns: list[str] = Field(default_factory=list)
    prompt: str = ""

    @model_validator(mode="after")
    def _has_a_prompt(self) -> "_Line":
        if not (self.messages or self.turns or self.prompt):
            raise ValueError("none of `messages`, `turns` and `prompt` says anything")
        return self


def read_prompts(file: Path, tokenizer: ChatTokenizer, *, limit: int | None = None) -> PromptSet:
    """The first `limit` prompts of a file. Raises StartupError naming file and line."""
    prompts: list[tuple[int, ...]] = []
    for place, line in read_lines(file, _Line, "prompt file"):
        try:
            prompts.append(tuple(_tokens(line, tokenizer)))
        except RequestError as error:
            raise StartupError(f"{place}: {error.message}") from error
        if limit is not None and len(prompts) == limit:
            break
    if not prompts:
        raise StartupError(f"prompt file {file} holds no prompt")
    return PromptSet(file.stem, tuple(prompts))


def refuse_too_long(prompts: Sequence[Sequence[int]], max_tokens: int, max_model_len: int, source: str) -> None:
    """Raise StartupError if a prompt leaves no room for its answer."""
    longest = max(map(len, prompts))
    if longest + max_tokens > max_model_len:
        raise StartupError(
            f"{source}: a prompt of {longest} tokens and an answer of {max_tokens} exceed "
            f"max_model_len={max_model_len}; shorten one of them or raise max_model_len"
        )


def _tokens(line: _Line, tokenizer: ChatTokenizer) -> list[int]:
    if line.messages:
        return tokenizer.render_chat([message.model_dump() for message in line.messages])
    if line.turns:
        return tokenizer.render_chat([{"role": "user", "content": line.turns[0]}])
    return tokenizer.encode(line.prompt, add_special_tokens=True)
