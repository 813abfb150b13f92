"""What `adaptree bench gpu` finds: figures with their conditions, and the aims that they are held against.

Numbers only; how they are found and shown is said elsewhere.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Literal

Verdict = Literal["met", "missed", "not measured", "not judged"]


class NotMeasured(Exception):
    """What a section was to measure did not happen; the message says what did."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One number, of one section, under conditions of its own."""

    section: str
    name: str
    value: float
    unit: str
    at: dict[str, int | float | str] = field(default_factory=dict)
    costs_only: bool = False  # from random weights

    def as_json(self) -> dict[str, object]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Aim:
    """What a figure shall be."""

    what: str
    section: str
    name: str
    holds: Callable[[float], bool]
    of_large: bool = False  # judged by large models alone, whose weights are random


AIMS = (
    Aim("large plain decode at batch 1 is at 80 % of its floor", "decode", "share of floor", lambda v: v >= 0.8, True),
    Aim("host and glue take at most 10 % of a large step", "decode", "share outside kernels", lambda v: v <= 0.1, True),
    Aim("drafting takes at most 16 % of a large step", "drafter", "share of a step", lambda v: v <= 0.16, True),
    Aim("speculation is 2.5 times plain decode", "speed", "decode speedup at T=0", lambda v: v >= 2.5),
    Aim("training beside costs at most 10 % of tokens/s", "training", "loss of tokens/s", lambda v: v <= 0.1),
    Aim("no token differs", "exactness", "mismatched tokens", lambda v: v == 0),
)


@dataclass(frozen=True, slots=True)
class Judged:
    """An aim and what became of it."""

    what: str
    verdict: Verdict
    value: float | None


def judge(figures: Sequence[Figure], *, for_real: bool) -> list[Judged]:
    """Every aim against its worst figure; a rehearsal is not judged, but for exactness."""
    return [_judged(aim, [figure.value for figure in figures if _concerns(aim, figure)], for_real) for aim in AIMS]


def _concerns(aim: Aim, figure: Figure) -> bool:
    is_meant = (figure.section, figure.name) == (aim.section, aim.name)
    return is_meant and (figure.costs_only or not aim.of_large)


def _judged(aim: Aim, values: Sequence[float], for_real: bool) -> Judged:
    if not values:
        return Judged(aim.what, "not measured", None)
    failing = [value for value in values if not aim.holds(value)]
    value = failing[0] if failing else values[0]
    if not for_real and aim.section != "exactness":
        return Judged(aim.what, "not judged", value)
    return Judged(aim.what, "missed" if failing else "met", value)
