"""Learning breaks in every way there is while an engine serves: texts stay plain, and learning goes on.

A few injections of each kind; `tests/long/test_faults.py` has more of them.
"""

import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from adaptation.policy import Arm
from tests import fault_kinds
from tests.adaptation.damage import Damage, flip, misshape, truncate
from tests.adaptation.damaged_restarts import (
    Left,
    leave,
    restart_damaged,
    restart_with_damaged_snapshots,
    roll_back_damaged,
)
from tests.fault_kinds import dead_processes, restart_served_after_damage
from tests.fault_parts import learning_stream
from tests.practised import Practised, practised

torch.set_num_threads(1)
ROOT = Path(__file__).resolve().parents[2]

KINDS = {**fault_kinds.KINDS, "kills": fault_kinds.few_kills}


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> Practised:
    return practised(tmp_path_factory.mktemp("practised"), num_texts=8, updates=1)


@pytest.fixture(scope="module")
def left(tmp_path_factory: pytest.TempPathFactory) -> Left:
    return leave(tmp_path_factory.mktemp("left"))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize(("kind", "arm"), [(kind, "full" if kind == "broken recoveries" else "head") for kind in KINDS])
def test_serving_does_not_notice_and_learning_goes_on(known: Practised, tmp_path: Path, kind: str, arm: Arm) -> None:
    with learning_stream(known, tmp_path, arm=arm, seed=0) as struck:
        KINDS[kind](struck, 1)
        struck.check()


@pytest.mark.skipif(sys.platform != "linux", reason="needs memory that processes share")
def test_serving_does_not_notice_that_the_process_that_trains_is_dead(known: Practised, tmp_path: Path) -> None:
    with learning_stream(known, tmp_path, arm="full", seed=1, train_in="process") as struck:
        dead_processes(struck, 2)
        struck.check()


@pytest.mark.parametrize("damage", [flip, truncate])
def test_one_damaged_file_costs_at_most_one_update(left: Left, tmp_path: Path, damage: Damage) -> None:
    rng = random.Random(0)
    for number in range(12):
        restart_damaged(left, tmp_path / str(number), damage, rng)


@pytest.mark.parametrize("damage", [flip, truncate, misshape])
def test_no_damaged_snapshot_is_served(left: Left, tmp_path: Path, damage: Damage) -> None:
    rng = random.Random(0)
    for number in range(6):
        restart_with_damaged_snapshots(left, tmp_path / str(number), damage, rng)
        roll_back_damaged(left, tmp_path / str(number), damage, rng)


def test_an_engine_serves_plain_texts_after_a_restart_with_damaged_files(known: Practised, tmp_path: Path) -> None:
    restart_served_after_damage(known, tmp_path, times=2)


def test_a_real_kill_loses_at_most_one_update(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.adaptation.killed_learner", str(tmp_path), "3"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stderr
    print(result.stdout)
