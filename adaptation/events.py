"""What adaptation did and why, as records for metrics, logs and operators."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

EventKind = Literal[
    "published",  # an update is on its way to the engine
    "refused",  # the gate, or the disk, kept an update from being served
    "discarded",  # an update could not be computed
    "rolled_back",  # an alarm or an operator took the serving weights back
    "alarm",  # an alarm fired and there is nothing to go back to
    "dismissed",  # an alarm fired for a reason that is not the drafter's
    "changed",  # the traffic is another than before: what was learnt about updates is tried anew
    "paused",
    "resumed",
    "loaded",  # an operator brought weights from a folder
    "restored",  # an earlier process's state was taken up, or could not be
    "failed",  # something broke; serving is as it was
    "not_stored",  # the disk did not take the state
]


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that happened, with the numbers behind it."""

    kind: EventKind
    version: int  # of the drafter that is served from here on
    reason: str
    numbers: Mapping[str, float] = field(default_factory=dict)


Emit = Callable[[Event], None]
