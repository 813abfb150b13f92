import random
import shutil
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import Tensor

from adaptation.durable import digest, seal, unseal
from adaptation.errors import Damaged, NotStored
from adaptation.snapshot_folder import (
    MANIFEST,
    WEIGHTS,
    Snapshot,
    SnapshotInfo,
    folder_name,
    layout_of,
    read_snapshot,
    remove_snapshot,
    stored_versions,
    write_snapshot,
)
from tests.adaptation.drafts import info_of, is_version, tensors_of

LAYOUT = layout_of(tensors_of(0))


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


def test_a_snapshot_comes_back_as_it_was(stored: Path) -> None:
    assert is_version(read_snapshot(stored, 7, LAYOUT), 7)
    assert stored_versions(stored) == [7]
    assert sorted(path.name for path in stored.iterdir()) == [folder_name(7)]


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
    with pytest.raises(Damaged, match="says it is version 8"):
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
    content = {"format": 1, "info": info, "weights_bytes": len(weights), "weights_sha256": digest(weights), **changes}
    (folder / WEIGHTS).write_bytes(weights)
    (folder / MANIFEST).write_bytes(seal(content))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "changes",
    [
        {"format": 2},
        {"info": None},
        {"info": {"version": 7}},
        {"info": {"version": 7, "parent": 6, "date": "", "scores": {}, "more": 1}},
        {"weights_bytes": None},
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


def test_a_removed_snapshot_is_gone(stored: Path) -> None:
    remove_snapshot(stored, 7)
    assert list(stored.iterdir()) == []


def test_only_snapshots_are_listed(stored: Path) -> None:
    for name in (".unfinished-0000000008", "notes", "12", "٣" * 10, "0000000009.bak"):
        (stored / name).mkdir()
    assert stored_versions(stored) == [7]
    assert stored_versions(stored / "nowhere") == []


def test_scores_that_are_no_numbers_are_not_stored(tmp_path: Path) -> None:
    info = SnapshotInfo(1, None, "2026-01-01T00:00:00Z", {"serving": float("nan")})
    with pytest.raises(NotStored, match="could not be described"):
        write_snapshot(tmp_path, Snapshot(info, tensors_of(1)))
    assert list(tmp_path.iterdir()) == []


def test_what_is_written_can_be_read_by_others(stored: Path) -> None:
    folder = stored / folder_name(7)
    assert safetensors.torch.load_file(folder / WEIGHTS).keys() == tensors_of(7).keys()
    content = unseal((folder / MANIFEST).read_bytes())
    assert content["weights_sha256"] == digest((folder / WEIGHTS).read_bytes())
