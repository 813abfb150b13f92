"""EAGLE-3 and its relatives: a first layer whose attention reads the token's embedding beside the state, `fc` of three
target layers, and a draft vocabulary. Read as EAGLE and SpecForge publish it (`midlayer`, EAGLE-3.1's norms), as
speculators does (`layers.N`, nested layer config)."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from drafters.network.checkpoint import VOCABULARY, TargetParts
from drafters.network.config import SpecBlockConfig
from drafters.published.form import (
    TRAINED_LENGTH,
    Described,
    PublishedForm,
    Tensors,
    drop_embedding,
    layers_of,
    named,
    refuse_set,
    renamed,
    speculators_config,
    taps_of,
    vocabulary,
    written_layers,
    written_vocabulary,
)

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


def _is_eagle3(described: Described) -> bool:
    """By name; the oldest files have only the name of a language model, and a draft vocabulary."""
    names = named(described)
    eagle = any("eagle3" in name.lower() for name in names)
    return eagle or (set(names) <= {"LlamaForCausalLM"} and "draft_vocab_size" in described)


def _config(described: Described, tensors: Tensors, target: TargetParts) -> SpecBlockConfig:
    """With `norm_output` (EAGLE-3.1) blocks continue from the normed state, as in vLLM and speculators."""
    layers = layers_of(described.get(_NESTED, described), target)
    own = described.get("eagle_config") or {}
    refuse_set(described, _UNREAD, layers["hidden_size"])
    return SpecBlockConfig(
        {**layers, "num_hidden_layers": target.config["num_hidden_layers"]},
        tap_layers=_taps(described.get(_TAPS) or [layer + 1 for layer in own.get(_TAPS) or ()], target),
        draft_vocab_size=described.get("draft_vocab_size") or layers["vocab_size"],
        num_layers=layers["num_hidden_layers"],
        trained_length=described.get(TRAINED_LENGTH) or layers["max_position_embeddings"],
        normalise_features=bool(described.get("fc_norm")) or bool(described.get("norm_before_fc")),
        joined_norm=bool(described.get("norm_before_fc")),
        normed_residual=bool(described.get("norm_before_residual")),
        ranks_from_draft=True,
        token_beside=True,
        kind="eagle3",
        block_size=1,
        shift=False,
        continues_from="normed" if described.get("norm_output") else None,
    )


def _taps(counted: Sequence[int] | None, target: TargetParts) -> tuple[int, ...]:
    """Return the tapped layers; number k is the output of layer k - 1 (in an `eagle_config`, of layer k). Unset: 2,
    L / 2 and L - 3."""
    depth = target.config["num_hidden_layers"]
    if not counted and depth < 4:
        raise ValueError(f"it taps the fourth layer from the end, and the target has {depth}")
    return taps_of(counted or (2, depth // 2, depth - 3), target, first=1)


def _weights(tensors: dict[str, Tensor], config: SpecBlockConfig, target: TargetParts) -> dict[str, Tensor]:
    drop_embedding(tensors, target)
    d2t = vocabulary(tensors, config)
    return {**renamed(tensors, _NAMES), **d2t}


def _tensors(weights: Tensors, config: SpecBlockConfig, first: str) -> dict[str, Tensor]:
    """Return a file's tensors; `first`: prefix of the first layer. A rank head has no place in it."""
    names = {
        "input_layer.condition_proj.": "fc.",
        "input_layer.feature_norms.": "fc_norm.",
        "input_layer.token_norm.": f"{first}input_layernorm.",
        f"{_LAYER}input_layernorm.": f"{first}hidden_norm.",
        _LAYER: first,
        "decoder.": "",
    }
    if config.joined_norm:
        names["input_layer.feature_norms.0."] = "input_norm."
    left = ("rank_", VOCABULARY)
    kept = {name: value for name, value in weights.items() if not name.startswith(left)}
    return {**renamed(kept, names), **written_vocabulary(weights, config)}


def _flags(config: SpecBlockConfig) -> dict[str, Any]:
    """Return the keys for what differs from EAGLE's own network. Raises ValueError for a network that no form of this
    family holds."""
    if not config.token_beside:
        raise ValueError(f"a drafter of kind {config.kind} reads a fused input, and none of a token beside the state")
    if config.target["model_type"] != "llama" or config.target.get("mlp_bias"):
        raise ValueError(f"its layers are {config.target['model_type']}'s, and the form has Llama's without biases")
    return {
        "fc_norm": config.normalise_features and not config.joined_norm,
        "norm_before_fc": config.joined_norm,
        "norm_before_residual": config.normed_residual,
        "norm_output": not config.continues_raw,
    }


def _write_eagle3(config: SpecBlockConfig, weights: Tensors, target: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """As SpecForge writes it; flags that EAGLE's own files lack are written only where they are set."""
    flags = {key: True for key, is_set in _flags(config).items() if is_set}
    if config.num_layers > 1:
        raise ValueError(f"it has {config.num_layers} layers, and the form has one: write the speculators form")
    described = {
        "architectures": ["LlamaForCausalLMEagle3"],
        **written_layers(config),
        "draft_vocab_size": config.draft_vocab_size,
        _TAPS: [tap + 1 for tap in config.tap_layers],  # as vLLM counts; beside it as SGLang and SpecForge do
        "eagle_config": {_TAPS: list(config.tap_layers), "use_aux_hidden_state": True},
        TRAINED_LENGTH: config.trained_length,
        **flags,
    }
    return described, _tensors(weights, config, "midlayer.")


def _write_speculators(
    config: SpecBlockConfig, weights: Tensors, target: str
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """As speculators writes EAGLE-3."""
    described = {
        "architectures": ["Eagle3Speculator"],
        **speculators_config("eagle3", config, target),
        _TAPS: [tap + 1 for tap in config.tap_layers],
        **_flags(config),
    }
    return described, _tensors(weights, config, "layers.0.")


EAGLE3 = PublishedForm(
    "eagle3",
    lambda described: _is_eagle3(described) and _NESTED not in described,
    lambda _: "eagle3",
    _config,
    _weights,
    write=_write_eagle3,
    writes=("eagle3",),
)
SPECULATORS_EAGLE3 = EAGLE3._replace(
    name="speculators", recognises=_is_eagle3, write=_write_speculators, writes=("eagle3",)
)
