"""What may be asked of the learner by others than its own engine: put before the thread that owns it, never awaited."""

from collections.abc import Mapping
from concurrent.futures import Future

from pydantic import JsonValue
from torch import Tensor

from adaptation.learner import Learner
from adaptation.worker import Worker
from drafters.feedback import QueryFeedback

_LEADER = "leader"


class Desk:
    """One learner and its thread."""

    def __init__(self, learner: Learner, worker: Worker) -> None:
        self._learner = learner
        self._worker = worker

    def observe(self, feedback: QueryFeedback) -> Future[object]:
        return self._worker.ask(lambda: self._learner.observe(feedback))

    def follow(self, weights: Mapping[str, Tensor]) -> Future[int]:
        """Serve what the leader has published. # -> the version it has here"""
        return self._worker.ask(lambda: self._learner.adopt(weights, _LEADER))

    def shared(self) -> Future[dict[str, JsonValue]]:
        return self._worker.ask(self._learner.shared)

    def inherit(self, shared: Mapping[str, JsonValue]) -> Future[None]:
        return self._worker.ask(lambda: self._learner.inherit(shared))

    def keep(self, feedback: QueryFeedback) -> None:
        """A query of this process, as its own engine would hand it over."""
        self._worker.offer(feedback)
