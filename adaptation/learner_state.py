"""What learning knows beside the weights (bandit, alarms, calibration), kept across restarts.

A sealed file that is replaced as a whole, and the one before it: whoever damages the newer falls back to the older.
Knows only names and plain values.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import ConfigDict, NonNegativeInt, TypeAdapter, ValidationError

from adaptation.durable import seal, sync_folder, unseal, write_synced
from adaptation.errors import Damaged, NotStored
from adaptation.policy import State

_FORMAT = 1


@dataclass(frozen=True)
class LearnerState:
    """The state of each part by its name, and the drafter version they had learnt about."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    version: NonNegativeInt
    parts: Mapping[str, State]


@dataclass(frozen=True, slots=True)
class Loaded:
    """The newest state that can be trusted; None: nothing to resume from."""

    state: LearnerState | None
    refused: tuple[str, ...]  # what was passed over, and why


_STATE = TypeAdapter(LearnerState)


class LearnerStateFile:
    """`learner.json` in a folder, and `learner.previous.json` beside it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._current = folder / "learner.json"
        self._previous = folder / "learner.previous.json"
        self._unfinished = folder / ".unfinished-learner.json"

    def save(self, state: LearnerState) -> None:
        """Raises NotStored, and then what was saved before can still be loaded."""
        try:
            data = seal({"format": _FORMAT, "state": _STATE.dump_python(state, mode="json")})
            self._folder.mkdir(parents=True, exist_ok=True)
            write_synced(self._unfinished, data)
            self._replace()
        except (OSError, ValueError) as error:
            raise NotStored(f"the learner's state could not be stored in {self._folder}: {error}") from error

    def load(self) -> Loaded:
        refused: list[str] = []
        for path in (self._current, self._previous):
            try:
                data = path.read_bytes()
            except FileNotFoundError:
                continue
            except OSError as error:
                refused.append(f"{path.name}: unreadable: {error}")
                continue
            try:
                return Loaded(_parse(data), tuple(refused))
            except Damaged as error:
                refused.append(f"{path.name}: {error}")
        return Loaded(None, tuple(refused))

    def _replace(self) -> None:
        """A damaged current file must not push a good previous one out."""
        if self._is_good(self._current):
            self._current.replace(self._previous)
        self._unfinished.replace(self._current)
        sync_folder(self._folder)

    def _is_good(self, path: Path) -> bool:
        try:
            _parse(path.read_bytes())
        except (OSError, Damaged):
            return False
        return True


def _parse(data: bytes) -> LearnerState:
    content = unseal(data)
    if content.get("format") != _FORMAT:
        raise Damaged(f"format {content.get('format')!r}; this release reads {_FORMAT}")
    try:
        return _STATE.validate_python(content.get("state"))
    except ValidationError as error:
        raise Damaged("does not describe a learner") from error
