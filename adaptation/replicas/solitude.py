"""A process that learns by itself: what the engine tells goes straight to its own learner."""

from typing import Protocol

from adaptation.records import ReplicaStatus
from adaptation.worker import Worker
from drafters.feedback import QueryFeedback


class Replicas(Protocol):
    """Whom this process learns with."""

    def start(self) -> None: ...

    def stop(self) -> bool:
        """Nothing is sent or fetched any more. # -> whether that was done in time"""
        ...

    def offer(self, feedback: QueryFeedback) -> None:
        """A query has ended. Called by the engine thread; never waits."""
        ...

    def status(self) -> ReplicaStatus: ...


class Solitude:
    """With nobody."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    def start(self) -> None:
        """There is nobody to talk to."""

    def stop(self) -> bool:
        return True

    def offer(self, feedback: QueryFeedback) -> None:
        self._worker.offer(feedback)

    def status(self) -> ReplicaStatus:
        return ReplicaStatus()
