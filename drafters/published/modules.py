"""Drafters on the target's last layer: Medusa's heads, and the multi-token prediction module that a target is published
with."""

from typing import Any

import torch
from torch import Tensor

from drafters.network.checkpoint import HEAD, VOCABULARY, TargetParts
from drafters.network.config import SpecBlockConfig
from drafters.published.form import Described, PublishedForm, Tensors, renamed
from drafters.trained_kinds import TRAINED_KINDS


def _on_last_layer(target: TargetParts, **numbers: Any) -> SpecBlockConfig:
    """Return the config of a drafter that reads the target's last layer and can draft every token."""
    last, vocab = target.config["num_hidden_layers"] - 1, target.config["vocab_size"]
    return SpecBlockConfig(target.config, (last,), vocab, ranks_from_draft=True, **numbers)


# Medusa: for each head a residual block and an output layer, on the target's last state after the output norm.

_MEDUSA_KEY = "medusa_num_heads"
"""Some configs state fewer heads than there are."""
_MEDUSA_PARTS = ("0.linear.weight", "0.linear.bias", "1.weight")


def _medusa_config(described: Described, tensors: Tensors, target: TargetParts) -> SpecBlockConfig:
    if described.get("medusa_num_layers", 1) != 1:
        raise ValueError("its heads have more than one residual block each, which are not read")
    block_size = len({name.partition(".")[0] for name in _by_head(tensors)})
    return _on_last_layer(target, kind="medusa", num_layers=0, block_size=block_size, shift=False, own_heads=True)


def _medusa_weights(tensors: dict[str, Tensor], config: SpecBlockConfig, target: TargetParts) -> dict[str, Tensor]:
    if target.norm is None:
        raise ValueError("its target ends in a norm of another kind")
    own, heads = _by_head(tensors), range(config.block_size)
    unknown = sorted(own.keys() - {f"{head}.{part}" for head in heads for part in _MEDUSA_PARTS})
    if unknown:
        raise ValueError(f"it has tensors that are not read: {', '.join(unknown)}")
    weight, bias, output = (torch.stack([own[f"{head}.{part}"] for head in heads]) for part in _MEDUSA_PARTS)
    return {
        "input_layer.feature_norms.0.weight": target.norm,
        "input_layer.condition_proj.weight": torch.eye(config.hidden_size),
        "input_layer.heads_weight": weight,
        "input_layer.heads_bias": bias,
        HEAD: output,
        VOCABULARY: torch.arange(config.draft_vocab_size),
    }


def _by_head(tensors: Tensors) -> dict[str, Tensor]:
    """Return tensors by names that begin with the number of the head."""
    return {name.removeprefix("medusa_head."): value for name, value in tensors.items()}


# MiMo's multi-token prediction module, among its target's weights: one layer on a projection of the last layer's
# output, before the output norm, and the next token's embedding; the target's own head reads it.

_MTP_MODULE = "model.mtp_layers.0."
_MTP_NAMES = {
    "hidden_layernorm.": "input_layer.condition_norm.",
    "token_layernorm.": "input_layer.token_norm.",
    "final_layernorm.": "decoder.norm.",
    "": "decoder.layers.0.",
}


def _is_mtp(described: Described) -> bool:
    return described.get("model_type") == "mimo" and bool(described.get("num_nextn_predict_layers"))


def _mtp_config(described: Described, tensors: Tensors, target: TargetParts) -> SpecBlockConfig:
    length = target.config["max_position_embeddings"]
    shape = TRAINED_KINDS["mtp"].shape
    return _on_last_layer(target, kind="mtp", trained_length=length, normalise_features=False, **shape)


def _mtp_weights(tensors: dict[str, Tensor], config: SpecBlockConfig, target: TargetParts) -> dict[str, Tensor]:
    """The condition is the tapped state itself; position queries are 0."""
    own = {name.removeprefix(_MTP_MODULE): value for name, value in tensors.items() if name.startswith(_MTP_MODULE)}
    joined, hidden = own.pop("input_proj.weight"), config.hidden_size  # columns of the state, then of the token
    return {
        **renamed(own, _MTP_NAMES),
        "input_layer.condition_proj.weight": torch.eye(hidden),
        "input_layer.position_queries": torch.zeros(1, hidden),
        "input_layer.query_norm.weight": torch.ones(hidden),
        "input_layer.fuse.weight": torch.cat([joined, joined.new_zeros(hidden, hidden)], dim=1),
        HEAD: tensors.get(HEAD, target.embedding),  # files with tied weights have no head
        VOCABULARY: torch.arange(config.draft_vocab_size),
    }


MTP = PublishedForm(
    "mtp",
    _is_mtp,
    lambda _: "mtp",
    _mtp_config,
    _mtp_weights,
    reads=lambda name: name.startswith(_MTP_MODULE) or name == HEAD,
)
MEDUSA = PublishedForm(
    "medusa", lambda described: _MEDUSA_KEY in described, lambda _: "medusa", _medusa_config, _medusa_weights
)
