"""What a metric is, as data: a name, a text, and how its value is read from a record.

`service/metrics.py` makes them real. Knows neither Prometheus nor what is measured; names come without prefix, and
counters without their `_total`. (No slots: calling a generic alias of a frozen class with slots fails on Python 3.11.)
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

Record = TypeVar("Record", contravariant=True)


@dataclass(frozen=True)
class Count(Generic[Record]):
    """A counter that a record adds to."""

    name: str
    text: str
    read: Callable[[Record], float]


@dataclass(frozen=True)
class Split(Generic[Record]):
    """A counter with labels that a record adds to; `keys` are all there are, `:` between the values of several."""

    name: str
    text: str
    labels: tuple[str, ...]
    keys: tuple[str, ...]
    read: Callable[[Record], Mapping[str, float]]


@dataclass(frozen=True)
class Level(Generic[Record]):
    """A gauge that a record sets; None leaves it as it is."""

    name: str
    text: str
    read: Callable[[Record], float | None]


@dataclass(frozen=True)
class Levels(Generic[Record]):
    """A gauge with a label; keys that a record does not hold keep their value."""

    name: str
    text: str
    label: str
    keys: tuple[str, ...]
    read: Callable[[Record], Mapping[str, float]]


@dataclass(frozen=True)
class Spread(Generic[Record]):
    """A histogram; a record brings any number of observations."""

    name: str
    text: str
    buckets: tuple[float, ...]
    read: Callable[[Record], Iterable[float]]


Told = Count[Record] | Split[Record] | Level[Record] | Levels[Record] | Spread[Record]
"""A metric that changes when somebody tells of a record."""


@dataclass(frozen=True)
class Asked(Generic[Record]):
    """A metric whose whole value is read from a record at each scrape."""

    kind: Literal["gauge", "counter"]
    name: str
    text: str
    read: Callable[[Record], Mapping[str, float]]
    labels: tuple[str, ...] = ()
    keys: tuple[str, ...] = ("",)
