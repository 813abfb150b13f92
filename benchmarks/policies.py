"""Policies of learning that benchmarks compare with the bandit: one kind of update whenever its buffer is full."""

from collections.abc import Mapping, Sequence
from random import Random
from typing import Final, Literal

from adaptation.config import Tuning
from adaptation.policy import Arm, Bandit, BanditRules, Choice, Judgement, QueryReport, State

FixedName = Literal["always", "head_only", "full_only"]
PolicyName = Literal["bandit", FixedName, "never"]

_ARMS: Final[Mapping[FixedName, Arm]] = {"always": "full", "head_only": "head", "full_only": "full"}


class EveryBatch(Bandit):
    """One kind of update whenever its buffer is full, whatever it gains and costs.

    With full updates of 8 queries it is the schedule of Online Speculative Decoding (arXiv 2310.07177).
    """

    def __init__(self, arm: Arm, batch_queries: int, *, name: str) -> None:
        rules = BanditRules(batch_queries={}, alpha=1.0, epsilon=(0.0, 0.0), s_min=0.0)  # it estimates nothing
        super().__init__(rules, rng=Random(0))
        self.name = name
        self._arm, self._batch_queries = arm, batch_queries

    @property
    def resting(self) -> bool:
        """Always False: an update is made whenever its buffer is full."""
        return False

    def decide(self, query: QueryReport) -> Choice:
        """Choose the arm for every query that may be learnt from."""
        if not query.usable:
            return Choice(None, "unusable")
        if query.signal is None:
            return Choice(None, "not_admitted")
        return Choice(self._arm, "gain")

    def due(self, signals: Mapping[Arm, Sequence[float]]) -> Arm | None:
        """Return the arm once its buffer is full."""
        return self._arm if len(signals[self._arm]) >= self._batch_queries else None

    def ended(self, arm: Arm, signal: float, judgement: Judgement, seconds: float, *, published: bool) -> None:
        """No-op: outcomes of updates change nothing."""

    def state(self) -> State:
        """Serializable state: empty."""
        return {}

    def restore(self, state: State) -> None:
        """Check that the state is empty. Raises ValueError for the state of another policy."""
        if state:
            raise ValueError("not the state of a fixed policy, which has none")


def fixed_policy(name: FixedName, tuning: Tuning) -> EveryBatch:
    """Build the policy of this name, with the buffer sizes of `tuning`."""
    arm = _ARMS[name]
    return EveryBatch(arm, tuning.head_queries if arm == "head" else tuning.full_queries, name=name)
