"""Stage 1: the target answers the prompts, with the engine that serves it; answers are lines of JSON.

A drafter is to predict what this target says, so only its own words teach. Half of the prompts are answered greedily
and half at a temperature; which, and with what noise, follows from seed and prompt id, so a run that is taken up again
writes what it would have written. A line is whole or it is not there: what a kill tore off is dropped when the file is
opened again.
"""

import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, Field

from service.assembly import assemble
from service.config import ServiceConfig
from service.engine.engine import Engine
from service.engine.requests import GenerationRequest, SamplingParams
from service.errors import RequestError, StartupError
from service.logging import bar, say
from service.prompts import Prompt, read_lines, read_prompts
from service.tokenizer import ChatTokenizer

FEWEST_TOKENS = 4
"""Shorter responses teach nothing: a block predicts the tokens after the next."""

_GREEDY_SHARE = 0.5
_WARM = (0.7, 1.0)


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
    found = [response for file in files for response in _responses(file)]
    kept = [response for response in found if len(response.response) >= FEWEST_TOKENS]
    if not kept:
        names = ", ".join(str(file) for file in files)
        raise StartupError(f"{names}: no response of at least {FEWEST_TOKENS} tokens; answer more prompts first")
    return Answered(kept, len(found) - len(kept))


class ResponseFile:
    """A file of responses that grows."""

    def __init__(self, path: Path) -> None:
        self._drop_torn_line(path)
        self.done = {response.id for response in _responses(path)} if path.exists() else set()
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


def _responses(file: Path) -> Iterator[Response]:
    return (response for _, response in read_lines(file, Response, "response file"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Answering:
    """How the prompts are answered."""

    max_tokens: int = 256
    concurrency: int = 16
    seed: int = 0
    deadline: float | None = None  # by time.monotonic(): take up no further prompt after it; None = answer all


def regenerate(
    engine: Engine,
    tokenizer: ChatTokenizer,
    prompts: Sequence[Prompt],
    out: Path,
    how: Answering,
    *,
    max_model_len: int,
) -> int:
    """Append the missing answers to `out`; returns how many responses it holds then. Raises StartupError."""
    file = ResponseFile(out)
    try:
        missing = [prompt for prompt in prompts if prompt.id not in file.done]
        before = len(file.done)
        if before:
            say(f"{out}: {before} responses are there already, {len(missing)} prompts to answer")
        if missing:
            _Answers(engine, tokenizer, file, how, max_model_len).answer(missing)
        return len(file.done)
    finally:
        file.close()


def answer_prompts(config: ServiceConfig, prompts: Sequence[Path], out: Path, how: Answering) -> None:
    """Stage 1 as a command runs it."""
    wanted = read_prompts(prompts)
    assembly = assemble(config)
    regenerate(assembly.engine(), assembly.tokenizer, wanted, out, how, max_model_len=assembly.limits.max_model_len)


class _Answers:
    """Keeps the engine busy with as many prompts as may run together."""

    def __init__(
        self, engine: Engine, tokenizer: ChatTokenizer, file: ResponseFile, how: Answering, max_model_len: int
    ) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._file = file
        self._how = how
        self._most_prompt_tokens = max_model_len - how.max_tokens
        self._running: dict[str, Response] = {}
        self._too_long = 0
        self._tokens = 0

    def answer(self, prompts: Sequence[Prompt]) -> None:
        began = time.perf_counter()
        waiting = iter(prompts)
        with bar("answering", len(prompts)) as advance:
            finished = 0
            while self._refill(waiting, is_first=finished == 0 and not self._tokens):
                finished += self._step()
                rate = self._tokens / (time.perf_counter() - began)
                advance(finished, f"{self._tokens} tokens, {rate:.0f} tokens/s")
        if self._too_long:
            say(f"left out {self._too_long} prompts of more than {self._most_prompt_tokens} tokens")

    def _refill(self, waiting: Iterator[Prompt], *, is_first: bool) -> bool:
        """Whether anything runs. The first prompts are answered however late it is: without them nothing follows."""
        is_late = self._how.deadline is not None and time.monotonic() > self._how.deadline and not is_first
        while not is_late and len(self._running) < self._how.concurrency:
            prompt = next(waiting, None)
            if prompt is None:
                break
            self._start(prompt)
        return bool(self._running)

    def _start(self, prompt: Prompt) -> None:
        tokens = self._tokens_of(prompt)
        if len(tokens) > self._most_prompt_tokens:
            self._too_long += 1
            return
        drawn = random.Random(f"{self._how.seed} {prompt.id}")
        temperature = 0.0 if drawn.random() < _GREEDY_SHARE else drawn.choice(_WARM)
        sampling = SamplingParams(seed=drawn.getrandbits(63), max_tokens=self._how.max_tokens, temperature=temperature)
        self._engine.add(GenerationRequest(request_id=prompt.id, prompt=tokens, sampling=sampling))
        self._running[prompt.id] = Response(
            id=prompt.id, task=prompt.task, temperature=temperature, prompt=tokens, response=[]
        )

    def _tokens_of(self, prompt: Prompt) -> list[int]:
        try:
            return self._tokenizer.render_chat(prompt.messages)
        except RequestError as error:
            raise StartupError(f"prompt {prompt.id}: {error.message}") from error

    def _step(self) -> int:
        """How many answers one engine step completed."""
        finished = 0
        for output in self._engine.step().outputs:
            response = self._running[output.request_id]
            response.response.extend(output.token_ids)
            self._tokens += len(output.token_ids)
            if output.finish_reason is None:
                continue
            del self._running[output.request_id]
            if output.finish_reason == "error":
                raise StartupError(f"prompt {output.request_id}: {output.error}; leave it out of the prompt file")
            self._file.append(response)
            finished += 1
        return finished
