"""What a replica believes about the version that all shall serve, and what it refuses to believe.

Pure bookkeeping: knows neither the store nor the weights themselves.
"""

from adaptation.records import Refused
from adaptation.replicas.announcement import Announcement, read, written
from adaptation.replicas.signature import Signature


class Belief:
    """The newest announcement that was accepted or made here."""

    def __init__(self, fingerprint: str, num_bytes: int, signature: Signature) -> None:
        """`num_bytes`: of weights that fit, which all are of one size."""
        self.fingerprint = fingerprint
        self._num_bytes = num_bytes
        self._signature = signature
        self._known: Announcement | None = None
        self._raw = b""

    @property
    def known(self) -> Announcement | None:
        return self._known

    @property
    def raw(self) -> bytes:
        """`known` as it lies in the store; empty before there is one."""
        return self._raw

    @property
    def epoch(self) -> int:
        return self._known.epoch if self._known is not None else 0

    @property
    def next_number(self) -> int:
        return self._known.number + 1 if self._known is not None else 0

    @property
    def sha256(self) -> str:
        return self._known.sha256 if self._known is not None else ""

    def judge(self, raw: bytes) -> Announcement:
        """What the store holds, if it may be followed. Raises Refused."""
        announcement = read(raw, self._signature)
        if announcement.fingerprint != self.fingerprint:
            raise Refused("foreign", f"fingerprint {announcement.fingerprint[:16]}, not {self.fingerprint[:16]}")
        if announcement.num_bytes != self._num_bytes:
            raise Refused("misfit", f"{announcement.num_bytes} bytes of weights, not {self._num_bytes}")
        if raw != self._raw and self._known is not None:
            self._check_order(announcement, self._known)
        return announcement

    def accept(self, announcement: Announcement, raw: bytes) -> None:
        """From now on this is what all serve."""
        self._known, self._raw = announcement, raw

    def make(self, announcement: Announcement) -> bytes:
        """The same, said by this replica. # -> as it is to lie in the store"""
        raw = written(announcement, self._signature)
        self.accept(announcement, raw)
        return raw

    @staticmethod
    def _check_order(announcement: Announcement, known: Announcement) -> None:
        if announcement.order < known.order:
            raise Refused("old", f"version {announcement.order}, and {known.order} is known")
        if announcement.order == known.order:
            raise Refused("fork", f"version {announcement.order} is known with other content")
        follows = announcement.epoch == known.epoch and announcement.number == known.number + 1
        if follows and announcement.parent != known.sha256:
            raise Refused("fork", f"version {announcement.order} does not follow from the one before it")
