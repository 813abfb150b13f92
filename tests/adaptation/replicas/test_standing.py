"""Whether a replica learns, by where it stands; and whom its engine's queries reach when there is nobody else."""

from pathlib import Path

import pytest

from adaptation.records import ReplicaStatus
from adaptation.replicas.solitude import Solitude
from adaptation.replicas.standing import InTurn, Stand, Standing
from adaptation.worker import Worker
from tests.adaptation.samples import bench, feedback

pytestmark = pytest.mark.usefixtures("impatient")


@pytest.mark.parametrize(
    ("stand", "learns_alone", "learns"),
    [
        ("leading", True, True),
        ("leading", False, True),
        ("following", True, False),
        ("following", False, False),
        ("alone", True, True),
        ("alone", False, False),
    ],
)
def test_who_learns(stand: Stand, learns_alone: bool, learns: bool) -> None:
    standing = Standing(learns_alone=learns_alone)
    standing.now = stand
    assert standing.learns is learns


def test_an_update_waits_for_its_turn_and_is_broken_off_with_it(tmp_path: Path) -> None:
    tried, standing = bench(tmp_path, head_queries=2), Standing(learns_alone=False)
    loop = InTurn(tried.learner, standing)
    for seed in range(12):
        loop.observe(feedback(seed))
    assert loop.update(lambda: False) is None
    standing.now = "leading"

    def lost() -> bool:
        standing.now = "following"
        return False

    broken = loop.update(lost)
    assert broken is not None
    assert broken.outcome == "interrupted"


def test_alone_by_choice_everything_is_heard_here(tmp_path: Path) -> None:
    worker = Worker(bench(tmp_path).learner, most_waiting=4, threads=1, duty_cycle=1.0)
    solitude = Solitude(worker)
    solitude.start()
    solitude.offer(feedback(0))
    assert len(worker._waiting) == 1
    assert solitude.status() == ReplicaStatus()
    assert solitude.stop()
