"""Serving what the leader has announced: read, doubt, fetch, check, and let the learner serve it between two steps.

Knows neither who leads nor how weights come to be.
"""

import logging
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

from torch import Tensor

from adaptation.checkpoint import Layout
from adaptation.records import Refused
from adaptation.replicas.announcement import Announcement
from adaptation.replicas.belief import Belief
from adaptation.replicas.board import Board
from adaptation.replicas.desk import Desk
from adaptation.replicas.lease import Claim
from adaptation.replicas.served import ServedWeights, weights_from_bytes

logger = logging.getLogger(__name__)

_PATIENCE_SECONDS = 2.0  # until what was refused is looked at again


@dataclass(frozen=True, slots=True)
class _Adopting:
    """Weights on their way through the learner's thread."""

    announcement: Announcement
    raw: bytes
    answer: Future[int]


class Following:
    """All calls come from the thread that talks to the store."""

    def __init__(
        self,
        board: Board,
        belief: Belief,
        claim: Claim,
        served: ServedWeights,
        desk: Desk,
        *,
        layout: Layout,
        vocab: int,
        clock: Callable[[], float],
    ) -> None:
        self.fates: Counter[str] = Counter()  # of versions
        self._board = board
        self._belief = belief
        self._claim = claim
        self._served = served
        self._desk = desk
        self._layout = layout
        self._vocab = vocab
        self._clock = clock
        self._adopting: _Adopting | None = None
        self._refused = b""
        self._again_at = 0.0

    def turn(self) -> None:
        """Move towards what is announced, and stay with it. Raises StoreLost."""
        raw = self._board.current()
        if raw is None:
            self._give_back()
        elif self.settled(raw) and raw == self._belief.raw and self._strayed(raw):
            self._follow(raw)

    def settled(self, raw: bytes | None) -> bool:
        """Whether what is announced is followed, or will not be; else a step towards it is done. Raises StoreLost."""
        if self._adopting is not None:
            return self._adopted(self._adopting)
        if raw is None or raw == self._belief.raw or self._is_put_off(raw):
            return True
        self._follow(raw)
        return self._adopting is None

    def _strayed(self, raw: bytes) -> bool:
        """What is announced was followed, and something else is served: learnt alone, or brought by an operator."""
        return self._served.now().sha256 != self._belief.sha256 and not self._is_put_off(raw)

    def _is_put_off(self, raw: bytes) -> bool:
        return raw == self._refused and self._clock() < self._again_at

    def _follow(self, raw: bytes) -> None:
        try:
            announcement = self._belief.judge(raw)
            if announcement.sha256 == self._served.now().sha256:
                self._belief.accept(announcement, raw)
            else:
                self._adopting = _Adopting(announcement, raw, self._desk.follow(self._fetched(announcement)))
        except Refused as refusal:
            self._refuse(raw, refusal)

    def _fetched(self, announcement: Announcement) -> dict[str, Tensor]:
        data = self._board.get(announcement.sha256, announcement.num_bytes)
        try:
            return weights_from_bytes(data, announcement.sha256, self._layout, self._vocab)
        except Refused as refusal:
            if refusal.reason == "torn":
                self._board.remove(announcement.sha256)
            raise

    def _adopted(self, adopting: _Adopting) -> bool:
        if not adopting.answer.done():
            return False
        self._adopting = None
        if adopting.answer.cancelled():
            return True  # this process ends
        error = adopting.answer.exception()
        if error is not None:
            self._put_off(adopting.raw, "not_served", str(error))
            return True
        self._belief.accept(adopting.announcement, adopting.raw)
        self.fates["followed"] += 1
        logger.info("following %s: version %s", adopting.announcement.leader, adopting.announcement.order)
        return True

    def _refuse(self, raw: bytes, refusal: Refused) -> None:
        self._put_off(raw, refusal.reason, str(refusal))
        if refusal.reason in ("old", "fork"):  # a leader that knows less than is known here leads anew, above it
            self._claim.raise_epoch(self._belief.epoch + 1)

    def _put_off(self, raw: bytes, fate: str, detail: str) -> None:
        """Refused for now: what is announced may be mended meanwhile, but need not be read ten times a second."""
        if raw != self._refused:
            self.fates[fate] += 1
            logger.warning("an announced version is not followed: %s", detail)
        self._refused, self._again_at = raw, self._clock() + _PATIENCE_SECONDS

    def _give_back(self) -> None:
        """The store has forgotten everything: tell it what all serve, if that is still served here."""
        known, served = self._belief.known, self._served.now()
        if known is None:
            return
        self._claim.raise_epoch(known.epoch)
        if known.sha256 == served.sha256:
            if not self._board.has(known.sha256, known.num_bytes):
                self._board.put(known.sha256, served.data)
            self._board.give_back(self._belief.raw, known.sha256)
