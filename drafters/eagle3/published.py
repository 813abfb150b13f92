"""EAGLE-3 as its authors publish it: `midlayer`, whose attention reads the token's embedding beside the state, `fc` of
three of the target's layers, and a vocabulary of its own."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from drafters.eagle3.kind import EAGLE3
from drafters.specblock.checkpoint import VOCABULARY, TargetParts, names_tokens
from drafters.specblock.form import Form, renamed
from drafters.specblock.model import SpecBlockConfig

_EMBEDDING = "embed_tokens.weight"
_NAMES = {
    "fc.": "input_layer.condition_proj.",
    "midlayer.input_layernorm.": "input_layer.token_norm.",
    "midlayer.hidden_norm.": "decoder.layers.0.input_layernorm.",
    "midlayer.": "decoder.layers.0.",
    "norm.": "decoder.norm.",
}
_OTHERWISE = ("norm_before_residual", "eagle_config", "eagle_aux_hidden_state_layer_ids")
"""What would change the result, by a config's key."""


def _recognises(described: Mapping[str, Any]) -> bool:
    named = any("eagle3" in name.lower() for name in described.get("architectures") or ())
    return named or "draft_vocab_size" in described


def _config(described: Mapping[str, Any], tensors: Mapping[str, Tensor], target: TargetParts) -> SpecBlockConfig:
    """It taps what layers 2, L / 2 and L - 3 of the target receive."""
    for name in _OTHERWISE:
        if described.get(name):
            raise ValueError(f"its config sets {name}, which is not read")
    for name in ("hidden_size", "vocab_size"):
        if described[name] != target.config[name]:
            raise ValueError(f"its {name} is {described[name]}, the target's is {target.config[name]}")
    depth = target.config["num_hidden_layers"]
    if depth < 4:
        raise ValueError(f"it taps the fourth layer from the end, and the target has {depth}")
    return SpecBlockConfig(
        described,
        tap_layers=(1, depth // 2 - 1, depth - 4),
        draft_vocab_size=described.get("draft_vocab_size") or described["vocab_size"],
        trained_length=described["max_position_embeddings"],
        normalise_features=False,
        kind="eagle3",
        ranks_from_draft=True,
        token_beside=True,
        **EAGLE3.shape,
    )


def _weights(tensors: dict[str, Tensor], config: SpecBlockConfig, target: TargetParts) -> dict[str, Tensor]:
    """`d2t` holds distances; without it every token can be drafted."""
    embedding = tensors.pop(_EMBEDDING, None)
    if embedding is not None and not _same(embedding, target.embedding):
        raise ValueError(f"its {_EMBEDDING} is not the target's")
    tensors.pop("t2d", None)
    tokens = torch.arange(config.draft_vocab_size)
    unsaid = torch.zeros(len(tokens) if len(tokens) == config.target_vocab_size else 0)
    distances = tensors.pop("d2t", unsaid)
    if distances.shape != tokens.shape:
        raise ValueError(f"its d2t must list {len(tokens)} tokens, and lists {distances.numel()}")
    d2t = tokens + distances.long()
    if not names_tokens(d2t, config.target_vocab_size):
        raise ValueError("its d2t names tokens that the target does not have, or one twice")
    return {**renamed(tensors, _NAMES), VOCABULARY: d2t}


def _same(embedding: Tensor, other: Tensor) -> bool:
    """Apart from the type they are held in."""
    other = other.cpu()  # planned transfer: at the start
    return embedding.shape == other.shape and torch.equal(embedding.bfloat16(), other.bfloat16())


EAGLE3_FORM = Form("eagle3", _recognises, lambda name: True, _config, _weights)
