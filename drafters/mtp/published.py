"""MiMo's module, as it lies among its target's weights: one layer behind a projection of what the target's last layer
puts out, before the output norm, and the next token's embedding; the target's own head reads it."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from drafters.mtp.kind import MTP
from drafters.specblock.checkpoint import VOCABULARY, TargetParts
from drafters.specblock.form import Form, renamed
from drafters.specblock.model import SpecBlockConfig

_MODULE = "model.mtp_layers.0."
_HEAD = "lm_head.weight"
_NAMES = {
    "hidden_layernorm.": "input_layer.condition_norm.",
    "token_layernorm.": "input_layer.token_norm.",
    "final_layernorm.": "decoder.norm.",
    "": "decoder.layers.0.",
}


def _recognises(described: Mapping[str, Any]) -> bool:
    return described.get("model_type") == "mimo" and bool(described.get("num_nextn_predict_layers"))


def _reads(name: str) -> bool:
    return name.startswith(_MODULE) or name == _HEAD


def _config(described: Mapping[str, Any], tensors: Mapping[str, Tensor], target: TargetParts) -> SpecBlockConfig:
    """Of the last layer's output alone."""
    return SpecBlockConfig(
        target.config,
        tap_layers=(target.config["num_hidden_layers"] - 1,),
        draft_vocab_size=target.config["vocab_size"],
        trained_length=target.config["max_position_embeddings"],
        normalise_features=False,
        kind="mtp",
        ranks_from_draft=True,
        **MTP.shape,
    )


def _weights(tensors: dict[str, Tensor], config: SpecBlockConfig, target: TargetParts) -> dict[str, Tensor]:
    """The condition is the state itself, and no entry asks for its position."""
    own = {name.removeprefix(_MODULE): value for name, value in tensors.items() if name.startswith(_MODULE)}
    joined, hidden = own.pop("input_proj.weight"), config.hidden_size  # of the state, then of the token
    return {
        **renamed(own, _NAMES),
        "input_layer.condition_proj.weight": torch.eye(hidden),
        "input_layer.position_queries": torch.zeros(1, hidden),
        "input_layer.query_norm.weight": torch.ones(hidden),
        "input_layer.fuse.weight": torch.cat([joined, joined.new_zeros(hidden, hidden)], dim=1),
        _HEAD: tensors.get(_HEAD, target.embedding),  # without one they are the same
        VOCABULARY: torch.arange(config.draft_vocab_size),
    }


MTP_FORM = Form("mtp", _recognises, _reads, _config, _weights)
