import json

import pytest

from adaptation.policy import Arm, EveryBatch, Policy, QueryReport, State


def report(signal: float | None = 7.0, seconds: float = 2.0) -> QueryReport:
    return QueryReport(seconds, signal)


@pytest.mark.parametrize("arm", ["head", "full"])
def test_every_eighth_query_completes_a_batch(arm: Arm) -> None:
    policy: Policy = EveryBatch(arm, 8)
    taken: list[int] = []
    for number in range(1, 33):
        assert policy.decide(report()).arm == arm
        if policy.take_update() == arm:
            taken.append(number)
            policy.ended(None, 1.0, published=True)
    assert taken == [8, 16, 24, 32]


def test_an_update_waits_for_the_one_under_way() -> None:
    policy = EveryBatch("full", 2)
    for _ in range(2):
        policy.decide(report())
    assert policy.take_update() == "full"
    for _ in range(5):
        policy.decide(report())
        assert policy.take_update() is None
    policy.ended(None, 1.0, published=False)
    assert policy.take_update() == "full"


def test_what_must_not_or_cannot_be_learnt_from_counts_for_nothing() -> None:
    policy = EveryBatch("full", 1)
    assert policy.decide(report(signal=None)).reason == "not_admitted"
    assert policy.decide(report(seconds=float("nan"))).reason == "unusable"
    assert policy.take_update() is None


def test_it_goes_on_where_it_stopped() -> None:
    first, second = EveryBatch("full", 3), EveryBatch("full", 3)
    first.decide(report())
    first.decide(report())
    second.restore(json.loads(json.dumps(first.state())))
    second.decide(report())
    assert second.take_update() == "full"
    first.reset()
    assert first.state() == {"num_waiting": 0}


@pytest.mark.parametrize("state", [{}, {"num_waiting": -1}, {"num_waiting": "3"}, {"num_waiting": 1, "more": 2}])
def test_a_foreign_state_is_refused(state: State) -> None:
    policy = EveryBatch("full", 3)
    with pytest.raises(ValueError, match="not the state"):
        policy.restore(state)


def test_never_learns_nothing() -> None:
    policy: Policy = EveryBatch(None)
    for _ in range(100):
        assert policy.decide(report()).choice == "skip"
        assert policy.take_update() is None
    assert policy.resting
