"""What steps cost: against the bandwidth floor, by rows and context, replayed and as they are, and
beside what the drafter takes. Random weights do: what a key says changes no time.
"""

from collections.abc import Callable, Iterator
from functools import partial
from statistics import median

import torch

from service.assembly import Assembly
from service.bench.generate import generate
from service.bench.gpu_clock import copy_bandwidth, device_seconds, wall_seconds
from service.bench.gpu_figures import Figure
from service.bench.gpu_plan import Plan
from service.engine.budget import FixedBudget
from service.engine.costs.measuring import Point, Stage
from service.engine.requests import GenerationRequest, SamplingParams
from service.engine.stats import StepStats

_PROMPT = 64
_NODES = 32
_SEQUENCES = 4  # 256 rows of a root and 64 nodes each


def step_figures(assembly: Assembly, plan: Plan) -> Iterator[Figure]:
    """Decode, verify, replaying and drafting of one model."""
    model, costs_only = assembly.config.model, assembly.config.load_format == "dummy"

    def figure(section: str, name: str, value: float, unit: str, **at: int | float | str) -> Figure:
        return Figure(section, name, value, unit, {"model": model, **at}, costs_only)

    yield from _decode(assembly, plan, figure)
    yield from _verify(assembly, plan, figure)
    yield from _graphs(assembly, plan, figure)
    yield from _drafter(assembly, plan, figure)


_Make = Callable[..., Figure]


def _decode(assembly: Assembly, plan: Plan, figure: _Make) -> Iterator[Figure]:
    """A plain step of one short text, as the engine makes it, and the target's part of it."""
    target, device = assembly.target, assembly.target.device
    bandwidth = copy_bandwidth(device, plan.copied_bytes)
    stage = Stage(target, lines=1, length=_PROMPT)
    rows = stage.place(Point(1, _PROMPT, 1))
    forward = device_seconds(partial(target.forward, rows, stage.table), device, repeats=plan.repeats)
    floor = read_bytes(assembly, _PROMPT) / bandwidth
    step = median(seconds for _, seconds in _steps(assembly, plan, nodes=0))
    yield figure("decode", "copy bandwidth", bandwidth / 1e9, "GB/s")
    yield figure("decode", "floor", floor * 1e3, "ms", context=_PROMPT)
    yield figure("decode", "target forward", forward * 1e3, "ms", context=_PROMPT)
    yield figure("decode", "step", step * 1e3, "ms", context=_PROMPT)
    yield figure("decode", "share of floor", floor / step, "")
    yield figure("decode", "share outside kernels", max(0.0, 1 - forward / step), "")


def _verify(assembly: Assembly, plan: Plan, figure: _Make) -> Iterator[Figure]:
    target, device = assembly.target, assembly.target.device
    stage = Stage(target, lines=min(_SEQUENCES, assembly.limits.max_sequences), length=max(plan.contexts))
    for point in (Point(-(-rows // 65), context, rows) for context in plan.contexts for rows in plan.rows):
        rows = stage.place(point)
        run = partial(target.forward, rows, stage.table)
        seconds = device_seconds(run, device, repeats=plan.repeats)
        stage.free(rows)
        at = {"rows": point.rows, "context": point.context, "sequences": point.sequences}
        yield figure("verify", "forward", seconds * 1e3, "ms", **at)


def _graphs(assembly: Assembly, plan: Plan, figure: _Make) -> Iterator[Figure]:
    """The same forward of one row, replayed and kernel by kernel."""
    target, device = assembly.target, assembly.target.device
    stage = Stage(target, lines=1, length=plan.contexts[0])
    rows = stage.place(Point(1, plan.contexts[0], 1))
    replayed = wall_seconds(partial(target.forward, rows, stage.table), device, repeats=plan.repeats)
    with torch.inference_mode():
        as_it_is = wall_seconds(partial(target.forward_once, rows, stage.table), device, repeats=plan.repeats)
    yield figure("graphs", "replayed", replayed * 1e3, "ms", rows=1)
    yield figure("graphs", "kernel by kernel", as_it_is * 1e3, "ms", rows=1)
    yield figure("graphs", "gain", as_it_is / replayed, "times")


def _drafter(assembly: Assembly, plan: Plan, figure: _Make) -> Iterator[Figure]:
    """Grow and step of one sequence; drafting is timed where its results are waited for, at the tree's size."""
    steps = list(_steps(assembly, plan, nodes=_NODES))
    drafts = median(stats.draft_seconds for stats, _ in steps)
    whole = median(seconds for _, seconds in steps)
    yield figure("drafter", "forwards and growth", drafts * 1e3, "ms", blocks=2, nodes=_NODES)
    yield figure("drafter", "step", whole * 1e3, "ms", nodes=_NODES)
    yield figure("drafter", "share of a step", drafts / whole, "")


def _steps(assembly: Assembly, plan: Plan, *, nodes: int) -> Iterator[tuple[StepStats, float]]:
    """Steps of one decoding sequence that read no prompt; the first ones warm up."""
    drafter = assembly.drafter("none" if nodes == 0 else None)
    engine = assembly.engine(drafter, FixedBudget(min(nodes, assembly.limits.max_budget)))
    most_tokens = min(4 * plan.steps + 8, assembly.limits.max_model_len - _PROMPT)
    sampling = SamplingParams(seed=0, max_tokens=most_tokens, temperature=0.0, ignore_eos=True)
    prompt = tuple(range(_PROMPT))
    run = generate(engine, [GenerationRequest(request_id="steps", prompt=prompt, sampling=sampling)])
    decoding = [step for step in run.steps if not step.stats.prompt_tokens][2:]
    yield from ((step.stats, step.seconds) for step in decoding[: plan.steps])


def read_bytes(assembly: Assembly, context: int) -> int:
    """What decoding one token cannot help reading: weights, and keys and values of the context."""
    return assembly.loaded.read_bytes + context * assembly.loaded.kv_shape.bytes_per_slot
