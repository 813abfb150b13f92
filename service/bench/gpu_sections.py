"""The measurements of `adaptree bench gpu`: steps, speed, load, exactness and training beside serving, as figures."""

import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import torch
from transformers import PreTrainedModel

from adaptation.config import AdaptationConfig, Tuning
from adaptation.records import Event
from drafters.specblock import checkpoint
from service.assembly import Assembly, assemble
from service.bench.driver import ClosedLoop, Run, TimedStep, generate
from service.bench.experiment import (
    Measure,
    mismatches,
    percentile,
    plain_engine,
    requests_from,
    tokens_per_second,
    warm_up,
)
from service.bench.gpu_anatomy import anatomy_of
from service.bench.lossless import built_in_prompts, check
from service.bench.speed import contestants_of, measure_set
from service.config import ServiceConfig
from service.engine.budget import FixedBudget
from service.engine.costs.measuring import Point, made_up_texts, place_point
from service.engine.drafter_weights import dummy_network
from service.engine.engine import Engine
from service.engine.requests import GenerationRequest, SamplingParams
from service.engine.thread import serving
from service.engine.weights import random_model
from service.errors import StartupError
from service.learning.adaptive import Adaptive, build_adaptive
from service.prompts import PromptSet, read_prompt_set

At = dict[str, int | float | str]

_WARM_UPS = 2  # first runs, which are not counted


@dataclass(frozen=True, slots=True)
class Figure:
    """One number, of one section, under conditions of its own."""

    section: str
    name: str
    value: float
    unit: str
    at: At = field(default_factory=dict)
    costs_only: bool = False  # from random weights


_TINY: dict[str, object] = {
    **{"model": "dummy(tiny)", "load_dtype": "float32", "threads": 1, "device": "cpu"},
    **{"max_sequences": 2, "kv_cache": "100MiB"},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    for_real: bool = True
    minutes: float = 8
    large: tuple[str, ...] = ("llama-3.1-8b", "qwen3-8b")  # random weights
    rows: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128, 256)
    contexts: tuple[int, ...] = (256, 2048)
    concurrencies: tuple[int, ...] = (1, 4, 16, 64)
    widened: tuple[int, ...] = (4, 8)  # copies of the served model
    prompts: Path | None = None  # of the sections on text; None: built-in ones
    repeats: int = 20
    copied_bytes: int = 1 << 30
    steps: int = 64  # of an engine, to see what one takes
    answers: int = 16
    turns: int = 2
    answer_tokens: int = 128
    exact_tokens: int = 20_000
    training_requests: int = 64
    updates: int = 4  # to be made while they are served, again and again if need be
    patience_seconds: float = 40


FULL = Plan()
DRY = Plan(
    for_real=False,
    large=("tiny",),
    rows=(1, 16),
    contexts=(32,),
    concurrencies=(2,),
    widened=(2,),
    repeats=1,
    copied_bytes=1 << 20,
    steps=3,
    answers=1,
    turns=1,
    answer_tokens=8,
    exact_tokens=60,
    training_requests=12,
    updates=1,
    patience_seconds=60,
)


def check_device(config: ServiceConfig, plan: Plan, cuda_devices: int) -> None:
    """Raise StartupError where the plan cannot be carried out."""
    if plan.for_real and (cuda_devices == 0 or config.device == "cpu"):
        raise StartupError("bench gpu measures a GPU, and there is none: add --dry-run to try every part on a CPU")


def large_assembly(config: ServiceConfig, plan: Plan, name: str) -> Assembly:
    """Random weights of that shape, with a random drafter of two blocks."""
    sizes = {"max_model_len": max(plan.contexts) + 512, "max_sequences": 8, "kv_cache": "8GiB"}
    drafting = {"drafter": "specblock", "drafter_path": None, "draft_blocks": 2, "budget_policy": "fixed"}
    return _assembled(config, plan, {**sizes, **drafting}, model=f"dummy({name})")


def small_assembly(config: ServiceConfig, plan: Plan, folder: Path) -> Assembly:
    """The configured model; of a rehearsal a tiny one, with a random drafter that is stored, so that it can learn."""
    if plan.for_real:  # room beside it for more engines than a server has
        return _assembled(config, plan, {"kv_cache": "8GiB", "max_sequences": max(plan.concurrencies)})
    return _rehearsed(config, plan, folder)


def _rehearsed(
    config: ServiceConfig, plan: Plan, folder: Path, narrow: PreTrainedModel | None = None, **more: object
) -> Assembly:
    """A tiny model with a random drafter, for what it is before it is widened."""
    sizes = {"max_model_len": 512, "max_budget": 8, "budget_policy": "fixed", "drafter": "specblock"}
    first = _assembled(config, plan, {**sizes, "drafter": "memory"}, **more)
    identity = first.loaded.parts.identity
    network = dummy_network(narrow or first.loaded.model)
    checkpoint.save(folder, network, target_identity=identity, facts={}, own_head=True)
    return _assembled(config, plan, sizes, drafter_path=folder, **more)


def widened_assembly(config: ServiceConfig, plan: Plan, copies: int, folder: Path) -> Assembly:
    """The configured model so many times as wide, with its own drafter."""
    if plan.for_real:
        sizes = {"kv_cache": "16GiB", "max_sequences": 8}
        return _assembled(config, plan, sizes, model=f"widen({config.model_source}, {copies})")
    tiny = random_model("tiny", dtype=torch.float32, device=torch.device("cpu"))
    tiny.model.save_pretrained(folder / "model")
    tiny.tokenizer.save_pretrained(folder / "model")
    widened = f"widen({folder / 'model'}, {copies})"
    return _rehearsed(config, plan, folder / "drafter", tiny.model, model=widened)


def _assembled(config: ServiceConfig, plan: Plan, values: dict[str, object], **more: object) -> Assembly:
    tiny = {} if plan.for_real else _TINY
    changed = ServiceConfig.model_validate({**config.model_dump(), **values, **tiny, **more})
    return assemble(changed, graphs=True)


def small_prompts(assembly: Assembly, plan: Plan) -> list[list[int]]:
    """Prompts that leave room for an answer."""
    most = assembly.limits.max_model_len - plan.answer_tokens - 1
    if plan.prompts is None:
        return [prompt[:most] for prompt in built_in_prompts(assembly.tokenizer)]
    given = read_prompt_set(plan.prompts, assembly.tokenizer)
    return [[*prompt] for prompt in given.prompts if len(prompt) <= most]


def device_seconds(
    run: Callable[[], object], device: torch.device, *, repeats: int, before: Callable[[], object] = lambda: None
) -> float:
    """Median seconds that a device takes for `run`, without what `before` asks for; by the wall on a CPU."""
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
    """Median seconds until the host may go on with the results."""
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
    """Bytes per second that a large copy reads and writes: what nothing on this device can beat."""
    source = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * num_bytes / device_seconds(lambda: target.copy_(source), device, repeats=5)


_PROMPT = 64
_NODES = 31  # rows with the root: 32
_SEQUENCES = 4  # 256 rows of a root and 64 nodes each


def step_figures(assembly: Assembly, plan: Plan) -> Iterator[Figure]:
    """Decode, verify, replaying and drafting of one model."""
    model, costs_only = assembly.config.model_source, assembly.config.is_dummy
    for measure in (_decode, _verify, _graphs, _drafter, _anatomy):
        for figure in measure(assembly, plan):
            yield replace(figure, at={"model": model, **figure.at}, costs_only=costs_only)


def _decode(assembly: Assembly, plan: Plan) -> Iterator[Figure]:
    """A plain step of one short text, as the engine makes it, and the target's part of it."""
    target, device = assembly.target, assembly.target.device
    bandwidth = copy_bandwidth(device, plan.copied_bytes)
    trial = made_up_texts(target, lines=1, length=_PROMPT)
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
    trial = made_up_texts(target, lines=min(_SEQUENCES, assembly.limits.max_sequences), length=max(plan.contexts))
    for point in (Point(-(-rows // 65), context, rows) for context in plan.contexts for rows in plan.rows):
        rows = place_point(trial, point)
        run = partial(target.forward, rows, trial.table)
        seconds = device_seconds(run, device, repeats=plan.repeats)
        trial.free(rows)
        at: At = {"rows": point.rows, "context": point.context, "sequences": point.sequences}
        yield Figure("verify", "forward", seconds * 1e3, "ms", at)


def _graphs(assembly: Assembly, plan: Plan) -> Iterator[Figure]:
    """The same forward of one row, replayed and kernel by kernel."""
    target, device = assembly.target, assembly.target.device
    trial = made_up_texts(target, lines=1, length=plan.contexts[0])
    rows = place_point(trial, Point(1, plan.contexts[0], 1))
    replayed = wall_seconds(partial(target.forward, rows, trial.table), device, repeats=plan.repeats)
    with torch.inference_mode():
        as_it_is = wall_seconds(partial(target.forward_once, rows, trial.table), device, repeats=plan.repeats)
    yield Figure("graphs", "replayed", replayed * 1e3, "ms", {"rows": 1})
    yield Figure("graphs", "kernel by kernel", as_it_is * 1e3, "ms", {"rows": 1})
    yield Figure("graphs", "gain", as_it_is / replayed, "times")


def _drafter(assembly: Assembly, plan: Plan) -> Iterator[Figure]:
    """Grow and step of one sequence; drafting is timed where its results are waited for, at the tree's size."""
    plain = median(step.seconds for step in _steps(assembly, plan, nodes=0))
    steps = _steps(assembly, plan, nodes=_NODES)
    drafts = median(step.stats.draft_seconds for step in steps)
    whole = median(step.seconds for step in steps)
    yield Figure("drafter", "forwards and growth", drafts * 1e3, "ms", {"blocks": 2, "nodes": _NODES})
    yield Figure("drafter", "step", whole * 1e3, "ms", {"nodes": _NODES})
    yield Figure("drafter", "share of a step", drafts / whole, "")
    yield Figure("drafter", "over a plain step", whole / plain, "times")


def _anatomy(assembly: Assembly, plan: Plan) -> Iterator[Figure]:
    """What a step asks for and what the device does in it, plain and with a tree."""
    for name, nodes in (("plain", 0), ("drafted", _NODES)):
        engine = _engine(assembly, nodes)
        engine.add(_request(assembly, plan))
        for _ in range(_WARM_UPS + 4):
            engine.step()

        def some_steps(engine: Engine = engine) -> int:
            return len([engine.step() for _ in range(min(plan.steps, 8))])

        with serving(assembly.target.device):
            anatomy = anatomy_of(some_steps, assembly.target.device)
        for what, value, unit in anatomy.figures():
            yield Figure("anatomy", f"{name}: {what}", value, unit)


def _steps(assembly: Assembly, plan: Plan, *, nodes: int) -> list[TimedStep]:
    """Steps of one decoding sequence that read no prompt; the first ones warm up."""
    run = generate(_engine(assembly, nodes), [_request(assembly, plan)])
    return [step for step in run.steps if not step.stats.prompt_tokens][2 : 2 + plan.steps]


def _engine(assembly: Assembly, nodes: int) -> Engine:
    budget = FixedBudget(min(nodes, assembly.limits.max_budget))
    return assembly.engine(assembly.drafter("none") if nodes == 0 else None, budget)


def _request(assembly: Assembly, plan: Plan) -> GenerationRequest:
    """One made-up text that is long enough for all steps."""
    most_tokens = min(4 * plan.steps + 8, assembly.limits.max_model_len - _PROMPT)
    sampling = SamplingParams(seed=0, max_tokens=most_tokens, temperature=0.0, ignore_eos=True)
    return GenerationRequest(request_id="steps", prompt=tuple(range(_PROMPT)), sampling=sampling)


def read_bytes(assembly: Assembly, context: int) -> int:
    """What decoding one token cannot help reading: weights, and keys and values of the context."""
    return assembly.loaded.read_bytes + context * assembly.loaded.kv_shape.bytes_per_slot


def speed_figures(assembly: Assembly, plan: Plan) -> Iterator[Figure]:
    """Speculation against plain decoding on the same replayed forwards, greedy and sampled."""
    prompts = PromptSet("prompts", tuple(map(tuple, small_prompts(assembly, plan)[: plan.answers])))
    contestants = contestants_of(assembly)
    for temperature in (0.0, 1.0):
        measure = Measure(temperature, plan.answer_tokens, concurrency=1, seed=0)
        warm_up(contestants, prompts.prompts[0], measure)
        row = measure_set(prompts, contestants, measure)
        at: At = {"temperature": temperature, "model": assembly.config.model}
        name = f"at T={temperature:g}"
        for contestant in ("plain", "speculative"):
            speed = row[f"{contestant}_decode_tokens_per_second"]
            yield Figure("speed", f"{contestant} decode {name}", speed, "tokens/s", at)
        yield Figure("speed", f"decode speedup {name}", row["decode_speedup"], "times", at)
        yield Figure("speed", f"tau {name}", row["tau"], "tokens", at)
        yield Figure("exactness", "mismatched tokens", row["mismatched_tokens"], "tokens", at)


def load_figures(assembly: Assembly, plan: Plan) -> Iterator[Figure]:
    """Throughput by requests in flight, with the configured budget and without drafts, in turn."""
    engines = {"plain": plain_engine(assembly), "adaptive": assembly.engine()}
    for concurrency in plan.concurrencies:
        runs: dict[str, list[Run]] = {name: [] for name in engines}
        for turn in range(plan.turns + 1):
            for name, engine in engines.items():
                run = serve(engine, assembly, plan, concurrency, max(plan.answers, 2 * concurrency))
                runs[name] += [run] * (turn > 0)  # the first one warms up
        speeds = {name: tokens_per_second(mine) for name, mine in runs.items()}
        at: At = {"concurrency": concurrency}
        for name, speed in speeds.items():
            yield Figure("load", name, speed, "tokens/s", at)
        yield Figure("load", "adaptive over plain", speeds["adaptive"] / speeds["plain"], "times", at)
        yield Figure("exactness", "mismatched tokens", mismatches(runs["plain"], runs["adaptive"]), "tokens", at)


def exactness_figures(assembly: Assembly, plan: Plan) -> Iterator[Figure]:
    """Every way of decoding against plain decoding."""
    result = check(
        assembly,
        small_prompts(assembly, plan),
        num_tokens=plan.exact_tokens,
        answer_tokens=min(64, plan.answer_tokens),
    )
    at: At = {"numerics": assembly.numerics, "cases": len(result.cases)}
    yield Figure("exactness", "tokens compared", result.total.tokens_compared, "tokens", at)
    yield Figure("exactness", "mismatched tokens", result.total.mismatched_tokens, "tokens", at)


def serve(engine: Engine, assembly: Assembly, plan: Plan, concurrency: int, count: int) -> Run:
    """Answer so many of the built-in prompts, in turn, as the engine's thread would."""
    prompts = list(islice(cycle(small_prompts(assembly, plan)), count))
    requests = requests_from(prompts, 0, Measure(0.0, plan.answer_tokens, concurrency=count, seed=0))
    with serving(assembly.target.device):
        return generate(engine, requests, ClosedLoop(concurrency))


_TRAINING_CONCURRENCY = 4
_TRAINING_NODES = 16
_EAGER = Tuning(always_queries=4, gate_texts=4, validation_share=0.5, niceness=0)


def training_figures(assembly: Assembly, plan: Plan) -> Iterator[Figure]:
    """Steps and throughput without updates and with them. Raises RuntimeError when none was made."""
    quiet, _ = _served_beside(assembly, plan, "never", updates=0)
    busy, updates = _served_beside(assembly, plan, "always", updates=plan.updates)
    yield Figure("training", "updates", updates, "")
    for name, runs in (("off", quiet), ("on", busy)):
        steps = [step.stats for run in runs for step in run.steps]
        seconds = [step.draft_seconds + step.verify_seconds + step.other_seconds for step in steps]
        for percent in (50, 99):
            value = percentile(seconds, percent, method="linear") * 1e3
            yield Figure("training", f"step p{percent} {name}", value, "ms")
        yield Figure("training", f"throughput {name}", tokens_per_second(runs), "tokens/s")
    loss = 1 - tokens_per_second(busy) / tokens_per_second(quiet)
    yield Figure("training", "loss of tokens/s", loss, "")  # below 0: lost in the noise


def _served_beside(assembly: Assembly, plan: Plan, policy: str, *, updates: int) -> tuple[list[Run], int]:
    """Serve beside a learner until it has made so many updates or patience ends; what was served, and the updates."""
    told: Counter[str] = Counter()
    learning = assembly.config.adaptation.model_dump()
    config = AdaptationConfig.model_validate({**learning, "enabled": True, "policy": policy})
    budget = FixedBudget(min(_TRAINING_NODES, assembly.limits.max_budget))  # nothing is learnt where nothing is drafted

    def tell(event: Event) -> None:
        told[f"{event.kind}: {event.reason}"] += 1

    with TemporaryDirectory(prefix="adaptree-bench-") as folder:
        adaptive = build_adaptive(assembly, config, folder=Path(folder), emit=tell, policy=budget, tuning=_EAGER)
        adaptive.start()
        try:
            _serve_until(adaptive, assembly, plan, min(1, updates))  # a first update compiles and allocates
            runs, made = _serve_until(adaptive, assembly, plan, updates)
        finally:
            adaptive.stop()
    if updates and not made:
        raise RuntimeError(f"no update in {plan.patience_seconds:g} s of serving; learning told of {dict(told)}")
    return runs, made


def _serve_until(adaptive: Adaptive, assembly: Assembly, plan: Plan, updates: int) -> tuple[list[Run], int]:
    """All requests at least once, and again while updates are wanted and patience lasts."""
    num_updates, start = adaptive.learner.training.num_updates, time.monotonic()
    before, runs = sum(num_updates.values()), []
    while True:
        runs.append(serve(adaptive.engine, assembly, plan, _TRAINING_CONCURRENCY, plan.training_requests))
        made = sum(num_updates.values()) - before
        if made >= updates or time.monotonic() - start >= plan.patience_seconds:
            return runs, made


MEASURED: dict[str, Callable[[Assembly, Plan], Iterator[Figure]]] = {
    "exactness": exactness_figures,
    "steps": step_figures,
    "speed": speed_figures,
    "load": load_figures,
    "training": training_figures,
}
"""What is measured of the served model; `steps` and `speed` of others as well."""
