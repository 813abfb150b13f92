"""Puts together what an operator sees of learning, from the parts that know it. Decides and changes nothing.

To be asked in the thread that learns.
"""

from adaptation.buffers import HeldBack, LessonBuffers
from adaptation.history import History
from adaptation.intake import Intake
from adaptation.learner import Learner
from adaptation.policy import Policy
from adaptation.status import AdaptationStatus
from adaptation.watch import Watch
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
        intake: Intake,
        buffers: LessonBuffers,
        held_back: HeldBack,
        watch: Watch,
        history: History,
    ) -> None:
        self._policy_name = policy_name
        self._learner = learner
        self._weights = weights
        self._policy = policy
        self._intake = intake
        self._buffers = buffers
        self._held_back = held_back
        self._watch = watch
        self._history = history

    def status(self, worker: Worker) -> AdaptationStatus:
        learner, weights, intake, counts = self._learner, self._weights, self._intake, self._history.counts
        return AdaptationStatus(
            policy=self._policy_name,
            paused=learner.paused,
            version=weights.version,
            origin=weights.origin,
            exchanged_tokens=weights.num_exchanged,
            newest=weights.newest,
            condemned=tuple(sorted(weights.condemned)),
            snapshots=tuple(weights.snapshots.versions),
            collapsed=self._watch.collapsed,
            values={arm: value for arm, value in self._policy.values.items()},
            waiting={arm: count for arm, count in self._buffers.state().items()},
            held_back=len(self._held_back.texts),
            queries_heard=intake.decisions.total(),
            queries_dropped=worker.num_dropped,
            queries_excluded=intake.refusals.total(),
            excluded=dict(intake.refusals),
            lessons_dropped=self._buffers.num_dropped,
            decisions=dict(intake.decisions),
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
