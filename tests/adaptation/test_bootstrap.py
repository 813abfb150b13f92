"""What a drafter is made of, and what distances are measured to once it is made, or was brought."""

from pathlib import Path

import pytest
import torch

from adaptation.publisher import GateDecision
from adaptation.timing import Pieces
from drafters.network.checkpoint import weights_of
from tests.adaptation.drafts import same
from tests.adaptation.samples import Bench, bench, drafter, feedback


@pytest.fixture
def unmade(tmp_path: Path) -> Bench:
    return bench(tmp_path, made=False, policy="bandit")


def collect(tried: Bench, texts: range) -> None:
    for seed in texts:
        tried.observe(feedback, seed)
    while tried.buffers.for_sums:
        assert tried.learner.work()


def brought(scale: float) -> dict[str, torch.Tensor]:
    return {
        name: scale * value if value.is_floating_point() else value for name, value in weights_of(drafter()).items()
    }


def test_the_first_drafter_that_is_brought_is_what_distances_are_measured_to(unmade: Bench) -> None:
    for seed in range(12):
        unmade.observe(feedback, seed)
    assert unmade.buffers.for_sums
    for version, scale in enumerate((1.0, 2.0, 3.0), 1):
        assert unmade.learner.adopt(brought(scale), "leader") == version
        unmade.weights.between_steps()
        assert same(weights_of(unmade.weights.anchor), brought(1.0))
    assert same(weights_of(unmade.serving), brought(3.0))
    unmade.learner.work()
    assert not unmade.buffers.for_sums  # texts that nothing will be made of are not kept


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
    waiting = len(unmade.buffers.for_sums)
    assert (unmade.learner.work(), bootstrap.positions) == (False, 0)
    unmade.time._covers = lambda seconds: True
    assert unmade.learner.work()
    assert len(unmade.buffers.for_sums) == waiting - 1 > 0
    assert bootstrap.positions > 0
    unmade.learner.paused = True
    assert not unmade.learner.work()


def test_a_refused_solution_is_trained_in_idle_time_and_published_once_it_beats_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = bench(tmp_path, made=False, policy="bandit", idle_share=1.0)
    bootstrap, gains = tried.learner._bootstrap, iter((-0.5, -0.6, -0.4, 0.3))

    def judge() -> Pieces[GateDecision]:
        yield
        gain = next(gains)
        return GateDecision("better" if gain > 0 else "worse_than_serving", 8, 1.0 + gain, 1.0, 1.0, 0.01, 0.1)

    monkeypatch.setattr(tried.publisher, "judge", judge)
    collect(tried, range(100))
    expected = ["solved", "refused", "refused", "refused", "published"]
    states = []
    while [kind for kind in tried.kinds() if kind in expected] != expected:
        assert tried.update()
        states.append((bootstrap.collects, bootstrap.trains))
    assert states == [(True, True), (True, True), (False, True), (False, True)], "the first better copy ends it"
    assert tried.weights.latest.origin == 1
    assert not tried.buffers.for_sums
