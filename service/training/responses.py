"""What the target answered, as lines of JSON: written one by one, read again after any kind of interruption.

A line is whole or it is not there: what a kill tore off is dropped when the file is opened again.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, Field, ValidationError

from service.errors import StartupError

FEWEST_TOKENS = 4
"""Shorter responses teach nothing: a block predicts the tokens after the next."""


class Response(BaseModel):
    """One answer, as token ids. A response that ended by itself ends with the token that ended it."""

    id: str
    task: str = ""
    temperature: float = Field(ge=0)
    prompt: list[int] = Field(min_length=1)
    response: list[int]

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + len(self.response)


@dataclass(frozen=True, slots=True)
class Answered:
    """The content of some response files."""

    responses: list[Response]
    too_short: int  # left out

    @property
    def num_tokens(self) -> int:
        return sum(response.num_tokens for response in self.responses)

    @property
    def num_response_tokens(self) -> int:
        return sum(len(response.response) for response in self.responses)


def read_responses(files: Sequence[Path]) -> Answered:
    """All responses long enough to teach. Raises StartupError naming file and line, or when there are none."""
    found = [response for file in files for response in _lines(file)]
    kept = [response for response in found if len(response.response) >= FEWEST_TOKENS]
    if not kept:
        names = ", ".join(str(file) for file in files)
        raise StartupError(f"{names}: no response of at least {FEWEST_TOKENS} tokens; answer more prompts first")
    return Answered(kept, len(found) - len(kept))


class ResponseFile:
    """A file of responses that grows."""

    def __init__(self, path: Path) -> None:
        self._drop_torn_line(path)
        self.done = {response.id for response in _lines(path)} if path.exists() else set()
        self._stream = path.open("a", encoding="utf-8")

    def append(self, response: Response) -> None:
        """Written at once, so that a kill costs at most this line."""
        try:
            self._stream.write(response.model_dump_json() + "\n")
            self._stream.flush()
        except OSError as error:
            raise StartupError(f"{self._stream.name}: {error}; free some space and start again: it goes on") from error
        self.done.add(response.id)

    def close(self) -> None:
        self._stream.close()

    @staticmethod
    def _drop_torn_line(path: Path) -> None:
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            return
        content = path.read_bytes()
        whole = content.rfind(b"\n") + 1
        if whole < len(content):
            with path.open("r+b") as stream:
                stream.truncate(whole)


def _lines(file: Path) -> Iterator[Response]:
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise StartupError(f"response file {file} cannot be read: {error}") from error
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            yield _response(line, f"response file {file}, line {number}")


def _response(line: str, place: str) -> Response:
    try:
        return Response.model_validate_json(line)
    except ValidationError as error:
        problem = error.errors()[0]
        where = ".".join(map(str, problem["loc"]))
        raise StartupError(f"{place}: {where + ': ' if where else ''}{problem['msg']}") from None
