"""The ring of published drafters to go back to: the newest in memory, more of them on disk.

What cannot be trusted is refused with its reason, and the next older one is taken. Knows no drafter: tensors come and
go by name. One process owns a folder, one thread calls.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from adaptation.errors import Damaged
from adaptation.snapshot_folder import (
    Layout,
    Snapshot,
    SnapshotInfo,
    clear_unfinished,
    read_snapshot,
    remove_snapshot,
    stored_versions,
    write_snapshot,
)


@dataclass(frozen=True, slots=True)
class Refusal:
    """A stored snapshot that was passed over."""

    version: int
    reason: str


@dataclass(frozen=True, slots=True)
class Found:
    """The newest snapshot that can be trusted, and all newer ones that cannot."""

    snapshot: Snapshot | None
    refused: tuple[Refusal, ...]


class SnapshotRing:
    """Keeps the newest `on_disk` snapshots in a folder and the newest `in_memory` beside them."""

    def __init__(self, folder: Path, *, in_memory: int, on_disk: int) -> None:
        assert in_memory >= 1, "nothing kept in memory"
        assert on_disk >= 1, "nothing kept on disk"
        self._folder = folder
        self._num_in_memory = in_memory
        self._num_on_disk = on_disk
        self._memory: dict[int, Snapshot] = {}
        clear_unfinished(folder)

    @property
    def versions(self) -> list[int]:
        """Versions in memory or on disk, rising; also of snapshots that will be refused."""
        return sorted({*self._memory, *stored_versions(self._folder)})

    def add(self, info: SnapshotInfo, tensors: Mapping[str, Tensor]) -> None:
        """Store copies of these tensors. Raises NotStored, and then memory and disk are as they were; or NotRemoved,
        and then only the ring is longer than it should be."""
        snapshot = Snapshot(info, _copies(tensors))
        write_snapshot(self._folder, snapshot)
        self._memory[info.version] = snapshot
        for version in sorted(self._memory)[: -self._num_in_memory]:
            del self._memory[version]
        self._drop_oldest()

    def get(self, version: int, layout: Layout) -> Snapshot:
        """Raises Damaged for a snapshot that cannot be trusted, or is not there."""
        kept = self._memory.get(version)
        if kept is not None:
            return Snapshot(kept.info, _copies(kept.tensors))
        return read_snapshot(self._folder, version, layout)

    def newest(self, layout: Layout, *, below: int | None = None) -> Found:
        """The newest good snapshot, older than version `below` if given."""
        refused: list[Refusal] = []
        for version in reversed(self.versions):
            if below is not None and version >= below:
                continue
            try:
                return Found(self.get(version, layout), tuple(refused))
            except Damaged as error:
                refused.append(Refusal(version, str(error)))
        return Found(None, tuple(refused))

    def _drop_oldest(self) -> None:
        for version in stored_versions(self._folder)[: -self._num_on_disk]:
            remove_snapshot(self._folder, version)


def _copies(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """On the host, each with memory of its own: the trainer goes on writing to the originals."""
    return {
        name: tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        for name, tensor in tensors.items()
    }
