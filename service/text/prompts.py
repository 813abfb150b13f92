"""Read JSON Lines files of prompts for benchmarks and training, and of a target's answers. Errors name file and
line."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, Field, ValidationError, model_validator

from service.errors import RequestError, StartupError
from service.text.tokenizer import ChatTokenizer

_Line = TypeVar("_Line", bound=BaseModel)


class PromptMessage(BaseModel):
    """One message of a prompt."""

    role: str
    content: str


class Prompt(BaseModel):
    """Line of a file of training prompts."""

    id: str = Field(min_length=1)
    task: str = ""
    messages: list[PromptMessage] = Field(min_length=1)

    def tokens(self, tokenizer: ChatTokenizer) -> list[int]:
        """Render the prompt with the chat template and encode it."""
        return tokenizer.render_chat([message.model_dump() for message in self.messages])


class PromptLine(BaseModel):
    """Line of a file of benchmark prompts: `messages`, or `turns` (the first is used), or `prompt` as plain text. Other
    keys are ignored."""

    messages: list[PromptMessage] = Field(default_factory=list)
    turns: list[str] = Field(default_factory=list)
    prompt: str = ""

    @model_validator(mode="after")
    def _has_a_prompt(self) -> "PromptLine":
        if not (self.messages or self.turns or self.prompt):
            raise ValueError("`messages`, `turns` and `prompt` are all empty")
        return self

    @property
    def chat(self) -> list[dict[str, str]]:
        """Messages of the prompt; empty if it is plain text."""
        first = [PromptMessage(role="user", content=turn) for turn in self.turns[:1]]
        return [message.model_dump() for message in self.messages or first]

    def tokens(self, tokenizer: ChatTokenizer) -> list[int]:
        """Encode the prompt, rendered with the chat template unless it is plain text."""
        chat = self.chat
        return tokenizer.render_chat(chat) if chat else tokenizer.encode(self.prompt, add_special_tokens=True)


@dataclass(frozen=True, slots=True)
class PromptSet:
    """Prompts of one file, as token ids."""

    name: str
    prompts: tuple[tuple[int, ...], ...]


def read_prompts(files: Sequence[Path]) -> list[Prompt]:
    """Read training prompts, in the order of the files. Raises StartupError naming file and line."""
    found: dict[str, Prompt] = {}
    for file in files:
        before = len(found)
        for where, line in read_lines(file, Prompt, "prompt file"):
            if line.id in found:
                raise StartupError(f"{where}: the id {line.id!r} is used twice")
            found[line.id] = line
        if len(found) == before:
            raise StartupError(f"prompt file {file} holds no prompt: give lines with id, task and messages")
    return list(found.values())


def read_prompt_set(file: Path, tokenizer: ChatTokenizer, *, limit: int | None = None) -> PromptSet:
    """Read the first `limit` prompts of a benchmark file. Raises StartupError naming file and line."""
    prompts: list[tuple[int, ...]] = []
    for where, line in read_lines(file, PromptLine, "prompt file"):
        try:
            prompts.append(tuple(line.tokens(tokenizer)))
        except RequestError as error:
            raise StartupError(f"{where}: {error.message}") from error
        if limit is not None and len(prompts) == limit:
            break
    if not prompts:
        raise StartupError(f"prompt file {file} holds no prompt")
    return PromptSet(file.stem, tuple(prompts))


def refuse_too_long(prompts: Sequence[Sequence[int]], max_tokens: int, max_model_len: int, source: str) -> None:
    """Raise StartupError if a prompt and its answer exceed the context length."""
    longest = max(map(len, prompts))
    if longest + max_tokens > max_model_len:
        raise StartupError(
            f"{source}: a prompt of {longest} tokens and an answer of {max_tokens} exceed "
            f"max_model_len={max_model_len}; shorten one of them or raise max_model_len"
        )


def source_of(prompt_id: str) -> str:
    """Return the data source of a prompt: its id without the trailing number."""
    source, dash, number = prompt_id.rpartition("-")
    return source if dash and number.isdigit() else prompt_id


def read_lines(file: Path, kind: type[_Line], what: str) -> Iterator[tuple[str, _Line]]:
    """Yield the location (file and line) and content of each line that is not blank. Raises StartupError naming it."""
    try:
        content = file.read_bytes()
    except OSError as error:
        raise StartupError(f"{what} {file} cannot be read: {error}") from error
    yield from lines_of(content, kind, f"{what} {file}")


def lines_of(content: bytes, kind: type[_Line], name: str) -> Iterator[tuple[str, _Line]]:
    """Parse the content of the file `name` like `read_lines`."""
    # Only line feeds end a line of JSON: other separators may occur inside a string.
    for number, line in enumerate(content.split(b"\n"), start=1):
        where = f"{name}, line {number}"
        if not line.strip():
            continue
        try:
            parsed = kind.model_validate_json(line)
        except ValidationError as error:
            problems = "; ".join(_problem(found["loc"], found["msg"]) for found in error.errors())
            raise StartupError(f"{where}: {problems}") from None
        yield where, parsed


def _problem(path: tuple[int | str, ...], message: str) -> str:
    return f"{'.'.join(map(str, path))}: {message}" if path else message
