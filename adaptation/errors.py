"""What can go wrong in adaptation without being a bug of ours, as one tree of exceptions.

AdaptationError
├── Damaged     a stored file cannot be trusted; the message names the file and what is wrong with it
├── NotStored   the disk did not take a file; whatever was stored before is intact
├── NotRemoved  the disk kept a file that should go; everything else was done
├── Refused     what another replica sent must not be used; the reason is one word
├── TrainingLost  the process that trains has died; its update is lost, and the next starts another process
└── StoreLost   the store that replicas share does not answer; what it did last is not known
    └── StoreRefused  it answered that it will not
"""

from typing import Literal


class AdaptationError(Exception):
    """Base of every error of adaptation that the rest of the server outlives."""


class Damaged(AdaptationError):
    """A stored file is missing a part, was altered, or does not fit what it is loaded for."""


class NotRemoved(AdaptationError):
    """An old file could not be removed; what was to be stored is stored."""


class NotStored(AdaptationError):
    """A file could not be written, for want of space or permission; what was there before is still there."""


RefusalReason = Literal[
    "torn",  # a part is missing or was altered on its way
    "forged",  # not signed with the secret that replicas share
    "foreign",  # made for another model, drafter or type of weights
    "old",  # newer versions are known
    "fork",  # does not follow from the version before it
    "misfit",  # names, shapes or numbers that cannot be
    "not_finite",
]


class Refused(AdaptationError):
    """Something that came from outside this process and must not be used."""

    def __init__(self, reason: RefusalReason, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason: RefusalReason = reason


class TrainingLost(AdaptationError):
    """The process that trains ended before it had answered."""


class StoreLost(AdaptationError):
    """The shared store could not be reached, or did not answer in time."""


class StoreRefused(StoreLost):
    """The shared store answered with an error of its own: out of memory, no permission, an unknown group."""
