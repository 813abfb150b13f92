"""How many entries can be waiting for each row, by what the host knows without asking the device.

A step's host learns how much it committed only after the drafter has been told; the root of the next step says it.
"""

from collections.abc import Sequence

from drafters.protocol import HostMetadata


class Backlog:
    """Upper bounds, exact where every step is heard of."""

    def __init__(self, max_sequences: int) -> None:
        self._before = [0] * max_sequences
        self._newest = [(0, 0)] * max_sequences  # root of the last commit and most entries it can have brought

    def take(self, host: HostMetadata) -> int:
        """The entries of these rows are run; most of any."""
        most = max(self._waiting(row, root) for row, root in zip(host.rows, host.roots, strict=True))
        self.clear(host.rows)
        return most

    def crowded(self, host: HostMetadata, room: int) -> HostMetadata:
        """Those rows of which more entries than this can be waiting."""
        found = [
            (row, root) for row, root in zip(host.rows, host.roots, strict=True) if self._waiting(row, root) > room
        ]
        return HostMetadata(tuple(row for row, _ in found), tuple(root for _, root in found))

    def add(self, host: HostMetadata, most: int) -> None:
        """A step has committed at most so many entries of each row, the first of them the root's."""
        for row, root in zip(host.rows, host.roots, strict=True):
            self._waiting(row, root)
            self._newest[row] = root, most

    def clear(self, rows: Sequence[int]) -> None:
        """Nothing waits for these rows."""
        for row in rows:
            self._before[row], self._newest[row] = 0, (0, 0)

    def _waiting(self, row: int, root: int) -> int:
        """Most entries that wait for a row whose root stands here by now."""
        start, most = self._newest[row]
        self._before[row] += max(0, min(most, root - start))
        self._newest[row] = root, 0
        return self._before[row]
