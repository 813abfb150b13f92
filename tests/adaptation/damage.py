"""Restarts and rollbacks of a learner whose stored state was damaged: it goes on with weights that it had published,
bit by bit, or with those it began with."""

import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import Tensor

from adaptation.checkpoint import MANIFEST, WEIGHTS, digest, seal, unseal
from adaptation.publisher import Gate
from drafters.network.checkpoint import weights_of
from tests.adaptation.drafts import same
from tests.adaptation.samples import Bench, bench, drafter, feedback

Damage = Callable[[Path, random.Random], None]


def flip(path: Path, rng: random.Random) -> None:
    """One bit, anywhere."""
    data = bytearray(path.read_bytes())
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(bytes(data))


def truncate(path: Path, rng: random.Random) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: rng.randrange(len(data))])


def misshape(path: Path, rng: random.Random) -> None:
    """A snapshot with the right hashes, one tensor of which has another shape. # path of either of its files"""
    folder = path.parent
    tensors = safetensors.torch.load_file(folder / WEIGHTS)
    name = rng.choice(sorted(tensors))
    tensors[name] = torch.cat([tensors[name].reshape(-1), torch.zeros(1, dtype=tensors[name].dtype)])
    weights = safetensors.torch.save(tensors)
    content = unseal((folder / MANIFEST).read_bytes())
    content |= {"weights_sha256": digest(weights)}
    (folder / WEIGHTS).write_bytes(weights)
    (folder / MANIFEST).write_bytes(seal(content))


def snapshot_files(folder: Path) -> list[Path]:
    """Both files of every published snapshot below a learner's folder, oldest first."""
    return sorted((folder / "snapshots").glob("*/*"))


def all_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


PUBLISHES = 4


def fresh(folder: Path) -> Bench:
    return bench(folder, head_queries=2, head_steps=1, snapshots=3)


@dataclass
class Left:
    """What a learner that has published some versions has left, and what its weights were."""

    folder: Path
    known: dict[int, dict[str, Tensor]]  # weights by the version that first had them
    trained: dict[int, dict[str, Tensor]]  # training copy and optimizers, by the same version
    newest: int

    def restarted(self, folder: Path) -> Bench:
        later = fresh(folder)
        later.learner.restore()
        later.weights.between_steps()
        return later

    def check(self, later: Bench, *, oldest: int) -> None:
        """Published weights that are no older than that, to the bit, in all places that hold them."""
        origin = later.weights.origin
        assert oldest <= origin <= self.newest
        assert same(weights_of(later.serving), self.known[origin])
        trained = later.learner.training.trainer.tensors()
        if not (origin in self.trained and same(trained, self.trained[origin])):
            assert same(weights_of(later.weights.training), self.known[origin])
            assert not any(bool(value.any()) for name, value in trained.items() if not name.startswith("weights."))


def leave(folder: Path) -> Left:
    """A learner publishes until the oldest snapshot has left its ring."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Gate, "_reason", lambda *_: "better")
        before = fresh(folder)
        left, seed = Left(folder, {0: weights_of(drafter())}, {}, PUBLISHES), 0
        while before.weights.version < PUBLISHES:
            before.observe(feedback, seed)
            before.update()
            before.weights.between_steps()
            left.known[before.weights.origin] = _copies(weights_of(before.serving))
            left.trained[before.weights.origin] = _copies(before.learner.training.trainer.tensors())
            seed += 1
    return left


def _copies(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in tensors.items()}


def restart_damaged(left: Left, folder: Path, damage: Damage, rng: random.Random) -> None:
    """Any one file is damaged between two processes: what the newer one serves is at most one update old."""
    shutil.copytree(left.folder, folder)
    damage(rng.choice(all_files(folder)), rng)
    later = left.restarted(folder)
    left.check(later, oldest=left.newest - 1)
    shutil.rmtree(folder)


def restart_with_damaged_snapshots(left: Left, folder: Path, damage: Damage, rng: random.Random) -> None:
    """Any number of snapshots is damaged, perhaps all: the newest good one is served, or the anchor."""
    shutil.copytree(left.folder, folder)
    chosen = _damage_some(folder, damage, rng)
    later = left.restarted(folder)
    good = [version for version in later.weights.snapshots.versions if version not in chosen]
    assert later.weights.origin == max(good, default=0)
    left.check(later, oldest=0)
    shutil.rmtree(folder)


def roll_back_damaged(left: Left, folder: Path, damage: Damage, rng: random.Random) -> None:
    """Any number of snapshots is damaged while a learner runs: a rollback takes the newest good one, or the anchor."""
    shutil.copytree(left.folder, folder)
    running = left.restarted(folder)
    chosen = _damage_some(folder, damage, rng)
    restored = running.learner.rollback()
    running.weights.between_steps()
    older = [version for version in running.weights.snapshots.versions if version < left.newest]
    assert restored.origin == max([version for version in older if version not in chosen], default=0)
    left.check(running, oldest=0)
    shutil.rmtree(folder)


def _damage_some(folder: Path, damage: Damage, rng: random.Random) -> set[int]:
    """One file each of some snapshots. # -> their versions"""
    by_version: dict[int, list[Path]] = {}
    for path in snapshot_files(folder):
        by_version.setdefault(int(path.parent.name), []).append(path)
    chosen = rng.sample(sorted(by_version), rng.randint(1, len(by_version)))
    for version in chosen:
        damage(rng.choice(by_version[version]), rng)
    return set(chosen)
