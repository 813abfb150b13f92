"""Stage 1: the target answers the prompts, with the engine that serves it; answers are lines of JSON.

Half are answered greedily, half at a temperature. Temperature and noise follow from seed and prompt id, so a resumed
run writes the same answers as an uninterrupted one.
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
        """Length of prompt and response, in tokens."""
        return len(self.prompt) + len(self.response)


def read_responses(files: Sequence[Path]) -> list[Response]:
    """All responses long enough to train on. Raises StartupError naming file and line, or when there are none."""
    found = [response for file in files for _, response in read_lines(file, Response, "response file")]
    kept = [response for response in found if len(response.response) >= FEWEST_TOKENS]
    if not kept:
        names = ", ".join(str(file) for file in files)
        raise StartupError(f"{names}: no response of at least {FEWEST_TOKENS} tokens; answer more prompts first")
    if len(kept) < len(found):
        say(f"left out {len(found) - len(kept)} responses that are too short to train on")
    return kept


_BEGINS = b'{"id":"'
"""First bytes of each line of a response file."""


class ResponseFile:
    """A file of responses that is appended to."""

    def __init__(self, path: Path) -> None:
        """Open or create it, and cut off a torn last line. Raises StartupError for a file that cannot be written, or
        that holds something else, which is left unchanged."""
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
            self._stream.truncate(len(content) - len(torn))  # the rest of a line that a kill cut off
        except OSError as error:
            raise StartupError(f"response file {path} cannot be written ({error}): give another file") from error

    def append(self, response: Response) -> None:
        """Append a response and flush it, so that a kill loses at most this line."""
        try:
            self._stream.write(response.model_dump_json() + "\n")
            self._stream.flush()
        except OSError as error:
            raise StartupError(f"{self.path}: {error}; free some space and start again: it goes on") from error
        self.done.add(response.id)

    def close(self) -> None:
        """Close the file."""
        self._stream.close()


@dataclass(frozen=True, slots=True)
class Answering:
    """Options of answering prompts."""

    max_tokens: int = 256
    concurrency: int = 16
    seed: int = 0
    deadline: float | None = None  # time.monotonic() after which no further prompt is begun; None: answer all


def regenerate(
    engine: Engine,
    tokenizer: ChatTokenizer,
    prompts: Sequence[Prompt],
    file: ResponseFile,
    how: Answering,
    *,
    max_model_len: int,
) -> int:
    """Append the missing answers. # -> number of responses in the file; raises StartupError"""
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
    """A request, and its response without tokens."""
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
            # The first prompts are answered however late it is: without them nothing follows.
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
