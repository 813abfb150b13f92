"""Policies that ask no bandit: they show what deciding by gain is worth, and `Never` is learning switched off."""

from collections.abc import Mapping

from adaptation.policy import Arm, Decision, Measurement, QueryReport, State


class EveryBatch:
    """One kind of update, again and again, whenever so many queries have come together.

    With full updates of 8 queries it is the schedule of Online Speculative Decoding (arXiv 2310.07177).
    """

    def __init__(self, arm: Arm, batch_queries: int) -> None:
        self._arm: Arm = arm
        self._batch_queries = batch_queries
        self._num_waiting = 0
        self._training = False

    @property
    def values(self) -> Mapping[Arm, float]:
        return {}

    @property
    def last_measurement(self) -> Measurement | None:
        return None

    @property
    def resting(self) -> bool:
        return False

    def decide(self, query: QueryReport) -> Decision:
        if not query.usable:
            return Decision(None, "unusable", {})
        if query.signal is None:
            return Decision(None, "not_admitted", {})
        self._num_waiting += 1
        return Decision(self._arm, "fixed", {})

    def take_update(self) -> Arm | None:
        if self._training or self._num_waiting < self._batch_queries:
            return None
        self._num_waiting = 0
        self._training = True
        return self._arm

    def published(self, tau_ratio: float | None = None) -> None:
        assert self._training, "an update ends that never began"
        self._training = False

    def discarded(self, *, counted: bool = True) -> None:
        assert self._training, "an update ends that never began"
        self._training = False

    def traffic_changed(self) -> None:
        """Batches come whatever the texts are."""

    def reset(self) -> None:
        self._num_waiting = 0
        self._training = False

    def state(self) -> State:
        return {"num_waiting": self._num_waiting}

    def restore(self, state: State) -> None:
        waiting = state.get("num_waiting")
        if set(state) != {"num_waiting"} or not isinstance(waiting, int) or waiting < 0:
            raise ValueError("not the state of a fixed policy")
        self.reset()
        self._num_waiting = waiting


class Never:
    """Learns nothing."""

    @property
    def values(self) -> Mapping[Arm, float]:
        return {}

    @property
    def last_measurement(self) -> Measurement | None:
        return None

    @property
    def resting(self) -> bool:
        return True

    def decide(self, query: QueryReport) -> Decision:
        return Decision(None, "never", {})

    def take_update(self) -> Arm | None:
        return None

    def published(self, tau_ratio: float | None = None) -> None:
        raise AssertionError("an update ends that never began")

    def discarded(self, *, counted: bool = True) -> None:
        raise AssertionError("an update ends that never began")

    def traffic_changed(self) -> None:
        """Whatever the texts are."""

    def reset(self) -> None:
        return None

    def state(self) -> State:
        return {}

    def restore(self, state: State) -> None:
        if state:
            raise ValueError("not the state of a policy that never learns")
