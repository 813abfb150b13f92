"""`step-costs --anatomy`: where the time of a step goes, as exclusive seconds of named calls by kind of step.

A call's seconds are its own, without those of named calls inside it; what no named call took is `rest`. A name costs
some 0.3 microseconds a call, which is part of the call around it.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial, reduce
from importlib import import_module
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

from rich.table import Table

from adaptation.config import AdaptationConfig
from benchmarks.shared import percentile
from service.assembly import Assembly
from service.bench.driver import generate
from service.bench.experiment import Measure, Row, plain_engine, request_of
from service.engine.budget import CostBudget
from service.engine.engine import Engine
from service.learning.adaptive import build_adaptive

CALLS: Mapping[str, tuple[str, ...]] = {
    "weights of learning": ("service.engine.accounting:StepAccounting.start_step",),
    "schedule": ("service.engine.scheduler:Scheduler.schedule", "service.engine.engine:Engine._next_batch"),
    "decide the budget": ("service.engine.drafting:DraftStage.arrange",),
    "inputs of drafting": ("service.engine.drafting:DraftStage._limits",),
    "grow: memory": ("drafters.memory.drafter:MemoryDrafter.recall",),
    "grow: join network and memory": ("drafters.memory.drafter:MemoryDrafter.grow",),
    "grow: ask for the network": ("drafters.asking:GatedNetwork.propose",),
    "grow: network": ("drafters.network.drafter:SpecBlockDrafter.grow",),
    "grow: native": ("kernels.cpu.growth:CompiledGrowth.__call__",),
    "prune": ("service.engine.drafting:DraftStage._prune",),
    "draft, the rest": ("service.engine.drafting:DraftStage.draft",),
    "lay out rows": ("service.engine.rows:RowLayout.__call__",),
    "forward: plan": ("service.engine.target:Target.forward",),
    "forward: embed and places": (
        "service.engine.decoder:FusedDecoder.embedded",
        "service.engine.decoder:FusedDecoder.places",
    ),
    "forward: layers": ("kernels.cpu.layers:CompiledLayers.__call__",),
    "forward: features": ("service.engine.decoder:FusedDecoder.__call__",),
    "forward: head": ("service.engine.decoder:FusedDecoder.logits",),
    "choose tokens": ("service.engine.verify:VerifyStage._choose",),
    "settle": ("service.engine.verify:VerifyStage.verify",),
    "collect committed": ("service.engine.launch:committed_of",),
    "commit: memory": ("drafters.memory.drafter:MemoryDrafter.commit",),
    "commit: network": ("drafters.network.drafter:SpecBlockDrafter.commit",),
    "grow: record": ("drafters.network.recording:FeedbackRecorder.grown",),
    "commit: record": ("drafters.network.recording:FeedbackRecorder.commit",),
    "read the result": ("service.engine.engine:read_result",),
    "advance, free slots": ("service.engine.engine:Engine._settle",),
    "emit": ("service.engine.emit:EmitStage.emit",),
    "books: record": ("service.engine.accounting:StepAccounting.keep",),
    "books: charge": ("service.engine.accounting:charge",),
    "books: calibration": ("service.engine.tree_pruning:TreePruning.learn",),
    "books: budget": ("service.engine.budget:CostBudget.learn", "service.engine.budget:CostBudget.outlook"),
    "books: learn, the rest": ("service.engine.drafting:DraftStage.learn",),
    "step": ("service.engine.engine:Engine.step",),
}
"""Names of parts, and the functions that belong to each, as MODULE:NAME or MODULE:CLASS.NAME."""

Parts = dict[str, float]
"""Exclusive seconds by part."""


class Stopwatch:
    """Exclusive seconds of calls by part."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._parts = defaultdict[str, float](float)
        self._inner = [0.0]  # seconds of named calls inside each open call

    def timed(self, part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return `call`, whose exclusive seconds are added to `part`."""
        now, inner, parts = self._now, self._inner, self._parts

        def run(*args: Any, **kwargs: Any) -> Any:
            inner.append(0.0)
            start = now()
            try:
                return call(*args, **kwargs)
            finally:
                seconds = now() - start
                parts[part] += seconds - inner.pop()
                inner[-1] += seconds

        return run

    def take(self) -> Parts:
        """Return the seconds since the last call."""
        taken = dict(self._parts)
        self._parts.clear()
        return taken


@contextmanager
def watched() -> Iterator[Stopwatch]:
    """Time the calls of `CALLS` within the block."""
    watch, replaced = Stopwatch(), list[tuple[Any, str, Any]]()
    for part, places in CALLS.items():
        for place in places:
            module, _, name = place.partition(":")
            *path, last = name.split(".")
            owner: Any = reduce(getattr, path, import_module(module))
            replaced.append((owner, last, getattr(owner, last)))
            setattr(owner, last, watch.timed(part, getattr(owner, last)))
    try:
        yield watch
    finally:
        for owner, name, call in reversed(replaced):
            setattr(owner, name, call)


KINDS = ("plain", "suspended", "drafted", "recorded")
_TYPICAL = 95  # percentile of seconds beyond which a step, delayed by other programs, is left out


def anatomy(assembly: Assembly, prompts: Sequence[Sequence[int]], measure: Measure) -> tuple[list[Row], Parts]:
    """Time the steps of one sequence at a time, in turn plain, with drafts suspended, with drafts, and with drafts that
    are recorded to learn from. Returns mean microseconds of each part by kind, and by kind the share of the steps'
    seconds that has a name."""
    steps = {kind: list[tuple[float, Parts]]() for kind in KINDS}
    with watched() as watch, TemporaryDirectory(prefix="adaptree-bench-") as folder:
        drafted = assembly.engine(), _recorded(assembly, Path(folder))
        engines = dict(zip(KINDS, (plain_engine(assembly), _suspended(assembly), *drafted), strict=True))
        for number, prompt in enumerate(prompts):
            for kind, engine in engines.items():
                taken = list[Parts]()
                asked = [request_of(number, prompt, measure)]
                run = generate(engine, asked, before_step=partial(_take, watch, taken))
                parts = [*taken[1:], watch.take()]
                for step, own in zip(run.steps, parts, strict=True):
                    if number and not step.stats.prompt_tokens and step.stats.drafts >= (engine in drafted):
                        steps[kind].append((step.seconds, own))  # the first answers warm up
    return _means(steps)


def _take(watch: Stopwatch, taken: list[Parts], step: int) -> None:
    taken.append(watch.take())


def _suspended(assembly: Assembly) -> Engine:
    """Build an engine whose budget always decides against drafts."""
    engine = assembly.engine()
    assert isinstance(engine.policy, CostBudget), "a fixed budget is never suspended"
    engine.policy.gate.choose = lambda sequences, **how: [False] * len(sequences)  # type: ignore[method-assign]
    return engine


def _recorded(assembly: Assembly, folder: Path) -> Engine:
    """Build an engine that records every sequence. Nothing learns from the recordings."""
    learning = AdaptationConfig(enabled=True, train_in="thread")
    assembly = replace(assembly, config=assembly.config.model_copy(update={"adaptation": learning}))
    return build_adaptive(assembly, folder=folder, emit=lambda event: None).engine


def _means(steps: Mapping[str, list[tuple[float, Parts]]]) -> tuple[list[Row], Parts]:
    means, named = dict[str, Parts](), dict[str, float]()
    for kind, timed in steps.items():
        limit = percentile((seconds for seconds, _ in timed), _TYPICAL)
        kept = [(seconds, parts) for seconds, parts in timed if seconds <= limit]
        means[kind] = {part: 1e6 * fmean(parts.get(part, 0.0) for _, parts in kept) for part in CALLS}
        whole = 1e6 * fmean(seconds for seconds, _ in kept)
        named[kind] = sum(means[kind].values()) / whole
        means[kind]["whole step"] = whole
    rows = {part: {kind: means[kind][part] for kind in KINDS} for part in (*CALLS, "whole step")}
    return [{"part": part, **of_kinds} for part, of_kinds in rows.items() if max(of_kinds.values()) >= 1.0], named


def table_of_parts(rows: Sequence[Row]) -> Table:
    """Show the parts, in microseconds."""
    table = Table("microseconds", *KINDS)
    for row in rows:
        table.add_row(row["part"], *(f"{row[kind]:.0f}" for kind in KINDS))
    return table
