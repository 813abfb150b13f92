"""Medusa's heads as their authors publish them: a residual block and an output layer each, on the target's last state
after the output norm."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from drafters.specblock.checkpoint import VOCABULARY, TargetParts
from drafters.specblock.form import Form
from drafters.specblock.model import SpecBlockConfig

_KEY = "medusa_num_heads"
"""Of which some configs say fewer than there are."""
_PARTS = ("0.linear.weight", "0.linear.bias", "1.weight")


def _recognises(described: Mapping[str, Any]) -> bool:
    return _KEY in described


def _config(described: Mapping[str, Any], tensors: Mapping[str, Tensor], target: TargetParts) -> SpecBlockConfig:
    if described.get("medusa_num_layers", 1) != 1:
        raise ValueError("its heads have more than one residual block each, which are not read")
    return SpecBlockConfig(
        target.config,
        tap_layers=(target.config["num_hidden_layers"] - 1,),
        draft_vocab_size=target.config["vocab_size"],
        num_layers=0,
        block_size=len({name.partition(".")[0] for name in _own(tensors)}),
        shift=False,
        kind="medusa",
        ranks_from_draft=True,
        own_heads=True,
    )


def _weights(tensors: dict[str, Tensor], config: SpecBlockConfig, target: TargetParts) -> dict[str, Tensor]:
    if target.norm is None:
        raise ValueError("its target ends in a norm of another kind")
    own, heads = _own(tensors), range(config.block_size)
    unknown = sorted(own.keys() - {f"{head}.{part}" for head in heads for part in _PARTS})
    if unknown:
        raise ValueError(f"it has tensors that are not read: {', '.join(unknown)}")

    weight, bias, output = (torch.stack([own[f"{head}.{part}"] for head in heads]) for part in _PARTS)
    return {
        "input_layer.feature_norms.0.weight": target.norm,
        "input_layer.condition_proj.weight": torch.eye(config.hidden_size),
        "input_layer.heads_weight": weight,
        "input_layer.heads_bias": bias,
        "lm_head.weight": output,
        VOCABULARY: torch.arange(config.draft_vocab_size),
    }


def _own(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """By number of the head and name of the part."""
    return {name.removeprefix("medusa_head."): value for name, value in tensors.items()}


MEDUSA_FORM = Form("medusa", _recognises, lambda name: True, _config, _weights)
