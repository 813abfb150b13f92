import pytest

from adaptation.config import AdaptationConfig, Tuning
from adaptation.policy import ARMS, QueryReport, policy_of


def test_never_learns_nothing() -> None:
    policy = policy_of(AdaptationConfig(policy="never"), Tuning())
    for _ in range(100):
        decision = policy.decide(QueryReport(2.0, 7.0))
        assert (decision.arm, decision.reason) == (None, "never")
        assert policy.due({arm: [7.0] * 100 for arm in ARMS}) is None
    assert policy.resting
    assert policy.covers(1e9)
    assert (policy.values, policy.balance) == ({}, None)
    policy.restore({})  # as 0.3.0 saved it


def test_policies_of_comparisons_are_refused() -> None:
    with pytest.raises(ValueError, match="Input should be 'bandit' or 'never'"):
        AdaptationConfig.model_validate({"policy": "full_only"})
