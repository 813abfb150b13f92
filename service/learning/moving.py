"""Moves drafters between servers: exports what was learnt as a drafter folder, and checks and copies a drafter folder
to where the configured model finds it. Loads no model."""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from adaptation.checkpoint import (
    SNAPSHOTS,
    all_finite,
    read_manifest,
    stored_versions,
)
from adaptation.persistence import LearnerCheckpoint, SavedLearner
from adaptation.records import Damaged
from drafters.files import replace_file, replacing
from drafters.network import checkpoint
from drafters.network.checkpoint import CARD_FILE, CONFIG_FILE, VOCABULARY, WEIGHTS_FILE, Description, DrafterError
from drafters.network.config import SpecBlockConfig, config_from
from drafters.published import folders as published
from service.config import ServiceConfig
from service.engine.drafter_weights import import_place, shipped_folder, source_of
from service.errors import StartupError

DRAFTER_FILE = "drafter.json"
_MOVED = (CONFIG_FILE, WEIGHTS_FILE, CARD_FILE)


@dataclass(frozen=True, slots=True)
class Origin:
    """Which drafter learns in a folder, so that its snapshots can be read without the target and the deployed
    drafter."""

    target_identity: str  # as in drafter folders
    config: SpecBlockConfig
    model: str | None = None  # the target as `source_of` names it; None: not known
    origin_sha256: str | None = None  # of the deployed drafter's weights; None: there was none

    def write(self, folder: Path) -> None:
        """Write the file in a learning folder. Raises OSError, and then the file is unchanged."""
        content: dict[str, Any] = {
            "target_identity": self.target_identity,
            "drafter": self.config.described,
            "model": self.model,
            "origin_sha256": self.origin_sha256,
        }
        replace_file(folder / DRAFTER_FILE, (json.dumps(content, indent=2, sort_keys=True) + "\n").encode())

    @staticmethod
    def read(folder: Path) -> "Origin | None":
        """Read the file of a learning folder; None: there is none. Raises Damaged."""
        try:
            content: dict[str, Any] = json.loads((folder / DRAFTER_FILE).read_text())
            config = config_from(content["drafter"])
            return Origin(str(content["target_identity"]), config, content.get("model"), content.get("origin_sha256"))
        except FileNotFoundError:
            return None
        except (OSError, KeyError, TypeError, ValueError) as error:
            raise Damaged(f"{DRAFTER_FILE} does not describe a drafter: {error}") from error


@dataclass(frozen=True, slots=True)
class Learnt:
    """Contents of one learning folder, which may be a running server's."""

    folder: Path
    origin: Origin | None  # None: not known
    saved: SavedLearner
    versions: tuple[dict[str, Any], ...]  # kept ones, ascending, each as JSON values; a damaged one has a complaint
    complaint: str | None  # why there is no origin

    @property
    def served(self) -> int:
        """The version that first had the served weights; 0: the deployed ones."""
        return self.saved.origin

    @property
    def intact(self) -> list[int]:
        """Versions that can be read."""
        return [one["version"] for one in self.versions if one["complaint"] is None]

    def as_json(self) -> dict[str, Any]:
        """The contents as JSON values."""
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
    """Contents of a drafter folder as JSON values. Raises StartupError for one that cannot be used."""
    description = checked(folder)
    config = description.config
    weights = checkpoint.read_weights(folder, config)
    shapes = checkpoint.shapes_of(config)
    return {
        "folder": str(folder),
        "architecture": checkpoint.ARCHITECTURE,
        "target_identity": description.target_identity,
        "drafter": json.loads(config.as_json),
        "parameters": sum(torch.Size(shape).numel() for name, shape in shapes.items() if name != VOCABULARY),
        "stores_head": "lm_head.weight" in weights,
        "dtype": str(weights["rank_head.0.weight"].dtype).removeprefix("torch."),
        "tensors": {name: list(shape) for name, shape in shapes.items()},
        "bytes": (folder / WEIGHTS_FILE).stat().st_size,
        "weights_sha256": checkpoint.weights_sha256(folder),
        "facts": dict(description.facts),
    }


def learnt(config: ServiceConfig) -> list[Learnt]:
    """Learning folders in the state folder that are of the configured model, or do not name theirs."""
    parent, source = config.state_dir / "adaptation", source_of(config)
    folders = sorted(path for path in parent.iterdir() if path.is_dir()) if parent.is_dir() else []
    found = [look_at(folder) for folder in folders]
    return [one for one in found if one.origin is None or one.origin.model in (None, source)]


def look_at(folder: Path) -> Learnt:
    """Read a learning folder; nothing in it is changed."""
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


def import_drafter(config: ServiceConfig, folder: Path, *, force: bool) -> Path:
    """Copy a drafter folder to where the configured model finds it. # -> that place; raises StartupError"""
    identity, shipped = checked(folder).target_identity, shipped_folder(config.model_source)
    if shipped is not None and identity != (expected := checkpoint.describe(shipped).target_identity):
        raise StartupError(
            f"drafter {folder}: trained for target {identity}, but {config.model_source} is {expected}: "
            "set model to the one it was trained for"
        )
    place = import_place(config)
    if place.exists() and not force:
        raise StartupError(f"{place} holds a drafter for {config.model_source} already: replace it with --force")

    def write(unfinished: Path) -> None:
        for name in _MOVED:
            if (folder / name).is_file():
                shutil.copyfile(folder / name, unfinished / name)

    put(place, write)
    return place


def checked(folder: Path) -> Description:
    """Check all that can be checked without the target. Raises StartupError for a folder that no server can use."""
    if published.form_of(folder) is not None:
        raise StartupError(f"drafter {folder}: in its authors' form it is read where it lies: set drafter_path to it")
    try:
        described = checkpoint.describe(folder)
        weights = checkpoint.read_weights(folder, described.config)
        found = checkpoint.weights_sha256(folder)
    except (DrafterError, OSError) as error:
        raise StartupError(f"{error}; name a folder that `adaptree drafter export` or `train` has written") from error
    if described.weights_sha256 not in (None, found):
        raise StartupError(
            f"drafter {folder}: {WEIGHTS_FILE} is not the file that {CONFIG_FILE} was written with: copy both again"
        )
    if not all_finite(weights.values()):
        raise StartupError(f"drafter {folder}: holds weights that are not finite: export or train it again")
    return described


def put(place: Path, write: Callable[[Path], None]) -> None:
    """Write a folder and put it in place by a rename, replacing any that is there. Raises StartupError, and then the
    old one is still there."""
    try:
        with replacing(place) as unfinished:
            unfinished.mkdir()
            write(unfinished)
    except OSError as error:
        raise StartupError(f"{place} cannot be written: {error}") from error
