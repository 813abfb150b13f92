import random
from pathlib import Path

import pytest

from adaptation.alarm import PairedCusum
from adaptation.bandit import Bandit
from adaptation.build import build_cusum, build_policy
from adaptation.config import AdaptationConfig
from adaptation.durable import seal
from adaptation.errors import NotStored
from adaptation.learner_state import LearnerState, LearnerStateFile
from adaptation.policy import QueryReport
from tests.adaptation.crashing import Fuel, Killed, disk_full_after, running_on
from tests.adaptation.worlds import Clock

CURRENT, PREVIOUS = "learner.json", "learner.previous.json"


def state_of(version: int) -> LearnerState:
    return LearnerState(version, {"policy": {"values": {"head": 0.1 * version}}, "cusum": {"total": version / 3}})


def parts(clock: Clock) -> tuple[Bandit, PairedCusum]:
    config = AdaptationConfig(warm_up_queries=2, head_queries=1)
    policy = build_policy(config, clock=clock, rng=random.Random(3))
    assert isinstance(policy, Bandit)
    return policy, build_cusum(config)


def test_learning_goes_on_exactly_where_it_stopped(tmp_path: Path) -> None:
    clock = Clock()
    policy, cusum = parts(clock)
    query = QueryReport(emitted_tokens=31, draft_cost=1.1, verify_cost=7.7, training_cost=0.3, signal=6.1)
    for _ in range(30):
        policy.decide(query)
        if policy.take_update() is not None:
            policy.published()
    cusum.observe([1.3, 1.7] * 8, [1.6, 1.4] * 8)
    saved = LearnerState(4, {"policy": policy.state(), "cusum": cusum.state()})
    LearnerStateFile(tmp_path).save(saved)

    loaded = LearnerStateFile(tmp_path).load()
    assert loaded.state == saved
    resumed, resumed_cusum = parts(clock)
    resumed.restore(loaded.state.parts["policy"])
    resumed_cusum.restore(loaded.state.parts["cusum"])
    assert [resumed.decide(query) for _ in range(200)] == [policy.decide(query) for _ in range(200)]
    assert resumed_cusum.observe([1.0] * 16, [2.0] * 16) == cusum.observe([1.0] * 16, [2.0] * 16)


def test_nothing_saved_is_nothing_to_resume(tmp_path: Path) -> None:
    loaded = LearnerStateFile(tmp_path / "nowhere").load()
    assert (loaded.state, loaded.refused) == (None, ())


@pytest.mark.parametrize("seed", range(3))
def test_a_damaged_state_falls_back_to_the_one_before_and_says_so(tmp_path: Path, seed: int) -> None:
    file = LearnerStateFile(tmp_path)
    file.save(state_of(1))
    file.save(state_of(2))
    path = tmp_path / CURRENT
    good = path.read_bytes()
    rng = random.Random(seed)
    for _ in range(200):
        bad = bytearray(good)
        bad[rng.randrange(len(bad))] ^= 1 << rng.randrange(8)
        path.unlink()
        path.write_bytes(bytes(bad))
        loaded = file.load()
        assert loaded.state == state_of(1)
        assert [reason.startswith(CURRENT) for reason in loaded.refused] == [True]


def test_a_damaged_state_does_not_push_the_good_one_out(tmp_path: Path) -> None:
    file = LearnerStateFile(tmp_path)
    file.save(state_of(1))
    file.save(state_of(2))
    (tmp_path / CURRENT).write_bytes(b"damaged")
    file.save(state_of(3))
    assert file.load().state == state_of(3)
    (tmp_path / CURRENT).write_bytes(b"damaged")
    assert file.load().state == state_of(1)


def test_two_damaged_states_are_nothing_to_resume(tmp_path: Path) -> None:
    file = LearnerStateFile(tmp_path)
    file.save(state_of(1))
    file.save(state_of(2))
    (tmp_path / CURRENT).write_bytes(seal({"format": 2, "state": {}}))
    (tmp_path / PREVIOUS).write_bytes(seal({"format": 1, "state": {"version": -1, "parts": {}}}))
    loaded = file.load()
    assert loaded.state is None
    assert len(loaded.refused) == 2


def test_a_state_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / CURRENT).mkdir()
    loaded = LearnerStateFile(tmp_path).load()
    assert loaded.state is None
    assert "unreadable" in loaded.refused[0]


@pytest.mark.usefixtures("impatient")
def test_a_crash_at_any_byte_loses_at_most_the_state_being_written(tmp_path: Path) -> None:
    amount = 0
    while crash_after(amount, tmp_path / str(amount)):
        amount += 1
    assert amount > 200


def crash_after(amount: int, folder: Path) -> bool:
    """False when everything was done before the fuel ran out."""
    file = LearnerStateFile(folder)
    file.save(state_of(1))
    file.save(state_of(2))
    crashed = False
    with running_on(Fuel(amount)):
        try:
            file.save(state_of(3))
        except Killed:
            crashed = True
    loaded = file.load()
    assert loaded.refused == ()
    assert loaded.state == state_of(3) or (crashed and loaded.state == state_of(2))
    file.save(state_of(4))
    assert file.load().state == state_of(4)
    return crashed


@pytest.mark.parametrize("limit", [0, 1, 50, 200])
def test_a_full_disk_is_an_error_and_loses_nothing(tmp_path: Path, limit: int) -> None:
    file = LearnerStateFile(tmp_path)
    file.save(state_of(1))
    file.save(state_of(2))
    with disk_full_after(limit), pytest.raises(NotStored):
        file.save(state_of(3))
    assert file.load().state == state_of(2)


def test_a_number_that_is_none_is_an_error_and_loses_nothing(tmp_path: Path) -> None:
    file = LearnerStateFile(tmp_path)
    file.save(state_of(1))
    with pytest.raises(NotStored):
        file.save(LearnerState(2, {"policy": {"value": float("nan")}}))
    assert file.load().state == state_of(1)
