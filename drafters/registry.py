"""Builds drafters by name. This is the only module that knows every kind.

A name is the name of a kind, or `memory+A`:
trees that combine candidates of the memory and of A, where A runs only while that pays. Other distributions add kinds
by entry points of the group `adaptree.drafters`, each of which names a `Kind` or a `TrainedKind`.
"""

from collections.abc import Sequence
from functools import partial
from importlib.metadata import entry_points

from torch import Tensor

from drafters.kinds import Kind, Need, Parts
from drafters.kinds import TrainedWeights as TrainedWeights
from drafters.language_model.drafter import LanguageModelDrafter, scratch_places
from drafters.memory.drafter import MemoryDrafter
from drafters.network.drafter import SpecBlockDrafter
from drafters.protocol import Committed, DraftContext, Drafter, Noise
from drafters.trained_kinds import GROUP, MOVED_KINDS, TRAINED_KINDS, is_trained, is_trained_kind, loaded, why_unknown
from drafters.tree import Candidates, DraftTree

MEMORY = "memory"


class NoDrafter(Drafter):
    """Drafter that proposes empty trees, so that the step decodes plainly."""

    name = "none"

    def start(self, contexts: Sequence[DraftContext]) -> None:
        """Do nothing."""

    def grow(self, rows: Tensor, noise: Noise) -> Candidates:  # rows [batch]
        return DraftTree.empty(rows.shape[0], rows.device)

    def commit(self, committed: Committed) -> None:
        """Do nothing."""


def _trained(kind: str, parts: Parts) -> Drafter:
    """Build a drafter of a trained kind."""
    if parts.weights is None:
        raise ValueError(f"drafter {kind!r} needs trained weights: set drafter_path")
    return SpecBlockDrafter(parts.sizes, parts.weights)


def _draft_model(parts: Parts) -> Drafter:
    """Build a drafter that is another language model."""
    sizes = parts.sizes
    if parts.draft_model is None:
        raise ValueError("draft_model needs a model: set drafter_path to a folder, a .gguf file or a hub id")
    model = parts.draft_model(sizes.num_slots, scratch_places(sizes.max_sequences))
    return LanguageModelDrafter("draft_model", model, sizes)


_KINDS = {
    MEMORY: Kind(lambda parts: MemoryDrafter(parts.sizes)),
    "none": Kind(lambda parts: NoDrafter()),
    **{kind: Kind(partial(_trained, kind), needs="weights") for kind in TRAINED_KINDS},
    "draft_model": Kind(_draft_model, needs="model"),
}


def kind_names() -> tuple[str, ...]:
    """Return the names of all kinds, first this package's, then those of plug-ins."""
    installed = {entry.name for entry in entry_points(group=GROUP)}
    return (*_KINDS, *sorted(installed - _KINDS.keys()))


def needs_of(name: str) -> frozenset[Need]:
    """Return the needs of the drafter of that name, e.g. trained weights. Raises ValueError as `build_drafter`."""
    return frozenset(_kind(one).needs for one in _resolved(name))


def taps_of(name: str, num_layers: int, trained: Sequence[int]) -> tuple[int, ...]:
    """Return the target layers that the drafter of that name taps, in the order of its features. `num_layers`: number
    of target layers; `trained`: tapped layers of the trained weights. Raises ValueError as `build_drafter`."""
    layers: tuple[int, ...] = ()
    for one in _resolved(name):
        kind = _kind(one)
        own = trained if kind.needs == "weights" else kind.tap_layers(num_layers)
        layers += tuple(layer for layer in own if layer not in layers)  # layers may coincide in a small target
    return layers


def reads_predictions(name: str) -> bool:
    """Return whether the drafter of that name may draft from a client's prediction; plug-ins are assumed to."""
    return any(one == MEMORY or one not in _KINDS for one in _resolved(name))


def trained_kind_of(name: str) -> str | None:
    """Return the name of the trained kind in that name. Returns None if there is none."""
    return next((kind for kind in name.split("+") if is_trained_kind(kind)), None)


def build_drafter(name: str, parts: Parts) -> Drafter:
    """Build the drafter of that name. Raises ValueError for an invalid name, or if `parts` lacks something it needs."""
    drafter = _kind(_resolved(name)[-1]).build(parts)
    return MemoryDrafter(parts.sizes, drafter) if "+" in name else drafter


def memory_of(drafter: Drafter) -> MemoryDrafter | None:
    """Return the drafter if it is a memory with room for past answers, else None."""
    return drafter if isinstance(drafter, MemoryDrafter) and drafter.past.share_buckets else None


def _resolved(name: str) -> list[str]:
    """Split a name into the names of kinds, the memory first. Raises ValueError for an invalid combination."""
    found = name.split("+")
    for one in found:
        _kind(one)
    if len(found) > 2:
        raise ValueError(f"drafter {name!r} joins {len(found)} drafters: one tree has at most two")
    if len(found) == 2 and found[0] == found[1]:
        raise ValueError(f"drafter {name!r} names the same drafter twice")
    if len(found) == 2 and MEMORY not in found:
        raise ValueError(f"drafter {name!r}: only the memory combines with another, as in memory+specblock")
    return sorted(found, key=lambda one: one != MEMORY)


def _kind(name: str) -> Kind:
    if name in _KINDS:
        return _KINDS[name]
    for entry in entry_points(group=GROUP, name=name):
        kind = loaded(entry)
        if is_trained(kind):
            return Kind(partial(_trained, name), needs="weights")
        if not isinstance(kind, Kind):
            raise ValueError(f"drafter {name!r} ({entry.value}) is neither a Kind nor a TrainedKind")
        return kind
    if name in MOVED_KINDS:
        raise ValueError(f"drafter {name!r} {why_unknown(name)}")
    raise ValueError(f"unknown drafter {name!r}: choose one of {', '.join(kind_names())}, or memory+A")
