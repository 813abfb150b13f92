"""What a model with real weights does on the device: speculation against plain decoding, throughput under load, what
learning beside it costs, and whether every token is the same.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from service.adaptive import build_adaptive
from service.assembly import Assembly
from service.bench.gpu_figures import Figure
from service.bench.gpu_plan import Plan, small_prompts
from service.bench.load import ClosedLoop, LoadRun, drive
from service.bench.lossless import check
from service.bench.prompts import PromptSet
from service.bench.speed import PLAIN, SPECULATIVE, EngineContestant, Measure, measure_set, requests_from, warm_up
from service.engine.budget import FixedBudget
from service.engine.engine import Engine
from service.engine.streams import serving

_TRAINING_CONCURRENCY = 4


def speed_figures(assembly: Assembly, plan: Plan) -> Iterator[Figure]:
    """Speculation against plain decoding on the same replayed forwards, greedy and sampled."""
    prompts = PromptSet("built-in", tuple(map(tuple, small_prompts(assembly, plan)[: plan.answers])))
    contestants = [EngineContestant(PLAIN, _plain(assembly)), EngineContestant(SPECULATIVE, assembly.engine())]
    for temperature in (0.0, 1.0):
        measure = Measure(temperature, plan.answer_tokens, concurrency=1, seed=0)
        warm_up(contestants, prompts.prompts[0], measure)
        row = measure_set(prompts, contestants, measure)
        at: dict[str, int | float | str] = {"temperature": temperature, "model": assembly.config.model}
        name = f"at T={temperature:g}"
        yield Figure("speed", f"plain decode {name}", row.plain_decode_tokens_per_second, "tokens/s", at)
        yield Figure("speed", f"speculative decode {name}", row.speculative_decode_tokens_per_second, "tokens/s", at)
        yield Figure("speed", f"decode speedup {name}", row.decode_speedup, "times", at)
        yield Figure("speed", f"tau {name}", row.tau, "tokens", at)
        yield Figure("exactness", "mismatched tokens", row.mismatched_tokens, "tokens", at)


def load_figures(assembly: Assembly, plan: Plan) -> Iterator[Figure]:
    """Throughput by requests in flight, with the configured budget and without drafts."""
    engines = {"plain": _plain(assembly), "adaptive": assembly.engine()}
    for concurrency in plan.concurrencies:
        for name, engine in engines.items():
            run = _drive(engine, assembly, plan, concurrency, 2 * concurrency)
            yield Figure("load", name, _tokens_per_second(run), "tokens/s", {"concurrency": concurrency})


def training_figures(assembly: Assembly, plan: Plan) -> Iterator[Figure]:
    """The same requests with nobody learning and with updates beside them, as often as they can."""
    quiet = _with_learning(assembly, plan, "never")
    busy = _with_learning(assembly, plan, "always")
    for name, (run, _) in (("off", quiet), ("on", busy)):
        steps = torch.tensor([stats.draft_seconds + stats.verify_seconds + stats.other_seconds for stats in run.steps])
        for share in (0.5, 0.99):
            yield Figure("training", f"step p{share * 100:g} {name}", float(steps.quantile(share)) * 1e3, "ms")
        yield Figure("training", f"throughput {name}", _tokens_per_second(run), "tokens/s")
    yield Figure("training", "updates", busy[1], "")
    if busy[1]:
        loss = 1 - _tokens_per_second(busy[0]) / _tokens_per_second(quiet[0])
        yield Figure("training", "loss of tokens/s", max(0.0, loss), "")


def exactness_figures(assembly: Assembly, plan: Plan) -> Iterator[Figure]:
    """Every way of decoding against plain decoding."""
    result = check(
        assembly,
        small_prompts(assembly, plan),
        num_tokens=plan.exact_tokens,
        answer_tokens=min(64, plan.answer_tokens),
    )
    at: dict[str, int | float | str] = {"numerics": assembly.numerics, "cases": len(result.cases)}
    yield Figure("exactness", "tokens compared", result.tokens_compared, "tokens", at)
    yield Figure("exactness", "mismatched tokens", result.mismatched_tokens, "tokens", at)


def _plain(assembly: Assembly) -> Engine:
    return assembly.engine(assembly.drafter("none"), FixedBudget(0))


def _with_learning(assembly: Assembly, plan: Plan, policy: str) -> tuple[LoadRun, int]:
    """Serve some requests beside a learner; how many updates it did meanwhile."""
    learning = assembly.config.adaptation
    values = {
        "enabled": True,
        "policy": policy,
        "duty_cycle": 1.0,
        "always_queries": 4,
        "gate_sequences": 4,
        "held_back_share": 0.5,
    }
    config = type(learning).model_validate({**learning.model_dump(), **values})
    with TemporaryDirectory(prefix="adaptree-bench-") as folder:
        adaptive = build_adaptive(assembly, config, folder=Path(folder), emit=lambda event: None)
        adaptive.start()
        try:
            run = _drive(adaptive.engine, assembly, plan, _TRAINING_CONCURRENCY, plan.training_requests)
            return run, sum(adaptive.learner.num_updates.values())
        finally:
            adaptive.stop()


def _drive(engine: Engine, assembly: Assembly, plan: Plan, concurrency: int, count: int) -> LoadRun:
    prompts = small_prompts(assembly, plan)
    chosen: Sequence[Sequence[int]] = [prompts[number % len(prompts)] for number in range(count)]
    measure = Measure(0.0, plan.answer_tokens, concurrency=count, seed=0)
    requests = [replace(one, request_id=f"load-{n}") for n, one in enumerate(requests_from(chosen, 0, measure))]
    with serving(assembly.target.device):
        return drive(engine, requests, ClosedLoop(concurrency))


def _tokens_per_second(run: LoadRun) -> float:
    return sum(len(one.token_ids) for one in run.served) / run.seconds
