import pytest

from adaptation.policy import ARMS, Arm, EveryBatch, Policy, QueryReport, State
from tests.adaptation.worlds import Buffers


def report(signal: float | None = 7.0, seconds: float = 2.0) -> QueryReport:
    return QueryReport(seconds, signal)


@pytest.mark.parametrize("arm", ["head", "full"])
def test_every_eighth_query_completes_a_batch(arm: Arm) -> None:
    policy: Policy = EveryBatch(arm, 8)
    taken, buffers = list[int](), Buffers()
    for number in range(1, 33):
        assert buffers.decide(policy, report()).arm == arm
        if buffers.take(policy) == (arm, 7.0):
            taken.append(number)
    assert taken == [8, 16, 24, 32]


def test_what_must_not_or_cannot_be_learnt_from_counts_for_nothing() -> None:
    policy, buffers = EveryBatch("full", 1), Buffers()
    assert buffers.decide(policy, report(signal=None)).reason == "not_admitted"
    assert buffers.decide(policy, report(seconds=float("nan"))).reason == "unusable"
    assert buffers.take(policy) is None


@pytest.mark.parametrize("state", [{"num_waiting": 2}, {"knowledge": {}, "random": []}])
def test_a_foreign_state_is_refused(state: State) -> None:
    policy = EveryBatch("full", 3)
    with pytest.raises(ValueError, match="not the state"):
        policy.restore(state)


def test_never_learns_nothing() -> None:
    policy: Policy = EveryBatch(None)
    for _ in range(100):
        assert policy.decide(report()).arm is None
        assert policy.due({arm: [7.0] for arm in ARMS}) is None
    assert policy.resting
