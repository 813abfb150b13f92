"""The waiting queue. A body of requests waits as one entry, whose sequences come to be one by one as they start; a
preempted sequence is an entry of its own. Counters of what clients were served say whose turn it is."""

from bisect import insort
from collections import deque
from collections.abc import Collection, Iterable
from operator import attrgetter

from service.engine.requests import Submission
from service.engine.sequence import Sequence, new_sequence

PROMPT_SHARE = 0.5
"""Service of computing one prompt token, against 1 for generating a token."""


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
        """Go on to the sequence after `head`."""
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
        """Make the next sequence; None: all have started."""
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
        self.num_sequences = 0  # those that do not exist yet, too
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
            self.add(entry)  # one that was parked is looked at again
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
