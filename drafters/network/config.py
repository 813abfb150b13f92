"""The configuration of a trained drafter: sizes and switches, as `config.json` has them beside the weights."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

from drafters.trained_kinds import TRAINED_KINDS, TrainedKind, why_unknown
from kernels.decoder_layer import FUSED_FAMILIES
from kernels.lattice import TOP

PrefixEntries = Literal["first", "all"]
States = Literal["normed", "raw"]


@dataclass(frozen=True, slots=True)
class SpecBlockConfig:
    """Sizes and switches of a drafter. Raises ValueError for values that cannot work together."""

    target: Mapping[str, Any]  # transformers config of the layers, whose type is among `FUSED_FAMILIES`
    tap_layers: tuple[int, ...]  # target layers whose outputs make the condition
    draft_vocab_size: int  # tokens the drafter can propose
    num_layers: int = 2
    block_size: int = 4  # K, positions per forward
    rank_hidden: int = 256
    # "all", as in the paper, costs K times the rows for no gain that was measured (docs/training.md).
    prefix_entries: PrefixEntries = "first"  # which of a committed position's K entries later ones attend to
    normalise_features: bool = (
        True  # norm each tapped feature before the projection (EAGLE-3.1; not in published files)
    )
    normalise_rank_inputs: bool = True  # norm states and scale features of the rank head
    shift: bool = True  # False: ablation without the layer-wise shift
    broadcast: bool = True  # False: only a block's first entry sees condition and token
    coupled: bool = True  # rank head trained on scores with the sampling noise
    trained_length: int = 512  # longest context seen in training, tokens
    # Fields from here on are written only where they differ from the default: see `described`.
    kind: str = "specblock"  # of `TRAINED_KINDS`
    ranks_from_draft: bool = False  # the rank head corrects the rank classes that the draft distribution implies
    token_beside: bool = False  # the first layer's attention reads [token; state] (EAGLE-3)
    continues_from: States | None = None  # where further blocks start; None: raw beside a token, else normed
    joined_norm: bool = False  # one norm of all tapped features together instead of one for each
    normed_residual: bool = False  # of `token_beside`: the first layer adds to the normed state
    mask_token: int | None = None  # entries without a token of their own read this one's embedding
    restarts: bool = False  # further blocks stand at the positions of the first
    rank_scores: int = 0  # likeliest scores from which the rank head's features are computed; 0: all
    rank_biases: bool = True  # of the rank head's layers
    silent_first: bool = False  # a row before a block's entries, the newest token's, predicts nothing

    def __post_init__(self) -> None:
        if self.kind not in TRAINED_KINDS:
            raise ValueError(f"drafter config: kind {self.kind!r} {why_unknown(self.kind)}")
        for name in ("draft_vocab_size", "num_layers", "block_size", "rank_hidden", "trained_length"):
            if getattr(self, name) < 1:
                raise ValueError(f"drafter config: {name} must be at least 1")
        if self.token_beside and (self.shift or self.block_size > 1):
            raise ValueError("drafter config: token_beside asks for blocks of one position, and for no shift")
        if self.mask_token is not None and not 0 <= self.mask_token < self.target_vocab_size:
            raise ValueError(f"drafter config: mask_token {self.mask_token} is no token of the target")
        masked = self.mask_token is not None
        if (masked or self.silent_first) and not (masked and self.traits.forward == "injected"):
            raise ValueError("drafter config: mask_token, with silent_first, is for kinds dflash and jetspec")
        if self.rank_scores and not TOP <= self.rank_scores <= self.draft_vocab_size:
            raise ValueError(f"drafter config: rank_scores must be 0, or from {TOP} to the draft vocabulary's size")
        if self.prefix_entries not in ("first", "all"):
            raise ValueError("drafter config: prefix_entries must be 'first' or 'all'")
        if self.prefix_entries == "all" and not self.runs_context:
            raise ValueError(f"drafter config: prefix_entries must be 'first' in one of kind {self.kind}")
        kind = self.target.get("model_type")
        if kind not in FUSED_FAMILIES:
            raise ValueError(
                f"drafter config: a drafter cannot have layers of kind {kind!r}, only of {', '.join(FUSED_FAMILIES)}; "
                "train one for this target with `adaptree train drafter`"
            )
        if not self.tap_layers:
            raise ValueError("drafter config: tap_layers must name at least one target layer")

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
    def entries(self) -> int:
        """Entries per committed position that later positions attend to."""
        return self.block_size if self.prefix_entries == "all" else 1

    @property
    def traits(self) -> TrainedKind:
        """The kind's data."""
        return TRAINED_KINDS[self.kind]

    @property
    def continues_raw(self) -> bool:
        """Whether further blocks start at states before the output norm."""
        return self.token_beside if self.continues_from is None else self.continues_from == "raw"

    @property
    def reach(self) -> int:
        """Training horizon in positions: trained_blocks * block_size."""
        return self.traits.trained_blocks * self.block_size

    @property
    def runs_context(self) -> bool:
        """Whether committed positions run through the layers as entries, each of which has a state to predict from."""
        return self.traits.forward == "entries"

    @property
    def forward_size(self) -> int:
        """Positions that one forward of the layers computes states for."""
        return self.reach if self.traits.conditioned else self.block_size + self.silent_first

    @property
    def cached_entries(self) -> int:
        """Entries of an anchor's block whose keys and values stay as those of a committed position."""
        return self.entries if self.runs_context else 0

    @property
    def described(self) -> dict[str, Any]:
        """Plain values for `config.json`. Fields after `trained_length` are left out at their defaults: digests are
        taken of this, and those of older drafters must not change."""
        values, names = asdict(self), [field.name for field in fields(self)]
        defaults = {field.name: field.default for field in fields(self)[names.index("trained_length") + 1 :]}
        return {name: value for name, value in values.items() if name not in defaults or value != defaults[name]}

    @property
    def as_json(self) -> str:
        """`described` as JSON text with sorted keys."""
        return json.dumps(self.described, indent=2, sort_keys=True)


def config_from(values: Mapping[str, Any]) -> SpecBlockConfig:
    """Return the config that `described` was taken of. Raises KeyError, TypeError, ValueError for other values."""
    return SpecBlockConfig(**{**values, "tap_layers": tuple(values["tap_layers"])})
