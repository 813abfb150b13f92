"""The kinds of trained drafters by name, with the module of each. A kind is imported when it is first requested, so
that commands that only list names do not import torch.

Other distributions add kinds by entry points of the group `adaptree.drafters`, each of which names a `TrainedKind`.
"""

from collections.abc import Iterator
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any, TypeGuard

if TYPE_CHECKING:  # these modules import torch
    from drafters.network.form import PublishedForm, TrainedKind

GROUP = "adaptree.drafters"

TRAINED_KINDS = {
    "specblock": "drafters.trained.specblock:KIND",
    "eagle3": "drafters.trained.eagle3:KIND",
    "dflash": "drafters.trained.dflash:DFLASH",
    "jetspec": "drafters.trained.dflash:JETSPEC",
    "treeflash": "drafters.trained.treeflash:KIND",
    "mtp": "drafters.trained.mtp:KIND",
}
"""Entry points of this package's kinds, by their name in drafter files and in the setting `drafter`."""

OF_TARGETS = ("mtp",)
"""Kinds that are published as part of a target and cannot be trained from scratch."""

MOVED_KINDS = ("parallel", "medusa", "falcon")
"""Kinds of release 0.3.0 that have become plug-ins of the benchmarks."""


def trained_kind(name: str) -> "TrainedKind":
    """Return the trained kind of this name. Raises ValueError if there is none, or if its plug-in cannot be loaded."""
    if name in TRAINED_KINDS:
        return _built_in(name)
    for kind in map(loaded, entry_points(group=GROUP, name=name)):
        if is_trained(kind):
            return kind
    raise ValueError(f"kind {name!r} {why_unknown(name)}")


def is_trained_kind(name: str) -> bool:
    """Whether a trained kind has this name. Raises ValueError if its plug-in cannot be loaded."""
    return name in TRAINED_KINDS or any(is_trained(loaded(entry)) for entry in entry_points(group=GROUP, name=name))


def loaded(entry: EntryPoint) -> Any:
    """Load the object of an entry point. Raises ValueError if that fails."""
    try:
        return entry.load()
    except Exception as error:  # the import of a plug-in may raise anything
        raise ValueError(f"drafter {entry.name!r} ({entry.value}) cannot be loaded: {error!r}") from error


def is_trained(kind: object) -> "TypeGuard[TrainedKind]":
    """Whether the object of an entry point is a trained kind."""
    from drafters.network.form import TrainedKind

    return isinstance(kind, TrainedKind)


def published_forms() -> Iterator["PublishedForm"]:
    """Yield the published forms of all kinds, those of this package first. Raises ValueError if a plug-in cannot be
    loaded."""
    for name in TRAINED_KINDS:
        yield from _built_in(name).forms
    for entry in entry_points(group=GROUP):
        if entry.name not in TRAINED_KINDS and is_trained(kind := loaded(entry)):
            yield from kind.forms


def why_unknown(name: str) -> str:
    """Return why there is no trained kind of this name, as the end of a message that begins with the name."""
    if name in MOVED_KINDS:
        return "is a plug-in of benchmarks/baselines in the source now: install it, or use a drafter of another kind"
    return f"is none of {', '.join(TRAINED_KINDS)}"


@cache
def _built_in(name: str) -> "TrainedKind":
    kind: TrainedKind = EntryPoint(name, TRAINED_KINDS[name], GROUP).load()
    return kind
