"""Data of the live page: the state over the last second, and its history over the last minutes. Engine and learning
threads append plain records without blocking; `tick` sums them once per second for all readers."""

import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple, TypeVar

from adaptation.records import AdaptationStatus, Event
from drafters.memory_counts import MemoryCounts
from service.engine.stats import FinishStats, LoadStats, StepStats
from service.observability.guard import Guard
from service.observability.learning_tables import label_of

KEPT_MOMENTS: Final = 300  # intervals between ticks
_KEPT_EVENTS: Final = 20
_KEPT_SPANS: Final = 240  # most spans that the time since the start is divided into
_MAX_PENDING: Final = 65_536  # most records that wait for the next tick; beyond it, the oldest are dropped

Record = TypeVar("Record")
Json = dict[str, Any]

_CHARTED: Final = ("unix_seconds", "tokens_per_second", "tau", "budget", "accepted_by_source", "running", "waiting")


class Live:
    """Collects records from any thread without locks, and sums them for the live page. Only one thread calls `tick` and
    `past`."""

    def __init__(self, *, now: Callable[[], float] = time.time, clock: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._clock = clock
        self.guard = Guard()  # replaced by the engine's guard once it is loaded
        self._steps: deque[StepStats] = deque(maxlen=_MAX_PENDING)
        self._finished: deque[FinishStats] = deque(maxlen=_MAX_PENDING)
        self._happened: deque[Json] = deque(maxlen=_MAX_PENDING)
        self._load = LoadStats(num_running=0, num_waiting=0, slots_used=0, slots_total=0)
        self._memory: MemoryCounts | None = None
        self._learning: AdaptationStatus | None = None
        self._ticked = clock()
        self._past: dict[str, deque[Json]] = {
            "points": deque(maxlen=KEPT_MOMENTS),
            "events": deque(maxlen=_KEPT_EVENTS),
        }
        self._since_start = SinceStart()

    def observe_load(self, load: LoadStats) -> None:
        """Record the present load."""
        self._load = load

    def observe_step(self, stats: StepStats) -> None:
        """Record an engine step."""
        self._steps.append(stats)

    def observe_finish(self, stats: FinishStats) -> None:
        """Record a finished sequence."""
        self._finished.append(stats)

    def observe_event(self, event: Event) -> None:
        """Record a learning event. Its reason is reduced to the metric label, because free text may name files."""
        fields = {"kind": event.kind, "reason": label_of(event.kind, event.reason), "version": event.version}
        self._happened.append({"unix_seconds": self._now(), **fields, "numbers": dict(event.numbers)})

    def observe_adaptation(self, status: AdaptationStatus) -> None:
        """Record the status of learning."""
        self._learning = replace(status, events=())

    @property
    def is_quiet(self) -> bool:
        """Whether nothing has happened since the last tick."""
        return not (self._steps or self._happened)

    def tick(self) -> Json:
        """Sum the records since the last tick (usually a second), and return the sums as the feed's JSON object."""
        now, last = self._clock(), self._ticked
        self._ticked, seconds = now, now - last
        steps, events = _taken(self._steps), _taken(self._happened)
        sources: Counter[str] = Counter()
        for step in steps:
            sources.update(step.accepted_by_source)
            self._memory = step.memory
        moment: Json = {
            "unix_seconds": self._now(),  # end of the interval
            "seconds": seconds,
            "tokens_per_second": _rate(sum(step.emitted_tokens for step in steps), seconds),
            "prompt_tokens_per_second": _rate(sum(step.prompt_tokens for step in steps), seconds),
            "tau": _tau(steps),
            "against_plain": compared(steps),
            "budget": sum(step.drafted_nodes for step in steps) / len(steps) if steps else None,  # mean per step
            "budget_reason": Counter(step.budget_reason for step in steps).most_common(1)[0][0] if steps else None,
            "drafting": steps[-1].drafting if steps else None,  # None without a step, or with a fixed budget
            "accepted_by_source": sources,
            "memory": self._memory,  # after the last step; None if the drafter has no memory
            "phase_seconds": {
                "draft": sum(step.draft_seconds for step in steps),
                "verify": sum(step.verify_seconds for step in steps),
                "other": sum(step.other_seconds for step in steps),
            },
            "finished": Counter(sequence.finish_reason for sequence in _taken(self._finished)),
            "running": self._load.num_running,
            "waiting": self._load.num_waiting,
            "slots_used_share": _rate(self._load.slots_used, self._load.slots_total),
            "learning": self._learning,  # the last status, without events; None if learning is off
            "events": events,
            "switched_off": self.guard.switched_off,  # Unix seconds by bookkeeping part
        }
        point = {name: moment[name] for name in _CHARTED}
        learning = self._learning
        point |= {"version": learning and learning.version, "values": learning.values if learning else {}}
        self._past["points"].append(point)
        if moment["against_plain"] is not None:
            self._since_start.add(Decoded(**moment["against_plain"], version=point["version"]))
        self._past["events"] += events
        return moment

    def past(self) -> Json:
        """Data of the charts, oldest first: points and events of the last minutes, and spans since the start."""
        return {
            **{name: list(kept) for name, kept in self._past.items()},
            "since_start": list(self._since_start.spans),
        }


class Decoded(NamedTuple):
    """Tokens generated in a span, the seconds of their steps, and the seconds that plain decoding would have taken."""

    tokens: int
    seconds: float
    plain_seconds: float
    version: int | None  # drafter version at the end; None if learning is off


class SinceStart:
    """History of decoding since the start, as a bounded number of spans; their length doubles when there are too
    many."""

    def __init__(self) -> None:
        self.spans: list[Decoded] = []
        self._longest = 1.0  # length of a span in seconds

    def add(self, new: Decoded) -> None:
        """Add what was decoded since the last call."""
        self._append(new)
        if len(self.spans) > _KEPT_SPANS:
            self._longest *= 2
            old, self.spans = self.spans, []
            for span in old:
                self._append(span)

    def _append(self, new: Decoded) -> None:
        if self.spans and self.spans[-1].seconds + new.seconds <= self._longest:
            last = self.spans.pop()
            sums = (last.tokens + new.tokens, last.seconds + new.seconds, last.plain_seconds + new.plain_seconds)
            new = Decoded(*sums, new.version)
        self.spans.append(new)


def compared(steps: Sequence[StepStats]) -> Json | None:
    """Compare steps with plain decoding at its measured cost: tokens, seconds, and seconds that plain decoding would
    have taken. Returns None if no step has an estimate of the time it saved."""
    timed = [
        (step.emitted_tokens, step.seconds, step.saved_seconds) for step in steps if step.saved_seconds is not None
    ]
    if not timed:
        return None
    tokens, seconds, saved = map(sum, zip(*timed, strict=True))
    return {"tokens": tokens, "seconds": seconds, "plain_seconds": seconds + saved}


def _taken(waiting: deque[Record]) -> list[Record]:
    """Remove and return the records that are waiting now; other threads may append meanwhile."""
    return [waiting.popleft() for _ in range(len(waiting))]


def _tau(steps: Sequence[StepStats]) -> float | None:
    """Mean acceptance length; None if nothing was verified. Each inter-token gap of a sequence is one verify."""
    verifies = sum(len(step.itl_seconds) for step in steps)
    return 1 + sum(step.accepted_tokens for step in steps) / verifies if verifies else None


def _rate(amount: float, per: float) -> float:
    return amount / per if per > 0 else 0.0
