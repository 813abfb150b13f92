"""What the time of a step goes into: the ops of the device's table and the calls of a drafter, each by the clock."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import torch

from drafters.protocol import Drafter
from kernels import ops
from kernels.tree_attention import Attention
from service.assembly import device_of
from service.bench.driver import Run, TimedStep, generate
from service.bench.experiment import Contestant
from service.config import ServiceConfig
from service.engine.engine import Engine
from service.engine.requests import GenerationRequest
from service.engine.sampling import EAGER_SAMPLER
from service.errors import StartupError

PRODUCTS, ATTENTION, LAYER, CHOICE, DRAFTING, REST = PARTS = (
    *("products", "attention", "norms, rotary, gates", "choice", "drafting", "rest"),
)
_PART_OF: Mapping[str, str] = {
    **dict.fromkeys(("add_rms_norm", "rotary_store", "silu_mul"), LAYER),
    "settle": CHOICE,
}
_DRAFTING_CALLS = ("start", "grow", "read", "commit", "finish")


class Clock:
    """Seconds by part; what is called within a timed call belongs to that one's part."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._seconds = defaultdict[str, float](float)
        self._is_running = False

    def timed(self, part: str, call: Callable[..., Any]) -> Callable[..., Any]:
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

    def take(self) -> Mapping[str, float]:
        """The seconds since the last time."""
        taken, self._seconds = self._seconds, defaultdict(float)
        return taken

    def timed_drafter(self, drafter: Drafter) -> Drafter:
        """The same one, with everything that it does timed."""
        for name in _DRAFTING_CALLS:
            setattr(drafter, name, self.timed(DRAFTING, getattr(drafter, name)))
        return drafter


@dataclass(frozen=True, slots=True)
class _TimedAttention:
    attend: Callable[..., Any]


@contextmanager
def timed_ops(config: ServiceConfig) -> Iterator[Clock]:
    """While it lasts, ops are timed, and layers run op by op, which takes a tenth longer than in one call; what is
    planned then stays so. Raises StartupError for a GPU."""
    if device_of(config.device).type != "cpu":
        raise StartupError("--anatomy times calls, which a GPU only queues: give --device cpu")
    clock, table = Clock(), ops.on(torch.device("cpu"))
    plan_linear, plan_attention = table.plan_linear, clock.timed(ATTENTION, table.plan_attention)

    def timed_attention(*args: Any, **kwargs: Any) -> Attention:
        return _TimedAttention(clock.timed(ATTENTION, plan_attention(*args, **kwargs).attend))

    planned = {
        "plan_linear": lambda weight, bias: clock.timed(PRODUCTS, plan_linear(weight, bias)),
        "plan_attention": timed_attention,
        "plan_layers": ops.REFERENCE.plan_layers,
    }
    called = {name: clock.timed(part, getattr(table, name)) for name, part in _PART_OF.items()}
    choosing = {name: clock.timed(CHOICE, getattr(EAGER_SAMPLER, name)) for name in ("likeliest", "sample")}
    with _replaced(table, {**planned, **called}), _replaced(EAGER_SAMPLER, choosing):
        yield clock


@contextmanager
def _replaced(holder: object, attributes: Mapping[str, object]) -> Iterator[None]:
    """Give an object attributes of its own for a while."""
    before = dict(vars(holder))
    vars(holder).update(attributes)
    try:
        yield
    finally:
        vars(holder).clear()
        vars(holder).update(before)


def watched(clock: Clock, engine: Engine) -> Contestant:
    """`generate` of this engine, whose steps tell their parts."""

    def answer(requests: Sequence[GenerationRequest]) -> Run:
        taken: list[Mapping[str, float]] = []
        run = generate(engine, requests, before_step=lambda number: taken.append(clock.take()))
        parts = [*taken[1:], clock.take()]
        return replace(run, steps=tuple(_with_rest(step, mine) for step, mine in zip(run.steps, parts, strict=True)))

    return answer


def _with_rest(step: TimedStep, parts: Mapping[str, float]) -> TimedStep:
    return replace(step, parts={**parts, REST: step.seconds - sum(parts.values())})


def milliseconds(steps: Sequence[TimedStep]) -> dict[str, float]:
    """By part, of a mean step that reads no prompt; empty where there was none that was watched."""
    decoding = [step.parts for step in steps if step.parts and not step.stats.prompt_tokens]
    return {part: 1000 * fmean(parts.get(part, 0.0) for parts in decoding) for part in PARTS} if decoding else {}
