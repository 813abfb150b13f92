"""Fairness between clients: the waiting queue, counters of served tokens that decide which client is next, and the pace
of prompts beside the decoding of others. A body of requests waits as one entry, whose sequences are created one by one
as they start; a preempted sequence is an entry of its own."""

import time
from bisect import insort
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from operator import attrgetter
from typing import NamedTuple

from service.engine.requests import Submission
from service.engine.sequence import Sequence, new_sequence

PROMPT_SHARE = 0.5
"""Service of computing one prompt token, against 1 for generating a token."""

_PACE_RATE = 0.25
"""Rate of the moving mean of seconds of steps without prompts."""

_MEASURED_EVERY = 16
"""Steps with prompts before one without: a sixteenth of reading, to know what decoding takes now."""

_GROWTH = 1.25
"""Most growth of a step's rows from one step to the next: by so much a step may be longer than is fair."""


class Entry:
    """A place in the queue. Only the next of its sequences exists: a body may ask for thousands."""

    def __init__(self, body: Submission | None, arrival: int, preempted: Sequence | None = None) -> None:
        """`arrival`: rank of the body's first sequence; the others have the ranks that follow. Without a body, it is
        the place of a sequence that was preempted."""
        self._body = body
        self._requests = deque(() if body is None else body.requests)
        self._index = 0  # index of the next sequence within the first request
        self._arrival = arrival
        self.num_sequences = (preempted is not None) + sum(request.n for request in self._requests)
        self.head = preempted or self._unfolded()

    @property
    def client(self) -> str:
        """The client that waits here."""
        assert self.head is not None, "nothing waits here"
        return self.head.client

    @property
    def order(self) -> tuple[int, int]:
        """Rank among the entries of its client."""
        assert self.head is not None, "nothing waits here"
        return self.head.request.priority, self.head.arrival

    def advance(self) -> None:
        """Replace `head` by the next sequence."""
        self.head = self._unfolded()
        self.num_sequences -= 1

    def remove(self, request_ids: Collection[str]) -> list[Sequence]:
        """Remove the sequences of these requests. # -> those that existed"""
        if self._requests and self._requests[0].request_id in request_ids:
            self._index = 0
        self._requests = deque(one for one in self._requests if one.request_id not in request_ids)
        self.num_sequences = 1 + sum(request.n for request in self._requests) - self._index
        if self.head is None or self.head.request.request_id not in request_ids:
            return []
        gone = [self.head]
        self.advance()
        return gone

    def _unfolded(self) -> Sequence | None:
        """Create the next sequence; None: all have started."""
        if not self._requests:
            if self._body is not None:
                self._body.waits = False
            return None
        request = self._requests[0]
        sequence = new_sequence(request, self._index)
        sequence.arrival, self._arrival = self._arrival, self._arrival + 1
        self._index += 1
        if self._index == request.n:
            self._requests.popleft()
            self._index = 0
        return sequence


class WaitingQueue:
    """Entries by client, each client's in the order in which they start. Entries whose prompt begins with what a
    running sequence computes just now are parked with it: they are looked at again when it has, not in every step."""

    def __init__(self) -> None:
        self.num_sequences = 0  # includes sequences that are not created yet
        self._num_arrived = 0
        self._entries: dict[str, list[Entry]] = {}
        self._parked: dict[Sequence, list[Entry]] = {}

    @property
    def clients(self) -> set[str]:
        """Clients with an entry."""
        return {entry.client for entry in self._all()}

    @property
    def ready(self) -> Iterable[str]:
        """Clients with an entry that is not parked."""
        return self._entries.keys()

    def arrive(self, body: Submission) -> None:
        """Add a new body."""
        entry = Entry(body, self._num_arrived)
        self._num_arrived += entry.num_sequences
        self.add(entry)

    def add(self, entry: Entry) -> None:
        """Add an entry."""
        self.num_sequences += entry.num_sequences
        self._place(entry)

    def first(self, client: str) -> Sequence | None:
        """The next sequence of this client; None: it has none, or all are parked."""
        entries = self._entries.get(client)
        return entries[0].head if entries else None

    def take(self, head: Sequence) -> None:
        """Remove the next sequence of an entry."""
        entry = self._pop(head)
        self.num_sequences -= 1
        entry.advance()
        self._place(entry)

    def park(self, head: Sequence, computing: Sequence) -> None:
        """Let the entry of this next sequence wait for a running one."""
        self._parked.setdefault(computing, []).append(self._pop(head))

    def release(self, computing: Sequence) -> None:
        """Put the entries that wait for this sequence back in their places."""
        for entry in self._parked.pop(computing, ()):
            self._place(entry)

    def remove(self, request_ids: Collection[str]) -> list[Sequence]:
        """Remove all sequences of these requests. # -> those that existed"""
        entries, removed = self._all(), list[Sequence]()
        self._entries.clear()
        self._parked.clear()
        self.num_sequences = 0
        for entry in entries:
            removed += entry.remove(request_ids)
            self.add(entry)  # parked entries are unparked
        return removed

    def _place(self, entry: Entry) -> None:
        """Put an entry where it belongs; one without sequences is dropped."""
        if entry.head is not None:
            insort(self._entries.setdefault(entry.client, []), entry, key=attrgetter("order"))

    def _pop(self, head: Sequence) -> Entry:
        entries = self._entries[head.client]
        entry = next(entry for entry in entries if entry.head is head)
        entries.remove(entry)
        if not entries:
            del self._entries[head.client]
        return entry

    def _all(self) -> list[Entry]:
        return [entry for held in (self._entries, self._parked) for entries in held.values() for entry in entries]


class ServiceCounters:
    """Tokens served by client ("virtual token counters", arXiv 2401.00588): who is admitted next, whose prompt comes
    first. Running sequences decode in every step, so no counter makes the machine wait.

    A client that comes back starts level with the least served: it has no claim on service it did not ask for. Counters
    of absent clients are kept only while they are above that.
    """

    def __init__(self) -> None:
        self._served: dict[str, float] = {}

    def enter(self, client: str, present: Collection[str]) -> None:
        """Add a client; `present`: clients with sequences that wait or run."""
        if not present:
            self._served = {client: 0.0}
        elif client not in present:
            least = min(self._served[other] for other in present)
            self._served = {other: count for other, count in self._served.items() if other in present or count > least}
            self._served[client] = max(least, self._served.get(client, least))

    def settle(self, sequence: Sequence) -> None:
        """Charge a client for what its running sequence was served since the last call."""
        served = service_of(sequence)
        # Tokens computed again after a preemption are not charged twice.
        self._served[sequence.client] += max(0.0, served - sequence.charged_tokens)
        sequence.charged_tokens = max(served, sequence.charged_tokens)

    def waive(self, sequence: Sequence) -> None:
        """Charge nothing for the prefix that a sequence found in the cache."""
        sequence.charged_tokens = max(service_of(sequence), sequence.charged_tokens)

    def served(self, client: str) -> float:
        """Tokens that a present client was served."""
        return self._served[client]


def service_of(sequence: Sequence) -> float:
    """Tokens a sequence was served; a prompt token counts as PROMPT_SHARE."""
    return PROMPT_SHARE * min(sequence.num_computed, sequence.num_prompt) + sequence.num_generated


class Reader(NamedTuple):
    """A client whose prompts a step reads."""

    num_rows: int
    num_others: int  # number of other clients that decode in the step


class PromptPace:
    """Limits the prompt rows of a step beside the decoding of other clients, so that reading takes one client's share
    of the time: an n-th beside n - 1 others.

    The cost of rows is measured as the time by which a step is longer than one without them, and their number follows.
    A client that took more than its share owes the difference, and reads on once the others have decoded for as long.
    """

    def __init__(self, most_rows: int, now: Callable[[], float] = time.perf_counter) -> None:
        """`most_rows`: most rows of a step; `now`: clock in seconds."""
        self.most_rows, self._now = most_rows, now
        self._rows = float(most_rows)
        self._plain_seconds: float | None = None  # mean seconds of a step without prompts
        self._num_read = 0  # steps with prompts since the last one without
        self._debts: dict[str, float] = {}  # seconds, by client
        self._step: tuple[float, Mapping[str, Reader]] | None = None  # under way: its beginning, and its readers

    @property
    def num_rows(self) -> int:
        """Prompt rows that the next step may have; 0 for a step that measures decoding alone."""
        is_known = self._plain_seconds is not None and self._num_read < _MEASURED_EVERY
        return max(1, int(self._rows)) if is_known else 0

    def owes(self, client: str) -> bool:
        """Whether the client has used others' time and must wait."""
        return self._debts.get(client, 0.0) > 0

    def begin(self, readers: Mapping[str, Reader]) -> None:
        """Begin a step with decoding sequences; `readers` by client."""
        if all(reader.num_others for reader in readers.values()):
            self._step = self._now(), readers

    def observe(self, *, is_over: bool) -> None:
        """End the step and learn from its duration; `is_over`: nothing runs now, so the duration is not known."""
        step, self._step = self._step, None
        if step is None or is_over:
            return
        (began, readers), seconds = step, self._now()
        seconds -= began
        if not readers:
            before = seconds if self._plain_seconds is None else self._plain_seconds
            self._plain_seconds, self._num_read = before + _PACE_RATE * (seconds - before), 0
            self._debts = {client: debt - seconds for client, debt in self._debts.items() if debt > 0}
            return
        assert self._plain_seconds is not None, "prompts are read when it is known"
        plain, self._num_read = self._plain_seconds, self._num_read + 1
        rows, longer = sum(one.num_rows for one in readers.values()), max(0.0, seconds - plain)
        for client, (count, others) in readers.items():
            debt = self._debts.get(client, 0.0) + longer * count / rows * others - plain
            self._debts[client] = max(debt, -plain)  # a credit is at most one step's time
        fair = sum(plain / one.num_others for one in readers.values())
        scale = min(fair / longer, _GROWTH) if longer else _GROWTH
        if scale < 1:
            self._rows = max(1.0, rows * scale)
        elif rows >= int(self._rows):  # a step with fewer rows does not show whether more would fit
            self._rows = min(self._rows * scale, self.most_rows)
