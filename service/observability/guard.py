"""Guard for bookkeeping: exceptions in metrics, learning and the like are counted and end no request."""

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping
from threading import Lock
from typing import Final, Literal, TypeVar, get_args

logger = logging.getLogger(__name__)

Result = TypeVar("Result")
Part = Literal[
    "weights", "charge", "end_queries", "end_step", "learn", "recorder", "metrics", "observers",
    "adaptation", "sharing", "memory_file", "limits"
]  # fmt: skip
"""Parts that a server can do without. After a step: charge its time to queries, pass finished ones to learning, make
its record, learn from it, record samples. Beside steps: write new weights, metrics, the live feed, the learning thread,
exchange past answers with other replicas, keep them in a file. Counting tokens of keys is never switched off."""
PARTS: Final[tuple[Part, ...]] = get_args(Part)

_MOST_IN_A_ROW = 3
"""Exceptions of a part before it is switched off: one or two may come from what it was given, and the next input is
another."""
_LOG_SECONDS = 60.0  # least seconds between two tracebacks of a part


class Guard:
    """Runs parts of the server on which no text depends. An exception of a part is counted and logged, and the third
    one in a row switches it off until a restart. Thread-safe."""

    def __init__(self, *, now: Callable[[], float] = time.time, clock: Callable[[], float] = time.monotonic) -> None:
        self._now, self._clock = now, clock
        self._errors: Counter[Part] = Counter()
        self._in_a_row: Counter[tuple[Part, str]] = Counter()
        self._off: dict[Part, float] = {}
        self._logged: dict[Part, float] = {}
        self._lock = Lock()

    @property
    def errors(self) -> Mapping[str, int]:
        """Exceptions since the start, by part."""
        with self._lock:
            return {part: count for part, count in self._errors.items()}

    @property
    def switched_off(self) -> Mapping[str, float]:
        """The parts that are off, and since when, in Unix seconds."""
        with self._lock:
            return {part: since for part, since in self._off.items()}

    def is_off(self, part: Part) -> bool:
        """Whether the part has been switched off."""
        return part in self._off

    def run(self, part: Part, call: Callable[[], Result], otherwise: Callable[[], Result], name: str = "") -> Result:
        """Call a part; where it has several calls, `name` is this one, whose exceptions in a row are counted.
        # -> its result, or `otherwise()` where the part raises or is off"""
        if part in self._off:
            return otherwise()
        try:
            result = call()
        except Exception as error:
            self.count(part, error)
            with self._lock:
                self._in_a_row[part, name] += 1
            if self._in_a_row[part, name] >= _MOST_IN_A_ROW:
                self.switch_off(part)
            return otherwise()
        if self._in_a_row[part, name]:
            with self._lock:
                self._in_a_row[part, name] = 0
        return result

    def count(self, part: Part, error: BaseException | None = None) -> None:
        """Count and log a failure of a part, once a minute with its traceback."""
        with self._lock:
            self._errors[part] += 1
            now = self._clock()
            shows = now - self._logged.get(part, -math.inf) >= _LOG_SECONDS
            if shows:
                self._logged[part] = now
        if shows:
            logger.error("%s failed; texts go on", part, exc_info=error)

    def switch_off(self, part: Part) -> None:
        """Switch a part off until a restart."""
        with self._lock:
            is_new = part not in self._off
            self._off.setdefault(part, self._now())
        if is_new:
            logger.error("%s is switched off until a restart; texts go on", part)
