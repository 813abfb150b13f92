"""What learning keeps across restarts: who served, what the policy and the alarms know, and the training copy.

Each part is whole or absent; a part that cannot be trusted is named and left out. Knows nothing of their content.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from pydantic import JsonValue
from torch import Tensor

from adaptation.errors import Damaged
from adaptation.learner_state import LearnerState, LearnerStateFile
from adaptation.policy import State
from adaptation.snapshot_folder import (
    Snapshot,
    SnapshotInfo,
    clear_unfinished,
    layout_of,
    read_snapshot,
    remove_snapshot,
    stored_versions,
    write_snapshot,
)

_KEPT = 2


@dataclass(frozen=True, slots=True)
class Remembered:
    """What an earlier process left; empty for a first start."""

    newest: int
    origin: int
    condemned: set[int]
    parts: Mapping[str, State]
    complaints: tuple[str, ...]


class Memory:
    """The files of one learner, in a folder that is its own."""

    def __init__(self, folder: Path) -> None:
        self._file = LearnerStateFile(folder)
        self._training = folder / "training"
        clear_unfinished(self._training)

    def save(self, *, newest: int, origin: int, condemned: set[int], parts: Mapping[str, State]) -> None:
        """Raises NotStored, and then the state before is still there."""
        served: State = {"origin": origin, "condemned": list[JsonValue](sorted(condemned))}
        self._file.save(LearnerState(newest, {**parts, "served": served}))

    def load(self) -> Remembered:
        loaded = self._file.load()
        if loaded.state is None:
            return Remembered(0, 0, set(), {}, loaded.refused)
        parts = dict(loaded.state.parts)
        try:
            origin, condemned = _served(parts.pop("served", {}))
        except ValueError as error:
            return Remembered(loaded.state.version, 0, set(), {}, (*loaded.refused, str(error)))
        return Remembered(loaded.state.version, origin, condemned, parts, loaded.refused)

    def save_training(self, tensors: Mapping[str, Tensor], *, origin: int) -> None:
        """Store the training copy and its optimizers. Raises NotStored, NotRemoved."""
        stored = stored_versions(self._training)
        number = max(stored, default=0) + 1
        info = SnapshotInfo(number, origin, datetime.now(UTC).isoformat(timespec="seconds"), {})
        held = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        write_snapshot(self._training, Snapshot(info, held))
        for old in [*stored, number][:-_KEPT]:
            remove_snapshot(self._training, old)

    def load_training(self, like: Mapping[str, Tensor], *, origin: int) -> dict[str, Tensor] | None:
        """The newest trusted training copy that went out from these serving weights."""
        for number in reversed(stored_versions(self._training)):
            try:
                snapshot = read_snapshot(self._training, number, layout_of(like))
            except Damaged:
                continue  # an older one, or the serving weights themselves, are as good a start
            if snapshot.info.parent == origin:
                return snapshot.tensors
        return None


def _served(state: State) -> tuple[int, set[int]]:
    origin, condemned = state.get("origin"), state.get("condemned")
    if not isinstance(origin, int) or not isinstance(condemned, list):
        raise ValueError("does not say which weights were served")
    versions = {version for version in condemned if isinstance(version, int)}
    if len(versions) != len(condemned):
        raise ValueError("names condemned versions that are no numbers")
    return origin, versions
