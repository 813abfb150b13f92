"""EAGLE-3 and its relatives: a first layer whose attention reads the token's embedding beside the state, `fc` of three
target layers, and a draft vocabulary. Read as EAGLE and SpecForge publish it (`midlayer`, EAGLE-3.1's norms), as
speculators does (`layers.N`, nested layer config), and P-EAGLE, which drafts all positions in one forward."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from drafters.published.form import (
    EMBEDDING,
    Described,
    PublishedForm,
    Tensors,
    drop_embedding,
    layers_of,
    named,
    refuse_set,
    renamed,
    taps_of,
    vocabulary,
)
from drafters.specblock.checkpoint import TargetParts
from drafters.specblock.config import SpecBlockConfig
from drafters.trained_kinds import TRAINED_KINDS

_NESTED = "transformer_layer_config"
_TAPS = "eagle_aux_hidden_state_layer_ids"
_LAYER = "decoder.layers.0."
_NAMES = {
    "fc.": "input_layer.condition_proj.",
    "fc_norm.": "input_layer.feature_norms.",
    "input_norm.": "input_layer.feature_norms.0.",
    "layers.": "decoder.layers.",
    **{
        f"{prefix}{theirs}": ours
        for prefix in ("midlayer.", "layers.0.")
        for theirs, ours in (
            ("", _LAYER),
            ("input_layernorm.", "input_layer.token_norm."),
            ("hidden_norm.", f"{_LAYER}input_layernorm."),
        )
    },
    "norm.": "decoder.norm.",
}
_UNREAD = ("target_hidden_size", "parallel_drafting", "sliding_window_non_causal")
"""Keys that would change the result."""
_DEPTHS = 8
"""Positions that P-EAGLE is trained for, where its file does not say."""


def _is_eagle3(described: Described) -> bool:
    """By name; the oldest files have only the name of a language model, and a draft vocabulary."""
    names = named(described)
    eagle = any("eagle3" in name.lower() for name in names)
    return eagle or (set(names) <= {"LlamaForCausalLM"} and "draft_vocab_size" in described)


def _is_peagle(described: Described) -> bool:
    return any("peagle" in name.lower() for name in named(described))


def _config(described: Described, tensors: Tensors, target: TargetParts, **kind: Any) -> SpecBlockConfig:
    layers = layers_of(described.get(_NESTED, described), target)
    own = described.get("eagle_config") or {}
    unread = {key: value for key, value in described.items() if value != layers["hidden_size"]}
    refuse_set(unread, _UNREAD)
    return SpecBlockConfig(
        layers,
        tap_layers=_taps(described.get(_TAPS) or own.get(_TAPS), target),
        draft_vocab_size=described.get("draft_vocab_size") or layers["vocab_size"],
        num_layers=layers["num_hidden_layers"],
        trained_length=layers["max_position_embeddings"],
        normalise_features=bool(described.get("fc_norm")) or bool(described.get("norm_before_fc")),
        joined_norm=bool(described.get("norm_before_fc")),
        normed_residual=bool(described.get("norm_before_residual")),
        ranks_from_draft=True,
        token_beside=True,
        **kind,
    )


def _eagle3_config(described: Described, tensors: Tensors, target: TargetParts) -> SpecBlockConfig:
    """With `norm_output` (EAGLE-3.1) blocks continue from the normed state, as in vLLM and speculators."""
    continues = "normed" if described.get("norm_output") else None
    return _config(described, tensors, target, kind="eagle3", block_size=1, shift=False, continues_from=continues)


def _peagle_config(described: Described, tensors: Tensors, target: TargetParts) -> SpecBlockConfig:
    if _mask_token(described) is None:
        raise ValueError("its config has no mask_token_id")
    methods = (described.get("speculators_config") or {}).get("proposal_methods") or [{}]
    shape = {**TRAINED_KINDS["parallel"].shape, "block_size": methods[0].get("speculative_tokens") or _DEPTHS}
    del shape["num_layers"]
    return _config(described, tensors, target, kind="parallel", mask_token=_mask_token(described), **shape)


def _mask_token(described: Described) -> int | None:
    token = described.get("mask_token_id")
    return None if token is None else int(token)


def _taps(counted: Sequence[int] | None, target: TargetParts) -> tuple[int, ...]:
    """Return the tapped layers; number k of a file is the output of layer k - 1. Unset: 2, L / 2 and L - 3."""
    depth = target.config["num_hidden_layers"]
    if not counted and depth < 4:
        raise ValueError(f"it taps the fourth layer from the end, and the target has {depth}")
    return taps_of(counted or (2, depth // 2, depth - 3), target, first=1)


def _eagle3_weights(tensors: dict[str, Tensor], config: SpecBlockConfig, target: TargetParts) -> dict[str, Tensor]:
    drop_embedding(tensors, target)
    d2t = vocabulary(tensors, config)
    return {**renamed(tensors, _NAMES), **d2t}


def _peagle_weights(tensors: dict[str, Tensor], config: SpecBlockConfig, target: TargetParts) -> dict[str, Tensor]:
    assert config.mask_token is not None
    mask = tensors.pop("mask_hidden")
    table = tensors.get(EMBEDDING, target.embedding)
    found = _eagle3_weights(tensors, config, target)
    embedded = table[config.mask_token].cpu()  # planned transfer: at the start
    return {**found, "input_layer.mask_features": mask.flatten(), "input_layer.mask_embedding": embedded}


EAGLE3 = PublishedForm("eagle3", _is_eagle3, lambda _: "eagle3", _eagle3_config, _eagle3_weights)
PEAGLE = PublishedForm("peagle", _is_peagle, lambda _: "parallel", _peagle_config, _peagle_weights)
