"""What a drafter is made of, and what distances are measured to once it is made, or was brought."""

from pathlib import Path

import pytest
import torch

from drafters.network.checkpoint import weights_of
from tests.adaptation.drafts import same
from tests.adaptation.samples import Bench, bench, drafter, feedback


@pytest.fixture
def unmade(tmp_path: Path) -> Bench:
    return bench(tmp_path, made=False, policy="bandit")


def collect(tried: Bench, texts: range) -> None:
    for seed in texts:
        tried.observe(feedback, seed)


def brought(scale: float) -> dict[str, torch.Tensor]:
    return {
        name: scale * value if value.is_floating_point() else value for name, value in weights_of(drafter()).items()
    }


def test_the_first_drafter_that_is_brought_is_what_distances_are_measured_to(unmade: Bench) -> None:
    for version, scale in enumerate((1.0, 2.0, 3.0), 1):
        assert unmade.learner.adopt(brought(scale), "leader") == version
        unmade.weights.between_steps()
        assert same(weights_of(unmade.weights.anchor), brought(1.0))
    assert same(weights_of(unmade.serving), brought(3.0))


def test_a_rollback_loses_nothing_that_was_collected(unmade: Bench) -> None:
    collect(unmade, range(12))
    collected = unmade.learner._bootstrap.positions
    assert collected > 0
    unmade.learner.rollback()
    assert unmade.learner._bootstrap.positions == collected
