"""Stage 1 of training: the target answers prompts, on the engine that serves it; answers are written as JSON lines.

Half of the prompts are answered greedily, half at a temperature. Temperature and noise follow from seed and prompt id,
so that a resumed run writes the same answers as an uninterrupted one.
"""

import random
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from pydantic import BaseModel, Field

from service.assembly import assemble
from service.config import ServiceConfig
from service.engine.engine import Engine
from service.engine.requests import GenerationRequest, SamplingParams, Submission
from service.errors import RequestError, StartupError
from service.logging import bar, say
from service.text.prompts import Prompt, lines_of, read_lines, read_prompts
from service.text.tokenizer import ChatTokenizer

FEWEST_TOKENS = 4
"""Fewest tokens of a response to train on: a block predicts the tokens after the next one."""

_GREEDY_SHARE = 0.5
_WARM = (0.7, 1.0)


class Response(BaseModel):
    """A line of a response file: prompt and answer as token ids, including the end token if the model ended it."""

    id: str
    task: str = ""
    temperature: float = Field(ge=0)
    prompt: list[int] = Field(min_length=1)
    response: list[int]

    @property
    def num_tokens(self) -> int:
        """Length of prompt and response, in tokens."""
        return len(self.prompt) + len(self.response)


def read_responses(files: Sequence[Path]) -> list[Response]:
    """Read all responses that are long enough to train on. Raises StartupError for a bad line, naming file and line, or
    if there is no such response."""
    found = [response for file in files for _, response in read_lines(file, Response, "response file")]
    kept = [response for response in found if len(response.response) >= FEWEST_TOKENS]
    if not kept:
        names = ", ".join(str(file) for file in files)
        raise StartupError(f"{names}: no response of at least {FEWEST_TOKENS} tokens; answer more prompts first")
    if len(kept) < len(found):
        say(f"left out {len(found) - len(kept)} responses that are too short to train on")
    return kept


_BEGINS = b'{"id":"'
"""First bytes of every line of a response file."""


class ResponseFile:
    """An append-only file of responses, which a resumed run continues."""

    def __init__(self, path: Path) -> None:
        """Open or create the file, and cut off an incomplete last line. Raises StartupError if it cannot be written, or
        if it holds something else; it is then left unchanged."""
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
            content = path.read_bytes()
            whole, _, torn = content.rpartition(b"\n")
            self.done = {line.id for _, line in lines_of(whole, Response, f"response file {path}")}
            if torn[: len(_BEGINS)] != _BEGINS[: len(torn)]:
                raise StartupError(f"response file {path} does not end with a response: give another file")
            self._stream = path.open("a", encoding="utf-8")
            self._stream.truncate(len(content) - len(torn))  # drops a line that a killed process left incomplete
        except OSError as error:
            raise StartupError(f"response file {path} cannot be written ({error}): give another file") from error

    def append(self, response: Response) -> None:
        """Append a response and flush it, so that a killed process loses at most this line. Raises StartupError."""
        try:
            self._stream.write(response.model_dump_json() + "\n")
            self._stream.flush()
        except OSError as error:
            raise StartupError(f"{self.path}: {error}; free some space and start again to resume") from error
        self.done.add(response.id)

    def close(self) -> None:
        """Close the file."""
        self._stream.close()


@dataclass(frozen=True, slots=True)
class Answering:
    """Options of stage 1: length of answers, concurrency, seed and deadline."""

    max_tokens: int = 256
    concurrency: int = 16
    seed: int = 0
    deadline: float | None = None  # time.monotonic() after which no further prompt is begun; None answers all prompts


def regenerate(
    engine: Engine,
    tokenizer: ChatTokenizer,
    prompts: Sequence[Prompt],
    file: ResponseFile,
    how: Answering,
    *,
    max_model_len: int,
) -> int:
    """Answer the prompts that have no answer in the file yet, and append the answers; returns the number of responses
    in the file. Raises StartupError."""
    missing = [prompt for prompt in prompts if prompt.id not in file.done]
    if file.done:
        say(f"{file.path}: {len(file.done)} responses are there already, {len(missing)} prompts to answer")
    pending = [_request_of(tokenizer, prompt, how) for prompt in missing]
    most = max_model_len - how.max_tokens
    fitting = [(request, response) for request, response in pending if len(request.prompt) <= most]
    if len(fitting) < len(pending):
        say(f"left out {len(pending) - len(fitting)} prompts of more than {most} tokens")
    _answer(engine, fitting, file, how)
    return len(file.done)


def _request_of(tokenizer: ChatTokenizer, prompt: Prompt, how: Answering) -> tuple[GenerationRequest, Response]:
    """Build a prompt's request, and its response without tokens. Raises StartupError."""
    try:
        tokens = prompt.tokens(tokenizer)
    except RequestError as error:
        raise StartupError(f"prompt {prompt.id}: {error.message}") from error
    drawn = random.Random(f"{how.seed} {prompt.id}")
    temperature = 0.0 if drawn.random() < _GREEDY_SHARE else drawn.choice(_WARM)
    sampling = SamplingParams(seed=drawn.getrandbits(63), max_tokens=how.max_tokens, temperature=temperature)
    response = Response(id=prompt.id, task=prompt.task, temperature=temperature, prompt=tokens, response=[])
    return GenerationRequest(request_id=prompt.id, prompt=tokens, sampling=sampling), response


def _answer(
    engine: Engine, pending: Sequence[tuple[GenerationRequest, Response]], file: ResponseFile, how: Answering
) -> None:
    """Answer the requests, `how.concurrency` at a time."""
    began, finished, num_tokens = time.perf_counter(), 0, 0
    waiting, running = iter(pending), dict[str, Response]()
    with bar("answering", len(pending)) as advance:
        while True:
            # The first prompts are answered even after the deadline: without any answer, no later stage can run.
            is_late = how.deadline is not None and time.monotonic() > how.deadline and num_tokens > 0
            for request, response in islice(waiting, 0 if is_late else how.concurrency - len(running)):
                engine.submit(Submission([request]))
                running[request.request_id] = response
            if not running:
                return
            for output in engine.step().outputs:
                response = running[output.request_id]
                response.response.extend(output.token_ids)
                num_tokens += len(output.token_ids)
                if output.finish_reason == "error":
                    raise StartupError(f"prompt {output.request_id}: {output.error}; leave it out of the prompt file")
                if output.finish_reason is not None:
                    file.append(running.pop(output.request_id))
                    finished += 1
            rate = num_tokens / (time.perf_counter() - began)
            advance(finished, f"{num_tokens} tokens, {rate:.0f} tokens/s")


def answer_prompts(config: ServiceConfig, prompts: Sequence[Path], out: Path, how: Answering) -> None:
    """Run stage 1. Raises StartupError."""
    wanted = read_prompts(prompts)
    with closing(ResponseFile(out)) as file:  # before the model is loaded: it may be refused
        assembly = assemble(config)
        most = assembly.limits.max_model_len
        regenerate(assembly.engine(), assembly.tokenizer, wanted, file, how, max_model_len=most)
