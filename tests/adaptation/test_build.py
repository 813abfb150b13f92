import random
from pathlib import Path

import pytest
import torch

from adaptation.bandit import Bandit
from adaptation.build import (
    build_collapse,
    build_cusum,
    build_falling_windows,
    build_gate,
    build_policy,
    build_quota,
    build_snapshots,
)
from adaptation.checkpoint import SnapshotInfo
from adaptation.config import AdaptationConfig
from adaptation.policy import QueryReport


def zero() -> float:
    return 0.0


@pytest.mark.parametrize(
    ("policy", "choice", "first_update"),
    [("always", "full", 8), ("head_only", "head", 4), ("full_only", "full", 6), ("never", "skip", None)],
)
def test_a_name_becomes_its_policy(policy: str, choice: str, first_update: int | None) -> None:
    config = AdaptationConfig.model_validate({"policy": policy, "full_queries": 6})
    built = build_policy(config, clock=zero, rng=random.Random(0))
    query = QueryReport(emitted_tokens=9, draft_cost=1.0, verify_cost=2.0, training_cost=0.0, signal=7.0)
    updates: list[int] = []
    for number in range(1, 9):
        assert built.decide(query).choice == choice
        if built.take_update() is not None:
            updates.append(number)
    assert updates[:1] == ([] if first_update is None else [first_update])


def test_the_bandit_is_the_default() -> None:
    assert isinstance(build_policy(AdaptationConfig(), clock=zero, rng=random.Random(0)), Bandit)


def test_the_numbers_arrive() -> None:
    config = AdaptationConfig(gate_sequences=20, cusum_threshold=4.0, fall_standard_errors=0.0, collapse_verifies=8)
    assert build_gate(config).judge([2.0] * 19, [1.0] * 19, [1.0] * 19).reason == "too_little_evidence"
    assert build_cusum(config).observe([1.0] * 16, [1.0] * 16).limit == 4.0
    assert build_falling_windows(config).observe([1.0] * 16).limit == 0.0
    assert build_collapse(config).observe(8, 8).fired
    assert build_quota(AdaptationConfig(query_positions=3), clock=zero).admit("a", 10, store=True).positions == 3


def test_the_ring_is_as_long_as_configured(tmp_path: Path) -> None:
    ring = build_snapshots(AdaptationConfig(snapshots_in_memory=1, snapshots_on_disk=2), tmp_path)
    tensors = {"w": torch.zeros(2)}
    for version in range(5):
        ring.add(SnapshotInfo(version, None, "2026-01-01T00:00:00Z", {}), tensors)
    assert ring.versions == [3, 4]
