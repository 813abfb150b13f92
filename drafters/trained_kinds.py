"""The kinds of trained drafters by name, and where each is. A kind is loaded when it is first asked for: commands that
only list names import nothing heavy.

Other distributions add kinds by entry points of the group `adaptree.drafters`, each a `TrainedKind`.
"""

from collections.abc import Iterator
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # they import the network
    from drafters.network.form import PublishedForm
    from drafters.network.kind import TrainedKind

GROUP = "adaptree.drafters"

TRAINED_KINDS = {
    "specblock": "drafters.trained.specblock:KIND",
    "eagle3": "drafters.trained.eagle3:KIND",
    "dflash": "drafters.trained.dflash:DFLASH",
    "jetspec": "drafters.trained.dflash:JETSPEC",
    "treeflash": "drafters.trained.treeflash:KIND",
    "mtp": "drafters.trained.mtp:KIND",
}
"""By the name that drafter files carry and that the setting `drafter` takes."""

OF_TARGETS = ("mtp",)
"""Kinds that are published together with a target, and never trained from the beginning."""

MOVED_KINDS = ("parallel", "medusa", "falcon")
"""Kinds of release 0.3.0 that are plug-ins of the benchmarks now."""


def trained_kind(name: str) -> "TrainedKind":
    """Return the trained kind of this name. Raises ValueError."""
    if name in TRAINED_KINDS:
        return _built_in(name)
    for kind in map(loaded, entry_points(group=GROUP, name=name)):
        if is_trained(kind):
            return kind  # type: ignore[no-any-return]
    raise ValueError(f"kind {name!r} {why_unknown(name)}")


def is_trained_kind(name: str) -> bool:
    """Whether a trained kind has this name. Raises ValueError for one that cannot be loaded."""
    return name in TRAINED_KINDS or any(is_trained(loaded(entry)) for entry in entry_points(group=GROUP, name=name))


def loaded(entry: EntryPoint) -> Any:
    """Return what an entry point names. Raises ValueError."""
    try:
        return entry.load()
    except Exception as error:  # importing foreign code may raise anything
        raise ValueError(f"drafter {entry.name!r} ({entry.value}) cannot be loaded: {error!r}") from error


def is_trained(kind: object) -> bool:
    """Whether an entry point's object is a trained kind."""
    from drafters.network.kind import TrainedKind

    return isinstance(kind, TrainedKind)


def published_forms() -> Iterator["PublishedForm"]:
    """Return the published forms of all kinds, of this package first. Raises ValueError for a plug-in that cannot be
    loaded."""
    for name in TRAINED_KINDS:
        yield from _built_in(name).forms
    for entry in entry_points(group=GROUP):
        if entry.name not in TRAINED_KINDS and is_trained(kind := loaded(entry)):
            yield from kind.forms


def why_unknown(name: str) -> str:
    """Return why no trained kind has this name, to follow the name in a message."""
    if name in MOVED_KINDS:
        return "is a plug-in of benchmarks/baselines in the source now: use it from there, or a drafter of another kind"
    return f"is none of {', '.join(TRAINED_KINDS)}"


@cache
def _built_in(name: str) -> "TrainedKind":
    kind: TrainedKind = EntryPoint(name, TRAINED_KINDS[name], GROUP).load()
    return kind
