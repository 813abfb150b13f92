"""What updates on a side stream cost those who are served meanwhile: the same requests with nobody learning, and with
updates as often as they can be made.

A figure without an update behind it would be a figure of nothing: then there is none, and the section fails.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic

import torch

from adaptation.config import AdaptationConfig
from adaptation.records import Event
from service.adaptive import Adaptive, build_adaptive
from service.assembly import Assembly
from service.bench.gpu_figures import Figure, NotMeasured
from service.bench.gpu_plan import Plan
from service.bench.gpu_serving import num_tokens, serve
from service.bench.load import LoadRun
from service.engine.budget import FixedBudget

_CONCURRENCY = 4
_NODES = 16
_EAGER: dict[str, object] = {
    "enabled": True,
    "duty_cycle": 1.0,
    "always_queries": 4,
    "gate_sequences": 4,
    "held_back_share": 0.5,
    "train_niceness": 0,
}


@dataclass(frozen=True, slots=True)
class Beside:
    """What was served, and how many updates were made meanwhile."""

    runs: tuple[LoadRun, ...]
    updates: int

    @property
    def tokens_per_second(self) -> float:
        return sum(map(num_tokens, self.runs)) / sum(run.seconds for run in self.runs)

    def step_seconds(self, share: float) -> float:
        """What so large a share of the steps stays below."""
        steps = [step for run in self.runs for step in run.steps]
        seconds = [step.draft_seconds + step.verify_seconds + step.other_seconds for step in steps]
        return float(torch.tensor(seconds).quantile(share))


def training_figures(assembly: Assembly, plan: Plan) -> Iterator[Figure]:
    """Steps and throughput without updates and with them. Raises NotMeasured when none was made."""
    quiet = _served_beside(assembly, plan, "never", updates=0)
    busy = _served_beside(assembly, plan, "always", updates=plan.updates)
    yield Figure("training", "updates", busy.updates, "")
    for name, beside in (("off", quiet), ("on", busy)):
        for share in (0.5, 0.99):
            yield Figure("training", f"step p{share * 100:g} {name}", beside.step_seconds(share) * 1e3, "ms")
        yield Figure("training", f"throughput {name}", beside.tokens_per_second, "tokens/s")
    loss = 1 - busy.tokens_per_second / quiet.tokens_per_second
    yield Figure("training", "loss of tokens/s", max(0.0, loss), "")


def _served_beside(assembly: Assembly, plan: Plan, policy: str, *, updates: int) -> Beside:
    """Serve beside a learner, until it has made so many updates or patience ends. Raises NotMeasured without any."""
    learning = assembly.config.adaptation
    config = AdaptationConfig.model_validate({**learning.model_dump(), **_EAGER, "policy": policy})
    with _learning(assembly, config) as (adaptive, told):
        _serve_until(adaptive, assembly, plan, min(1, updates))  # a first update compiles and allocates
        beside = _serve_until(adaptive, assembly, plan, updates)
    if updates and not beside.updates:
        raise NotMeasured(f"no update in {plan.patience_seconds:g} s of serving; learning told of {dict(told)}")
    return beside


def _serve_until(adaptive: Adaptive, assembly: Assembly, plan: Plan, updates: int) -> Beside:
    """All requests at least once, and again while updates are wanted and patience lasts."""
    before, start = _made(adaptive), monotonic()
    runs = [serve(adaptive.engine, assembly, plan, _CONCURRENCY, plan.training_requests)]
    while _made(adaptive) - before < updates and monotonic() - start < plan.patience_seconds:
        runs.append(serve(adaptive.engine, assembly, plan, _CONCURRENCY, plan.training_requests))
    return Beside(tuple(runs), _made(adaptive) - before)


def _made(adaptive: Adaptive) -> int:
    return sum(adaptive.learner.num_updates.values())


@contextmanager
def _learning(assembly: Assembly, config: AdaptationConfig) -> Iterator[tuple[Adaptive, Counter[str]]]:
    """A learner at work, and what it tells: how often which event had which reason."""
    told: Counter[str] = Counter()
    budget = FixedBudget(min(_NODES, assembly.limits.max_budget))  # nothing can be learnt where nothing is drafted

    def tell(event: Event) -> None:
        told[f"{event.kind}: {event.reason}"] += 1

    with TemporaryDirectory(prefix="adaptree-bench-") as folder:
        adaptive = build_adaptive(assembly, config, folder=Path(folder), emit=tell, policy=budget)
        adaptive.start()
        try:
            yield adaptive, told
        finally:
            adaptive.stop()
