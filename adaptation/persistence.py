"""Saves and restores the learner's state: the serving version, policy and monitors, and the training copy. Also decides
which process owns a learning folder.
"""

import itertools
import logging
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol

from pydantic import ConfigDict, JsonValue, NonNegativeInt, TypeAdapter
from torch import Tensor

from adaptation.checkpoint import (
    FORMAT,
    SnapshotInfo,
    SnapshotRing,
    check_layout,
    layout_of,
    now,
    seal,
    unseal_current,
)
from adaptation.policy import State
from adaptation.records import Damaged, EventLog, NotStored, Refused
from adaptation.trainer import OnlineTrainer
from adaptation.weights import ANCHOR, DrafterWeights
from drafters.files import lock, replacing

logger = logging.getLogger(__name__)

_LOCK = "lock"
_KEPT_COPIES = 2
_FORMER_MOMENTS = "head."
"""Prefix of the optimizer moments of head updates, which 0.2.0 saved with the training copy and later releases do not
use."""
_FORMER_PARTS = frozenset({"tokens"})  # token counts, by which 0.2.0 exchanged tokens of the draft vocabulary

TensorKind = Literal["training", "sums", "anchor"]
"""Tensors saved besides versions: the training copy, the sums a drafter is solved from, and the solved anchor."""


@dataclass(frozen=True, slots=True)
class SavedLearner:
    """State of an earlier process; the defaults describe a first start."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    newest: NonNegativeInt = 0  # highest version used
    origin: NonNegativeInt = 0  # the version that first had the serving weights
    condemned: set[NonNegativeInt] = field(default_factory=set)  # versions excluded from rollbacks
    parts: Mapping[str, State] = field(default_factory=dict)
    complaints: tuple[str, ...] = ()  # unusable files, and why
    paused: bool = False  # learning was paused by an operator


_SAVED = TypeAdapter(SavedLearner)


def owned(folder: Path) -> Path:
    """Lock this folder until the process ends or, if another process learns there, the first free numbered folder next
    to it. Returns the chosen folder."""
    for number in itertools.count(1):
        chosen = folder if number == 1 else folder.with_name(f"{folder.name}-{number}")
        try:
            chosen.mkdir(parents=True, exist_ok=True)
            lock(chosen / _LOCK)
        except BlockingIOError:
            continue
        except OSError as error:  # storing will fail, too, and log it
            logger.warning("%s cannot be locked, so other processes may learn there too: %s", chosen, error)
        break
    return chosen


class LearnerCheckpoint:
    """Files of one learner: its state (`learner.json`, and the one before it), and tensors by kind."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._current, self._previous = folder / "learner.json", folder / "learner.previous.json"

    def save(
        self, *, newest: int, origin: int, condemned: set[int], parts: Mapping[str, State], paused: bool = False
    ) -> None:
        """Write the state. Raises NotStored, and then the previous state can still be loaded."""
        served: State = {"origin": origin, "condemned": list[JsonValue](sorted(condemned)), "paused": paused}
        state: State = {"version": newest, "parts": {**parts, "served": served}}
        try:
            data = seal({"format": FORMAT, "state": state})
            with replacing(self._current) as unfinished:
                unfinished.write_bytes(data)
                if self._is_good(self._current):  # a damaged file must not push a good previous one out
                    self._current.replace(self._previous)
        except (OSError, ValueError) as error:
            raise NotStored(f"the learner's state could not be stored in {self._folder}: {error}") from error

    def load(self) -> SavedLearner:
        """Read the newest undamaged state; its `complaints` name unusable files."""
        complaints: list[str] = []
        for path in (self._current, self._previous):
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

    def save_tensors(self, kind: TensorKind, tensors: Mapping[str, Tensor], *, origin: int) -> None:
        """Store tensors of any shape [...] that belong to these serving weights. Raises NotStored, NotRemoved."""
        ring = self._ring(kind)
        ring.add(SnapshotInfo(max(ring.versions, default=0) + 1, origin, now(), {}), tensors)

    def load_tensors(
        self, kind: TensorKind, like: Mapping[str, Tensor], *, origin: int | None = None
    ) -> dict[str, Tensor] | None:
        """Read the newest undamaged tensors of this kind with the shapes [...] of `like` and, if `origin` is given, for
        these serving weights. Returns None if there are none."""
        ring = self._ring(kind)
        for number in reversed(ring.versions):
            try:
                snapshot = ring.get(number, None)
                tensors = self._without_former(snapshot.tensors, like)
                check_layout(tensors, layout_of(like))
            except (Damaged, Refused) as error:  # older tensors or the serving weights are used instead
                logger.warning("ignoring saved tensors %s %d in %s: %s", kind, number, self._folder, error)
                continue
            if origin is None or snapshot.info.parent == origin:
                return tensors
        return None

    def _without_former(self, tensors: dict[str, Tensor], like: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors [...] without the optimizer moments of 0.2.0."""
        former = {name for name in tensors.keys() - like.keys() if name.startswith(_FORMER_MOMENTS)}
        if former:
            logger.info("ignoring optimizer moments of head updates in %s: they are no longer used", self._folder)
        return {name: value for name, value in tensors.items() if name not in former}

    def drop_tensors(self, kind: TensorKind) -> None:
        """Remove all tensors of this kind."""
        shutil.rmtree(self._folder / kind, ignore_errors=True)

    def _ring(self, kind: TensorKind) -> SnapshotRing:
        return SnapshotRing(self._folder / kind, size=_KEPT_COPIES)

    @staticmethod
    def _is_good(path: Path) -> bool:
        try:
            return bool(_parsed_learner(path.read_bytes()))
        except (OSError, Damaged):
            return False


def _parsed_learner(data: bytes) -> SavedLearner:
    """Decode a learner's state. Raises Damaged."""
    state: Any = unseal_current(data).get("state")
    try:
        parts = dict(state["parts"])
        return _SAVED.validate_python({"newest": state["version"], **parts.pop("served"), "parts": parts})
    except (KeyError, TypeError, ValueError) as error:
        raise Damaged("incomplete or invalid learner state") from error


class Part(Protocol):
    """A part of the learner whose state is saved."""

    def state(self) -> State:
        """Return the state as plain values."""

    def restore(self, state: State) -> None:
        """Load a state. Raises ValueError if it is unusable, and then changes nothing."""


class Persistence:
    """Saves the learner and restores it in a later process. A failure to store is an event and raises nothing."""

    def __init__(
        self,
        checkpoint: LearnerCheckpoint,
        weights: DrafterWeights,
        trainer: OnlineTrainer,
        parts: Mapping[str, Part],
        log: EventLog,
    ) -> None:
        """`parts`: keys are the names under which their states are saved."""
        self.checkpoint = checkpoint
        self._weights = weights
        self._trainer = trainer
        self._parts = parts
        self._log = log

    def save(self, *, paused: bool, training: bool) -> None:
        """Save the state, and with `training` the training copy with its optimizers.

        The training copy is ten times as large as the serving weights: it is saved when the process ends, not at every
        publish. A process that was killed resumes from the serving weights, with new optimizers.
        """
        weights, origin = self._weights, self._weights.latest.origin
        states = {name: part.state() for name, part in self._parts.items()}
        save = partial(self.checkpoint.save, newest=weights.newest, origin=origin, condemned=weights.condemned)
        self._log.storing(lambda: save(parts=states, paused=paused))
        if training:
            tensors = self._trainer.tensors()
            self._log.storing(lambda: self.checkpoint.save_tensors("training", tensors, origin=origin))

    def restore(self) -> bool:
        """Stage the weights that an earlier process served, and restore the parts. Returns whether learning was
        paused."""
        saved, weights = self.checkpoint.load(), self._weights
        for complaint in saved.complaints:
            self._log.add("restored", complaint)
        weights.resume(saved.newest, saved.condemned)
        if weights.highest != ANCHOR:  # the serving weights get a new version, even the deployed drafter
            self._restore_weights(saved.origin)
        if weights.latest.origin == saved.origin:  # otherwise the states belong to other weights
            self._restore_parts(saved.parts)
        return saved.paused

    def training_copy(self) -> dict[str, Tensor] | None:
        """Read the saved training copy with its optimizers, shapes [...] as in `OnlineTrainer.tensors`. Returns None if
        there is none for these serving weights."""
        return self.checkpoint.load_tensors("training", self._trainer.tensors(), origin=self._weights.latest.origin)

    def _restore_weights(self, origin: int) -> None:
        try:
            self._weights.restore(origin)
            self._log.add("restored", "same_weights", {"origin": origin})
        except Damaged as error:
            restored = self._weights.restore_before(origin)
            self._log.add("restored", f"version {origin}: {error}", {"origin": restored.origin})

    def _restore_parts(self, states: Mapping[str, State]) -> None:
        """Restore the parts; one whose state is unusable keeps its initial state."""
        if _FORMER_PARTS & states.keys() - self._parts.keys():
            logger.info("ignoring token counts: the draft vocabulary is no longer exchanged while learning")
        for name, part in self._parts.items():
            try:
                if name in states:
                    part.restore(states[name])
            except ValueError as error:
                self._log.add("restored", f"{name}: {error}")
