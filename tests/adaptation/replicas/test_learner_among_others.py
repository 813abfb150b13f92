"""What a learner offers to those it learns with: its weights, and what it knows of its arms."""

from pathlib import Path

import pytest

from tests.adaptation.samples import Bench, bench, feedback

pytestmark = pytest.mark.usefixtures("impatient")


def experienced(folder: Path, policy: str) -> Bench:
    tried = bench(folder, policy=policy, warm_up_queries=2)
    for seed in range(9):
        tried.observe(feedback, seed)
    return tried


@pytest.mark.parametrize("policy", ["bandit", "head_only", "never"])
def test_what_one_knows_another_goes_on_from(tmp_path: Path, policy: str) -> None:
    one, two = experienced(tmp_path / "one", policy), bench(tmp_path / "two", policy=policy)
    two.learner.inherit(one.learner.shared())
    assert two.learner.shared() == one.learner.shared()
    assert two.events == []


def test_whoever_learns_after_a_paused_one_is_paused_until_resumed(tmp_path: Path) -> None:
    one, two = experienced(tmp_path / "one", "bandit"), bench(tmp_path / "two", policy="bandit")
    before = one.learner.shared()
    one.learner.pause()
    two.learner.inherit(one.learner.shared())
    assert two.learner.paused
    two.learner.inherit(before)
    assert two.learner.paused, "what is older than the pause does not end it"
    two.learner.resume()
    assert [(event.kind, event.reason) for event in two.events] == [("paused", "inherited"), ("resumed", "operator")]


@pytest.mark.parametrize("shared", [{}, {"policy": 3}, {"policy": {"knowledge": {}, "random": []}}])
def test_what_is_no_knowledge_is_told_and_changes_nothing(tmp_path: Path, shared: dict[str, object]) -> None:
    tried = experienced(tmp_path, "bandit")
    before = tried.learner.shared()
    tried.learner.inherit(shared)  # type: ignore[arg-type]
    assert tried.learner.shared() == before
    assert [event.kind for event in tried.events] == ["restored"]
