"""The thread through which a replica learns with others: it holds or follows a leader, sends and fetches.

All waiting for the store is done here, and in no other thread. Where the store is lost the replica is alone after as
long as a lease lasts, and comes back by itself. Knows neither engine nor learner.
"""

import logging
import threading
from collections.abc import Callable
from typing import Final

from adaptation.records import ReplicaStatus, StoreLost
from adaptation.replicas.backoff import Backoff
from adaptation.replicas.belief import Belief
from adaptation.replicas.desk import Desk
from adaptation.replicas.following import Following
from adaptation.replicas.hearing import Hearing
from adaptation.replicas.leading import Leading
from adaptation.replicas.lease import Claim
from adaptation.replicas.outbox import Outbox
from adaptation.replicas.served import ServedWeights
from adaptation.replicas.standing import Stand, Standing
from adaptation.replicas.stream import QueryStream
from adaptation.worker import bound_threads, step_back
from drafters.feedback import QueryFeedback

logger = logging.getLogger(__name__)

_TURN_SECONDS: Final = 0.1


class Exchange:
    """Owner of everything in here but the outbox's inlet and the learner's desk."""

    def __init__(
        self,
        *,
        name: str,
        standing: Standing,
        claim: Claim,
        stream: QueryStream,
        outbox: Outbox,
        hearing: Hearing,
        following: Following,
        leading: Leading,
        belief: Belief,
        served: ServedWeights,
        desk: Desk,
        backoff: Backoff,
        patience_seconds: float,
        niceness: int,
        clock: Callable[[], float],
    ) -> None:
        """`patience_seconds`: without the store until this replica counts itself alone."""
        self.connected = False
        self.num_lost = 0
        self._name = name
        self._standing = standing
        self._claim = claim
        self._stream = stream
        self._outbox = outbox
        self._hearing = hearing
        self._following = following
        self._leading = leading
        self._belief = belief
        self._served = served
        self._desk = desk
        self._backoff = backoff
        self._patience_seconds = patience_seconds
        self._niceness = niceness
        self._clock = clock
        self._answered_at = clock()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="replicas", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_seconds: float = 5.0) -> bool:
        """End the thread, and let another replica lead at once. # -> whether it has ended in time"""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(timeout_seconds)
        return not self._thread.is_alive()

    def offer(self, feedback: QueryFeedback) -> None:
        """A finished query, to be heard here or sent to whoever leads. Called by the engine thread; never waits."""
        if self._standing.learns:
            self._desk.keep(feedback)
        else:
            self._outbox.offer(feedback)

    def status(self) -> ReplicaStatus:
        """From any thread."""
        known = self._belief.known
        return ReplicaStatus(
            name=self._name,
            standing=self._standing.now,
            connected=self.connected,
            leader=known.leader if known is not None else "",
            epoch=known.epoch if known is not None else 0,
            number=known.number if known is not None else 0,
            announced_sha256=known.sha256 if known is not None else "",
            served_sha256=self._served.last_seen.sha256,
            queries={**self._outbox.fates, **self._hearing.fates},
            versions={**self._following.fates, "announced": self._leading.num_announced},
            connections_lost=self.num_lost,
        )

    def _run(self) -> None:
        bound_threads(1)
        step_back(self._niceness)
        while not self._stopping.is_set():
            self._stopping.wait(self.attempt())
        self._leave()

    def attempt(self) -> float:
        """One turn, whatever comes of it. # -> seconds until the next"""
        try:
            self.turn()
        except StoreLost as error:
            self._lose(str(error))
        except Exception:
            logger.exception("learning with other replicas failed; trying again")
            self._lose("an error of this process")
        else:
            return _TURN_SECONDS
        return self._backoff.next()

    def turn(self) -> None:
        """Everything that is due with the others, once. Raises StoreLost."""
        if not self.connected:
            self._greet()
        if self._claim.hold(self._belief.epoch):
            self._stand("leading")
            self._outbox.keep(self._desk)
            self._leading.turn(self._claim.epoch)
        else:
            self._stand("following")
            self._following.turn()
            self._outbox.send()
        self._answered_at = self._clock()

    def _greet(self) -> None:
        """The store may be another one than before, or have forgotten everything."""
        self._stream.join()
        self._claim.raise_epoch(self._belief.epoch)
        self.connected = True
        self._backoff.reset()
        logger.info("connected with the other replicas")

    def _lose(self, reason: str) -> None:
        if self.connected:
            self.num_lost += 1
            logger.warning("the store of the replicas is lost: %s", reason)
        self.connected = False
        self._served.now()  # what is learnt meanwhile is told by the status
        if self._clock() - self._answered_at > self._patience_seconds:
            self._stand("alone")
            if self._standing.learns:
                self._outbox.keep(self._desk)

    def _stand(self, stand: Stand) -> None:
        if self._standing.now != stand:
            logger.info("replica %s: %s, was %s", self._name, stand, self._standing.now)
        self._standing.now = stand

    def _leave(self) -> None:
        try:
            self._claim.give_up()
        except StoreLost as error:
            logger.info("leaving without a word to the other replicas: %s", error)
