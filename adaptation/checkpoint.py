"""What learning keeps on disk: a ring of published drafters, and the learner's state with its training copy.

A file is either the old one or the new one, whenever the process dies. What is read is hashed before it is parsed and
must fit the drafter it is for; what cannot be trusted is passed over. One process owns a folder (`owned`), one thread
calls.
"""

import hashlib
import itertools
import json
import logging
import os
import shutil
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import safetensors
import safetensors.torch
import torch
from pydantic import ConfigDict, JsonValue, NonNegativeInt, TypeAdapter, ValidationError
from torch import Tensor

from adaptation.policy import State
from adaptation.records import Damaged, NotRemoved, NotStored, Refused
from adaptation.trainer import all_finite

logger = logging.getLogger(__name__)

SNAPSHOTS = "snapshots"
"""The folder of published drafters, in that of a learner."""
WEIGHTS = "weights.safetensors"
MANIFEST = "snapshot.json"
_UNFINISHED = ".unfinished-"
_LOCK = "lock"
_FORMAT = 1
_KEPT_COPIES = 2

Kind = Literal["training", "sums", "anchor"]
"""Tensors that are kept beside the versions: the training copy, what a drafter is solved from, and the made anchor."""

Layout = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
"""Names, shapes and types of a drafter's tensors."""


@dataclass(frozen=True)
class SnapshotInfo:
    """What is known about a snapshot beside its weights."""

    __pydantic_config__ = ConfigDict(extra="forbid", allow_inf_nan=False)

    version: NonNegativeInt
    parent: NonNegativeInt | None  # the version it was trained from
    date: str  # ISO 8601, UTC
    scores: dict[str, float]  # what the gate saw: mean emitted per verify, by drafter


@dataclass(frozen=True, slots=True)
class Snapshot:
    info: SnapshotInfo
    tensors: dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class Manifest:
    """What is written beside a snapshot's weights."""

    info: SnapshotInfo
    weights_sha256: str


@dataclass(frozen=True, slots=True)
class SavedLearner:
    """What an earlier process left; empty for a first start."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    newest: NonNegativeInt = 0  # version there was
    origin: NonNegativeInt = 0  # the version that first had the serving weights
    condemned: set[NonNegativeInt] = field(default_factory=set)  # never to go back to
    parts: Mapping[str, State] = field(default_factory=dict)
    complaints: tuple[str, ...] = ()  # what was passed over, and why
    paused: bool = False  # by an operator


_INFO = TypeAdapter(SnapshotInfo)
_SAVED = TypeAdapter(SavedLearner)


def owned(folder: Path) -> Path:
    """This folder, or where other processes learn in it the first numbered one beside it that nobody learns in. It is
    locked until this process ends, however it does."""
    try:
        import fcntl
    except ImportError:  # Windows has none
        return folder
    for number in itertools.count(1):
        chosen = folder if number == 1 else folder.with_name(f"{folder.name}-{number}")
        try:
            chosen.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(chosen / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                os.close(descriptor)
                raise
        except BlockingIOError:
            continue
        except OSError as error:  # whoever cannot write there stores nothing either, and says so then
            logger.warning("no other process is kept from learning in %s: %s", chosen, error)
        break
    return chosen


class SnapshotRing:
    """Keeps the newest `on_disk` published drafters in a folder, whatever serves among them, and the newest `in_memory`
    beside them."""

    def __init__(self, folder: Path, *, in_memory: int, on_disk: int) -> None:
        self._folder = folder
        self._num_in_memory = in_memory
        self._num_on_disk = on_disk
        self._memory: dict[int, Snapshot] = {}
        clear_unfinished(folder)

    @property
    def versions(self) -> list[int]:
        """Versions in memory or on disk, rising; also of snapshots that cannot be trusted."""
        return sorted({*self._memory, *stored_versions(self._folder)})

    def add(
        self,
        info: SnapshotInfo,
        tensors: Mapping[str, Tensor],
        *,
        served: int | None = None,
        condemned: Collection[int] = (),
    ) -> None:
        """Store copies of these tensors. The version that is `served` makes no room for them, and those `condemned` do
        so first. Raises NotStored, and then memory and disk are as they were; or NotRemoved, and then only the ring is
        longer than it should be."""
        keeps = self._num_in_memory > 0
        snapshot = Snapshot(info, _on_host(tensors, copy=keeps))
        write_snapshot(self._folder, snapshot)
        if keeps:
            self._memory[info.version] = snapshot
        for version in sorted(self._memory)[: -self._num_in_memory]:
            del self._memory[version]
        self._make_room({info.version, served}, condemned)

    def get(self, version: int, layout: Layout) -> Snapshot:
        """Raises Damaged for a snapshot that cannot be trusted, or is not there."""
        kept = self._memory.get(version)
        if kept is not None:
            return Snapshot(kept.info, _on_host(kept.tensors))
        return read_snapshot(self._folder, version, layout)

    def _make_room(self, kept: Collection[int | None], condemned: Collection[int]) -> None:
        stored = stored_versions(self._folder)
        able = [version for version in stored if version not in kept]
        able.sort(key=lambda version: (version not in condemned, version))
        for version in able[: max(0, len(stored) - self._num_on_disk)]:
            remove_snapshot(self._folder, version)


class LearnerCheckpoint:
    """Who served, what policy and monitors know (`learner.json`, and the one before it), and tensors by kind."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._current, self._previous = _learner_files(folder)
        self._unfinished = folder / f"{_UNFINISHED}learner.json"

    def save(
        self, *, newest: int, origin: int, condemned: set[int], parts: Mapping[str, State], paused: bool = False
    ) -> None:
        """Raises NotStored, and then what was saved before can still be loaded."""
        served: State = {"origin": origin, "condemned": list[JsonValue](sorted(condemned)), "paused": paused}
        state: State = {"version": newest, "parts": {**parts, "served": served}}
        try:
            data = seal({"format": _FORMAT, "state": state})
            self._folder.mkdir(parents=True, exist_ok=True)
            write_synced(self._unfinished, data)
            if self._is_good(self._current):  # a damaged file must not push a good previous one out
                self._current.replace(self._previous)
            self._unfinished.replace(self._current)
            sync_folder(self._folder)
        except (OSError, ValueError) as error:
            raise NotStored(f"the learner's state could not be stored in {self._folder}: {error}") from error

    def load(self) -> SavedLearner:
        return saved_learner(self._folder)

    def save_tensors(self, kind: Kind, tensors: Mapping[str, Tensor], *, origin: int) -> None:
        """Store the training copy with its optimizers, or what else has its kind. Raises NotStored, NotRemoved."""
        ring = self._ring(kind)
        ring.add(SnapshotInfo(max(ring.versions, default=0) + 1, origin, now(), {}), tensors)

    def load_tensors(
        self, kind: Kind, like: Mapping[str, Tensor], *, origin: int | None = None
    ) -> dict[str, Tensor] | None:
        """The newest trusted ones of this kind, that went out from these serving weights if any are named."""
        ring = self._ring(kind)
        for number in reversed(ring.versions):
            try:
                snapshot = ring.get(number, layout_of(like))
            except Damaged:
                continue  # an older one, or the serving weights themselves, are as good a start
            if origin is None or snapshot.info.parent == origin:
                return snapshot.tensors
        return None

    def drop_tensors(self, kind: Kind) -> None:
        """Remove all of this kind: nobody goes on from them."""
        shutil.rmtree(self._folder / kind, ignore_errors=True)

    def _ring(self, kind: Kind) -> SnapshotRing:
        return SnapshotRing(self._folder / kind, in_memory=0, on_disk=_KEPT_COPIES)

    @staticmethod
    def _is_good(path: Path) -> bool:
        try:
            return bool(_parsed_learner(path.read_bytes()))
        except (OSError, Damaged):
            return False


def saved_learner(folder: Path) -> SavedLearner:
    """What the process that learns in this folder has saved last; the folder may be another process's."""
    complaints: list[str] = []
    for path in _learner_files(folder):
        try:
            saved = _parsed_learner(path.read_bytes())
        except FileNotFoundError:
            continue
        except OSError as error:
            complaints.append(f"{path.name}: unreadable: {error}")
        except Damaged as error:
            complaints.append(f"{path.name}: {error}")
        else:
            return replace(saved, complaints=tuple(complaints))
    return SavedLearner(complaints=tuple(complaints))


def _learner_files(folder: Path) -> tuple[Path, Path]:
    """The newest state, and the one before it."""
    return folder / "learner.json", folder / "learner.previous.json"


def _parsed_learner(data: bytes) -> SavedLearner:
    """Raises Damaged."""
    state: Any = _unseal_ours(data).get("state")
    try:
        parts = dict(state["parts"])
        return _SAVED.validate_python({"newest": state["version"], **parts.pop("served"), "parts": parts})
    except (KeyError, TypeError, ValueError) as error:
        raise Damaged("does not describe a learner") from error


def write_snapshot(parent: Path, snapshot: Snapshot) -> None:
    """Add a snapshot's folder to `parent` by one rename. Raises NotStored, and then nothing has changed."""
    info, final = snapshot.info, parent / folder_name(snapshot.info.version)
    if final.exists():
        raise NotStored(f"snapshot {final.name} exists already; versions must not be used twice")
    if not all_finite(snapshot.tensors.values()):
        raise NotStored(f"snapshot {final.name} holds weights that are not finite")
    weights = safetensors.torch.save(snapshot.tensors)
    told: JsonValue = _INFO.dump_python(info, mode="json")
    content = {"format": _FORMAT, "info": told, "weights_sha256": digest(weights)}
    unfinished = parent / f"{_UNFINISHED}{final.name}"
    try:
        manifest = seal(content)
        parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir()
        write_synced(unfinished / WEIGHTS, weights)
        write_synced(unfinished / MANIFEST, manifest)
        sync_folder(unfinished)
        unfinished.rename(final)
        sync_folder(parent)
    except (OSError, ValueError) as error:
        for path in (unfinished, final):
            shutil.rmtree(path, ignore_errors=True)
        raise NotStored(f"snapshot {final.name} could not be stored in {parent}: {error}") from error


def read_snapshot(parent: Path, version: int, layout: Layout) -> Snapshot:
    """Raises Damaged unless every bit is what was written and the tensors fit `layout`."""
    manifest = read_manifest(parent, version)
    try:
        weights = (parent / folder_name(version) / WEIGHTS).read_bytes()
    except OSError as error:
        raise Damaged(f"unreadable: {error}") from error
    if manifest.weights_sha256 != digest(weights):
        raise Damaged(f"{WEIGHTS} does not have the hash it was written with")
    try:
        return Snapshot(manifest.info, load_tensors(weights, layout))
    except Refused as error:
        raise Damaged(f"{WEIGHTS} {error.detail}") from error


def read_manifest(parent: Path, version: int) -> Manifest:
    """What is said of a snapshot; its weights are not read. Raises Damaged."""
    try:
        content = _unseal_ours((parent / folder_name(version) / MANIFEST).read_bytes())
    except OSError as error:
        raise Damaged(f"unreadable: {error}") from error
    try:
        info = _INFO.validate_python(content.get("info"))
    except ValidationError as error:
        raise Damaged(f"{MANIFEST} does not describe a snapshot") from error
    if info.version != version:
        raise Damaged(f"says it is version {info.version}")
    return Manifest(info, str(content.get("weights_sha256")))


def stored_layout(parent: Path, version: int) -> Layout:
    """Names, shapes and types as a snapshot's file claims them; neither they nor its hash are checked. Raises
    Damaged."""
    try:
        return layout_of(safetensors.torch.load_file(parent / folder_name(version) / WEIGHTS))
    except (OSError, safetensors.SafetensorError) as error:
        raise Damaged(f"{WEIGHTS} cannot be read: {error}") from error


def load_tensors(data: bytes, layout: Layout) -> dict[str, Tensor]:
    """Raises Refused unless they fit `layout` and are finite."""
    try:
        tensors = safetensors.torch.load(data)
    except safetensors.SafetensorError as error:
        raise Refused("misfit", f"holds no tensors: {error}") from error
    found = layout_of(tensors)
    wrong = sorted(name for name in {*found, *layout} if found.get(name) != layout.get(name))
    if wrong:
        first = f"first {wrong[0]}: {found.get(wrong[0])}, not {layout.get(wrong[0])}"
        raise Refused("misfit", f"holds {len(wrong)} tensors whose names, shapes or types do not fit, {first}")
    if not all_finite(tensors.values()):
        raise Refused("not_finite", "holds weights that are not finite")
    return tensors


def remove_snapshot(parent: Path, version: int) -> None:
    """Renamed first, so that a crash never leaves half a snapshot under a valid name. Raises NotRemoved."""
    unfinished = parent / f"{_UNFINISHED}{folder_name(version)}"
    try:
        (parent / folder_name(version)).rename(unfinished)
        shutil.rmtree(unfinished)
    except OSError as error:
        raise NotRemoved(f"snapshot {folder_name(version)} could not be removed from {parent}: {error}") from error


def clear_unfinished(parent: Path) -> None:
    """Remove what a crash left behind."""
    for path in parent.glob(f"{_UNFINISHED}*"):
        shutil.rmtree(path, ignore_errors=True)


def stored_versions(parent: Path) -> list[int]:
    """Versions with a folder, whether or not they can be read, rising."""
    if not parent.is_dir():
        return []
    numbers = {int(entry) for entry in os.listdir(parent) if entry.isascii() and entry.isdecimal()}
    return sorted(version for version in numbers if (parent / folder_name(version)).exists())


def folder_name(version: int) -> str:
    return f"{version:010d}"


def layout_of(tensors: Mapping[str, Tensor]) -> Layout:
    return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}


def now() -> str:
    """ISO 8601, UTC."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def _on_host(tensors: Mapping[str, Tensor], *, copy: bool = True) -> dict[str, Tensor]:
    """`copy`: each with memory of its own, where the trainer goes on writing to the originals."""
    return {name: tensor.detach().to("cpu", copy=copy).contiguous() for name, tensor in tensors.items()}


def seal(content: Mapping[str, JsonValue]) -> bytes:
    """Canonical JSON that carries its own SHA-256. Raises ValueError for numbers that JSON has no word for."""
    return _canonical({"content": dict(content), "sha256": digest(_canonical(dict(content)))})


def unseal(data: bytes) -> dict[str, JsonValue]:
    """Raises Damaged unless these are exactly the bytes that `seal` made: every bit is covered, spaces included."""
    try:
        outer = json.loads(data)
        again = seal(outer["content"])
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise Damaged(f"not a sealed text: {type(error).__name__}") from error
    if again != data:
        raise Damaged("not the bytes that were sealed")
    content: dict[str, JsonValue] = outer["content"]
    return content


def _unseal_ours(data: bytes) -> dict[str, JsonValue]:
    content = unseal(data)
    if content.get("format") != _FORMAT:
        raise Damaged(f"format {content.get('format')!r}; this release reads {_FORMAT}")
    return content


def _canonical(value: JsonValue) -> bytes:
    return json.dumps(value, sort_keys=True, indent=1, allow_nan=False).encode()


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def write_synced(path: Path, data: bytes) -> None:
    """Write a file and wait until the disk has it. Raises OSError."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Wait until the disk knows the names in a folder. Only POSIX can say so."""
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
