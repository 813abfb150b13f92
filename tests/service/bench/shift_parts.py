"""Turns made by hand, and learning that only pretends, for the tests of the shift benchmark."""

from adaptation.config import AdaptationConfig
from adaptation.records import Event
from service.bench.shift_play import AnsweredQuery, Counts, Noted, Phase, Played, Stream, Turn
from service.prompts import PromptSet

EAGER = AdaptationConfig(head_queries=1, full_queries=1, head_learning_rate=0.02, full_learning_rate=0.02)
EAGER_NUMBERS: dict[str, object] = {
    "warm_up_queries": 1,
    "validation_share": 0.3,
    "gate_texts": 4,
    "gate_standard_errors": 0,
    "update_norm": 0.5,
    "niceness": 0,
}
"""Learns something within a few queries."""


def prompt_set(name: str, count: int, *, first: int = 0) -> PromptSet:
    """Prompts of one token each, all different."""
    return PromptSet(name, tuple((first + number,) for number in range(count)))


def stream_of_halves(queries: int) -> Stream:
    half = queries // 2
    phases = (Phase("old", prompt_set("old", half).prompts), Phase("new", prompt_set("new", half, first=half).prompts))
    return Stream(phases, new_from=half)


def played(
    turn: Turn,
    *,
    accepted: int,
    seconds: float = 1.0,
    engine_seconds: float = 0.5,
    tokens: int = 8,
    counts: Counts | None = None,
    noted: tuple[Noted, ...] = (),
    gaps: tuple[float, ...] = (0.02,),
) -> Played:
    """A turn in which every query took four verifies that accepted so many tokens in all."""
    query = AnsweredQuery(tuple(range(tokens)), accepted, 4)
    queries = (query,) * len(turn.prompts)
    return Played(turn, queries, gaps, engine_seconds, seconds, counts or Counts(), noted)


def publish(query: int, **numbers: float) -> Noted:
    return Noted(query, Event("published", 1, "better", numbers))
