"""`python -m benchmarks anatomy`: milliseconds of a step by part, timed on the wall clock of a CPU."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from statistics import fmean
from typing import Any

import torch

from benchmarks.draft_records import DrafterProxy
from drafters.protocol import Drafter
from drafters.regret import RegretLedger
from kernels import ops
from kernels.tree_attention import Attention
from service.assembly import device_of
from service.bench.commands import AnswerTokens, Limit, MorePromptFiles, Out, PromptFiles, Seed, Temperatures
from service.bench.driver import Run, TimedStep, generate
from service.bench.experiment import (
    PLAIN,
    SPECULATIVE,
    Measure,
    Row,
    conclude,
    mismatches,
    plain_engine,
    prepare,
    read_sets,
    table_of,
    take_turns,
    warm_up,
)
from service.config import LoadedConfig, ServiceConfig
from service.engine.engine import Engine
from service.engine.requests import GenerationRequest
from service.engine.sampler import EAGER_SAMPLER
from service.errors import StartupError

PRODUCTS, ATTENTION, LAYER, CHOICE, DRAFTING, REST = PARTS = (
    *("products", "attention", "norms, rotary, gates", "choice", "drafting", "rest"),
)
_PART_OF = {**dict.fromkeys(("add_rms_norm", "rotary_store", "silu_mul"), LAYER), "settle": CHOICE}
_DRAFTING_CALLS = dict.fromkeys(("start", "grow", "read", "commit", "finish"), DRAFTING)

Parts = Mapping[str, float]
"""Seconds by part."""


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

    def __init__(self, drafter: Drafter, clock: Clock, parts: Mapping[str, str] = _DRAFTING_CALLS) -> None:
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
        self.steps: list[tuple[TimedStep, Parts]] = []

    def __call__(self, requests: Sequence[GenerationRequest]) -> Run:
        taken: list[Parts] = []
        run = generate(self._engine, requests, before_step=lambda number: taken.append(self._clock.take()))
        for step, parts in zip(run.steps, [*taken[1:], self._clock.take()], strict=True):
            self.steps.append((step, {**parts, REST: step.seconds - sum(parts.values())}))
        return run

    def take(self) -> list[tuple[TimedStep, Parts]]:
        """Return the steps since the last call that read no prompt."""
        taken, self.steps = self.steps, []
        return [(step, parts) for step, parts in taken if not step.stats.prompt_tokens]


@dataclass(frozen=True, slots=True)
class _TimedAttention:
    attend: Callable[..., Any]


@contextmanager
def timed_ops(config: ServiceConfig) -> Iterator[Clock]:
    """Time the CPU's ops inside the block, and those planned in it for as long as they live.

    Layers run op by op, which takes a tenth longer than in one call. Raises StartupError for a GPU."""
    if device_of(config.device).type != "cpu":
        raise StartupError("anatomy times calls, which a GPU only queues: give --device cpu")
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
    """Replace attributes of an object inside the block."""
    before = dict(vars(holder))
    vars(holder).update(attributes)
    try:
        yield
    finally:
        vars(holder).clear()
        vars(holder).update(before)


def milliseconds(steps: Sequence[tuple[TimedStep, Parts]]) -> dict[str, float]:
    """Return the milliseconds of a mean step by part; nothing without a step."""
    return {part: 1000 * fmean(parts.get(part, 0.0) for _, parts in steps) for part in PARTS} if steps else {}


def run(
    loaded: LoadedConfig,
    prompts: PromptFiles,
    more_prompts: MorePromptFiles = None,
    limit: Limit = None,
    temperature: Temperatures = [0.0],  # noqa: B006  # read as a signature, never changed
    max_tokens: AnswerTokens = 128,
    seed: Seed = 0,
    out: Out = None,
) -> bool:
    """Time the parts of plain and of drafted steps on a CPU. Exit code 1 if any token differs."""
    rows: list[Row] = []
    with timed_ops(loaded.config) as clock:
        assembly = prepare(loaded.config, out)
        ledger = RegretLedger()
        drafter = TimedDrafter(assembly.drafter(ledger=ledger), clock).as_drafter()
        plain = Watched(clock, plain_engine(assembly))
        drafted = Watched(clock, assembly.engine(drafter, ledger=ledger))
        contestants = {PLAIN: plain, SPECULATIVE: drafted}
        sets = read_sets(assembly, [*prompts, *(more_prompts or [])], limit, max_tokens)
        warm_up(contestants, sets[0].prompts[0], Measure(temperature[0], max_tokens, 1, seed))
        for heat, one in product(dict.fromkeys(temperature), sets):
            for contestant in contestants.values():
                contestant.take()
            runs = take_turns(one.prompts, contestants, Measure(heat, max_tokens, 1, seed))
            found = {
                "plain": plain.take(),
                "drafted": [step for step in drafted.take() if step[0].stats.drafts],
            }
            what = {"set": one.name, "temperature": heat, "mismatched_tokens": mismatches(*runs.values())}
            rows += [{**what, "step": name, "milliseconds": milliseconds(steps)} for name, steps in found.items()]
    summary = {"mismatched_tokens": sum(row["mismatched_tokens"] for row in rows)}
    caption = "milliseconds of a mean step that reads no prompt"
    return conclude(assembly, out, rows, summary, table_of(_COLUMNS, rows, caption=caption))


def _part(name: str) -> tuple[str, Callable[[Row], str]]:
    return name, lambda row: f"{row['milliseconds'].get(name, 0.0):.2f}"


_COLUMNS = (
    ("set", lambda row: row["set"]),
    ("T", lambda row: f"{row['temperature']:g}"),
    ("step", lambda row: row["step"]),
    *map(_part, PARTS),
    ("together", lambda row: f"{sum(row['milliseconds'].values()):.2f}"),
)
