"""What the replica that leads does for the others: hear their queries, announce what it serves, share what it knows.

Whatever changes the weights here, an update, a rollback or an operator, is announced: what is looked at is what is
served, not why.
"""

import logging
from collections.abc import Callable
from concurrent.futures import Future
from datetime import UTC, datetime

from pydantic import JsonValue

from adaptation.records import Refused
from adaptation.replicas.announcement import Announcement
from adaptation.replicas.belief import Belief
from adaptation.replicas.board import Board
from adaptation.replicas.desk import Desk
from adaptation.replicas.following import Following
from adaptation.replicas.hearing import Hearing
from adaptation.replicas.served import Served, ServedWeights
from adaptation.replicas.signature import Signature, opened, signed

logger = logging.getLogger(__name__)

_SHARE_SECONDS = 5.0


class Leading:
    """All calls come from the thread that talks to the store."""

    def __init__(
        self,
        board: Board,
        belief: Belief,
        following: Following,
        hearing: Hearing,
        served: ServedWeights,
        desk: Desk,
        signature: Signature,
        *,
        name: str,
        clock: Callable[[], float],
    ) -> None:
        self.num_announced = 0
        self._board = board
        self._belief = belief
        self._following = following
        self._hearing = hearing
        self._served = served
        self._desk = desk
        self._signature = signature
        self._name = name
        self._clock = clock
        self._epoch = 0  # that was begun
        self._sharing: Future[dict[str, JsonValue]] | None = None
        self._share_at = 0.0

    def turn(self, epoch: int) -> None:
        """One round of everything, under a lease of this epoch. Raises StoreLost."""
        raw = self._board.current()
        if epoch != self._epoch:
            if not self._following.settled(raw):
                return  # what the leader before has published comes first
            self._begin(epoch)
        served = self._served.now()
        if not self._is_announced(raw, served):
            self._announce(epoch, served)
        self._hearing.turn()
        self._share(epoch)

    def _begin(self, epoch: int) -> None:
        self._hearing.take_over()
        shared = self._board.shared()
        if shared is not None:
            self._inherit(shared)
        self._epoch = epoch
        self._share_at = self._clock()

    def _inherit(self, raw: bytes) -> None:
        try:
            content = opened("state", raw, self._signature)
        except Refused as refusal:
            logger.warning("the shared state is not taken over: %s", refusal)
            return
        if content.get("fingerprint") == self._belief.fingerprint:
            self._desk.inherit(content)

    def _is_announced(self, raw: bytes | None, served: Served) -> bool:
        """Under this lease, to the bit, with its weights: a store may forget, and others may write to it."""
        known = self._belief.known
        return (
            known is not None
            and known.epoch == self._epoch
            and known.sha256 == served.sha256
            and raw == self._belief.raw
            and self._board.has(known.sha256, known.num_bytes)
        )

    def _announce(self, epoch: int, served: Served) -> None:
        before = self._belief.sha256 or served.sha256
        announcement = self._next(epoch, served)
        if not self._board.has(served.sha256, len(served.data)):
            self._board.put(served.sha256, served.data)
        if self._board.announce(epoch, self._belief.make(announcement), served.sha256, before):
            self.num_announced += 1
            logger.info("announced version %s, weights %s", announcement.order, served.sha256[:16])

    def _next(self, epoch: int, served: Served) -> Announcement:
        """A new one, unless the store has only forgotten the last."""
        known = self._belief.known
        if known is not None and (known.epoch, known.sha256) == (epoch, served.sha256):
            return known
        return Announcement(
            epoch=epoch,
            number=self._belief.next_number,
            sha256=served.sha256,
            parent=self._belief.sha256,
            num_bytes=len(served.data),
            fingerprint=self._belief.fingerprint,
            leader=self._name,
            date=datetime.now(UTC).isoformat(timespec="seconds"),
        )

    def _share(self, epoch: int) -> None:
        """What the bandit knows, now and then, for whoever leads after this one."""
        if self._sharing is None and self._clock() >= self._share_at:
            self._sharing = self._desk.shared()
        if self._sharing is None or not self._sharing.done():
            return
        sharing, self._sharing = self._sharing, None
        self._share_at = self._clock() + _SHARE_SECONDS
        if not sharing.cancelled() and sharing.exception() is None:
            content = {**sharing.result(), "fingerprint": self._belief.fingerprint}
            self._board.share(epoch, signed("state", content, self._signature))
