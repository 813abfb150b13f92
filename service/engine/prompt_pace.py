"""How fast prompts are read beside the decoding of other clients."""

import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

_RATE = 0.25  # of the moving mean of what a step without prompts takes
_MEASURED_EVERY = 16  # steps with prompts, then one without: a sixteenth of reading, to know what decoding takes now

_GROWTH = 1.25
"""Of rows from one step to the next: by so much a step may be longer than is fair."""


class Reader(NamedTuple):
    """A client whose prompts a step reads."""

    num_rows: int
    num_others: int  # other clients that decode in the step


class PromptPace:
    """How many rows of prompts a step may have beside the decoding of other clients: so many that reading takes a
    client's share of the time, an n-th beside n - 1 others.

    What rows take is known afterwards, by what the step took longer than one without them. Their number follows, and
    what a client has had too much of others' time it owes: it reads on when they have decoded for as long without it.
    """

    def __init__(self, most_rows: int, now: Callable[[], float] = time.perf_counter) -> None:
        """`most_rows`: of a step; `now`: in seconds."""
        self.most_rows, self._now = most_rows, now
        self._rows = float(most_rows)
        self._plain_seconds: float | None = None  # of a step without prompts
        self._num_read = 0  # steps with prompts since then
        self._debts: dict[str, float] = {}  # seconds, by client
        self._step: tuple[float, Mapping[str, Reader]] | None = None  # under way: its beginning, and its readers

    @property
    def num_rows(self) -> int:
        """Rows that the next step may have; 0 where it is to show what decoding takes."""
        is_known = self._plain_seconds is not None and self._num_read < _MEASURED_EVERY
        return max(1, int(self._rows)) if is_known else 0

    def owes(self, client: str) -> bool:
        """Whether the client must wait."""
        return self._debts.get(client, 0.0) > 0

    def begin(self, readers: Mapping[str, Reader]) -> None:
        """A step with decoding sequences begins; `readers`: by client."""
        if all(reader.num_others for reader in readers.values()):
            self._step = self._now(), readers

    def observe(self, *, is_over: bool) -> None:
        """The step has ended; `is_over`: and after it perhaps nothing ran for a while."""
        step, self._step = self._step, None
        if step is None or is_over:
            return
        (began, readers), seconds = step, self._now()
        seconds -= began
        if not readers:
            before = seconds if self._plain_seconds is None else self._plain_seconds
            self._plain_seconds, self._num_read = before + _RATE * (seconds - before), 0
            self._debts = {client: debt - seconds for client, debt in self._debts.items() if debt > 0}
            return
        assert self._plain_seconds is not None, "prompts are read when it is known"
        plain, self._num_read = self._plain_seconds, self._num_read + 1
        rows, longer = sum(one.num_rows for one in readers.values()), max(0.0, seconds - plain)
        for client, (count, others) in readers.items():
            debt = self._debts.get(client, 0.0) + longer * count / rows * others - plain
            self._debts[client] = max(debt, -plain)  # a step's worth may be saved
        fair = sum(plain / one.num_others for one in readers.values())
        scale = min(fair / longer, _GROWTH) if longer else _GROWTH
        if scale < 1:
            self._rows = max(1.0, rows * scale)
        elif rows >= int(self._rows):  # fewer rows say nothing of more
            self._rows = min(self._rows * scale, self.most_rows)
