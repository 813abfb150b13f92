"""Where the time of a step goes: exclusive seconds of named calls, by kind of step.

A call's seconds are its own, without those of named calls inside it; what no named call took is `rest`. A name costs
some 0.3 microseconds a call, which is part of the call around it.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import Any

CALLS: Mapping[str, tuple[str, ...]] = {
    "weights of learning": ("service.engine.accounting:StepAccounting.start_step",),
    "schedule": ("service.engine.scheduler:Scheduler.schedule", "service.engine.engine:Engine._claim_slots"),
    "decide the budget": ("service.engine.drafting:DraftStage.arrange",),
    "inputs of drafting": ("service.engine.drafting:DraftStage._limits",),
    "grow: memory": ("drafters.memory.drafter:MemoryDrafter.recall",),
    "grow: join network and memory": ("drafters.memory.drafter:MemoryDrafter.grow",),
    "grow: ask for the network": ("drafters.asking:GatedNetwork.propose",),
    "grow: network": ("drafters.network.drafter:SpecBlockDrafter.grow",),
    "grow: noise": ("drafters.coupling:TreeNoise.of",),
    "grow: layers": ("drafters.network.serving:BlockForward.first", "drafters.network.serving:BlockForward.next"),
    "grow: heads": ("drafters.network.blocks:propose",),
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
    "collect committed": ("service.engine.engine:committed_of",),
    "commit: memory": ("drafters.memory.drafter:MemoryDrafter.commit",),
    "commit: network": ("drafters.network.drafter:SpecBlockDrafter.commit",),
    "commit: record": ("drafters.network.recording:FeedbackRecorder.commit",),
    "read the result": ("service.engine.engine:read_result",),
    "advance, free slots": ("service.engine.engine:Engine._commit_and_emit",),
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

    def __init__(self) -> None:
        self._parts = defaultdict[str, float](float)
        self._inner = [0.0]  # seconds of named calls inside each open call

    def timed(self, part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return `call`, whose exclusive seconds are added to `part`."""
        now, inner, parts = time.perf_counter, self._inner, self._parts

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
            owner: Any = import_module(module)
            for step in path:
                owner = getattr(owner, step)
            replaced.append((owner, last, getattr(owner, last)))
            setattr(owner, last, watch.timed(part, getattr(owner, last)))
    try:
        yield watch
    finally:
        for owner, name, call in reversed(replaced):
            setattr(owner, name, call)
