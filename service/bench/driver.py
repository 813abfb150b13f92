"""Drives an engine in this thread, without HTTP: sends requests, and records answers and steps with their times."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from service.engine.engine import Engine, EngineOutput
from service.engine.requests import FinishReason, GenerationRequest, SequenceOutput, Submission
from service.engine.stats import StepStats


@dataclass(frozen=True, slots=True)
class Answer:
    """One generated answer, with its latencies."""

    token_ids: tuple[int, ...]
    text: str = ""
    finish_reason: FinishReason | None = None
    accepted_per_step: tuple[int, ...] = ()
    first_token_seconds: float = 0.0  # seconds from arrival to the first token
    gaps_seconds: tuple[float, ...] = ()  # seconds between tokens after the first step; over HTTP, between chunks
    first_tokens: int = 1  # tokens of the first step, or over HTTP of the first chunk
    prompt_tokens: int = 0  # counted by the server; 0 in-process

    @property
    def seconds(self) -> float:
        """Seconds from arrival to the last token."""
        return self.first_token_seconds + sum(self.gaps_seconds)


@dataclass(frozen=True, slots=True)
class TimedStep:
    """Statistics of an engine step, and its wall-clock seconds."""

    stats: StepStats
    seconds: float


@dataclass(frozen=True, slots=True)
class Span:
    """Duration of a part of a run, and the tokens generated in it."""

    seconds: float
    tokens: int


@dataclass(frozen=True, slots=True)
class Run:
    """Result of a benchmark run: answers in the order of their requests, and the engine's steps."""

    answers: tuple[Answer, ...]
    steps: tuple[TimedStep, ...]
    seconds: float
    steady: Span = Span(0.0, 0)  # the part of the run in which all clients were busy

    @property
    def num_tokens(self) -> int:
        """Number of generated tokens, over all answers."""
        return sum(len(answer.token_ids) for answer in self.answers)

    @property
    def decoded(self) -> tuple[float, float]:
        """Totals over all answers: tokens after the first step or chunk, and seconds from there to the last token."""
        tokens = sum(len(answer.token_ids) - answer.first_tokens for answer in self.answers)
        return tokens, sum(sum(answer.gaps_seconds) for answer in self.answers)


class ClosedLoop:
    """Arrival process of a fixed number of clients, each of which sends its next request when it is answered."""

    def __init__(self, concurrency: int) -> None:
        self._concurrency = concurrency

    def due(self, elapsed_seconds: float, finished: int) -> int:
        """Return how many requests should have been sent by now, given how many have finished."""
        return finished + self._concurrency

    def is_steady(self, finished: int, total: int) -> bool:
        """Whether all clients are busy; excludes the first round, whose requests are sent at once, and the last one."""
        return self._concurrency <= finished <= total - self._concurrency

    def since(self, number: int, elapsed_seconds: float) -> float:
        """Return the arrival time in seconds of request `number`, if it is sent now."""
        return elapsed_seconds


@dataclass(slots=True)
class Served:
    """An answer that is being generated."""

    arrival_seconds: float
    last_seconds: float = 0.0  # time of its latest token
    answer: Answer = Answer(())

    def add(self, output: SequenceOutput, now: float) -> None:
        """Append a step's output; the step's tokens share the time since the previous output equally."""
        before, count = self.answer, len(output.token_ids)
        first, gaps = before.first_token_seconds, before.gaps_seconds
        if count and not before.token_ids:
            first = now - self.arrival_seconds
        elif count:
            gaps += ((now - self.last_seconds) / count,) * count
        if count:
            self.last_seconds = now
        speculation = output.speculation
        accepted = before.accepted_per_step if speculation is None else speculation.accepted_per_step
        tokens, text = before.token_ids + tuple(output.token_ids), before.text + output.text
        self.answer = Answer(tokens, text, output.finish_reason, accepted, first, gaps)


@dataclass
class Drive:
    """Serves requests, of one sequence each, on one engine; can be paused between steps, and does not count the time
    of pauses."""

    engine: Engine
    requests: Sequence[GenerationRequest]
    arrivals: ClosedLoop
    clock: Callable[[], float] = time.perf_counter
    sleep: Callable[[float], None] = time.sleep
    before_step: Callable[[int], None] = lambda number: None
    after_step: Callable[[EngineOutput], None] = lambda report: None
    num_finished: int = field(default=0, init=False)
    _seconds: float = field(default=0.0, init=False)  # time of all slices, without pauses
    steady: Span = field(default=Span(0.0, 0), init=False)  # so far, while all clients were busy
    _served: dict[str, Served] = field(default_factory=dict, init=False)
    _steps: list[TimedStep] = field(default_factory=list, init=False)

    @property
    def is_over(self) -> bool:
        """Whether all requests have finished."""
        return self.num_finished == len(self.requests)

    def go_on(self, seconds: float = math.inf, requests: float = math.inf) -> None:
        """Serve for `seconds`, or until so many more requests, or all, have finished."""
        start, end, most = self.clock() - self._seconds, self._seconds + seconds, self.num_finished + requests
        while not self.is_over and self._seconds < end and self.num_finished < most:
            self._send(self.clock() - start)
            is_steady = self.arrivals.is_steady(self.num_finished, len(self.requests))
            before = self._seconds
            tokens = self._step(start)
            if is_steady:
                self.steady = Span(self.steady.seconds + self._seconds - before, self.steady.tokens + tokens)
        while self.is_over and not self.engine.idle:  # a step of ended sequences may be in flight
            self.engine.step()

    def result(self) -> Run:
        """Return the answers and steps so far."""
        answers = tuple(served.answer for served in self._served.values())
        return Run(answers, tuple(self._steps), self._seconds, self.steady)

    def _send(self, elapsed: float) -> None:
        """Send the requests that are due."""
        due = min(len(self.requests), self.arrivals.due(elapsed, self.num_finished))
        for number in range(len(self._served), due):
            request = self.requests[number]
            self._served[request.request_id] = Served(self.arrivals.since(number, elapsed))
            self.engine.submit(Submission([replace(request, arrival_seconds=time.monotonic())]))

    def _step(self, start: float) -> int:
        """Run one engine step; returns the number of emitted tokens."""
        if self.engine.idle:
            self.sleep(0.001)
            self._seconds = self.clock() - start
            return 0
        self.before_step(len(self._steps))
        report = self.engine.step()
        before, self._seconds = self._seconds, self.clock() - start
        for output in report.outputs:
            self._served[output.request_id].add(output, self._seconds)
            self.num_finished += output.finish_reason is not None
        if report.stats is not None:
            self._steps.append(TimedStep(report.stats, self._seconds - before))
        self.after_step(report)
        return sum(len(output.token_ids) for output in report.outputs)


def generate(
    engine: Engine,
    requests: Sequence[GenerationRequest],
    arrivals: ClosedLoop | None = None,
    *,
    before_step: Callable[[int], None] = lambda number: None,
) -> Run:
    """Answer all requests without pausing; without `arrivals`, they are sent all at once."""
    driven = Drive(engine, requests, arrivals or ClosedLoop(len(requests)), before_step=before_step)
    driven.go_on()
    return driven.result()
