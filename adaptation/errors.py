"""What can go wrong in adaptation without being a bug of ours, as one tree of exceptions.

AdaptationError
├── Damaged     a stored file cannot be trusted; the message names the file and what is wrong with it
├── NotStored   the disk did not take a file; whatever was stored before is intact
└── NotRemoved  the disk kept a file that should go; everything else was done
"""


class AdaptationError(Exception):
    """Base of every error of adaptation that the rest of the server outlives."""


class Damaged(AdaptationError):
    """A stored file is missing a part, was altered, or does not fit what it is loaded for."""


class NotRemoved(AdaptationError):
    """An old file could not be removed; what was to be stored is stored."""


class NotStored(AdaptationError):
    """A file could not be written, for want of space or permission; what was there before is still there."""
