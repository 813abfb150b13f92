"""Snapshots of weights on disk, kept in a ring. A snapshot consists of a safetensors file and a manifest with its hash.

Files are checked when they are read: weights must match their hash and fit the drafter. One process owns a folder and
calls from one thread.
"""

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import safetensors
import safetensors.torch
import torch
from pydantic import ConfigDict, JsonValue, NonNegativeInt, TypeAdapter, ValidationError
from torch import Tensor

from adaptation.records import Damaged, NotRemoved, NotStored, Refused
from drafters.files import UNFINISHED, replacing

logger = logging.getLogger(__name__)

SNAPSHOTS = "snapshots"
"""Subfolder of published drafters in a learning folder."""
WEIGHTS = "weights.safetensors"
MANIFEST = "snapshot.json"
FORMAT = 1

Layout = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
"""Names, shapes and types of a drafter's tensors."""


@dataclass(frozen=True)
class SnapshotInfo:
    """Description of a snapshot, stored in its manifest."""

    __pydantic_config__ = ConfigDict(extra="forbid", allow_inf_nan=False)

    version: NonNegativeInt
    parent: NonNegativeInt | None  # version from which this one was trained
    date: str  # ISO 8601, UTC
    scores: dict[str, float]  # mean tokens per verify in the gate, by drafter


@dataclass(frozen=True, slots=True)
class Snapshot:
    info: SnapshotInfo
    tensors: dict[str, Tensor]


_INFO = TypeAdapter(SnapshotInfo)


class SnapshotRing:
    """Keeps the newest snapshots in a folder, the serving one among them."""

    def __init__(self, folder: Path, *, size: int) -> None:
        self._folder = folder
        self._size = size
        for path in folder.glob(f"{UNFINISHED}*"):  # left by a crash
            shutil.rmtree(path, ignore_errors=True)

    @property
    def versions(self) -> list[int]:
        """Stored versions, ascending, damaged ones included."""
        return stored_versions(self._folder)

    def add(
        self,
        info: SnapshotInfo,
        tensors: Mapping[str, Tensor],
        *,
        served: int | None = None,
        condemned: Collection[int] = (),
    ) -> None:
        """Store tensors of any shape [...] and remove old snapshots beyond the ring's size: `condemned` versions first,
        the `served` one never. Raises NotStored if nothing has changed, NotRemoved if the new one is stored and an old
        one could not be removed."""
        host = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        write_snapshot(self._folder, Snapshot(info, host))
        self._make_room({info.version, served}, condemned)

    def get(self, version: int, layout: Layout | None) -> Snapshot:
        """Read a snapshot; without a layout, tensors of any shape are accepted. Raises Damaged if it is damaged or
        missing."""
        return read_snapshot(self._folder, version, layout)

    def _make_room(self, kept: Collection[int | None], condemned: Collection[int]) -> None:
        stored = stored_versions(self._folder)
        able = [version for version in stored if version not in kept]
        able.sort(key=lambda version: (version not in condemned, version))
        for version in able[: max(0, len(stored) - self._size)]:
            remove_snapshot(self._folder, version)


def write_snapshot(parent: Path, snapshot: Snapshot) -> None:
    """Write a snapshot's folder in `parent`. Raises NotStored, and then nothing has changed."""
    info, final = snapshot.info, parent / folder_name(snapshot.info.version)
    if final.exists():
        raise NotStored(f"snapshot {final.name} exists already; versions must not be used twice")
    if not all_finite(snapshot.tensors.values()):
        raise NotStored(f"snapshot {final.name} holds weights that are not finite")
    weights = safetensors.torch.save(snapshot.tensors)
    described: JsonValue = _INFO.dump_python(info, mode="json")
    content = {"format": FORMAT, "info": described, "weights_sha256": digest(weights)}
    try:
        manifest = seal(content)
        with replacing(final) as unfinished:
            unfinished.mkdir()
            (unfinished / WEIGHTS).write_bytes(weights)
            (unfinished / MANIFEST).write_bytes(manifest)
    except (OSError, ValueError) as error:
        shutil.rmtree(final, ignore_errors=True)
        raise NotStored(f"snapshot {final.name} could not be stored in {parent}: {error}") from error


def read_snapshot(parent: Path, version: int, layout: Layout | None) -> Snapshot:
    """Read a snapshot. Raises Damaged unless its weights match their hash and, if `layout` is given, fit it."""
    info, sha256 = read_manifest(parent, version)
    try:
        weights = (parent / folder_name(version) / WEIGHTS).read_bytes()
    except OSError as error:
        raise Damaged(f"unreadable: {error}") from error
    if sha256 != digest(weights):
        raise Damaged(f"{WEIGHTS} does not match the hash in {MANIFEST}")
    try:
        return Snapshot(info, load_tensors(weights, layout))
    except Refused as error:
        raise Damaged(f"{WEIGHTS} {error.detail}") from error


def read_manifest(parent: Path, version: int) -> tuple[SnapshotInfo, str]:
    """Read the description of a snapshot and the SHA-256 of its weights, but not the weights. Raises Damaged."""
    try:
        content = unseal_current((parent / folder_name(version) / MANIFEST).read_bytes())
    except OSError as error:
        raise Damaged(f"unreadable: {error}") from error
    try:
        info = _INFO.validate_python(content.get("info"))
    except ValidationError as error:
        raise Damaged(f"{MANIFEST} has missing or invalid fields") from error
    if info.version != version:
        raise Damaged(f"{MANIFEST} is for version {info.version}, not {version}")
    return info, str(content.get("weights_sha256"))


def load_tensors(data: bytes, layout: Layout | None) -> dict[str, Tensor]:
    """Decode safetensors, with the shapes [...] of `layout` if one is given. Raises Refused unless they fit and are
    finite."""
    try:
        tensors = safetensors.torch.load(data)
    except safetensors.SafetensorError as error:
        raise Refused("misfit", f"holds no tensors: {error}") from error
    if layout is not None:
        check_layout(tensors, layout)
    if not all_finite(tensors.values()):
        raise Refused("not_finite", "holds weights that are not finite")
    return tensors


def check_layout(tensors: Mapping[str, Tensor], layout: Layout) -> None:
    """Raise Refused unless tensors have these names, shapes [...] and types."""
    found = layout_of(tensors)
    wrong = sorted(name for name in {*found, *layout} if found.get(name) != layout.get(name))
    if wrong:
        first = f"first {wrong[0]}: {found.get(wrong[0])}, not {layout.get(wrong[0])}"
        raise Refused("misfit", f"holds {len(wrong)} tensors whose names, shapes or types do not fit, {first}")


def all_finite(tensors: Iterable[Tensor]) -> bool:
    """Whether all elements of the tensors [...] are finite. Sums each tensor, so that one pass is enough."""
    return all(bool(tensor.sum(dtype=torch.float32).isfinite()) for tensor in tensors)


def remove_snapshot(parent: Path, version: int) -> None:
    """Remove a snapshot. Its folder is renamed first, so that a crash leaves no partial snapshot. Raises NotRemoved."""
    unfinished = parent / f"{UNFINISHED}{folder_name(version)}"
    try:
        (parent / folder_name(version)).rename(unfinished)
        shutil.rmtree(unfinished)
    except OSError as error:
        raise NotRemoved(f"snapshot {folder_name(version)} could not be removed from {parent}: {error}") from error


def stored_versions(parent: Path) -> list[int]:
    """Versions that have a folder, ascending, damaged ones included."""
    if not parent.is_dir():
        return []
    numbers = {int(entry) for entry in os.listdir(parent) if entry.isascii() and entry.isdecimal()}
    return sorted(version for version in numbers if (parent / folder_name(version)).exists())


def folder_name(version: int) -> str:
    """Name of a snapshot's folder."""
    return f"{version:010d}"


def layout_of(tensors: Mapping[str, Tensor]) -> Layout:
    """Names, shapes [...] and types of tensors."""
    return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}


def now() -> str:
    """Current time in ISO 8601, UTC."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def seal(content: Mapping[str, JsonValue]) -> bytes:
    """Encode canonical JSON with its own SHA-256. Raises ValueError for numbers that are not finite."""
    return _canonical({"content": dict(content), "sha256": digest(_canonical(dict(content)))})


def unseal(data: bytes) -> dict[str, JsonValue]:
    """Decode sealed JSON. Raises Damaged for any other bytes."""
    try:
        outer = json.loads(data)
        again = seal(outer["content"])
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise Damaged(f"not sealed JSON: {type(error).__name__}") from error
    if again != data:
        raise Damaged("content and hash do not match")
    content: dict[str, JsonValue] = outer["content"]
    return content


def unseal_current(data: bytes) -> dict[str, JsonValue]:
    """Decode sealed JSON, and check that its format is that of this release. Raises Damaged."""
    content = unseal(data)
    if content.get("format") != FORMAT:
        raise Damaged(f"format {content.get('format')!r}; this release reads {FORMAT}")
    return content


def _canonical(value: JsonValue) -> bytes:
    return json.dumps(value, sort_keys=True, indent=1, allow_nan=False).encode()


def digest(data: bytes) -> str:
    """SHA-256 in hex."""
    return hashlib.sha256(data).hexdigest()
