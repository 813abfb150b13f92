"""Wall-clock seconds of a step by part, timed around calls of its drafter."""

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.draft_records import DrafterProxy
from drafters.protocol import Drafter
from service.bench.driver import Run, TimedStep, generate
from service.engine.engine import Engine
from service.engine.requests import GenerationRequest

REST = "rest"
Parts = Mapping[str, float]
"""Seconds by part; REST is what no timed call took."""


class Clock:
    """Adds up seconds by part. A timed call inside another one belongs to the outer one's part."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._seconds = defaultdict[str, float](float)
        self._is_running = False

    def timed(self, part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return `call`, timed as part `part`."""

        def run(*args: Any, **kwargs: Any) -> Any:
            if self._is_running:
                return call(*args, **kwargs)
            self._is_running, start = True, self._now()
            try:
                return call(*args, **kwargs)
            finally:
                self._seconds[part] += self._now() - start
                self._is_running = False

        return run

    def take(self) -> Parts:
        """Return the seconds since the last call."""
        taken, self._seconds = self._seconds, defaultdict(float)
        return taken


class TimedDrafter(DrafterProxy):
    """Times calls of a drafter; `parts` names the part of each timed method."""

    def __init__(self, drafter: Drafter, clock: Clock, parts: Mapping[str, str]) -> None:
        super().__init__(drafter)
        self._clock = clock
        self._parts = parts

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.drafter, name)
        return self._clock.timed(self._parts[name], found) if name in self._parts else found


class Watched:
    """Answers requests as `generate` does, and keeps the parts of each step."""

    def __init__(self, clock: Clock, engine: Engine) -> None:
        self._clock = clock
        self._engine = engine
        self._steps: list[tuple[TimedStep, Parts]] = []

    def __call__(self, requests: Sequence[GenerationRequest]) -> Run:
        taken: list[Parts] = []
        run = generate(self._engine, requests, before_step=lambda number: taken.append(self._clock.take()))
        for step, parts in zip(run.steps, [*taken[1:], self._clock.take()], strict=True):
            self._steps.append((step, {**parts, REST: step.seconds - sum(parts.values())}))
        return run

    def take(self) -> list[tuple[TimedStep, Parts]]:
        """Return the steps since the last call that read no prompt."""
        taken, self._steps = self._steps, []
        return [(step, parts) for step, parts in taken if not step.stats.prompt_tokens]
