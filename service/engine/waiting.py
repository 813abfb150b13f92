"""Fairness between clients: the waiting queue, counters of served tokens that decide which client is next, and a limit
on prompt rows while other clients decode. The requests of one HTTP body wait as one entry, whose sequences are created
one by one when they start; a preempted sequence is an entry of its own."""

import time
from bisect import insort
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from operator import attrgetter
from typing import NamedTuple

from service.engine.requests import Submission
from service.engine.sequence import Sequence, new_sequence

PROMPT_SHARE = 0.5
"""Charge for computing one prompt token, relative to generating a token."""

_PACE_RATE = 0.25
"""Rate of the moving mean of the seconds of steps without prompts."""

_MEASURED_EVERY = 16
"""Number of consecutive steps with prompts after which a step without them measures the seconds of decoding alone."""

_GROWTH = 1.25
"""Maximum growth of the prompt rows from one step to the next, which bounds how much longer than fair a step can be."""


_FIRST_GUESS = 32.0  # expected tokens of an answer before any answer has ended

_RATE = 0.05
"""Rate of the moving mean of answer lengths."""

_LEAST_SHARE = 0.25
"""Minimum of the expected remaining length of an answer, as a share of the mean length."""


class Entry:
    """Queue entry for the sequences of one HTTP body, or for one preempted sequence. Only its next sequence (`head`) is
    created, because a body can ask for thousands."""

    def __init__(self, body: Submission | None, arrival: int, preempted: Sequence | None = None) -> None:
        """Either `body` or `preempted` is given. `arrival`: rank of the first sequence by arrival; the other sequences
        of the body have the following ranks."""
        self._body = body
        requests = () if body is None else body.requests
        self._left = deque((request, index) for request in requests for index in range(request.n))  # after `head`
        self._arrival = arrival
        self.head = preempted or self._unfolded()

    @property
    def num_sequences(self) -> int:
        """Number of the entry's sequences, `head` included."""
        return (self.head is not None) + len(self._left)

    @property
    def client(self) -> str:
        """Client of the entry's sequences."""
        assert self.head is not None, "the entry has no sequences left"
        return self.head.client

    @property
    def order(self) -> tuple[int, int]:
        """Sort key among the entries of one client: priority, then arrival."""
        assert self.head is not None, "the entry has no sequences left"
        return self.head.request.priority, self.head.arrival

    def advance(self) -> None:
        """Replace `head` by the next sequence."""
        self.head = self._unfolded()

    def remove(self, request_ids: Collection[str]) -> list[Sequence]:
        """Remove the sequences of these requests. Returns those that were created already."""
        self._left = deque(one for one in self._left if one[0].request_id not in request_ids)
        if self.head is None or self.head.request.request_id not in request_ids:
            return []
        gone = [self.head]
        self.advance()
        return gone

    def _unfolded(self) -> Sequence | None:
        """Create the next sequence. Returns None, and marks the body as started, if there is none left."""
        if not self._left:
            if self._body is not None:
                self._body.waits = False
            return None
        sequence = new_sequence(*self._left.popleft())
        sequence.arrival, self._arrival = self._arrival, self._arrival + 1
        return sequence


class WaitingQueue:
    """Waiting entries by client, each client's in the order in which they start. An entry whose prompt shares a prefix
    with a prompt being computed is parked: it is not ready before that prefix has been published."""

    def __init__(self) -> None:
        self.num_sequences = 0  # includes sequences that are not created yet
        self._num_arrived = 0
        self._entries: dict[str, list[Entry]] = {}
        self._parked: dict[Sequence, list[Entry]] = {}

    @property
    def clients(self) -> set[str]:
        """Clients with a waiting entry, parked or not."""
        return {entry.client for entry in self._all()}

    @property
    def ready(self) -> Iterable[str]:
        """Clients with an entry that is not parked."""
        return self._entries.keys()

    def arrive(self, body: Submission) -> None:
        """Add an entry for a new body of requests."""
        entry = Entry(body, self._num_arrived)
        self._num_arrived += entry.num_sequences
        self.add(entry)

    def add(self, entry: Entry) -> None:
        """Add an entry in its place by `order`."""
        self.num_sequences += entry.num_sequences
        self._place(entry)

    def first(self, client: str) -> Sequence | None:
        """Next sequence of this client. Returns None if the client has no entry, or only parked ones."""
        entries = self._entries.get(client)
        return entries[0].head if entries else None

    def take(self, head: Sequence) -> None:
        """Remove a sequence that `first` returned; the next one of its entry takes its place."""
        entry = self._pop(head)
        self.num_sequences -= 1
        entry.advance()
        self._place(entry)

    def park(self, head: Sequence, computing: Sequence) -> None:
        """Park the entry of this sequence until `release` is called for the running sequence `computing`."""
        self._parked.setdefault(computing, []).append(self._pop(head))

    def release(self, computing: Sequence) -> None:
        """Put the entries that were parked for this running sequence back in their places."""
        for entry in self._parked.pop(computing, ()):
            self._place(entry)

    def remove(self, request_ids: Collection[str]) -> list[Sequence]:
        """Remove all sequences of these requests. Returns those that were created already."""
        entries, removed = self._all(), list[Sequence]()
        self._entries.clear()
        self._parked.clear()
        self.num_sequences = 0
        for entry in entries:
            removed += entry.remove(request_ids)
            self.add(entry)  # parked entries are unparked
        return removed

    def _place(self, entry: Entry) -> None:
        """Insert an entry in its client's order; an entry without sequences is dropped."""
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
    """Counters of the tokens served to each client ("virtual token counters", arXiv 2401.00588). They decide which
    client is admitted next and whose prompt comes first; running sequences decode in every step regardless.

    A client that comes back starts with the lowest counter of the present clients, because it has no claim on service
    that it did not ask for. The counter of an absent client is kept only while it is above that.
    """

    def __init__(self) -> None:
        self._served: dict[str, float] = {}

    def enter(self, client: str, present: Collection[str]) -> None:
        """Add a client; `present`: all clients with waiting or running sequences."""
        if not present:
            self._served = {client: 0.0}
        elif client not in present:
            least = min(self._served[other] for other in present)
            self._served = {other: count for other, count in self._served.items() if other in present or count > least}
            self._served[client] = max(least, self._served.get(client, least))

    def settle(self, sequence: Sequence) -> None:
        """Charge a client for the tokens that its running sequence was served since the last call."""
        served = service_of(sequence)
        # Tokens that are computed again after a preemption are not charged again.
        self._served[sequence.client] += max(0.0, served - sequence.charged_tokens)
        sequence.charged_tokens = max(served, sequence.charged_tokens)

    def waive(self, sequence: Sequence) -> None:
        """Exempt the cached prefix of a starting sequence from charges."""
        sequence.charged_tokens = max(service_of(sequence), sequence.charged_tokens)

    def served(self, client: str) -> float:
        """Number of tokens charged to a present client."""
        return self._served[client]


def service_of(sequence: Sequence) -> float:
    """Number of tokens that a sequence was served, with each prompt token counted as PROMPT_SHARE."""
    return PROMPT_SHARE * min(sequence.num_computed, sequence.num_prompt) + sequence.num_generated


class Reader(NamedTuple):
    """Share of one client in the prompt rows of a step."""

    num_rows: int  # number of the client's prompt rows
    num_others: int  # number of other clients that decode in the step


class PromptPace:
    """Limits the prompt rows of a step while other clients decode, so that a client's prompts take no more than its
    share of the time: 1 / n of it if n - 1 other clients decode.

    The time of prompt rows is measured as the difference between steps with and without them, and their number is
    adapted to it. A client whose prompts took more than its share owes the difference: they continue only after the
    other clients have decoded for that time.
    """

    def __init__(self, most_rows: int, now: Callable[[], float] = time.perf_counter) -> None:
        """`most_rows`: maximum number of prompt rows of a step; `now`: clock in seconds."""
        self.most_rows, self._now = most_rows, now
        self._rows = float(most_rows)
        self._plain_seconds: float | None = None  # mean seconds of a step without prompts
        self._num_read = 0  # number of steps with prompts since the last step without
        self._debts: dict[str, float] = {}  # seconds owed by each client
        self._step: tuple[float, Mapping[str, Reader]] | None = None  # start and readers of the step being measured

    @property
    def num_rows(self) -> int:
        """Number of prompt rows that the next step may have; 0 if the step is to measure decoding alone."""
        is_known = self._plain_seconds is not None and self._num_read < _MEASURED_EVERY
        return max(1, int(self._rows)) if is_known else 0

    def owes(self, client: str) -> bool:
        """Whether the client's prompts must wait, because they took more than their share of the time."""
        return self._debts.get(client, 0.0) > 0

    def begin(self, readers: Mapping[str, Reader]) -> None:
        """Start measuring a step with decoding sequences. `readers`: shares in its prompt rows by client, empty for a
        step without prompts."""
        if all(reader.num_others for reader in readers.values()):
            self._step = self._now(), readers

    def observe(self, *, is_over: bool) -> None:
        """End the measurement of the last step, and learn from its duration. `is_over`: whether no sequence runs any
        more, so that the duration includes idle time and is ignored."""
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
        assert self._plain_seconds is not None, "a step without prompts must be measured first"
        plain, self._num_read = self._plain_seconds, self._num_read + 1
        rows, longer = sum(one.num_rows for one in readers.values()), max(0.0, seconds - plain)
        for client, (count, others) in readers.items():
            debt = self._debts.get(client, 0.0) + longer * count / rows * others - plain
            self._debts[client] = max(debt, -plain)  # a credit is at most the time of one plain step
        fair = sum(plain / one.num_others for one in readers.values())
        scale = min(fair / longer, _GROWTH) if longer else _GROWTH
        if scale < 1:
            self._rows = max(1.0, rows * scale)
        elif rows >= int(self._rows):  # a step with fewer rows does not show whether more would fit
            self._rows = min(self._rows * scale, self.most_rows)


class Forecast:
    """Predicts how many more slots a sequence will need before it ends, from the mean length of recent answers."""

    def __init__(self) -> None:
        self._mean_tokens = _FIRST_GUESS

    def observe(self, sequence: Sequence) -> None:
        """Update the mean with the length of an answer that ended."""
        self._mean_tokens += _RATE * (sequence.num_generated - self._mean_tokens)

    def claim(self, sequence: Sequence) -> int:
        """Predict the number of slots that a sequence will still need: for its pending tokens and the rest of its
        answer."""
        expected = max(self._mean_tokens - sequence.num_generated, _LEAST_SHARE * self._mean_tokens)
        return sequence.num_pending + min(sequence.num_remaining, round(expected))
