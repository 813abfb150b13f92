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


def _recognises(described: Mapping[str, Any]) -> bool:
    return _KEY in described


def _config(described: Mapping[str, Any], target: TargetParts) -> SpecBlockConfig:
    if described.get("medusa_num_layers", 1) != 1:
        raise ValueError("its heads have more than one residual block each, which are not read")
    return SpecBlockConfig(
        target.config,
        tap_layers=(target.config["num_hidden_layers"] - 1,),
        draft_vocab_size=target.config["vocab_size"],
        num_layers=0,
        block_size=described[_KEY],
        shift=False,
        kind="medusa",
        ranks_from_draft=True,
        own_heads=True,
    )


def _weights(tensors: dict[str, Tensor], config: SpecBlockConfig, target: TargetParts) -> dict[str, Tensor]:
    if target.norm is None:
        raise ValueError("its target ends in a norm of another kind")
    own = {name.removeprefix("medusa_head."): value for name, value in tensors.items()}

    def stacked(part: str) -> Tensor:
        return torch.stack([own[f"{head}.{part}"] for head in range(config.block_size)])

    return {
        "input_layer.feature_norms.0.weight": target.norm,
        "input_layer.condition_proj.weight": torch.eye(config.hidden_size),
        "input_layer.heads_weight": stacked("0.linear.weight"),
        "input_layer.heads_bias": stacked("0.linear.bias"),
        "lm_head.weight": stacked("1.weight"),
        VOCABULARY: torch.arange(config.draft_vocab_size),
    }


MEDUSA_FORM = Form("medusa", _recognises, lambda name: True, _config, _weights)
