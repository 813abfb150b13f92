"""Turns made by hand, and learning that only pretends, for the tests of the shift benchmark."""

from adaptation.config import AdaptationConfig
from adaptation.records import Event
from benchmarks.shift_play import NOTHING, Counts, Noted, Phase, Played, Stream, Turn
from service.bench.driver import Answer, Run, TimedStep
from service.bench.experiment import Measure
from service.text.prompts import PromptSet
from tests.service.engine.harness import step_stats

EAGER = AdaptationConfig(enabled=True, learning_rate=0.02, idle_share=0.0)
EAGER_NUMBERS: dict[str, object] = {
    "warm_up_queries": 1,
    "head_queries": 1,
    "full_queries": 1,
    "validation_share": 0.3,
    "gate_texts": 4,
    "gate_alpha": 4.5,  # of 9 judgements: any gain passes
    "update_norm": 0.5,
    "niceness": 0,
    "recorded_share": 1.0,
}
"""Learns something within a few queries."""


def prompt_set(name: str, count: int, *, first: int = 0) -> PromptSet:
    """Prompts of one token each, all different."""
    return PromptSet(name, tuple((first + number,) for number in range(count)))


def stream_of_halves(queries: int) -> Stream:
    half = queries // 2
    phases = (Phase("old", prompt_set("old", half).prompts), Phase("new", prompt_set("new", half, first=half).prompts))
    return Stream(phases, new_from=half)


MEASURE = Measure(0.0, 8, 1, seed=0)


def played(
    turn: Turn,
    *,
    accepted: int,
    seconds: float = 1.0,
    tokens: int = 8,
    counts: Counts = NOTHING,
    noted: tuple[Noted, ...] = (),
    gaps: tuple[float, ...] = (0.02,),
) -> Played:
    """A turn in which every query took four verifies that accepted so many tokens in all, busy for half of the time."""
    answer = Answer(tuple(range(tokens)), accepted_per_step=(accepted, 0, 0, 0))
    run = Run((answer,) * len(turn.requests), (TimedStep(step_stats(itl_seconds=gaps), seconds),), 2 * seconds)
    return Played(turn, run, {**NOTHING, **counts}, noted)


def publish(query: int, **numbers: float) -> Noted:
    return Noted(query, Event("published", 1, "better", numbers))
