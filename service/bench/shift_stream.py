"""The prompts of a shift benchmark: one kind of text and then another, or a mix of several again and again.

Cuts the stream into turns, of which every policy takes one after the other, and turns into windows. Knows neither who
answers nor who learns.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest

from service.bench.prompts import PromptSet
from service.errors import StartupError

_WINDOWS = 24  # of the whole stream, about: enough to see a course, few enough that each says something

Prompt = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Phase:
    """A stretch of the stream over which traffic does not change."""

    name: str
    prompts: tuple[Prompt, ...]


@dataclass(frozen=True, slots=True)
class Stream:
    """All phases, and the first query of the stretch in which there is something new to learn."""

    phases: tuple[Phase, ...]
    new_from: int

    @property
    def num_queries(self) -> int:
        return sum(len(phase.prompts) for phase in self.phases)


@dataclass(frozen=True, slots=True)
class AskedQuery:
    """One query of a stream."""

    number: int  # its seed follows from it
    prompt: Prompt
    client: str = ""


@dataclass(frozen=True, slots=True)
class Turn:
    """Queries that a policy answers in one go. Neither turns nor windows reach over the end of a phase."""

    number: int
    phase: int
    window: int
    first: int  # number of its first query
    queries: tuple[AskedQuery, ...]

    @property
    def prompts(self) -> tuple[Prompt, ...]:
        return tuple(query.prompt for query in self.queries)


def shifted(before: Sequence[PromptSet], after: Sequence[PromptSet], queries: int, seed: int) -> Stream:
    """One half of these, then the other half of those. Raises StartupError where there are too few prompts."""
    first = Phase(_name(before), mixed(before, queries // 2, random.Random(seed)))
    second = Phase(_name(after), mixed(after, queries - queries // 2, random.Random(seed + 1)))
    return Stream((first, second), new_from=queries // 2)


def repeated(sets: Sequence[PromptSet], queries: int, epochs: int, seed: int) -> Stream:
    """One mix of all sets, so many times over, `queries` in all. Raises StartupError where prompts are missing."""
    if queries % epochs:
        raise StartupError(f"--queries {queries} cannot be cut into {epochs} equal epochs: give a multiple of --epochs")
    prompts = mixed(sets, queries // epochs, random.Random(seed))
    return Stream(tuple(Phase(f"epoch {epoch + 1}", prompts) for epoch in range(epochs)), new_from=0)


def mixed(sets: Sequence[PromptSet], count: int, rng: random.Random) -> tuple[Prompt, ...]:
    """So many prompts, equally many of each set while it lasts, in an order of chance. Raises StartupError."""
    shuffled = [rng.sample(chosen.prompts, len(chosen.prompts)) for chosen in sets]
    dealt = [prompt for prompt in chain.from_iterable(zip_longest(*shuffled)) if prompt is not None][:count]
    if len(dealt) < count:
        raise StartupError(f"{_name(sets)}: {count} prompts are needed and there are {len(dealt)}; lower --queries")
    return tuple(rng.sample(dealt, count))


def turns_of(stream: Stream, size: int) -> list[Turn]:
    """The whole stream in turns of `size` queries; the last turn of a phase may be shorter."""
    total = sum(-(-len(phase.prompts) // size) for phase in stream.phases)
    per_window = max(1, round(total / _WINDOWS))
    turns: list[Turn] = []
    first = window = 0
    for index, phase in enumerate(stream.phases):
        pieces = list(_pieces(phase.prompts, size))
        windows = max(1, len(pieces) // per_window)
        for place, prompts in enumerate(pieces):
            mine = window + min(place // per_window, windows - 1)
            queries = tuple(AskedQuery(number, prompt) for number, prompt in enumerate(prompts, start=first))
            turns.append(Turn(len(turns), index, mine, first, queries))
            first += len(prompts)
        window += windows
    return turns


def _name(sets: Sequence[PromptSet]) -> str:
    return " + ".join(chosen.name for chosen in sets)


def _pieces(prompts: tuple[Prompt, ...], size: int) -> Iterator[tuple[Prompt, ...]]:
    return (prompts[start : start + size] for start in range(0, len(prompts), size))
