"""The live state: what the server did in the last second, and how the last minutes went.

The threads that serve and learn leave plain records and go on; they are added up once a second for all who look.
"""

import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, TypeVar

from adaptation.records import AdaptationStatus, Event
from service.engine.stats import FinishStats, LoadStats, StepStats
from service.observability.metric_tables import label_of

KEPT_MOMENTS: Final = 300
_KEPT_EVENTS: Final = 20
_MOST_WAITING: Final = 65_536  # records nobody has added up yet; of more the oldest are lost
_NO_LOAD: Final = LoadStats(num_running=0, num_waiting=0, slots_used=0, slots_total=0)

Record = TypeVar("Record")


@dataclass(frozen=True, slots=True)
class SeenEvent:
    """Something that learning did. The reason is one of the metrics' words: sentences may name files."""

    unix_seconds: float
    kind: str
    reason: str
    version: int
    numbers: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """What a chart keeps of a moment."""

    unix_seconds: float
    tokens_per_second: float
    tau: float | None
    budget: float | None
    running: int
    waiting: int
    version: int | None
    values: Mapping[str, float]  # by arm


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """One stretch of time, a second as a rule."""

    unix_seconds: float  # its end
    seconds: float
    tokens_per_second: float
    prompt_tokens_per_second: float
    tau: float | None  # mean acceptance length; None: nothing was verified
    budget: float | None  # mean nodes verified per step; None: no step
    budget_reason: str | None  # the most frequent one
    accepted_by_source: Mapping[str, int]
    phase_seconds: Mapping[str, float]
    finished: Mapping[str, int]  # sequences that ended, by reason
    running: int
    waiting: int
    slots_used_share: float
    learning: AdaptationStatus | None  # as last observed, without its events; None: nobody learns
    events: tuple[SeenEvent, ...]

    @property
    def point(self) -> Point:
        return Point(
            unix_seconds=self.unix_seconds,
            tokens_per_second=self.tokens_per_second,
            tau=self.tau,
            budget=self.budget,
            running=self.running,
            waiting=self.waiting,
            version=None if self.learning is None else self.learning.version,
            values={} if self.learning is None else self.learning.values,
        )


@dataclass(frozen=True, slots=True)
class Past:
    """The last minutes, oldest first."""

    points: tuple[Point, ...]
    events: tuple[SeenEvent, ...]


class Live:
    """Observers may call from any thread, and wait for nobody; `tick` and `past` belong to one reader."""

    def __init__(self, *, now: Callable[[], float] = time.time, clock: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._clock = clock
        self._steps: deque[StepStats] = deque(maxlen=_MOST_WAITING)
        self._finished: deque[FinishStats] = deque(maxlen=_MOST_WAITING)
        self._happened: deque[SeenEvent] = deque(maxlen=_MOST_WAITING)
        self._load = _NO_LOAD
        self._learning: AdaptationStatus | None = None
        self._ticked = clock()
        self._points: deque[Point] = deque(maxlen=KEPT_MOMENTS)
        self._events: deque[SeenEvent] = deque(maxlen=_KEPT_EVENTS)

    def observe_load(self, load: LoadStats) -> None:
        """How busy the engine is, after a step or an abort."""
        self._load = load

    def observe_step(self, stats: StepStats) -> None:
        """One engine step."""
        self._steps.append(stats)

    def observe_finish(self, stats: FinishStats) -> None:
        """One sequence that ended."""
        self._finished.append(stats)

    def observe_event(self, event: Event) -> None:
        """One thing that learning did."""
        reason = label_of(event.kind, event.reason)
        self._happened.append(SeenEvent(self._now(), event.kind, reason, event.version, dict(event.numbers)))

    def observe_adaptation(self, status: AdaptationStatus) -> None:
        """Learning as it is now; shown until the next one comes."""
        self._learning = replace(status, events=())

    def tick(self) -> Moment:
        """The stretch since the last tick."""
        now, last = self._clock(), self._ticked
        self._ticked, seconds = now, now - last
        steps, finished = _taken(self._steps), _taken(self._finished)
        events = tuple(_taken(self._happened))
        reasons = Counter(step.budget_reason for step in steps)
        sources: Counter[str] = Counter()
        for step in steps:
            sources.update(step.accepted_by_source)
        moment = Moment(
            unix_seconds=self._now(),
            seconds=seconds,
            tokens_per_second=_rate(sum(step.emitted_tokens for step in steps), seconds),
            prompt_tokens_per_second=_rate(sum(step.prompt_tokens for step in steps), seconds),
            tau=_tau(steps),
            budget=sum(step.budget for step in steps) / len(steps) if steps else None,
            budget_reason=reasons.most_common(1)[0][0] if steps else None,
            accepted_by_source=dict(sources),
            phase_seconds={
                "draft": sum(step.draft_seconds for step in steps),
                "verify": sum(step.verify_seconds for step in steps),
                "other": sum(step.other_seconds for step in steps),
            },
            finished=Counter(sequence.finish_reason for sequence in finished),
            running=self._load.num_running,
            waiting=self._load.num_waiting,
            slots_used_share=_rate(self._load.slots_used, self._load.slots_total),
            learning=self._learning,
            events=events,
        )
        self._points.append(moment.point)
        self._events += events
        return moment

    def past(self) -> Past:
        """What was before; a moment that is still to come is not in it."""
        return Past(tuple(self._points), tuple(self._events))


def _taken(waiting: deque[Record]) -> list[Record]:
    """Everything that was there on arrival; more may come meanwhile."""
    return [waiting.popleft() for _ in range(len(waiting))]


def _tau(steps: Sequence[StepStats]) -> float | None:
    """A sequence's first token comes from reading its prompt and has no gap before it: every gap is one verify."""
    verifies = sum(len(step.itl_seconds) for step in steps)
    return 1 + sum(step.accepted_tokens for step in steps) / verifies if verifies else None


def _rate(amount: float, per: float) -> float:
    return amount / per if per > 0 else 0.0
