"""A tiny target with a drafter that learns, and plain answers to compare with."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from adaptation.records import Emit, Event
from service.assembly import Assembly, assemble
from service.bench.driver import generate
from service.engine.budget import Budget
from service.engine.engine import Engine, EngineLimits
from service.engine.requests import GenerationRequest, SamplingParams, Scope
from service.learning.adaptive import Adaptive, build_adaptive
from tests.service.bench.parts import save_drafter, save_two_layers, settings_for
from tests.tuned import QUICK, settled, tuned

EAGER: dict[str, object] = {
    **QUICK,
    "head_queries": 2,
    "full_queries": 2,
    "head_steps": 8,
    "full_steps": 4,
    "step_texts": 64,
    "warm_up_steps": 1,
    "niceness": 0,
}
"""Quick to decide, and eager to learn."""


def assembled(folder: Path, drafter: str = "memory+specblock", dtype: str = "float32") -> Assembly:
    """A small target in `folder`, and a drafter of random weights for it."""
    model = save_two_layers(folder / "model")
    settings = settings_for(model, dtype)
    weights = save_drafter(folder / "drafter", assemble(settings.model_copy(update={"drafter": "memory"})))
    return assemble(settings.model_copy(update={"drafter": drafter, "drafter_path": weights, "budget_policy": "fixed"}))


def built(
    assembly: Assembly,
    folder: Path,
    *,
    emit: Emit = lambda event: None,
    budget: Budget | None = None,
    limits: EngineLimits | None = None,
    **knobs: object,
) -> Adaptive:
    """An engine that learns, its thread not started."""
    config, tuning, policy = tuned({**EAGER, **knobs})
    mine = replace(assembly, config=assembly.config.model_copy(update={"adaptation": config}))
    return build_adaptive(mine, folder=folder, emit=emit, budget=budget, limits=limits, tuning=tuning, policy=policy)


@contextmanager
def learning(
    assembly: Assembly,
    folder: Path,
    *,
    events: list[Event] | None = None,
    budget: Budget | None = None,
    limits: EngineLimits | None = None,
    **knobs: object,
) -> Iterator[Adaptive]:
    """An engine that learns, its thread running."""
    emit = (lambda event: None) if events is None else events.append
    adaptive = built(assembly, folder, emit=emit, budget=budget, limits=limits, **knobs)
    adaptive.start()
    try:
        yield adaptive
    finally:
        assert adaptive.worker.stop()
        adaptive.learner.training.close()


def requests(prompts: Sequence[Sequence[int]], *, temperature: float, tokens: int) -> list[GenerationRequest]:
    return [
        GenerationRequest(
            request_id=str(number),
            prompt=tuple(prompt),
            sampling=SamplingParams(seed=number, max_tokens=tokens, temperature=temperature, ignore_eos=True),
            scope=Scope(address=f"client {number % 3}"),
        )
        for number, prompt in enumerate(prompts)
    ]


def texts(engine: Engine, asked: Sequence[GenerationRequest]) -> list[tuple[int, ...]]:
    return [answer.token_ids for answer in generate(engine, asked).answers]


def assert_learns(assembly: Assembly, folder: Path, asked: Sequence[GenerationRequest]) -> None:
    """An engine of this assembly learns from these while it gives plain answers."""
    plain = texts(assembly.engine(assembly.drafter("none")), asked)
    with learning(assembly, folder) as adaptive:
        assert texts(adaptive.engine, asked) == plain
        assert settled(adaptive.worker)
        status = adaptive.status()
    assert status.failures == {}
    assert sum(status.updates.values()) > 0
