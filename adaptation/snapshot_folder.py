"""One snapshot of a drafter as a folder: `weights.safetensors` and `snapshot.json`, made whole by a single rename.

What is read is hashed before it is parsed, and must fit the drafter it is for. Knows neither when to store nor which
snapshots to keep.
"""

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import safetensors.torch
import torch
from pydantic import ConfigDict, JsonValue, NonNegativeInt, TypeAdapter, ValidationError
from torch import Tensor

from adaptation.durable import digest, seal, sync_folder, unseal, write_synced
from adaptation.errors import Damaged, NotRemoved, NotStored
from adaptation.finite import all_finite

WEIGHTS = "weights.safetensors"
MANIFEST = "snapshot.json"
UNFINISHED = ".unfinished-"
_FORMAT = 1

Layout = Mapping[str, tuple[tuple[int, ...], torch.dtype]]


@dataclass(frozen=True)
class SnapshotInfo:
    """What is known about a snapshot beside its weights."""

    __pydantic_config__ = ConfigDict(extra="forbid", allow_inf_nan=False)

    version: NonNegativeInt
    parent: NonNegativeInt | None  # the version it was trained from
    date: str  # ISO 8601, UTC
    scores: dict[str, float]  # what the gate saw: mean emitted per verify, by drafter


@dataclass(frozen=True)
class Snapshot:
    info: SnapshotInfo
    tensors: dict[str, Tensor]


_INFO = TypeAdapter(SnapshotInfo)


def layout_of(tensors: Mapping[str, Tensor]) -> Layout:
    """Names, shapes and types: what a snapshot must have to fit."""
    return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}


def folder_name(version: int) -> str:
    return f"{version:010d}"


def write_snapshot(parent: Path, snapshot: Snapshot) -> None:
    """Add a snapshot's folder to `parent`. Raises NotStored, and then nothing has changed."""
    final = parent / folder_name(snapshot.info.version)
    if final.exists():
        raise NotStored(f"snapshot {final.name} exists already; versions must not be used twice")
    if not all_finite(snapshot.tensors.values()):
        raise NotStored(f"snapshot {final.name} holds weights that are not finite")
    weights = safetensors.torch.save(snapshot.tensors)
    manifest = _manifest(snapshot.info, weights)
    unfinished = parent / f"{UNFINISHED}{final.name}"
    try:
        parent.mkdir(parents=True, exist_ok=True)
        _write_files(unfinished, weights, manifest)
        unfinished.rename(final)
        sync_folder(parent)
    except OSError as error:
        for path in (unfinished, final):
            shutil.rmtree(path, ignore_errors=True)
        raise NotStored(f"snapshot {final.name} could not be stored in {parent}: {error}") from error


def read_snapshot(parent: Path, version: int, layout: Layout) -> Snapshot:
    """Raises Damaged unless every bit is what was written and the tensors fit `layout`."""
    folder = parent / folder_name(version)
    try:
        manifest = unseal((folder / MANIFEST).read_bytes())
        weights = (folder / WEIGHTS).read_bytes()
    except OSError as error:
        raise Damaged(f"unreadable: {error}") from error
    info = _info(manifest, weights)
    if info.version != version:
        raise Damaged(f"says it is version {info.version}")
    tensors = _tensors(weights)
    _check_fit(tensors, layout)
    return Snapshot(info, tensors)


def remove_snapshot(parent: Path, version: int) -> None:
    """Renamed first, so that a crash never leaves half a snapshot under a valid name. Raises NotRemoved."""
    unfinished = parent / f"{UNFINISHED}{folder_name(version)}"
    try:
        (parent / folder_name(version)).rename(unfinished)
        shutil.rmtree(unfinished)
    except OSError as error:
        raise NotRemoved(f"snapshot {folder_name(version)} could not be removed from {parent}: {error}") from error


def _write_files(folder: Path, weights: bytes, manifest: bytes) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    write_synced(folder / WEIGHTS, weights)
    write_synced(folder / MANIFEST, manifest)
    sync_folder(folder)


def _manifest(info: SnapshotInfo, weights: bytes) -> bytes:
    told: JsonValue = _INFO.dump_python(info, mode="json")
    content = {"format": _FORMAT, "info": told, "weights_bytes": len(weights), "weights_sha256": digest(weights)}
    try:
        return seal(content)
    except ValueError as error:
        raise NotStored(f"snapshot {folder_name(info.version)} could not be described: {error}") from error


def _info(manifest: Mapping[str, JsonValue], weights: bytes) -> SnapshotInfo:
    if manifest.get("format") != _FORMAT:
        raise Damaged(f"format {manifest.get('format')!r}; this release reads {_FORMAT}")
    if manifest.get("weights_bytes") != len(weights):
        raise Damaged(f"{WEIGHTS} has {len(weights)} bytes instead of {manifest.get('weights_bytes')}")
    if manifest.get("weights_sha256") != digest(weights):
        raise Damaged(f"{WEIGHTS} does not have the hash it was written with")
    try:
        return _INFO.validate_python(manifest.get("info"))
    except ValidationError as error:
        raise Damaged(f"{MANIFEST} does not describe a snapshot") from error


def _tensors(weights: bytes) -> dict[str, Tensor]:
    try:
        return safetensors.torch.load(weights)
    except safetensors.SafetensorError as error:
        raise Damaged(f"{WEIGHTS} holds no tensors: {error}") from error


def _check_fit(tensors: Mapping[str, Tensor], layout: Layout) -> None:
    found = layout_of(tensors)
    wrong = sorted(name for name in {*found, *layout} if found.get(name) != layout.get(name))
    if wrong:
        name = wrong[0]
        raise Damaged(f"{len(wrong)} tensors do not fit, first {name}: {found.get(name)}, not {layout.get(name)}")
    if not all_finite(tensors.values()):
        raise Damaged("holds weights that are not finite")


def clear_unfinished(parent: Path) -> None:
    """Remove what a crash left behind. Only the one process that writes to a folder may do so."""
    for path in parent.glob(f"{UNFINISHED}*"):
        shutil.rmtree(path, ignore_errors=True)


def stored_versions(parent: Path) -> list[int]:
    """Versions with a folder, whether or not they can be read, rising."""
    if not parent.is_dir():
        return []
    numbers = {int(entry) for entry in os.listdir(parent) if entry.isascii() and entry.isdecimal()}
    return sorted(version for version in numbers if (parent / folder_name(version)).exists())
