import subprocess
import sys
from pathlib import Path

import pytest
import torch

from adaptation.errors import Damaged, NotRemoved, NotStored
from adaptation.snapshot_folder import MANIFEST, WEIGHTS, folder_name, layout_of
from adaptation.snapshots import SnapshotRing
from tests.adaptation.crashing import Fuel, Killed, disk_full_after, running_on
from tests.adaptation.drafts import info_of, is_version, tensors_of

LAYOUT = layout_of(tensors_of(0))
ROOT = Path(__file__).resolve().parents[2]


def ring_in(folder: Path, *versions: int, in_memory: int = 2, on_disk: int = 3) -> SnapshotRing:
    ring = SnapshotRing(folder, in_memory=in_memory, on_disk=on_disk)
    for version in versions:
        ring.add(info_of(version), tensors_of(version))
    return ring


def damage(folder: Path, version: int, name: str = WEIGHTS) -> None:
    (folder / folder_name(version) / name).write_bytes(b"damaged")


def test_the_newest_are_kept(tmp_path: Path) -> None:
    ring = ring_in(tmp_path, *range(7))
    assert ring.versions == [4, 5, 6]
    assert all(is_version(ring.get(version, LAYOUT), version) for version in (4, 5, 6))
    with pytest.raises(Damaged, match="unreadable"):
        ring.get(3, LAYOUT)


def test_a_restart_finds_the_newest(tmp_path: Path) -> None:
    ring_in(tmp_path, 1, 2, 3)
    found = ring_in(tmp_path).newest(LAYOUT)
    assert found.snapshot is not None
    assert is_version(found.snapshot, 3)
    assert found.refused == ()


def test_nothing_stored_is_nothing_found(tmp_path: Path) -> None:
    found = ring_in(tmp_path / "not yet there").newest(LAYOUT)
    assert (found.snapshot, found.refused) == (None, ())


@pytest.mark.parametrize("name", [WEIGHTS, MANIFEST])
def test_a_damaged_one_is_passed_over_and_named(tmp_path: Path, name: str) -> None:
    ring_in(tmp_path, 1, 2, 3)
    damage(tmp_path, 3, name)
    found = ring_in(tmp_path).newest(LAYOUT)
    assert found.snapshot is not None
    assert is_version(found.snapshot, 2)
    assert [refusal.version for refusal in found.refused] == [3]


def test_all_damaged_is_nothing_found_and_all_named(tmp_path: Path) -> None:
    ring_in(tmp_path, 1, 2, 3)
    for version in (1, 2, 3):
        damage(tmp_path, version)
    found = ring_in(tmp_path).newest(LAYOUT)
    assert found.snapshot is None
    assert [refusal.version for refusal in found.refused] == [3, 2, 1]


def test_memory_outlives_the_disk(tmp_path: Path) -> None:
    ring = ring_in(tmp_path, 1, 2, 3)
    for version in (1, 2, 3):
        damage(tmp_path, version)
    assert is_version(ring.get(3, LAYOUT), 3)
    assert is_version(ring.get(2, LAYOUT), 2)
    with pytest.raises(Damaged):
        ring.get(1, LAYOUT)


def test_a_rollback_asks_for_an_older_one(tmp_path: Path) -> None:
    found = ring_in(tmp_path, 1, 2, 5).newest(LAYOUT, below=5)
    assert found.snapshot is not None
    assert is_version(found.snapshot, 2)
    assert ring_in(tmp_path).newest(LAYOUT, below=1).snapshot is None


def test_snapshots_are_copies_on_the_way_in_and_out(tmp_path: Path) -> None:
    ring = ring_in(tmp_path)
    tensors = tensors_of(1)
    ring.add(info_of(1), tensors)
    tensors["head.weight"].zero_()
    ring.get(1, LAYOUT).tensors["head.weight"].zero_()
    assert is_version(ring.get(1, LAYOUT), 1)
    assert is_version(ring_in(tmp_path).get(1, LAYOUT), 1)


def test_shared_and_strided_tensors_are_stored(tmp_path: Path) -> None:
    shared = torch.arange(12.0).reshape(3, 4)
    tensors = {"one": shared, "two": shared.T, "row": shared[1]}
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


@pytest.mark.usefixtures("impatient")
def test_a_crash_at_any_byte_loses_at_most_the_snapshot_being_written(tmp_path: Path) -> None:
    """Every byte written and every step between them, including the removal of the oldest."""
    crashes = 0
    while crash_after(crashes, tmp_path / str(crashes)):
        crashes += 1
    assert crashes > 600


def crash_after(amount: int, folder: Path) -> bool:
    """False when everything was done before the fuel ran out."""
    ring = ring_in(folder, 1, 2, on_disk=2)
    crashed = False
    with running_on(Fuel(amount)):
        try:
            ring.add(info_of(3), tensors_of(3))
        except Killed:
            crashed = True
    resumed = ring_in(folder, on_disk=2)
    found = resumed.newest(LAYOUT)
    assert found.refused == ()
    assert found.snapshot is not None
    newest = found.snapshot.info.version
    assert newest == 3 or (crashed and newest == 2)
    assert is_version(found.snapshot, newest)
    resumed.add(info_of(4), tensors_of(4))
    assert resumed.versions[-1] == 4
    assert not list(folder.glob(".unfinished*"))
    return crashed


def test_a_real_kill_loses_at_most_the_snapshot_being_written(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.adaptation.killed_writer", str(tmp_path), "20"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.split() == ["20", "kills"]
