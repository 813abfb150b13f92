"""Builds a drafter by name. The only place that knows every kind; others may be installed beside it.

A name is that of a kind, with an argument in parentheses where it takes one; or `memory+A`, one tree of what is
remembered and of what A proposes, which is asked where that pays; or `switch(A,B)`, one of two in each step.
Distributions add kinds by entry points of the group `adaptree.drafters`, each a `Kind`.
"""

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from importlib.metadata import EntryPoint, entry_points
from typing import NamedTuple

from torch import Tensor

from drafters.kinds import Kind, Need, Parts
from drafters.kinds import TrainedWeights as TrainedWeights
from drafters.language_model.kinds import DRAFT_MODEL, EARLY_EXIT
from drafters.memory.drafter import MemoryDrafter
from drafters.protocol import Committed, DraftContext, Drafter, Noise
from drafters.random_tree import RandomTreeDrafter
from drafters.specblock.drafter import SpecBlockDrafter
from drafters.specblock.growth import POLICIES
from drafters.switch import SwitchDrafter
from drafters.trained_kinds import TRAINED_KINDS
from drafters.tree import Candidates, DraftTree

GROUP = "adaptree.drafters"
MEMORY = "memory"
_NAME = re.compile(r"([\w.-]+)(?:\(([^()+]*)\))?")
_SWITCH = re.compile(r"switch\((.+),(.+)\)")


class NoDrafter(Drafter):
    """Grows the empty tree for everyone: plain decoding through the very same step."""

    name = "none"

    def start(self, contexts: Sequence[DraftContext]) -> None:
        """Nothing to begin."""

    def grow(self, rows: Tensor, noise: Noise) -> Candidates:
        return DraftTree.empty(rows.shape[0], rows.device)

    def commit(self, committed: Committed) -> None:
        """Nothing to learn."""


def _trained(kind: str, parts: Parts) -> Drafter:
    """The argument is a policy of growth."""
    if parts.weights is None:
        raise ValueError(f"drafter {kind!r} needs trained weights: set drafter_path")
    policy = parts.argument or parts.weights.policy
    if policy not in POLICIES:
        raise ValueError(f"drafter {kind}({policy}): trees grow by one of {', '.join(POLICIES)}")
    return SpecBlockDrafter(parts.sizes, replace(parts.weights, policy=policy))


_KINDS = {
    MEMORY: Kind(lambda parts: MemoryDrafter(parts.sizes), takes_argument=False),
    "none": Kind(lambda parts: NoDrafter(), takes_argument=False),
    "random": Kind(lambda parts: RandomTreeDrafter(parts.sizes), takes_argument=False),
    **{kind: Kind(partial(_trained, kind), needs="weights") for kind in TRAINED_KINDS},
    "draft_model": DRAFT_MODEL,
    "early_exit": EARLY_EXIT,
}


_BY_COST: tuple[Need, ...] = ("nothing", "layers", "weights", "model")
"""What the drafters need whose steps cost least, and so on."""


class _Named(NamedTuple):
    """One of the drafters of a name."""

    name: str  # of the kind
    kind: Kind
    argument: str

    @property
    def place(self) -> tuple[int, int, int, str]:
        """Among all there can be, cheaper ones first."""
        order = kind_names().index(self.name), len(self.argument), self.argument  # numbers by their size
        return _BY_COST.index(self.kind.needs), *order


def kind_names() -> tuple[str, ...]:
    """Every kind there is, those of this package first."""
    installed = {entry.name for entry in entry_points(group=GROUP)}
    return (*_KINDS, *sorted(installed - _KINDS.keys()))


def needs_of(name: str) -> frozenset[Need]:
    """What the drafter of that name needs. Raises ValueError as `build_drafter`."""
    return frozenset(one.kind.needs for one in _resolved(name))


def taps_of(name: str, num_layers: int, trained: Sequence[int]) -> tuple[int, ...]:
    """Which of so many layers the drafter of that name taps, in the order in which it is told; `trained`: those of the
    trained weights. Raises ValueError as `build_drafter`."""
    layers: tuple[int, ...] = ()
    for one in _resolved(name):
        own = trained if one.kind.needs == "weights" else one.kind.tap_layers(num_layers)
        layers += tuple(layer for layer in own if layer not in layers)  # of a small target one may tap a layer twice
    return layers


def trained_kind_of(name: str) -> str | None:
    """Which of the drafters of that name is served from a folder of this package's form, if one is."""
    kinds = (part.partition("(")[0] for part in _parts_of(name))
    return next((kind for kind in kinds if kind in TRAINED_KINDS), None)


def build_drafter(name: str, parts: Parts) -> Drafter:
    """The drafter of that name. Raises ValueError for one that there is not, or where something is missing that it
    needs."""
    named = _resolved(name)
    if "+" in name:  # the memory stands first
        return MemoryDrafter(parts.sizes, _built(named[1], parts))
    first, *others = (_built(one, parts) for one in named)
    return SwitchDrafter(first, others[0], parts.sizes) if others else first


def memory_of(drafter: Drafter) -> MemoryDrafter | None:
    """The memory of past answers in a drafter, if it has one."""
    parts = drafter.parts if isinstance(drafter, SwitchDrafter) else (drafter,)
    return next((part for part in parts if isinstance(part, MemoryDrafter) and part.past.share_buckets), None)


def _built(one: _Named, parts: Parts) -> Drafter:
    return one.kind.build(replace(parts, argument=one.argument))


def _resolved(name: str) -> list[_Named]:
    """The cheaper one first: the other is asked where that pays."""
    found = [_named(part) for part in _parts_of(name)]
    if len(found) > 2:
        raise ValueError(f"drafter {name!r} joins {len(found)} drafters: one tree has at most two")
    if len(found) == 2 and found[0] == found[1]:
        raise ValueError(f"drafter {name!r} asks the same one twice")
    if "+" in name and MEMORY not in (one.name for one in found):
        raise ValueError(f"drafter {name!r}: only the memory joins another in one tree, as in memory+specblock")
    if sum(one.kind.needs in ("weights", "model") for one in found) > 1:
        raise ValueError(f"drafter {name!r}: drafter_path holds what one of them needs, and both need something")
    return sorted(found, key=lambda one: one.place)


def _parts_of(name: str) -> tuple[str, ...]:
    """The names of the drafters that stand in a name."""
    two = _SWITCH.fullmatch(name)
    return tuple(name.split("+")) if two is None else two.groups()


def _named(name: str) -> _Named:
    match = _NAME.fullmatch(name)
    if match is None:
        raise ValueError(f"drafter {name!r} is no name of a kind, nor one with an argument, as in early_exit(4)")
    name, argument = match.groups(default="")
    kind = _kind(name)
    if argument and not kind.takes_argument:
        raise ValueError(f"drafter {name}({argument}): {name} takes no argument: leave the parentheses out")
    return _Named(name, kind, argument)


def _kind(name: str) -> Kind:
    if name in _KINDS:
        return _KINDS[name]
    for entry in entry_points(group=GROUP, name=name):
        return _loaded(entry)
    raise ValueError(
        f"unknown drafter {name!r}: choose one of {', '.join(kind_names())}, or two of them as memory+A or switch(A,B)"
    )


def _loaded(entry: EntryPoint) -> Kind:
    """A kind that another distribution brings."""
    try:
        kind = entry.load()
    except Exception as error:  # whatever a module of others does when it is imported
        raise ValueError(f"drafter {entry.name!r} ({entry.value}) cannot be loaded: {error!r}") from error
    if not isinstance(kind, Kind):
        raise ValueError(f"drafter {entry.name!r} ({entry.value}) is no drafters.kinds.Kind")
    return kind
