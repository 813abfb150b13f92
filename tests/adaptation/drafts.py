"""Small drafters' worth of tensors, of which each version can be distinguished from every other."""

from collections.abc import Mapping

import torch
from torch import Tensor

from adaptation.checkpoint import Snapshot, SnapshotInfo


def info_of(version: int) -> SnapshotInfo:
    return SnapshotInfo(version, version - 1 if version else None, "2026-01-01T00:00:00Z", {"serving": 1.5 + version})


def tensors_of(version: int) -> dict[str, Tensor]:
    return {
        "head.weight": torch.full((3, 5), float(version)),
        "rank.bias": torch.arange(4, dtype=torch.bfloat16) + version,
        "steps": torch.tensor(version),
    }


def is_version(snapshot: Snapshot, version: int) -> bool:
    return snapshot.info == info_of(version) and same(snapshot.tensors, tensors_of(version))


def same(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(
        left[name].dtype == right[name].dtype and torch.equal(left[name], right[name]) for name in left
    )
