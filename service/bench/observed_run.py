"""Runs prompts through an observed drafter and says what was seen.

A pass of its own, after everything that is timed: observing costs time and must cost the timed runs none.
"""

from collections.abc import Callable, Sequence

from drafters.registry import TRAINED, TrainedWeights
from service.assembly import Assembly
from service.bench.anatomy import Anatomy, anatomy_of
from service.bench.generate import generate
from service.bench.observe import Observed, observed
from service.bench.prompts import PromptSet
from service.bench.records import StepRecord
from service.bench.speed import Measure, requests_from
from service.engine.budget import BudgetPolicy
from service.engine.engine import Engine

_DEPTH_WITHOUT_BLOCKS = 8


def observe_sets(
    assembly: Assembly,
    sets: Sequence[PromptSet],
    measures: Sequence[Measure],
    advance: Callable[[int], None] = lambda prompts: None,
) -> list[list[StepRecord]]:
    """The steps of the configured drafter over every set, measure after measure."""
    with observed(assembly, assembly.drafter_name, assembly.weights) as seen:
        engine = assembly.engine(drafter=seen.drafter)
        return [observe(engine, seen, prompts, measure, advance) for measure in measures for prompts in sets]


def observe_variant(
    assembly: Assembly,
    name: str,
    weights: TrainedWeights,
    policy: BudgetPolicy,
    sets: Sequence[PromptSet],
    measure: Measure,
    *,
    coupled: bool,
) -> list[StepRecord]:
    """All steps of another drafter over every set."""
    with observed(assembly, name, weights, coupled=coupled) as seen:
        engine = assembly.engine(drafter=seen.drafter, policy=policy)
        return [step for prompts in sets for step in observe(engine, seen, prompts, measure)]


def observe(
    engine: Engine,
    seen: Observed,
    prompts: PromptSet,
    measure: Measure,
    advance: Callable[[int], None] = lambda prompts: None,
) -> list[StepRecord]:
    """The steps of one set's answers."""
    for first in range(0, len(prompts.prompts), measure.concurrency):
        requests = requests_from(prompts.prompts, first, measure)
        generate(engine, requests)
        advance(len(requests))
    return seen.recorder.take()


def judged(assembly: Assembly, steps: Sequence[StepRecord]) -> Anatomy:
    """Statistics of the configured drafter's steps: of its trained source, if it has one, down to M * K."""
    weights = assembly.weights if assembly.drafter_name in TRAINED else None
    return anatomy_of(steps, depth=alpha_depth(weights), source="specblock" if weights else None)


def alpha_depth(weights: TrainedWeights | None) -> int:
    """M * K, the deepest that blocks reach one after the other."""
    return weights.blocks * weights.model.config.block_size if weights else _DEPTH_WITHOUT_BLOCKS
