"""Snapshots, training copies and the state of the learner on disk: whole or refused, whatever befalls them."""

import random
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import Tensor

from adaptation.checkpoint import (
    MANIFEST,
    WEIGHTS,
    Snapshot,
    SnapshotInfo,
    SnapshotRing,
    digest,
    folder_name,
    layout_of,
    read_snapshot,
    seal,
    stored_versions,
    unseal,
    write_snapshot,
)
from adaptation.persistence import LearnerCheckpoint, SavedLearner, owned
from adaptation.policy import State
from adaptation.records import Damaged, NotRemoved, NotStored
from tests.adaptation.crashing import Fuel, Killed, disk_full_after, running_on
from tests.adaptation.drafts import info_of, is_version, same, tensors_of

LAYOUT = layout_of(tensors_of(0))


@pytest.mark.parametrize(
    "data", [b"", b"null", b"[]", b"{}", b'{"content": 3, "sha256": ""}', b"\xff\xfe", b"[" * 100_000, b"\0" * 100]
)
def test_what_was_never_sealed_is_refused(data: bytes) -> None:
    with pytest.raises(Damaged):
        unseal(data)


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    """Version 7, stored."""
    write_snapshot(tmp_path, Snapshot(info_of(7), tensors_of(7)))
    return tmp_path


def flip(path: Path, place: int) -> None:
    with path.open("r+b") as file:
        file.seek(place // 8)
        byte = file.read(1)[0] ^ 1 << place % 8
        file.seek(place // 8)
        file.write(bytes([byte]))


def test_none_of_1000_flipped_bits_is_accepted(stored: Path) -> None:
    rng = random.Random(0)
    paths = [stored / folder_name(7) / name for name in (WEIGHTS, MANIFEST)]
    for _ in range(1000):
        path = rng.choice(paths)
        place = rng.randrange(8 * path.stat().st_size)
        flip(path, place)
        with pytest.raises(Damaged):
            read_snapshot(stored, 7, LAYOUT)
        flip(path, place)
    assert is_version(read_snapshot(stored, 7, LAYOUT), 7)


@pytest.mark.parametrize("name", [WEIGHTS, MANIFEST])
def test_no_truncated_file_is_accepted(stored: Path, name: str) -> None:
    path = stored / folder_name(7) / name
    data = path.read_bytes()
    for length in range(len(data)):
        path.write_bytes(data[:length])
        with pytest.raises(Damaged):
            read_snapshot(stored, 7, LAYOUT)
    path.write_bytes(data + b"\0")
    with pytest.raises(Damaged):
        read_snapshot(stored, 7, LAYOUT)


@pytest.mark.parametrize("name", [WEIGHTS, MANIFEST])
def test_a_missing_file_is_refused(stored: Path, name: str) -> None:
    (stored / folder_name(7) / name).unlink()
    with pytest.raises(Damaged, match="unreadable"):
        read_snapshot(stored, 7, LAYOUT)


def test_files_of_two_snapshots_do_not_mix(stored: Path) -> None:
    write_snapshot(stored, Snapshot(info_of(8), tensors_of(8)))
    shutil.copy(stored / folder_name(8) / WEIGHTS, stored / folder_name(7) / WEIGHTS)
    with pytest.raises(Damaged, match="hash"):
        read_snapshot(stored, 7, LAYOUT)
    shutil.copy(stored / folder_name(8) / MANIFEST, stored / folder_name(7) / MANIFEST)
    with pytest.raises(Damaged, match="is for version 8"):
        read_snapshot(stored, 7, LAYOUT)


def misfits() -> list[dict[str, Tensor]]:
    good = tensors_of(7)
    return [
        {**good, "head.weight": torch.zeros(5, 3)},
        {**good, "head.weight": good["head.weight"].half()},
        {**good, "more": torch.zeros(1)},
        {name: tensor for name, tensor in good.items() if name != "steps"},
        {},
    ]


@pytest.mark.parametrize("tensors", misfits())
def test_tensors_that_do_not_fit_are_refused(tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    write_snapshot(tmp_path, Snapshot(info_of(7), tensors))
    with pytest.raises(Damaged, match="do not fit"):
        read_snapshot(tmp_path, 7, LAYOUT)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_neither_stored_nor_loaded(tmp_path: Path, value: float) -> None:
    tensors = tensors_of(7)
    tensors["head.weight"][1, 2] = value
    with pytest.raises(NotStored, match="not finite"):
        write_snapshot(tmp_path, Snapshot(info_of(7), tensors))
    assert list(tmp_path.iterdir()) == []
    forge(tmp_path, safetensors.torch.save(tensors))
    with pytest.raises(Damaged, match="not finite"):
        read_snapshot(tmp_path, 7, LAYOUT)


def forge(parent: Path, weights: bytes, **changes: object) -> None:
    """A snapshot whose hashes are right and whose content is not."""
    folder = parent / folder_name(7)
    folder.mkdir(exist_ok=True)
    info = {"version": 7, "parent": 6, "date": "2026-01-01T00:00:00Z", "scores": {"serving": 1.0}}
    content = {"format": 1, "info": info, "weights_sha256": digest(weights), **changes}
    (folder / WEIGHTS).write_bytes(weights)
    (folder / MANIFEST).write_bytes(seal(content))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "changes",
    [
        {"format": 2},
        {"info": None},
        {"info": {"version": 7}},
        {"info": {"version": 7, "parent": 6, "date": "", "scores": {}, "more": 1}},
        {"weights_sha256": None},
    ],
    ids=str,
)
def test_sealed_nonsense_is_refused(tmp_path: Path, changes: dict[str, object]) -> None:
    forge(tmp_path, safetensors.torch.save(tensors_of(7)))
    read_snapshot(tmp_path, 7, LAYOUT)
    forge(tmp_path, safetensors.torch.save(tensors_of(7)), **changes)
    with pytest.raises(Damaged):
        read_snapshot(tmp_path, 7, LAYOUT)


def test_weights_that_are_no_tensors_are_refused(tmp_path: Path) -> None:
    forge(tmp_path, b"\xff" * 200)
    with pytest.raises(Damaged, match="holds no tensors"):
        read_snapshot(tmp_path, 7, LAYOUT)


def test_a_version_is_used_once(stored: Path) -> None:
    with pytest.raises(NotStored, match="exists already"):
        write_snapshot(stored, Snapshot(info_of(7), tensors_of(8)))
    assert is_version(read_snapshot(stored, 7, LAYOUT), 7)


def test_only_snapshots_are_listed(stored: Path) -> None:
    for name in (".unfinished-0000000008", "notes", "12", "٣" * 10, "0000000009.bak"):
        (stored / name).mkdir()
    assert stored_versions(stored) == [7]
    assert stored_versions(stored / "nowhere") == []


def test_scores_that_are_no_numbers_are_not_stored(tmp_path: Path) -> None:
    info = SnapshotInfo(1, None, "2026-01-01T00:00:00Z", {"serving": float("nan")})
    with pytest.raises(NotStored, match="could not be stored"):
        write_snapshot(tmp_path, Snapshot(info, tensors_of(1)))
    assert list(tmp_path.iterdir()) == []


def ring_in(folder: Path, *versions: int, size: int = 3) -> SnapshotRing:
    ring = SnapshotRing(folder, size=size)
    for version in versions:
        ring.add(info_of(version), tensors_of(version))
    return ring


def test_the_newest_are_kept(tmp_path: Path) -> None:
    ring = ring_in(tmp_path, *range(7))
    assert ring.versions == [4, 5, 6]
    assert all(is_version(ring.get(version, LAYOUT), version) for version in (4, 5, 6))
    with pytest.raises(Damaged, match="unreadable"):
        ring.get(3, LAYOUT)


def test_strided_tensors_are_stored(tmp_path: Path) -> None:
    tensors = {"one": torch.arange(12.0).reshape(3, 4), "two": torch.arange(12.0).reshape(3, 4).T}
    ring_in(tmp_path).add(info_of(1), tensors)
    read = ring_in(tmp_path).get(1, layout_of(tensors)).tensors
    assert all(torch.equal(read[name], tensors[name]) for name in tensors)


def test_a_full_disk_leaves_the_old_state_intact(tmp_path: Path) -> None:
    ring = ring_in(tmp_path, 1, 2, 3)
    before = contents(tmp_path)
    largest = max(map(len, before.values()))
    for limit in range(0, largest, 23):
        with disk_full_after(limit), pytest.raises(NotStored, match="could not be stored"):
            ring.add(info_of(4), tensors_of(4))
        assert contents(tmp_path) == before
        assert ring.versions == [1, 2, 3]
    ring.add(info_of(4), tensors_of(4))
    assert ring.versions == [2, 3, 4]


def test_a_folder_that_is_none_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    ring = ring_in(tmp_path / "file")
    with pytest.raises(NotStored):
        ring.add(info_of(1), tensors_of(1))
    assert ring.versions == []


def test_an_old_one_that_stays_is_an_error_and_the_new_one_is_stored(tmp_path: Path) -> None:
    ring = ring_in(tmp_path, 1, 2, 3)
    in_the_way = tmp_path / f".unfinished-{folder_name(1)}"
    in_the_way.mkdir()
    (in_the_way / "file").write_bytes(b"")
    with pytest.raises(NotRemoved):
        ring.add(info_of(4), tensors_of(4))
    assert ring.versions == [1, 2, 3, 4]
    assert is_version(ring.get(4, LAYOUT), 4)
    assert ring_in(tmp_path, 5).versions == [3, 4, 5]


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_crash_at_any_byte_loses_at_most_the_snapshot_being_written(tmp_path: Path) -> None:
    """Every byte written and every step between them, including the removal of the oldest."""
    crashes = 0
    while crash_in_ring(crashes, tmp_path / str(crashes)):
        crashes += 1
    assert crashes > 600


def crash_in_ring(amount: int, folder: Path) -> bool:
    """False when everything was done before the fuel ran out."""
    ring = ring_in(folder, 1, 2, size=2)
    crashed = False
    with running_on(Fuel(amount)):
        try:
            ring.add(info_of(3), tensors_of(3))
        except Killed:
            crashed = True
    resumed = ring_in(folder, size=2)
    newest = resumed.versions[-1]
    assert newest == 3 or (crashed and newest == 2)
    assert all(is_version(resumed.get(version, LAYOUT), version) for version in resumed.versions)
    resumed.add(info_of(4), tensors_of(4))
    assert resumed.versions[-1] == 4
    assert not list(folder.glob(".unfinished*"))
    return crashed


def test_each_process_learns_in_a_folder_of_its_own_and_a_killed_one_leaves_it_to_the_next(tmp_path: Path) -> None:
    shared = tmp_path / "state" / "learning"
    shared.mkdir(parents=True)
    program = (
        "import fcntl, sys; file = open(sys.argv[1], 'w'); fcntl.flock(file, fcntl.LOCK_EX); "
        "print(flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", program, str(shared / "lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None
        owner.stdout.readline()
        assert owned(shared) == tmp_path / "state" / "learning-2"
        owner.kill()
    assert owned(shared) == shared
    assert owned(shared) == tmp_path / "state" / "learning-3"


def test_a_folder_that_cannot_be_written_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    assert owned(tmp_path / "file" / "learning") == tmp_path / "file" / "learning"
    assert "other processes may learn there too" in caplog.text


CURRENT, PREVIOUS = "learner.json", "learner.previous.json"


def save(checkpoint: LearnerCheckpoint, version: int) -> None:
    checkpoint.save(newest=version, origin=version, condemned=set(), parts=parts_of(version))


def saved_twice(folder: Path) -> LearnerCheckpoint:
    file = LearnerCheckpoint(folder)
    save(file, 1)
    save(file, 2)
    return file


def parts_of(version: int) -> dict[str, State]:
    return {"policy": {"values": {"head": 0.1 * version}}, "cusum": {"total": version / 3}}


def saved(version: int) -> SavedLearner:
    return SavedLearner(version, version, set(), parts_of(version))


def test_a_damaged_state_falls_back_to_the_one_before_and_says_so(tmp_path: Path) -> None:
    file = saved_twice(tmp_path)
    path = tmp_path / CURRENT
    good = path.read_bytes()
    rng = random.Random(0)
    for _ in range(200):
        bad = bytearray(good)
        bad[rng.randrange(len(bad))] ^= 1 << rng.randrange(8)
        path.unlink()
        path.write_bytes(bytes(bad))
        loaded = file.load()
        assert replace(loaded, complaints=()) == saved(1)
        assert [reason.startswith(CURRENT) for reason in loaded.complaints] == [True]


def test_a_damaged_state_does_not_push_the_good_one_out(tmp_path: Path) -> None:
    file = saved_twice(tmp_path)
    (tmp_path / CURRENT).write_bytes(b"damaged")
    save(file, 3)
    assert file.load() == saved(3)
    (tmp_path / CURRENT).write_bytes(b"damaged")
    assert replace(file.load(), complaints=()) == saved(1)


def test_two_damaged_states_are_nothing_to_resume(tmp_path: Path) -> None:
    file = saved_twice(tmp_path)
    (tmp_path / CURRENT).write_bytes(seal({"format": 2, "state": {}}))
    (tmp_path / PREVIOUS).write_bytes(seal({"format": 1, "state": {"version": -1, "parts": {}}}))
    loaded = file.load()
    assert replace(loaded, complaints=()) == SavedLearner()
    assert len(loaded.complaints) == 2


def test_a_state_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / CURRENT).mkdir()
    loaded = LearnerCheckpoint(tmp_path).load()
    assert replace(loaded, complaints=()) == SavedLearner()
    assert "unreadable" in loaded.complaints[0]


def test_a_crash_at_any_byte_loses_at_most_the_state_being_written(tmp_path: Path) -> None:
    amount = 0
    while crash_in_file(amount, tmp_path / str(amount)):
        amount += 1
    assert amount > 200


def crash_in_file(amount: int, folder: Path) -> bool:
    """False when everything was done before the fuel ran out."""
    file = saved_twice(folder)
    crashed = False
    with running_on(Fuel(amount)):
        try:
            save(file, 3)
        except Killed:
            crashed = True
    loaded = file.load()
    assert loaded == saved(3) or (crashed and loaded == saved(2))
    save(file, 4)
    assert file.load() == saved(4)
    return crashed


@pytest.mark.parametrize("limit", [0, 1, 50, 200])
def test_a_full_disk_loses_no_state(tmp_path: Path, limit: int) -> None:
    file = saved_twice(tmp_path)
    with disk_full_after(limit), pytest.raises(NotStored):
        save(file, 3)
    assert file.load() == saved(2)


def test_a_number_that_is_none_is_an_error_and_loses_nothing(tmp_path: Path) -> None:
    file = LearnerCheckpoint(tmp_path)
    save(file, 1)
    with pytest.raises(NotStored):
        file.save(newest=2, origin=2, condemned=set(), parts={"policy": {"value": float("nan")}})
    assert replace(file.load(), complaints=()) == saved(1)


def test_what_was_saved_is_remembered(tmp_path: Path) -> None:
    LearnerCheckpoint(tmp_path).save(newest=7, origin=5, condemned={6, 2}, parts={"policy": {"num_waiting": 3}})
    assert LearnerCheckpoint(tmp_path).load() == SavedLearner(7, 5, {2, 6}, {"policy": {"num_waiting": 3}})


@pytest.mark.parametrize("damage", [False, True])
def test_the_training_copy_is_that_of_the_weights_that_serve(tmp_path: Path, damage: bool) -> None:
    file = LearnerCheckpoint(tmp_path)
    for origin in (1, 1, 2):
        file.save_tensors("training", tensors_of(origin), origin=origin)
    like = tensors_of(0)
    found = file.load_tensors("training", like, origin=2)
    assert found is not None
    assert same(found, tensors_of(2))
    assert file.load_tensors("training", like, origin=3) is None
    assert len(list((tmp_path / "training").iterdir())) == 2
    if damage:
        newest = max((tmp_path / "training").iterdir()) / "weights.safetensors"
        newest.write_bytes(newest.read_bytes()[:-1] + b"\0")
    older = file.load_tensors("training", like, origin=1)
    assert older is not None
    assert same(older, tensors_of(1))
    assert (file.load_tensors("training", like, origin=2) is None) == damage


def test_a_copy_of_another_drafter_does_not_fit(tmp_path: Path) -> None:
    file = LearnerCheckpoint(tmp_path)
    file.save_tensors("training", tensors_of(1), origin=1)
    assert file.load_tensors("training", {"head.weight": torch.zeros(1)}, origin=1) is None
