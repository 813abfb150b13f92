"""Learning breaks in every way there is while an engine serves: texts stay plain, and learning goes on.

A few injections of each kind, and in the slow tests at least 20 under both kinds of update.
"""

import os
import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from adaptation.policy import Arm
from tests.adaptation.damage import (
    Damage,
    Left,
    flip,
    leave,
    misshape,
    restart_damaged,
    restart_with_damaged_snapshots,
    roll_back_damaged,
    truncate,
)
from tests.fault_kinds import KINDS, dead_processes, few_kills, restart_served_after_damage
from tests.fault_parts import learning_stream
from tests.practised import Practised, practised

ROOT = Path(__file__).resolve().parents[2]


Sized = Callable[[int], int]
Tell = Callable[..., None]


@dataclass(frozen=True)
class Scale:
    """How often each fault strikes."""

    seed: int
    times: int
    flips: int
    truncations: int
    snapshots: int
    restarts: int
    kills: int


FEW = Scale(seed=0, times=1, flips=12, truncations=12, snapshots=6, restarts=2, kills=3)
MANY = Scale(seed=1, times=20, flips=1_000, truncations=100, snapshots=100, restarts=20, kills=100)
at_both_scales = pytest.mark.parametrize(
    "scale", [FEW, pytest.param(MANY, marks=pytest.mark.slow)], ids=["few", "many"]
)
STRIKES = [
    *(pytest.param(FEW, kind, "full" if kind == "broken recoveries" else "head") for kind in KINDS),
    *(pytest.param(MANY, kind, arm, marks=pytest.mark.slow) for kind in KINDS for arm in ("head", "full")),
]


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> Practised:
    return practised(tmp_path_factory.mktemp("practised"), num_texts=8, updates=1)


@pytest.fixture(scope="module")
def left(tmp_path_factory: pytest.TempPathFactory) -> Left:
    return leave(tmp_path_factory.mktemp("left"))


@pytest.fixture
def _quick_disk(scale: Scale, monkeypatch: pytest.MonkeyPatch) -> None:
    if scale is MANY:
        monkeypatch.setattr(os, "fsync", lambda _: None)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize(("scale", "kind", "arm"), STRIKES)
def test_serving_does_not_notice_and_learning_goes_on(
    known: Practised, tmp_path: Path, scale: Scale, kind: str, arm: Arm, sized: Sized, tell: Tell
) -> None:
    with learning_stream(known, tmp_path, arm=arm, seed=scale.seed) as struck:
        strike = few_kills if kind == "kills" and scale is FEW else KINDS[kind]
        strike(struck, sized(scale.times))
        struck.check()
    tell(**struck.reported())


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="needs memory that processes share")
def test_serving_does_not_notice_that_the_process_that_trains_is_dead(
    known: Practised, tmp_path: Path, sized: Sized, tell: Tell
) -> None:
    with learning_stream(known, tmp_path, arm="full", seed=1, train_in="process") as struck:
        dead_processes(struck, sized(20))
        struck.check()
    tell(**struck.reported())


@at_both_scales
@pytest.mark.usefixtures("_quick_disk")
@pytest.mark.parametrize("damage", [flip, truncate])
def test_one_damaged_file_costs_at_most_one_update(left: Left, tmp_path: Path, damage: Damage, scale: Scale) -> None:
    rng = random.Random(scale.seed)
    for number in range(scale.flips if damage is flip else scale.truncations):
        restart_damaged(left, tmp_path / str(number), damage, rng)


@at_both_scales
@pytest.mark.usefixtures("_quick_disk")
@pytest.mark.parametrize("damage", [flip, truncate, misshape])
def test_no_damaged_snapshot_is_served(left: Left, tmp_path: Path, damage: Damage, scale: Scale) -> None:
    rng = random.Random(scale.seed)
    for number in range(scale.snapshots):
        restart_with_damaged_snapshots(left, tmp_path / str(number), damage, rng)
        roll_back_damaged(left, tmp_path / str(number), damage, rng)


@at_both_scales
def test_an_engine_serves_plain_texts_after_a_restart_with_damaged_files(
    known: Practised, tmp_path: Path, scale: Scale
) -> None:
    restart_served_after_damage(known, tmp_path, times=scale.restarts)


@at_both_scales
def test_a_real_kill_loses_at_most_one_update(tmp_path: Path, scale: Scale) -> None:
    command = [sys.executable, "-m", "tests.adaptation.killed_learner", str(tmp_path), str(scale.kills)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=3600)
    assert result.returncode == 0, result.stderr
    print(result.stdout)
