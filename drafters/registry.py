"""Builds a drafter by name. The only module that knows every kind.

A name is a kind's, with an argument in parentheses where it takes one, or `memory+A`: one tree of the memory's
candidates and A's, where A runs while that pays.
Other distributions add kinds by entry points of the group `adaptree.drafters`, each a `Kind`.
"""

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from importlib.metadata import entry_points
from typing import NamedTuple

from torch import Tensor

from drafters.kinds import Kind, Need, Parts
from drafters.kinds import TrainedWeights as TrainedWeights
from drafters.language_model.drafter import LanguageModelDrafter, scratch_places
from drafters.memory.drafter import MemoryDrafter
from drafters.network.drafter import SpecBlockDrafter
from drafters.network.heads import POLICIES
from drafters.protocol import Committed, DraftContext, Drafter, Noise
from drafters.trained_kinds import GROUP, MOVED_KINDS, TRAINED_KINDS, is_trained, is_trained_kind, loaded, why_unknown
from drafters.tree import Candidates, DraftTree

MEMORY = "memory"
_NAME = re.compile(r"([\w.-]+)(?:\(([^()+]*)\))?")


class NoDrafter(Drafter):
    """Proposes empty trees: plain decoding through the same step."""

    name = "none"

    def start(self, contexts: Sequence[DraftContext]) -> None:
        """Do nothing."""

    def grow(self, rows: Tensor, noise: Noise) -> Candidates:  # rows [batch]
        return DraftTree.empty(rows.shape[0], rows.device)

    def commit(self, committed: Committed) -> None:
        """Do nothing."""


def _trained(kind: str, parts: Parts) -> Drafter:
    """Build a trained kind; the argument names a growth policy."""
    if parts.weights is None:
        raise ValueError(f"drafter {kind!r} needs trained weights: set drafter_path")
    policy = parts.argument or parts.weights.policy
    if policy not in POLICIES:
        raise ValueError(f"drafter {kind}({policy}): trees grow by one of {', '.join(POLICIES)}")
    return SpecBlockDrafter(parts.sizes, replace(parts.weights, policy=policy))


def _draft_model(parts: Parts) -> Drafter:
    """Build a drafter of another language model."""
    sizes = parts.sizes
    if parts.draft_model is None:
        raise ValueError("draft_model needs a model: set drafter_path to a folder, a .gguf file or a hub id")
    model = parts.draft_model(sizes.num_slots, scratch_places(sizes.max_sequences))
    return LanguageModelDrafter("draft_model", model, sizes)


_KINDS = {
    MEMORY: Kind(lambda parts: MemoryDrafter(parts.sizes), takes_argument=False),
    "none": Kind(lambda parts: NoDrafter(), takes_argument=False),
    **{kind: Kind(partial(_trained, kind), needs="weights") for kind in TRAINED_KINDS},
    "draft_model": Kind(_draft_model, needs="model", takes_argument=False),
}


class _NamedDrafter(NamedTuple):
    """One of the drafters in a name."""

    name: str  # the kind's
    kind: Kind
    argument: str


def kind_names() -> tuple[str, ...]:
    """Return the names of all kinds, this package's first."""
    installed = {entry.name for entry in entry_points(group=GROUP)}
    return (*_KINDS, *sorted(installed - _KINDS.keys()))


def needs_of(name: str) -> frozenset[Need]:
    """Return what the drafter of that name needs. Raises ValueError as `build_drafter`."""
    return frozenset(one.kind.needs for one in _resolved(name))


def taps_of(name: str, num_layers: int, trained: Sequence[int]) -> tuple[int, ...]:
    """Return the layers that the drafter of that name taps of so many, in the order of its features; `trained`: those
    of the trained weights. Raises ValueError as `build_drafter`."""
    layers: tuple[int, ...] = ()
    for one in _resolved(name):
        own = trained if one.kind.needs == "weights" else one.kind.tap_layers(num_layers)
        layers += tuple(layer for layer in own if layer not in layers)  # taps may coincide in a small target
    return layers


def reads_predictions(name: str) -> bool:
    """Return whether the drafter of that name may draft from a client's prediction; True for plug-ins."""
    return any(one.name == MEMORY or one.name not in _KINDS for one in _resolved(name))


def trained_kind_of(name: str) -> str | None:
    """Return the trained kind in that name, if there is one."""
    kinds = (part.partition("(")[0] for part in name.split("+"))
    return next((kind for kind in kinds if is_trained_kind(kind)), None)


def build_drafter(name: str, parts: Parts) -> Drafter:
    """Build the drafter of that name. Raises ValueError if there is none, or if it needs something that is missing."""
    last = _resolved(name)[-1]
    drafter = last.kind.build(replace(parts, argument=last.argument))
    return MemoryDrafter(parts.sizes, drafter) if "+" in name else drafter


def memory_of(drafter: Drafter) -> MemoryDrafter | None:
    """Return the drafter's memory of past answers, if it has one."""
    return drafter if isinstance(drafter, MemoryDrafter) and drafter.past.share_buckets else None


def _resolved(name: str) -> list[_NamedDrafter]:
    """Return the drafters of a name, the memory first."""
    found = [_named(part) for part in name.split("+")]
    if len(found) > 2:
        raise ValueError(f"drafter {name!r} joins {len(found)} drafters: one tree has at most two")
    if len(found) == 2 and found[0] == found[1]:
        raise ValueError(f"drafter {name!r} asks the same one twice")
    if len(found) == 2 and MEMORY not in (one.name for one in found):
        raise ValueError(f"drafter {name!r}: only the memory joins another in one tree, as in memory+specblock")
    return sorted(found, key=lambda one: one.name != MEMORY)


def _named(name: str) -> _NamedDrafter:
    match = _NAME.fullmatch(name)
    if match is None:
        raise ValueError(f"drafter {name!r} is not the name of a kind, nor one with an argument, as in specblock(rank)")
    name, argument = match.groups(default="")
    kind = _kind(name)
    if argument and not kind.takes_argument:
        raise ValueError(f"drafter {name}({argument}): {name} takes no argument: leave the parentheses out")
    return _NamedDrafter(name, kind, argument)


def _kind(name: str) -> Kind:
    if name in _KINDS:
        return _KINDS[name]
    for entry in entry_points(group=GROUP, name=name):
        kind = loaded(entry)
        if is_trained(kind):
            return Kind(partial(_trained, name), needs="weights")
        if not isinstance(kind, Kind):
            raise ValueError(f"drafter {name!r} ({entry.value}) is not a drafters.kinds.Kind")
        return kind
    if name in MOVED_KINDS:
        raise ValueError(f"drafter {name!r} {why_unknown(name)}")
    raise ValueError(f"unknown drafter {name!r}: choose one of {', '.join(kind_names())}, or memory+A for A with it")
