"""What a model with real weights does on the device: speculation against plain decoding, throughput under load, and
whether every token is the same. What learning beside it costs is asked elsewhere.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

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
            run = serve(engine, assembly, plan, concurrency, 2 * concurrency)
            yield Figure("load", name, num_tokens(run) / run.seconds, "tokens/s", {"concurrency": concurrency})


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


def serve(engine: Engine, assembly: Assembly, plan: Plan, concurrency: int, count: int) -> LoadRun:
    """Answer so many of the built-in prompts, in turn, as the engine's thread would."""
    prompts = small_prompts(assembly, plan)
    chosen: Sequence[Sequence[int]] = [prompts[number % len(prompts)] for number in range(count)]
    measure = Measure(0.0, plan.answer_tokens, concurrency=count, seed=0)
    requests = [replace(one, request_id=f"load-{n}") for n, one in enumerate(requests_from(chosen, 0, measure))]
    with serving(assembly.target.device):
        return drive(engine, requests, ClosedLoop(concurrency))


def num_tokens(run: LoadRun) -> int:
    """Tokens of all answers."""
    return sum(len(one.token_ids) for one in run.served)
