"""The multi-token prediction module that some targets include in their weights. Supported: MiMo's (arXiv 2505.07608).

It is one layer of the target's family. Its input is a projection of the target's last state, before the output norm,
and the next token's embedding; its output goes to the target's head. For a second position the same layer runs on its
own state."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from drafters.network.checkpoint import HEAD, VOCABULARY, TargetParts
from drafters.network.config import DrafterConfig, Fields, NetworkTraits, RankHeadShape
from drafters.network.form import Described, PublishedForm, Tensors, TrainedKind, renamed
from drafters.network.serving import BlockForward
from drafters.network.structure import Structure
from drafters.trained.specblock import FusedStructure
from drafters.training.forward import TrainingForward

_OPTIONS: Fields = {"normalise_features": False, "shift": False, "ranks_from_draft": True}


@dataclass(frozen=True, slots=True)
class MTPConfig(DrafterConfig):
    """Config of a target's own multi-token prediction module."""

    kind: ClassVar[str] = "mtp"
    trained_blocks: ClassVar[int] = 2

    def structure(self) -> Structure:
        return MTPStructure(self)

    @property
    def options(self) -> Fields:
        return _OPTIONS

    @property
    def traits(self) -> NetworkTraits:
        return NetworkTraits(0, RankHeadShape(from_draft=True))


class MTPStructure(FusedStructure):
    """Structure of the module: SpecBlock's input layer for blocks of one position, with position queries of 0."""

    serving = BlockForward
    training = TrainingForward


_MODULE = "model.mtp_layers.0."
_NAMES = {
    "hidden_layernorm.": "input_layer.condition_norm.",
    "token_layernorm.": "input_layer.token_norm.",
    "final_layernorm.": "decoder.norm.",
    "": "decoder.layers.0.",
}


def _is_mtp(described: Described) -> bool:
    return described.get("model_type") == "mimo" and bool(described.get("num_nextn_predict_layers"))


def _config(described: Described, tensors: Tensors, target: TargetParts) -> MTPConfig:
    """Return the config: it taps the target's last layer, and can draft every token."""
    layers = target.config
    return MTPConfig(
        layers,
        (layers["num_hidden_layers"] - 1,),
        layers["vocab_size"],
        num_layers=1,
        block_size=1,
        trained_length=layers["max_position_embeddings"],
    )


def _weights(tensors: dict[str, Tensor], config: DrafterConfig, target: TargetParts) -> dict[str, Tensor]:
    """Return the weights: the condition is the tapped state itself, and position queries are 0."""
    own = {name.removeprefix(_MODULE): value for name, value in tensors.items() if name.startswith(_MODULE)}
    joined, hidden = own.pop("input_proj.weight"), config.hidden_size  # columns of the state, then of the token
    return {
        **renamed(own, _NAMES),
        "input_layer.condition_proj.weight": torch.eye(hidden),
        "input_layer.position_queries": torch.zeros(1, hidden),
        "input_layer.query_norm.weight": torch.ones(hidden),
        "input_layer.fuse.weight": torch.cat([joined, joined.new_zeros(hidden, hidden)], dim=1),
        HEAD: tensors.get(HEAD, target.embedding),  # files with tied weights have no head
        VOCABULARY: torch.arange(config.draft_vocab_size),
    }


FORM = PublishedForm(
    "mtp",
    _is_mtp,
    lambda _: "mtp",
    _config,
    _weights,
    reads=lambda name: name.startswith(_MODULE) or name == HEAD,
)

KIND = TrainedKind(MTPConfig, {"block_size": 1, "num_layers": 1, **_OPTIONS}, (FORM,))
