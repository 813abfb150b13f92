"""The waiting sequences: a line per client, ordered by priority and then by arrival. Knows nothing of who runs."""

from bisect import insort
from collections.abc import Iterator

from service.engine.sequence import Sequence


class WaitingLines:
    """Whoever was preempted stands where it stood before: its place follows from priority and arrival alone."""

    def __init__(self) -> None:
        self._lines: dict[str, list[Sequence]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Sequence]:
        return (sequence for line in self._lines.values() for sequence in line)

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence in self._lines.get(sequence.client, ())

    @property
    def clients(self) -> list[str]:
        """Those whose line is not empty."""
        return list(self._lines)

    def line(self, client: str) -> list[Sequence]:
        """A client's sequences, the first to start first."""
        return self._lines[client]

    def add(self, sequence: Sequence) -> None:
        insort(self._lines.setdefault(sequence.client, []), sequence, key=_place)
        self._count += 1

    def remove(self, sequence: Sequence) -> None:
        line = self._lines[sequence.client]
        line.remove(sequence)
        self._count -= 1
        if not line:
            del self._lines[sequence.client]


def _place(sequence: Sequence) -> tuple[int, int]:
    return sequence.request.priority, sequence.number
