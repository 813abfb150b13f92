"""MiMo's multi-token prediction module, which lies among its target's weights: one layer on a projection of the last
layer's output, before the output norm, and the next token's embedding; the target's own head reads it."""

import torch
from torch import Tensor

from drafters.network.checkpoint import HEAD, VOCABULARY, TargetParts
from drafters.network.config import SpecBlockConfig
from drafters.published.form import Described, PublishedForm, Tensors, renamed
from drafters.trained_kinds import TRAINED_KINDS

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
    """It reads the target's last layer and can draft every token."""
    layers = target.config
    return SpecBlockConfig(
        layers,
        (layers["num_hidden_layers"] - 1,),
        layers["vocab_size"],
        trained_length=layers["max_position_embeddings"],
        kind="mtp",
        normalise_features=False,
        ranks_from_draft=True,
        **TRAINED_KINDS["mtp"].shape,
    )


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
