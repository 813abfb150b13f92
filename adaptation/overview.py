"""Puts together what an operator sees of learning, from the parts that know it. Decides and changes nothing.

To be asked in the thread that learns.
"""

from adaptation.feedback import FeedbackFilter
from adaptation.learner import Learner
from adaptation.monitor import RollbackMonitor
from adaptation.policy import Policy
from adaptation.records import AdaptationStatus, History
from adaptation.samples import SampleBuffers, ValidationSet
from adaptation.weights import DrafterWeights
from adaptation.worker import Worker


class Overview:
    """Holds the parts of one learner, to look at."""

    def __init__(
        self,
        policy_name: str,
        *,
        learner: Learner,
        weights: DrafterWeights,
        policy: Policy,
        feedback_filter: FeedbackFilter,
        buffers: SampleBuffers,
        held_back: ValidationSet,
        watch: RollbackMonitor,
        history: History,
    ) -> None:
        self._policy_name = policy_name
        self._learner = learner
        self._weights = weights
        self._policy = policy
        self._filter = feedback_filter
        self._buffers = buffers
        self._held_back = held_back
        self._monitor = watch
        self._history = history

    def status(self, worker: Worker) -> AdaptationStatus:
        learner, weights, feedback_filter, counts = self._learner, self._weights, self._filter, self._history.counts
        return AdaptationStatus(
            policy=self._policy_name,
            paused=learner.paused,
            version=weights.version,
            origin=weights.origin,
            exchanged_tokens=weights.num_exchanged,
            newest=weights.newest,
            condemned=tuple(sorted(weights.condemned)),
            snapshots=tuple(weights.snapshots.versions),
            collapsed=self._monitor.collapsed,
            values={arm: value for arm, value in self._policy.values.items()},
            waiting={arm: count for arm, count in self._buffers.state().items()},
            held_back=len(self._held_back.texts),
            queries_heard=feedback_filter.decisions.total(),
            queries_dropped=worker.num_dropped,
            queries_excluded=feedback_filter.refusals.total(),
            excluded=dict(feedback_filter.refusals),
            lessons_dropped=self._buffers.num_dropped,
            decisions=dict(feedback_filter.decisions),
            updates={arm: count for arm, count in learner.num_updates.items()},
            publishes=counts["published"],
            refusals=counts["refused"],
            rollbacks=counts["rolled_back"],
            discards=counts["discarded"],
            training_seconds=learner.training_seconds,
            kl_to_anchor=learner.drift(),
            failures={stage: count for stage, count in worker.failures.items()},
            restarts=worker.num_restarts,
            events=self._history.last,
        )
