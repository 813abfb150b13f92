"""The config of a trained drafter: the sizes that all kinds share. The config class of a kind adds its own options, and
`traits` translates them for the shared network, forwards and training.

`config.json` has had the same flat form for all kinds since release 0.1; `described` and `of_fields` convert to and
from it."""

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from dataclasses import fields as dataclass_fields
from typing import Any, ClassVar, NamedTuple, Self

from drafters.trained_kinds import trained_kind
from kernels.families import OF_DRAFTERS

Fields = Mapping[str, Any]
"""Fields of a `config.json` by name."""

_SHARED = ("draft_vocab_size", "num_layers", "block_size", "rank_hidden", "coupled", "trained_length")
_ALWAYS_WRITTEN: Fields = {
    "num_layers": 2,
    "block_size": 4,
    "rank_hidden": 256,
    "prefix_entries": "first",
    "normalise_features": True,
    "normalise_rank_inputs": True,
    "shift": True,
    "broadcast": True,
    "coupled": True,
    "trained_length": 512,
}
_WRITTEN_IF_SET: Fields = {
    "kind": "specblock",
    "ranks_from_draft": False,
    "token_beside": False,
    "continues_from": None,
    "joined_norm": False,
    "normed_residual": False,
    "mask_token": None,
    "restarts": False,
    "rank_scores": 0,
    "rank_biases": True,
    "silent_first": False,
}
"""Fields with their defaults, left out of the file at the default: digests of older drafters must not change."""
_DEFAULTS: Fields = {**_ALWAYS_WRITTEN, **_WRITTEN_IF_SET}

_SHORT_BLOCK = 2  # positions; drafters of such short blocks may run as many forwards as they were trained for


class RankHeadShape(NamedTuple):
    """Options of the rank head."""

    normalised: bool = True  # its input states are normed, and the features scaled
    biases: bool = True
    scores: int = 0  # number of highest scores from which features are computed; 0: all
    from_draft: bool = False  # it corrects the class probabilities under the draft distribution


class NetworkTraits(NamedTuple):
    """Properties of a kind's network on which the shared network, forwards and training depend."""

    normed_parts: int  # parts of the tapped features that are normed separately before the projection
    rank_head: RankHeadShape = RankHeadShape()
    shifts: int = 0  # number of layer-wise shifts
    entries: int = 1  # entries of each committed position to which later positions attend
    injected: bool = False  # committed positions run no layer: keys and values come from their condition
    silent: int = 0  # rows before a block's entries that predict nothing
    two_way: bool = False  # entries of a block attend to all of the block, not only to those before
    paths: int = 1  # likeliest paths that continue at each position; above 1 only if a tree has one block
    one_forward: bool = False  # the layers run once for all blocks of a tree
    continues_raw: bool = False  # further blocks start at states before the output norm
    restarts: bool = False  # further blocks have the rotary positions of the first


@dataclass(frozen=True, slots=True)
class DrafterConfig(ABC):
    """Config of a trained drafter, with the sizes of all kinds. Raises ValueError for invalid values."""

    kind: ClassVar[str]  # the name in drafter files and in the setting `drafter`
    trained_blocks: ClassVar[int]  # number of consecutive blocks in training
    family: ClassVar[str | None] = None  # layer family in published drafters of the kind; None: the target's
    fixed: ClassVar[Fields] = {}  # fields of `config.json` with one value for all drafters of the kind

    target: Mapping[str, Any]  # transformers config of the drafter's layers, of a type in `families`
    tap_layers: tuple[int, ...]  # target layers whose outputs are the features
    draft_vocab_size: int  # tokens the drafter can propose
    num_layers: int
    block_size: int  # K, positions per forward
    rank_hidden: int = 256
    coupled: bool = True  # the rank head was trained with sampling noise in the scores
    trained_length: int = 512  # longest context seen in training, tokens

    def __post_init__(self) -> None:
        for name in ("num_layers", "draft_vocab_size", "block_size", "rank_hidden", "trained_length"):
            if getattr(self, name) < 1:
                raise ValueError(f"drafter config: {name} must be at least 1")
        layers = self.target.get("model_type")
        if layers not in self.families:
            raise ValueError(
                f"drafter config: a drafter cannot have layers of kind {layers!r}, only of "
                f"{', '.join(self.families)}; train one for this target with `adaptree train drafter`"
            )
        if not self.tap_layers:
            raise ValueError("drafter config: tap_layers must name at least one target layer")

    @abstractmethod
    def structure(self) -> Any:
        """Return the `Structure` of the kind's network for this config."""

    @property
    def families(self) -> tuple[str, ...]:
        """Model types that layers of the kind can have."""
        return OF_DRAFTERS

    @property
    @abstractmethod
    def traits(self) -> NetworkTraits:
        """The properties on which the shared code depends."""

    @property
    def options(self) -> Fields:
        """The kind's own fields of `config.json`: by default `fixed`, and the fields of its class that have a name
        there."""
        return {**self.fixed, **{name: getattr(self, name) for name in self._own_names()}}

    @classmethod
    def options_of(cls, fields: Fields) -> Fields:
        """Return the kind's own constructor arguments for these fields of `config.json`. Raises ValueError."""
        return {name: fields[name] for name in cls._own_names()}

    @classmethod
    def _own_names(cls) -> list[str]:
        return [own.name for own in dataclass_fields(cls) if own.name in _DEFAULTS and own.name not in _SHARED]

    @property
    def hidden_size(self) -> int:
        """Width of the states, equal to the target's."""
        return int(self.target["hidden_size"])

    @property
    def target_vocab_size(self) -> int:
        """Size of the target's vocabulary."""
        return int(self.target["vocab_size"])

    @property
    def features_size(self) -> int:
        """Width of the tapped features of one position, taps * hidden."""
        return len(self.tap_layers) * self.hidden_size

    @property
    def reach(self) -> int:
        """Training horizon in positions: trained_blocks * block_size."""
        return self.trained_blocks * self.block_size

    @property
    def forward_size(self) -> int:
        """Number of rows of a block: the positions for which a forward of the layers computes states."""
        return self.reach if self.traits.one_forward else self.block_size + self.traits.silent

    @property
    def cached_entries(self) -> int:
        """Number of entries of an anchor's block that are committed entries, whose keys and values stay in the pool."""
        return 0 if self.traits.injected else self.traits.entries

    def blocks(self, requested: int) -> int:
        """Return the maximum number of blocks per tree for the requested number. It is the trained number for kinds
        with one trained block or one forward per tree, and at least the trained number for short blocks."""
        if self.trained_blocks == 1 or self.traits.one_forward:
            return self.trained_blocks
        return max(requested, self.trained_blocks) if self.block_size <= _SHORT_BLOCK else requested

    @property
    def described(self) -> dict[str, Any]:
        """This config as the fields of its `config.json`; optional fields at their default are left out."""
        found = self._fields
        return {name: found[name] for name in found if found[name] != _WRITTEN_IF_SET.get(name, ...)}

    @property
    def as_json(self) -> str:
        """The fields of `described` as JSON text with sorted keys, to hash or compare."""
        return json.dumps(self.described, indent=2, sort_keys=True)

    @property
    def _fields(self) -> dict[str, Any]:
        shared = {name: getattr(self, name) for name in ("target", "tap_layers", "kind", *_SHARED)}
        return {**_DEFAULTS, **shared, **self.options}

    @classmethod
    def of_fields(cls, values: Fields) -> Self:
        """Return the config for the fields of a `config.json`. Raises KeyError, TypeError or ValueError if they are
        invalid."""
        unknown = sorted(values.keys() - _DEFAULTS.keys() - {"target", "tap_layers", "draft_vocab_size"})
        if unknown:
            raise ValueError(f"drafter config: unknown to this version: {', '.join(unknown)}")
        fields = {**_DEFAULTS, **values, "tap_layers": tuple(values["tap_layers"])}
        shared = {name: fields[name] for name in ("target", "tap_layers", *_SHARED)}
        config = cls(**shared, **cls.options_of(fields))
        for name, value in config._fields.items():
            if fields[name] != value:
                raise ValueError(f"drafter config: {name} must be {value!r}, not {fields[name]!r}, for kind {cls.kind}")
        return config


def config_from(values: Fields) -> DrafterConfig:
    """Return the config of any kind for the fields of a `config.json`. Raises KeyError, TypeError or ValueError if they
    are invalid."""
    return trained_kind(values.get("kind", "specblock")).config.of_fields(values)
