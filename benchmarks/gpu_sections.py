"""The measurements of `python -m benchmarks gpu`: steps, speed, load, exactness, and training while serving."""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from adaptation.config import Tuning
from adaptation.records import Event
from benchmarks.policies import fixed_policy
from benchmarks.shared import percentile
from service.assembly import Assembly
from service.bench.driver import ClosedLoop, Run, TimedStep, generate
from service.bench.experiment import (
    Measure,
    mismatches,
    plain_engine,
    requests_from,
    tokens_per_second,
    warm_up,
)
from service.bench.lossless import BUILT_IN, check
from service.bench.speed import contestants_of, measure_set
from service.engine.budget import FixedBudget
from service.engine.engine import Engine
from service.engine.measuring import Point, dummy_texts, place_point
from service.engine.requests import GenerationRequest, SamplingParams, Submission
from service.engine.thread import serving
from service.learning.adaptive import Adaptive, build_adaptive
from service.text.prompts import PromptSet, read_prompt_set

At = dict[str, int | float | str]
"""The conditions of one figure, by name."""

_WARM_UPS = 2  # runs that are not counted
_PROMPT = 64  # tokens
_NODES = 31  # 32 rows with the root
_SEQUENCES = 4  # 256 rows of a root and 64 nodes each
_LARGEST_KERNELS = 12  # that are named
_TRAINING_CONCURRENCY = 4
_TRAINING_NODES = 16
_LOAD_TURNS = 2
_EAGER = Tuning(full_queries=4, gate_texts=4, validation_share=0.5, niceness=0)
_HOST_CALLS = {
    "launches": ("cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx"),
    "copies": ("cudaMemcpyAsync", "cudaMemsetAsync"),
    "graphs replayed": ("cudaGraphLaunch",),
    "waits": ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy"),
}


@dataclass(frozen=True, slots=True)
class Figure:
    """One number of one section."""

    section: str
    name: str
    value: float
    unit: str
    at: At = field(default_factory=dict)
    costs_only: bool = False  # from random weights


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How much is measured."""

    for_real: bool = True  # False: a rehearsal on a CPU
    minutes: float = 8
    large: tuple[Path, ...] = ()  # checkpoints with random weights
    deepened: tuple[Path, ...] = ()  # checkpoints of deepened models
    prompts: Path | None = None  # None: the built-in ones
    rows: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128, 256)
    contexts: tuple[int, ...] = (256, 2048)
    concurrencies: tuple[int, ...] = (1, 4, 16, 64, 128)
    repeats: int = 20
    copied_bytes: int = 1 << 30
    steps: int = 64
    answers: int = 16
    answer_tokens: int = 128
    exact_tokens: int = 20_000
    training_requests: int = 64
    updates: int = 4  # requests are repeated until so many were made
    patience_seconds: float = 60


FULL = Plan()
DRY = Plan(
    for_real=False,
    rows=(1, 16),
    contexts=(32,),
    concurrencies=(2,),
    repeats=1,
    copied_bytes=1 << 20,
    steps=3,
    answers=1,
    answer_tokens=8,
    exact_tokens=60,
    training_requests=12,
    updates=1,
)


def small_prompts(assembly: Assembly, plan: Plan) -> list[list[int]]:
    """Return the prompts, without those that leave no room for an answer; built-in ones are cut."""
    most = assembly.limits.max_model_len - plan.answer_tokens - 1
    if plan.prompts is None:
        return [[*prompt[:most]] for prompt in read_prompt_set(BUILT_IN, assembly.tokenizer).prompts]
    given = read_prompt_set(plan.prompts, assembly.tokenizer)
    return [[*prompt] for prompt in given.prompts if len(prompt) <= most]


def device_seconds(
    run: Callable[[], object], device: torch.device, *, repeats: int, before: Callable[[], object] = lambda: None
) -> float:
    """Return the median seconds that the device takes for `run`, without `before`; on a CPU those of the wall clock."""
    if device.type != "cuda":
        return wall_seconds(run, device, repeats=repeats, before=before)
    events = [
        (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(_WARM_UPS + repeats)
    ]
    for begin, end in events:
        before()
        begin.record()
        run()
        end.record()
    torch.cuda.synchronize(device)
    milliseconds: list[float] = [begin.elapsed_time(end) for begin, end in events[_WARM_UPS:]]
    return median(milliseconds) / 1000


def wall_seconds(
    run: Callable[[], object], device: torch.device, *, repeats: int, before: Callable[[], object] = lambda: None
) -> float:
    """Return the median seconds until the host can read the results of `run`."""
    seconds: list[float] = []
    for _ in range(_WARM_UPS + repeats):
        before()
        start = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - start)
    return median(seconds[_WARM_UPS:])


def copy_bandwidth(device: torch.device, num_bytes: int) -> float:
    """Return bytes per second that a large copy reads and writes: an upper bound for everything on this device."""
    source = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * num_bytes / device_seconds(lambda: target.copy_(source), device, repeats=5)


def step_figures(assembly: Assembly, plan: Plan, *, costs_only: bool = False) -> Iterator[Figure]:
    """Yield figures of decoding, verifying, graph replay and drafting; `costs_only`: the weights are random."""
    model = assembly.config.public_model_name
    for measure in (_decode, _verify, _graphs, _drafter, _anatomy):
        for figure in measure(assembly, plan):
            yield replace(figure, at={"model": model, **figure.at}, costs_only=costs_only)


def _decode(assembly: Assembly, plan: Plan) -> Iterator[Figure]:
    """Measure a plain step of one short text, and the target's forward in it."""
    target, device = assembly.target, assembly.target.device
    bandwidth = copy_bandwidth(device, plan.copied_bytes)
    trial = dummy_texts(target, sequences=1, length=_PROMPT)
    rows = place_point(trial, Point(1, _PROMPT, 1))
    forward = device_seconds(partial(target.forward, rows, trial.table), device, repeats=plan.repeats)
    floor = read_bytes(assembly, _PROMPT) / bandwidth
    step = median(step.seconds for step in _steps(assembly, plan, nodes=0))
    yield Figure("decode", "copy bandwidth", bandwidth / 1e9, "GB/s")
    yield Figure("decode", "floor", floor * 1e3, "ms", {"context": _PROMPT})
    yield Figure("decode", "target forward", forward * 1e3, "ms", {"context": _PROMPT})
    yield Figure("decode", "step", step * 1e3, "ms", {"context": _PROMPT})
    yield Figure("decode", "share of floor", floor / step, "")
    yield Figure("decode", "share outside kernels", max(0.0, 1 - forward / step), "")


def _verify(assembly: Assembly, plan: Plan) -> Iterator[Figure]:
    target, device = assembly.target, assembly.target.device
    trial = dummy_texts(target, sequences=min(_SEQUENCES, assembly.limits.max_sequences), length=max(plan.contexts))
    for point in (Point(-(-rows // 65), context, rows) for context in plan.contexts for rows in plan.rows):
        rows = place_point(trial, point)
        run = partial(target.forward, rows, trial.table)
        seconds = device_seconds(run, device, repeats=plan.repeats)
        trial.free(rows)
        at: At = {"rows": point.rows, "context": point.context, "sequences": point.sequences}
        yield Figure("verify", "forward", seconds * 1e3, "ms", at)


def _graphs(assembly: Assembly, plan: Plan) -> Iterator[Figure]:
    """Measure a forward of one row, replayed and kernel by kernel."""
    target, device = assembly.target, assembly.target.device
    trial = dummy_texts(target, sequences=1, length=plan.contexts[0])
    rows = place_point(trial, Point(1, plan.contexts[0], 1))
    replayed = wall_seconds(partial(target.forward, rows, trial.table), device, repeats=plan.repeats)
    with torch.inference_mode():
        eager = wall_seconds(partial(target.forward_once, rows, trial.table), device, repeats=plan.repeats)
    yield Figure("graphs", "replayed", replayed * 1e3, "ms", {"rows": 1})
    yield Figure("graphs", "kernel by kernel", eager * 1e3, "ms", {"rows": 1})
    yield Figure("graphs", "gain", eager / replayed, "times")


def _drafter(assembly: Assembly, plan: Plan) -> Iterator[Figure]:
    """Measure drafting and the whole step of one sequence; drafting ends when the tree's size is read."""
    plain = median(step.seconds for step in _steps(assembly, plan, nodes=0))
    steps = _steps(assembly, plan, nodes=_NODES)
    drafts = median(step.stats.draft_seconds for step in steps)
    whole = median(step.seconds for step in steps)
    yield Figure("drafter", "forwards and growth", drafts * 1e3, "ms", {"blocks": 2, "nodes": _NODES})
    yield Figure("drafter", "step", whole * 1e3, "ms", {"nodes": _NODES})
    yield Figure("drafter", "share of a step", drafts / whole, "")
    yield Figure("drafter", "over a plain step", whole / plain, "times")


def _anatomy(assembly: Assembly, plan: Plan) -> Iterator[Figure]:
    """Count what a step asks the device for and what the device does in it, plain and with a tree."""
    for name, nodes in (("plain", 0), ("drafted", _NODES)):
        engine, count = _engine(assembly, nodes), min(plan.steps, 8)
        engine.submit(Submission([_request(assembly, plan)]))
        for _ in range(_WARM_UPS + 4):
            engine.step()
        for what, value, unit in _profiled(engine, count, assembly.target.device):
            yield Figure("anatomy", f"{name}: {what}", value, unit)


def _profiled(engine: Engine, steps: int, device: torch.device) -> Iterator[tuple[str, float, str]]:
    """Yield name, value and unit of a mean step: calls of the host, kernels, and milliseconds of the device."""
    on_device = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_device else [])]
    with serving(device), profile(activities=activities) as profiler:
        for _ in range(steps):
            engine.step()
        if on_device:
            torch.cuda.synchronize(device)
    calls, kernels, microseconds = Counter[str](), Counter[str](), Counter[str]()
    for event in profiler.events() or ():
        if event.device_type.name == "CUDA":
            name = event.name.split("(")[0][:80]
            kernels[name] += 1
            microseconds[name] += event.device_time_total
        else:
            calls[event.name] += 1
    if on_device:
        for call, names in _HOST_CALLS.items():
            yield call, sum(calls[name] for name in names) / steps, ""
    else:
        yield "operations", sum(count for name, count in calls.items() if name.startswith("aten::")) / steps, ""
    yield "kernels", kernels.total() / steps, ""
    yield "device busy", sum(microseconds.values()) / steps / 1e3, "ms"
    for name, duration in microseconds.most_common(_LARGEST_KERNELS):
        yield f"kernel {name}, {kernels[name] / steps:g} times", duration / steps / 1e3, "ms"


def _steps(assembly: Assembly, plan: Plan, *, nodes: int) -> list[TimedStep]:
    """Return decoding steps of one sequence, without the first two."""
    run = generate(_engine(assembly, nodes), [_request(assembly, plan)])
    return [step for step in run.steps if not step.stats.prompt_tokens][2 : 2 + plan.steps]


def _engine(assembly: Assembly, nodes: int) -> Engine:
    budget = FixedBudget(min(nodes, assembly.limits.max_budget))
    return assembly.engine(assembly.drafter("none") if nodes == 0 else None, budget)


def _request(assembly: Assembly, plan: Plan) -> GenerationRequest:
    """Return a request that is long enough for all steps."""
    most_tokens = min(4 * plan.steps + 8, assembly.limits.max_model_len - _PROMPT)
    sampling = SamplingParams(seed=0, max_tokens=most_tokens, temperature=0.0, ignore_eos=True)
    return GenerationRequest(request_id="steps", prompt=tuple(range(_PROMPT)), sampling=sampling)


def read_bytes(assembly: Assembly, context: int) -> int:
    """Return bytes that decoding one token must read: weights, and keys and values of `context` tokens."""
    return assembly.loaded.read_bytes + context * assembly.loaded.kv_shape.bytes_per_slot


def speed_figures(assembly: Assembly, plan: Plan) -> Iterator[Figure]:
    """Yield speculative against plain decoding, greedy and sampled."""
    prompts = PromptSet("prompts", tuple(map(tuple, small_prompts(assembly, plan)[: plan.answers])))
    contestants = contestants_of(assembly)
    for temperature in (0.0, 1.0):
        measure = Measure(temperature, plan.answer_tokens, concurrency=1, seed=0)
        warm_up(contestants, prompts.prompts[0], measure)
        row = measure_set(prompts, contestants, measure)
        at: At = {"temperature": temperature, "model": assembly.config.public_model_name}
        name = f"at T={temperature:g}"
        for contestant in ("plain", "speculative"):
            speed = row[f"{contestant}_decode_tokens_per_second"]
            yield Figure("speed", f"{contestant} decode {name}", speed, "tokens/s", at)
        yield Figure("speed", f"decode speedup {name}", row["decode_speedup"], "times", at)
        yield Figure("speed", f"tau {name}", row["tau"], "tokens", at)
        yield Figure("exactness", "mismatched tokens", row["mismatched_tokens"], "tokens", at)


def load_figures(assembly: Assembly, plan: Plan) -> Iterator[Figure]:
    """Yield throughput by requests in flight, with the configured budget and without drafts, in turn, and the prices
    that budgets are decided by."""
    yield from _measured_prices(assembly)
    engines = {"plain": plain_engine(assembly), "adaptive": assembly.engine()}
    for concurrency in plan.concurrencies:
        runs: dict[str, list[Run]] = {name: [] for name in engines}
        for turn in range(_LOAD_TURNS + 1):
            for name, engine in engines.items():
                run = _serve(engine, assembly, plan, concurrency, max(plan.answers, 2 * concurrency))
                runs[name] += [run] * (turn > 0)  # the first one warms up
        speeds = {name: tokens_per_second(mine) for name, mine in runs.items()}
        at: At = {"concurrency": concurrency}
        for name, speed in speeds.items():
            yield Figure("load", name, speed, "tokens/s", at)
        yield Figure("load", "adaptive over plain", speeds["adaptive"] / speeds["plain"], "times", at)
        for name, mine in runs.items():
            yield from _outside_of_forwards(name, mine, concurrency)
        yield Figure("exactness", "mismatched tokens", mismatches(runs["plain"], runs["adaptive"]), "tokens", at)


def _measured_prices(assembly: Assembly) -> Iterator[Figure]:
    """Yield what the start measured: seconds of forwards by sequences, context and rows, and of drafting."""
    if assembly.costs is None:
        return
    table, drafts = assembly.costs.verify, assembly.costs.drafts
    for (i, j, k), seconds in np.ndenumerate(table.seconds):
        at: At = {"sequences": int(table.sequences[i]), "context": int(table.contexts[j]), "rows": int(table.rows[k])}
        yield Figure("prices", "forward", 1e3 * seconds, "ms", at)
    for batch, seconds in zip(drafts.batches, drafts.seconds, strict=True):
        yield Figure("prices", "drafting", 1e3 * seconds, "ms", {"sequences": int(batch)})


def _outside_of_forwards(name: str, runs: Sequence[Run], sequences: int) -> Iterator[Figure]:
    """Yield what steps of a full batch take besides forward and drafting, plain ones and those with drafts."""
    full = [step for run in runs for step in run.steps if not step.stats.prompt_tokens]
    for kind, steps in (
        ("plain", [step for step in full if not step.stats.drafts]),
        ("drafted", [step for step in full if step.stats.drafts]),
    ):
        if steps and (kind == "drafted") == (name == "adaptive"):
            other = median(step.seconds - step.stats.verify_seconds - step.stats.draft_seconds for step in steps)
            yield Figure("prices", f"other {kind}", 1e3 * max(0.0, other), "ms", {"sequences": sequences})


def exactness_figures(assembly: Assembly, plan: Plan) -> Iterator[Figure]:
    """Yield the lossless check's counts."""
    result = check(
        assembly,
        small_prompts(assembly, plan),
        num_tokens=plan.exact_tokens,
        answer_tokens=min(64, plan.answer_tokens),
    )
    at: At = {"numerics": assembly.numerics, "cases": len(result.cases)}
    yield Figure("exactness", "tokens compared", result.total.tokens_compared, "tokens", at)
    yield Figure("exactness", "mismatched tokens", result.total.mismatched_tokens, "tokens", at)


def _serve(engine: Engine, assembly: Assembly, plan: Plan, concurrency: int, count: int) -> Run:
    """Answer `count` of the prompts, repeated where there are fewer, on the engine thread's stream."""
    prompts = list(islice(cycle(small_prompts(assembly, plan)), count))
    requests = requests_from(prompts, 0, Measure(0.0, plan.answer_tokens, concurrency=count, seed=0))
    with serving(assembly.target.device):
        return generate(engine, requests, ClosedLoop(concurrency))


def training_figures(assembly: Assembly, plan: Plan) -> Iterator[Figure]:
    """Yield the number of updates, the time of one and of judging it, step times (p50, p99) and throughput with and
    without them, and the share lost. Raises RuntimeError when no update was made."""
    quiet, _, _ = _serve_while_learning(assembly, plan, updates=0)
    busy, updates, judged = _serve_while_learning(assembly, plan, updates=plan.updates)
    yield Figure("training", "updates", updates, "")
    for name, number in (("one update", "seconds"), ("judging it", "judging_seconds")) if judged else ():
        yield Figure("training", name, median(numbers[number] for numbers in judged) * 1e3, "ms")
    for name, runs in (("off", quiet), ("on", busy)):
        times = [1e3 * step.stats.seconds for run in runs for step in run.steps]
        for percent in (50, 99):
            yield Figure("training", f"step p{percent} {name}", percentile(times, percent, method="linear"), "ms")
        yield Figure("training", f"throughput {name}", tokens_per_second(runs), "tokens/s")
    lost = 1 - tokens_per_second(busy) / tokens_per_second(quiet)  # below 0: within noise
    yield Figure("training", "loss of tokens/s", lost, "")


def _serve_while_learning(
    assembly: Assembly, plan: Plan, *, updates: int
) -> tuple[list[Run], int, list[Mapping[str, float]]]:
    """Serve until `updates` updates or the end of patience; return runs, updates, and numbers of the judged ones."""
    events: list[Event] = []
    config = assembly.config.adaptation.model_copy(update={"enabled": True, "policy": "bandit" if updates else "never"})
    learning = replace(assembly, config=assembly.config.model_copy(update={"adaptation": config}))
    budget = FixedBudget(min(_TRAINING_NODES, assembly.limits.max_budget))  # without drafts nothing is learnt
    with TemporaryDirectory(prefix="adaptree-bench-") as folder:
        adaptive = build_adaptive(
            learning,
            folder=Path(folder),
            emit=events.append,
            budget=budget,
            tuning=_EAGER,
            policy=fixed_policy("always", _EAGER) if updates else None,
        )
        adaptive.start()
        try:
            _serve_until(adaptive, assembly, plan, min(1, updates))  # a first update compiles and allocates
            runs, made = _serve_until(adaptive, assembly, plan, updates)
        finally:
            adaptive.stop()
    if updates and not made:
        kinds = [f"{event.kind}: {event.reason}" for event in events]
        raise RuntimeError(f"no update in {plan.patience_seconds:g} s of serving; events of learning: {kinds}")
    return runs, made, [event.numbers for event in events if "judging_seconds" in event.numbers]


def _serve_until(adaptive: Adaptive, assembly: Assembly, plan: Plan, updates: int) -> tuple[list[Run], int]:
    """Answer all requests once, and again until `updates` updates are made or patience ends."""
    num_updates, start = adaptive.learner.training.num_updates, time.monotonic()
    before, runs = sum(num_updates.values()), []
    while True:
        runs.append(_serve(adaptive.engine, assembly, plan, _TRAINING_CONCURRENCY, plan.training_requests))
        made = sum(num_updates.values()) - before
        if made >= updates or time.monotonic() - start >= plan.patience_seconds:
            return runs, made


FiguresOf = Callable[[Assembly, Plan], Iterator[Figure]]
MEASURED: dict[str, FiguresOf] = {
    "exactness": exactness_figures,
    "steps": step_figures,
    "speed": speed_figures,
    "load": load_figures,
    "training": training_figures,
}
"""Of the served model; `steps` and `speed` measure the plan's other checkpoints too."""
