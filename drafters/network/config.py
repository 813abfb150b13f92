"""The configuration of a trained drafter: the sizes that all kinds share. A kind's own config adds its options, and
says by `traits` what they mean for the shared network, forwards and training.

`config.json` has kept one flat form since release 0.1, whatever the kind: `described` writes it and `Fields` reads it.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Self

from drafters.trained_kinds import trained_kind
from kernels.decoder_layer import FUSED_FAMILIES

Fields = Mapping[str, Any]
"""The values of a `config.json`, complete: those left out in the file have their defaults."""

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
"""Digests are taken of what is written, and those of older drafters must not change."""
_DEFAULTS: Fields = {**_ALWAYS_WRITTEN, **_WRITTEN_IF_SET}

_SHORT_BLOCK = 2  # positions; further forwards for so few are offered up to the trained depth, each taken while it pays


class RankHeadShape(NamedTuple):
    """Variants of the rank head."""

    normalised: bool = True  # states are normed and features scaled
    biases: bool = True
    scores: int = 0  # likeliest scores from which features are computed; 0: all
    from_draft: bool = False  # it corrects the rank classes that the draft distribution implies


class NetworkTraits(NamedTuple):
    """Properties of a drafter that the shared network, forwards and training read."""

    normed_parts: int  # parts of the tapped features that have a norm each, before the projection
    rank_head: RankHeadShape = RankHeadShape()
    shifts: int = 0  # layer-wise shifts, between layers
    entries: int = 1  # entries per committed position that later positions attend to
    silent: int = 0  # rows before a block's entries that predict nothing
    two_way: bool = False  # entries of a block attend to all of the block, not only to those before
    paths: int = 1  # likeliest paths that go on at each position of a block; above 1 only where a tree has one block
    one_forward: bool = False  # one forward of the layers serves all blocks of a tree
    continues_raw: bool = False  # further blocks start at states before the output norm
    restarts: bool = False  # further blocks stand at the positions of the first


@dataclass(frozen=True, slots=True)
class DrafterConfig(ABC):
    """Sizes that drafters of all kinds have. Raises ValueError for values that cannot work together."""

    kind: ClassVar[str]  # the name in drafter files and in the setting `drafter`
    trained_blocks: ClassVar[int]  # consecutive blocks that training goes through
    family: ClassVar[str | None] = None  # layer family the kind is published with; None: the target's
    injected: ClassVar[bool] = False  # committed positions run no layer: keys and values are made of their condition

    target: Mapping[str, Any]  # transformers config of the layers, whose type is among `FUSED_FAMILIES`
    tap_layers: tuple[int, ...]  # target layers whose outputs make the condition
    draft_vocab_size: int  # tokens the drafter can propose
    num_layers: int
    block_size: int  # K, positions per forward
    rank_hidden: int = 256
    coupled: bool = True  # the rank head was trained on scores with the sampling noise
    trained_length: int = 512  # longest context seen in training, tokens

    def __post_init__(self) -> None:
        for name in ("num_layers", "draft_vocab_size", "block_size", "rank_hidden", "trained_length"):
            if getattr(self, name) < 1:
                raise ValueError(f"drafter config: {name} must be at least 1")
        layers = self.target.get("model_type")
        if layers not in FUSED_FAMILIES:
            raise ValueError(
                f"drafter config: a drafter cannot have layers of kind {layers!r}, only of "
                f"{', '.join(FUSED_FAMILIES)}; train one for this target with `adaptree train drafter`"
            )
        if not self.tap_layers:
            raise ValueError("drafter config: tap_layers must name at least one target layer")

    @abstractmethod
    def structure(self) -> Any:
        """Return the kind's `Structure` of this config."""

    @property
    @abstractmethod
    def traits(self) -> NetworkTraits:
        """Properties that the shared parts read."""

    @property
    @abstractmethod
    def options(self) -> Fields:
        """Fields of `config.json` in which the kind differs from the defaults."""

    @classmethod
    @abstractmethod
    def options_of(cls, fields: Fields) -> Fields:
        """Return the values of the kind's own fields for these fields of `config.json`."""

    @property
    def hidden_size(self) -> int:
        """Width of states, the target's."""
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
        """Positions that one forward of the layers computes states for."""
        return self.reach if self.traits.one_forward else self.block_size + self.traits.silent

    @property
    def cached_entries(self) -> int:
        """Entries of an anchor's block whose keys and values stay in the pool when the anchor is committed."""
        return 0 if self.injected else self.traits.entries

    def blocks(self, requested: int) -> int:
        """Return the number of blocks per tree: as requested, except for kinds that were trained for one block or draft
        from one forward (then the trained number), and for short blocks (at least the trained number)."""
        if self.trained_blocks == 1 or self.traits.one_forward:
            return self.trained_blocks
        return max(requested, self.trained_blocks) if self.block_size <= _SHORT_BLOCK else requested

    @property
    def described(self) -> dict[str, Any]:
        """Fields of `config.json`, as plain values."""
        found = self._fields
        return {name: found[name] for name in found if found[name] != _WRITTEN_IF_SET.get(name, ...)}

    @property
    def as_json(self) -> str:
        """`described` as JSON text with sorted keys."""
        return json.dumps(self.described, indent=2, sort_keys=True)

    @property
    def _fields(self) -> dict[str, Any]:
        shared = {name: getattr(self, name) for name in ("target", "tap_layers", "kind", *_SHARED)}
        return {**_DEFAULTS, **shared, **self.options}

    @classmethod
    def of_fields(cls, values: Fields) -> Self:
        """Return the config from the fields of its `config.json`. Raises KeyError, TypeError and ValueError."""
        unknown = sorted(values.keys() - _DEFAULTS.keys() - {"target", "tap_layers", "draft_vocab_size"})
        if unknown:
            raise ValueError(f"drafter config: {', '.join(unknown)} is unknown to this version")
        fields = {**_DEFAULTS, **values, "tap_layers": tuple(values["tap_layers"])}
        shared = {name: fields[name] for name in ("target", "tap_layers", *_SHARED)}
        config = cls(**shared, **cls.options_of(fields))
        for name, value in config._fields.items():
            if fields[name] != value:
                raise ValueError(
                    f"drafter config: {name} must be {value!r}, not {fields[name]!r}, in one of kind {cls.kind}"
                )
        return config


def config_from(values: Fields) -> DrafterConfig:
    """Return the config of any kind from the fields of its `config.json` (`described`). Raises KeyError, TypeError and
    ValueError."""
    return trained_kind(values.get("kind", "specblock")).config.of_fields(values)
