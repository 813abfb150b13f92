"""What a SpecBlock drafter is made of; written beside its weights and checked against the target it is loaded for."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

PrefixEntries = Literal["first", "all"]
RANK_CLASSES = 4
"""Where the target's token stands in the drafter's ranking: 1, 2-4, 5-10, beyond (SpecBlock appendix B)."""


@dataclass(frozen=True, slots=True)
class SpecBlockConfig:
    """Shapes and switches of one drafter. Raises ValueError for values that cannot work."""

    target: Mapping[str, Any]  # transformers' config of the target's decoder: the drafter's layers are of its kind
    tap_layers: tuple[int, ...]  # target layers whose outputs make the condition
    draft_vocab_size: int  # tokens the drafter can propose
    num_layers: int = 2
    block_size: int = 4  # K, positions per forward
    rank_hidden: int = 256
    prefix_entries: PrefixEntries = "first"  # which of a committed position's K entries later ones attend to
    normalise_features: bool = True  # each tapped feature before the projection (EAGLE-3.1; not in published files)
    normalise_rank_inputs: bool = True  # states and features of the rank head, which learns nothing from raw ones
    shift: bool = True  # False: ablation without the layer-wise shift
    broadcast: bool = True  # False: ablation, only a block's first position sees the condition
    coupled: bool = True  # rank head trained on scores with the sampling noise
    trained_length: int = 512  # longest context seen in training, tokens

    def __post_init__(self) -> None:
        for name in ("draft_vocab_size", "num_layers", "block_size", "rank_hidden", "trained_length"):
            if getattr(self, name) < 1:
                raise ValueError(f"drafter config: {name} must be at least 1")
        if self.prefix_entries not in ("first", "all"):
            raise ValueError("drafter config: prefix_entries must be 'first' or 'all'")
        if not self.tap_layers:
            raise ValueError("drafter config: tap_layers must name at least one target layer")

    @property
    def hidden_size(self) -> int:
        return int(self.target["hidden_size"])

    @property
    def target_vocab_size(self) -> int:
        return int(self.target["vocab_size"])

    @property
    def entries(self) -> int:
        """Entries of a committed position that later positions attend to."""
        return self.block_size if self.prefix_entries == "all" else 1

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2, sort_keys=True)

    @staticmethod
    def from_mapping(values: Mapping[str, Any]) -> "SpecBlockConfig":
        """Raises ValueError for unknown keys."""
        unknown = set(values) - {field.name for field in fields(SpecBlockConfig)}
        if unknown:
            raise ValueError(f"drafter config: unknown keys {', '.join(sorted(unknown))}")
        return SpecBlockConfig(**{**values, "tap_layers": tuple(values["tap_layers"])})
