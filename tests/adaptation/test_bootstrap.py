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
    while tried.learner._bootstrap.waiting:
        assert tried.learner.work()


def brought(scale: float) -> dict[str, torch.Tensor]:
    return {
        name: scale * value if value.is_floating_point() else value for name, value in weights_of(drafter()).items()
    }


def test_the_first_drafter_that_is_brought_is_what_distances_are_measured_to(unmade: Bench) -> None:
    for seed in range(12):
        unmade.observe(feedback, seed)
    assert unmade.learner._bootstrap.waiting
    for version, scale in enumerate((1.0, 2.0, 3.0), 1):
        assert unmade.learner.adopt(brought(scale), "leader") == version
        unmade.weights.between_steps()
        assert same(weights_of(unmade.weights.anchor), brought(1.0))
    assert same(weights_of(unmade.serving), brought(3.0))
    assert not unmade.learner._bootstrap.waiting  # texts that nothing will be made of are not kept


def test_a_rollback_loses_nothing_that_was_collected(unmade: Bench) -> None:
    collect(unmade, range(12))
    collected = unmade.learner._bootstrap.positions
    assert collected > 0
    unmade.learner.rollback()
    assert unmade.learner._bootstrap.positions == collected


def test_texts_wait_until_the_server_is_idle_or_the_ledger_covers_them(unmade: Bench) -> None:
    """And are then added one at a time, so that a query comes between them."""
    bootstrap = unmade.learner._bootstrap
    unmade.time._covers = lambda seconds: False
    unmade.time.stepping()  # a step that lasts
    for seed in range(12):
        unmade.observe(feedback, seed)
    waiting = len(bootstrap.waiting)
    assert (unmade.learner.work(), bootstrap.positions) == (False, 0)
    unmade.time._covers = lambda seconds: True
    assert unmade.learner.work()
    assert len(bootstrap.waiting) == waiting - 1 > 0
    assert bootstrap.positions > 0
    unmade.learner.paused = True
    assert not unmade.learner.work()
