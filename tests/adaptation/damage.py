"""What may have become of a stored file: bits flipped, an end missing, or content that is whole and fits nothing."""

import random
from collections.abc import Callable
from pathlib import Path

import safetensors.torch
import torch

from adaptation.checkpoint import MANIFEST, WEIGHTS, digest, seal, unseal

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
