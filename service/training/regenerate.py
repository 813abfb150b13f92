"""Stage 1: the target answers the prompts, with the engine that serves it.

A drafter is to predict what this target says, so only its own words teach. Half of the prompts are answered greedily
and half at a temperature; which, and with what noise, follows from seed and prompt id, so a run that is taken up again
writes what it would have written.
"""

import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from service.engine.engine import Engine
from service.engine.requests import GenerationRequest, SamplingParams
from service.errors import RequestError, StartupError
from service.logging import bar, say
from service.tokenizer import ChatTokenizer
from service.training.prompts import Prompt
from service.training.responses import Response, ResponseFile

_GREEDY_SHARE = 0.5
_WARM = (0.7, 1.0)


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
