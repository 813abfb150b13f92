import pytest

from adaptation.config import Tuning
from adaptation.policy import Arm, QueryReport
from benchmarks.policies import FixedName, fixed_policy
from tests.adaptation.worlds import Buffers

TUNING = Tuning(head_queries=8, full_queries=8)


@pytest.mark.parametrize(("name", "arm"), [("always", "full"), ("full_only", "full"), ("head_only", "head")])
def test_every_eighth_query_completes_a_batch(name: FixedName, arm: Arm) -> None:
    policy, buffers, taken = fixed_policy(name, TUNING), Buffers(), list[int]()
    for number in range(1, 33):
        assert buffers.decide(policy, QueryReport(2.0, 7.0)).arm == arm
        if buffers.take(policy) == (arm, 7.0):
            taken.append(number)
    assert taken == [8, 16, 24, 32]


def test_what_must_not_or_cannot_be_learnt_from_counts_for_nothing() -> None:
    policy = fixed_policy("full_only", TUNING)
    assert policy.decide(QueryReport(2.0, None)).reason == "not_admitted"
    assert policy.decide(QueryReport(float("nan"), 7.0)).reason == "unusable"
    with pytest.raises(ValueError, match="not the state"):
        policy.restore({"knowledge": {}, "random": []})
