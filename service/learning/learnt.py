"""Reads what servers have learnt: describes the versions in learning folders, and exports one of them as a drafter
folder. Loads no model."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from adaptation.checkpoint import (
    SNAPSHOTS,
    Snapshot,
    all_finite,
    read_manifest,
    read_snapshot,
    stored_versions,
)
from adaptation.persistence import LearnerCheckpoint, SavedLearner
from adaptation.records import Damaged
from adaptation.weights import ANCHOR
from drafters import folders as published
from drafters.files import replace_file, replacing
from drafters.network import checkpoint
from drafters.network.checkpoint import CARD_FILE, CONFIG_FILE, VOCABULARY, WEIGHTS_FILE, DrafterError
from drafters.network.config import DrafterConfig, config_from
from service import __version__
from service.config import ServiceConfig
from service.drafter import source_of
from service.errors import StartupError
from service.learning.cards import exported_card

DRAFTER_FILE = "drafter.json"


@dataclass(frozen=True, slots=True)
class Origin:
    """Provenance of the drafter that learns in a folder; with it, snapshots can be read without the target and the
    deployed drafter."""

    target_identity: str  # hash of the target, as in drafter folders
    config: DrafterConfig
    model: str | None = None  # the target as `source_of` names it; None if not known
    origin_sha256: str | None = None  # hash of the deployed drafter's weights; None if there was none

    def write(self, folder: Path) -> None:
        """Write the provenance to a learning folder. Raises OSError and leaves the file unchanged if that fails."""
        content: dict[str, Any] = {
            "target_identity": self.target_identity,
            "drafter": self.config.described,
            "model": self.model,
            "origin_sha256": self.origin_sha256,
        }
        replace_file(folder / DRAFTER_FILE, (json.dumps(content, indent=2, sort_keys=True) + "\n").encode())

    @staticmethod
    def read(folder: Path) -> "Origin | None":
        """Read the provenance in a learning folder; returns None if there is none. Raises Damaged."""
        try:
            content: dict[str, Any] = json.loads((folder / DRAFTER_FILE).read_text())
            config = config_from(content["drafter"])
            return Origin(str(content["target_identity"]), config, content.get("model"), content.get("origin_sha256"))
        except FileNotFoundError:
            return None
        except (OSError, KeyError, TypeError, ValueError) as error:
            raise Damaged(f"{DRAFTER_FILE} is incomplete or invalid: {error}") from error


@dataclass(frozen=True, slots=True)
class Learnt:
    """Contents of one learning folder, which may belong to a running server."""

    folder: Path
    origin: Origin | None  # None if not known
    saved: SavedLearner
    versions: tuple[dict[str, Any], ...]  # kept versions, ascending, as JSON values; damaged ones have a complaint
    complaint: str | None  # reason why `origin` cannot be read

    @property
    def served(self) -> int:
        """The version that first had the served weights; 0 if these are the deployed drafter's."""
        return self.saved.origin

    @property
    def intact(self) -> list[int]:
        """Numbers of the versions that can be read."""
        return [one["version"] for one in self.versions if one["complaint"] is None]

    def as_json(self) -> dict[str, Any]:
        """Convert the contents to JSON values, as `adaptree drafter inspect --json` prints them."""
        origin = self.origin
        return {
            "folder": str(self.folder),
            "model": origin and origin.model,
            "target_identity": origin and origin.target_identity,
            "drafter": None if origin is None else json.loads(origin.config.as_json),
            "origin_sha256": origin and origin.origin_sha256,
            "served": self.served,
            "newest": self.saved.newest,
            "complaints": [*self.saved.complaints, *([self.complaint] if self.complaint else [])],
            "versions": list(self.versions),
        }


def described(folder: Path) -> dict[str, Any]:
    """Check a drafter folder as far as possible without the target, and describe it as JSON values. Raises StartupError
    for a folder that no server can use."""
    if published.form_of(folder) is not None:
        raise StartupError(f"drafter {folder} is in its authors' format: serve it directly, set drafter_path to it")
    try:
        found = checkpoint.describe(folder)
        weights = checkpoint.read_weights(folder, found.config)
        sha256, num_bytes = checkpoint.weights_sha256(folder), (folder / WEIGHTS_FILE).stat().st_size
    except (DrafterError, OSError) as error:
        raise StartupError(f"{error}; name a folder that `adaptree drafter export` or `train` has written") from error
    if found.weights_sha256 not in (None, sha256):
        raise StartupError(
            f"drafter {folder}: {WEIGHTS_FILE} does not match the hash in {CONFIG_FILE}: copy both again"
        )
    if not all_finite(weights.values()):
        raise StartupError(f"drafter {folder}: has weights that are not finite: export or train it again")
    shapes = checkpoint.shapes_of(found.config)
    return {
        "folder": str(folder),
        "architecture": checkpoint.ARCHITECTURE,
        "target_identity": found.target_identity,
        "drafter": json.loads(found.config.as_json),
        "parameters": sum(torch.Size(shape).numel() for name, shape in shapes.items() if name != VOCABULARY),
        "stores_head": checkpoint.HEAD in weights,
        "dtype": str(weights["rank_head.0.weight"].dtype).removeprefix("torch."),
        "tensors": {name: list(shape) for name, shape in shapes.items()},
        "bytes": num_bytes,
        "weights_sha256": sha256,
        "facts": dict(found.facts),
    }


def learnt(config: ServiceConfig) -> list[Learnt]:
    """Read the learning folders of the configured model, and those whose model is not known."""
    parent, source = config.state_dir / "adaptation", source_of(config)
    folders = sorted(path for path in parent.iterdir() if path.is_dir()) if parent.is_dir() else []
    found = [look_at(folder) for folder in folders]
    return [one for one in found if one.origin is None or one.origin.model in (None, source)]


def look_at(folder: Path) -> Learnt:
    """Read a learning folder without changing it."""
    origin, complaint, saved = None, None, LearnerCheckpoint(folder).load()
    try:
        origin = Origin.read(folder)
    except Damaged as error:
        complaint = str(error)
    versions = (
        _described_version(folder / SNAPSHOTS, version, saved) for version in stored_versions(folder / SNAPSHOTS)
    )
    return Learnt(folder, origin, saved, tuple(versions), complaint)


def _described_version(snapshots: Path, version: int, saved: SavedLearner) -> dict[str, Any]:
    info = sha256 = complaint = None
    try:
        info, sha256 = read_manifest(snapshots, version)
    except Damaged as error:
        complaint = str(error)
    return {
        "version": version,
        "parent": info and info.parent,
        "date": info and info.date,
        "scores": info and dict(info.scores),
        "weights_sha256": sha256,
        "served": version == saved.origin,
        "taken_back": version in saved.condemned,
        "complaint": complaint,
    }


def new_folder(out: Path) -> Path:
    """Return the absolute path of a folder to write. Raises StartupError if it exists and is not an empty folder."""
    out = out.expanduser().resolve()
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise StartupError(f"{out} exists and is not an empty folder: name another one with --out")
    return out


def export(config: ServiceConfig, out: Path, *, version: int | None, source: Path | None) -> int:
    """Export a version as a drafter folder, atomically; returns its number. `version`: None exports the served one;
    `source`: path or name of the learning folder, or None for the only one that has versions. Raises StartupError."""
    out, chosen = new_folder(out), _chosen(config, source)
    version, origin = _version_of(chosen, version), _origin_of(chosen)
    snapshot, target = _read(chosen, version, origin), _shown_name(origin)
    lineage = {
        "version": version,
        "parent": snapshot.info.parent,
        "date": snapshot.info.date,
        "scores": dict(snapshot.info.scores),
        "origin_sha256": origin.origin_sha256,
        "weights_sha256": next(one["weights_sha256"] for one in chosen.versions if one["version"] == version),
    }
    versions = {"adaptree": __version__, "torch": str(torch.__version__)}
    facts = {"target": target, "lineage": lineage, "versions": versions}
    identity, tensors = origin.target_identity, snapshot.tensors
    try:
        with replacing(out) as unfinished:
            checkpoint.save_weights(unfinished, origin.config, tensors, target_identity=identity, facts=facts)
            (unfinished / CARD_FILE).write_text(exported_card(origin.config, target, {**lineage, **versions}))
    except OSError as error:
        raise StartupError(f"{out} cannot be written: {error}") from error
    return version


def _chosen(config: ServiceConfig, source: Path | None) -> Learnt:
    if source is not None:
        named = source if source.is_dir() else config.state_dir / "adaptation" / source
        if not named.is_dir():
            raise StartupError(f"--from {source}: no such folder, nor one in {config.state_dir / 'adaptation'}")
        return look_at(named)
    found = [one for one in learnt(config) if one.versions]
    if not found:
        raise StartupError(
            f"nothing was learnt for {config.model} in {config.state_dir}: name the state_dir of the server that "
            "learnt, or serve with adaptation.enabled true until `adaptree drafter inspect` shows a version"
        )
    if len(found) > 1:
        listed = "".join(f"\n  {one.folder.name}: {_summary(one)}" for one in found)
        raise StartupError(f"several drafters have learnt in {config.state_dir}: choose one with --from{listed}")
    return found[0]


def _summary(one: Learnt) -> str:
    last = one.versions[-1]
    dated = f" of {last['date']}" if last["date"] else ""
    return f"{len(one.versions)} versions, newest {last['version']}{dated}, served {one.served}"


def _version_of(chosen: Learnt, version: int | None) -> int:
    """Determine the version to export. Raises StartupError."""
    listed = ", ".join(map(str, chosen.intact)) or "none"
    if version is None and chosen.served == ANCHOR:
        raise StartupError(
            f"{chosen.folder.name} serves the deployed drafter: copy that drafter's folder, "
            f"or name a version with --version (kept: {listed})"
        )
    version = chosen.served if version is None else version
    if version not in [one["version"] for one in chosen.versions]:
        raise StartupError(f"version {version} is not kept in {chosen.folder}: name one with --version ({listed})")
    return version


def _origin_of(chosen: Learnt) -> Origin:
    if chosen.origin is None:
        why = chosen.complaint or f"{DRAFTER_FILE} is missing"
        raise StartupError(
            f"the drafter of {chosen.folder} is not known ({why}): start its server once with "
            f"adaptation.enabled true, which writes {DRAFTER_FILE}"
        )
    return chosen.origin


def _read(chosen: Learnt, version: int, origin: Origin) -> Snapshot:
    """Read the snapshot of a version. Raises StartupError if it is damaged or does not fit the drafter."""
    try:
        snapshot = read_snapshot(chosen.folder / SNAPSHOTS, version, None)
        found = {name: tuple(value.shape) for name, value in snapshot.tensors.items()}
        if found != checkpoint.shapes_of(origin.config):
            raise Damaged("its tensors do not match the drafter's shapes")
        if not checkpoint.names_tokens(snapshot.tensors[VOCABULARY], origin.config.target_vocab_size):
            raise Damaged(f"{VOCABULARY} names tokens that the target does not have, or one twice")
        return snapshot
    except Damaged as error:
        listed = ", ".join(str(other) for other in chosen.intact if other != version) or "none"
        raise StartupError(
            f"version {version} in {chosen.folder / SNAPSHOTS} cannot be trusted: {error}; name another with --version "
            f"({listed})"
        ) from error


def _shown_name(origin: Origin) -> str:
    """Return the target's name, without the folders of a local path."""
    name = origin.model or f"target {origin.target_identity}"
    return Path(name).name.removesuffix(".gguf") if Path(name).is_absolute() else name
