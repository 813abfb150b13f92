"""Guard for bookkeeping: counts and logs exceptions of parts (metrics, learning, ...) that must not fail requests."""

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
"""Bookkeeping parts, without which a server still generates. In the engine's step: `weights` serves new weights,
`charge` charges the step's time to queries, `end_queries` passes finished queries to learning, `end_step` makes the
step's record, `learn` learns from it, `recorder` records samples, `metrics` and `observers` (live feed) receive the
record. In other threads: `adaptation` learns, `sharing` exchanges past answers, `memory_file` saves them. `limits`
counts the tokens of API keys, and is never switched off."""
PARTS: Final[tuple[Part, ...]] = get_args(Part)

_MOST_IN_A_ROW = 3
"""Consecutive exceptions that switch a part off; one or two may be due to unusual inputs."""
_LOG_SECONDS = 60.0  # shortest time between two logged tracebacks of a part


class Guard:
    """Runs bookkeeping parts, on which no generated token depends. Exceptions are counted and logged; the third one in
    a row switches the part off until a restart. Thread-safe."""

    def __init__(self, *, now: Callable[[], float] = time.time, clock: Callable[[], float] = time.monotonic) -> None:
        self._now, self._clock = now, clock
        self._errors: Counter[Part] = Counter()
        self._in_a_row: Counter[tuple[Part, str]] = Counter()
        self._off: dict[Part, float] = {}
        self._logged: dict[Part, float] = {}
        self._lock = Lock()

    @property
    def errors(self) -> Mapping[str, int]:
        """Number of exceptions since the start, by part."""
        with self._lock:
            return {part: count for part, count in self._errors.items()}

    @property
    def switched_off(self) -> Mapping[str, float]:
        """Unix time (seconds) at which each part that is off was switched off."""
        with self._lock:
            return {part: since for part, since in self._off.items()}

    def is_off(self, part: Part) -> bool:
        """Whether the part has been switched off."""
        return part in self._off

    def run(self, part: Part, call: Callable[[], Result], otherwise: Callable[[], Result], name: str = "") -> Result:
        """Return `call()`, or `otherwise()` if the part raises or is off. `name` distinguishes the calls of one part,
        whose consecutive exceptions are counted separately."""
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
        if self._in_a_row and self._in_a_row[part, name]:
            with self._lock:
                self._in_a_row[part, name] = 0
        return result

    def count(self, part: Part, error: BaseException | None = None) -> None:
        """Count a failure of a part, and log it with its traceback at most once a minute."""
        with self._lock:
            self._errors[part] += 1
            now = self._clock()
            shows = now - self._logged.get(part, -math.inf) >= _LOG_SECONDS
            if shows:
                self._logged[part] = now
        if shows:
            logger.error("bookkeeping part %r failed; generation is not affected", part, exc_info=error)

    def switch_off(self, part: Part) -> None:
        """Switch a part off until a restart."""
        with self._lock:
            is_new = part not in self._off
            self._off.setdefault(part, self._now())
        if is_new:
            logger.error("bookkeeping part %r is switched off until a restart; generation is not affected", part)
