"""What an operator sees is what has happened."""

from pathlib import Path

import pytest
import torch

from adaptation.records import AdaptationStatus
from adaptation.worker import Worker
from drafters.specblock.model import SpecBlock
from tests.adaptation.samples import Bench, bench, feedback, full_bench, vocabulary

torch.set_num_threads(1)
pytestmark = pytest.mark.usefixtures("impatient")


def seen(tried: Bench) -> AdaptationStatus:
    worker = Worker(tried.learner, max_waiting=4, duty_cycle=1.0)
    worker.num_dropped, worker.num_restarts = 3, 2
    worker.failures["hear"] = 1
    return tried.learner.status(worker)


def test_before_anything_happened(tmp_path: Path) -> None:
    status = seen(bench(tmp_path, policy="bandit"))
    assert (status.policy, status.version, status.origin, status.newest) == ("bandit", 0, 0, 0)
    assert status.values == {"head": 0.0, "full": 0.0}
    assert status.waiting == {"head": 0, "full": 0}
    assert (status.kl_to_anchor, status.collapsed, status.paused) == (None, False, False)
    assert (status.queries_dropped, status.restarts, status.failures) == (3, 2, {"hear": 1})


def test_after_traffic_an_update_and_a_rollback(tmp_path: Path) -> None:
    tried = full_bench(tmp_path)
    token = int(vocabulary()[0][5])
    for seed in range(40):
        tried.observe(lambda seed, **told: feedback(seed, token=token, **told), seed)
        tried.learner.update()
        tried.weights.between_steps()
    tried.learner.observe(feedback(99, rejected=0, accepted=()))
    tried.learner.rollback()
    status = seen(tried)
    kinds = tried.kinds()
    assert status.publishes == kinds.count("published") > 0
    assert status.refusals == kinds.count("refused")
    assert (status.rollbacks, status.newest, status.version) == (1, tried.weights.newest, tried.weights.version)
    assert status.updates == {"full": kinds.count("published") + kinds.count("refused")}
    assert status.queries_heard == sum(status.decisions.values()) == 41
    assert status.excluded == {"nothing_to_learn": status.queries_excluded}
    assert status.snapshots == tuple(tried.weights.snapshots.versions)
    assert status.condemned == tuple(sorted(tried.weights.condemned)) != ()
    assert status.kl_to_anchor is not None
    assert status.training_seconds == tried.learner.time.seconds > 0
    assert [past.kind for past in status.events] == kinds[-50:]


def test_the_distance_to_the_anchor_is_measured_once_per_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = bench(tmp_path, policy="never")
    for seed in range(8):
        tried.observe(feedback, seed)
    asked: list[int] = []
    whole = tried.weights.served_in_full

    def counted() -> SpecBlock:
        asked.append(1)
        return whole()

    monkeypatch.setattr(tried.weights, "served_in_full", counted)
    assert tried.learner._evaluator.kl_to_anchor() == tried.learner._evaluator.kl_to_anchor() == 0.0
    assert len(asked) == 1
    with torch.no_grad():
        tried.weights.training.lm_head.weight.mul_(1.5)
    tried.weights.publish({})
    changed = tried.learner._evaluator.kl_to_anchor()
    assert changed is not None
    assert changed > 0
    assert len(asked) == 2
