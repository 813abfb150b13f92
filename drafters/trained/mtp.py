"""The multi-token prediction module that some targets include in their weights: one layer of the target's family.

Its input is a projection of the target's last state and the next token's embedding; its output, after a norm of its
own, goes to the target's head. For a second position the same layer runs on its own output. Three forms:

| form | tensors | state that it reads | projection reads |
|---|---|---|---|
| MiMo (arXiv 2505.07608) | `model.mtp_layers.0.*` | before the target's output norm | state, token |
| GLM-4.5, DeepSeek-V3 (arXiv 2412.19437) | `model.layers.N.*` of N layers | after that norm | token, state |
| Qwen3-Next, Qwen3.5 | `mtp.*`; norms multiply by 1 + weight | after that norm | token, state |

DeepSeek's layers have an attention that is not supported here."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from drafters.network.checkpoint import HEAD, VOCABULARY, TargetParts
from drafters.network.config import DrafterConfig, Fields, NetworkTraits, RankHeadShape
from drafters.network.form import Described, PublishedForm, Tensors, TrainedKind, renamed
from drafters.network.serving import BlockForward
from drafters.network.structure import Structure
from drafters.trained.specblock import FusedStructure
from drafters.training.forward import TrainingForward
from kernels.families import OF_DRAFTERS

_MIMO, _NEXTN = ("mimo",), ("glm4_moe",)
_QWEN = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
"""Model types of each form."""
_OPTIONS: Fields = {"normalise_features": False, "shift": False, "ranks_from_draft": True}


@dataclass(frozen=True, slots=True)
class MTPConfig(DrafterConfig):
    """Config of a target's own multi-token prediction module."""

    kind: ClassVar[str] = "mtp"
    trained_blocks: ClassVar[int] = 2

    reads_normed: bool = False  # it reads the target's state after the output norm

    def structure(self) -> Structure:
        return MTPStructure(self)

    @property
    def families(self) -> tuple[str, ...]:
        return (*OF_DRAFTERS, *_NEXTN, *_QWEN)

    @property
    def options(self) -> Fields:
        return {**_OPTIONS, "normalise_features": self.reads_normed}

    @classmethod
    def options_of(cls, fields: Fields) -> Fields:
        return {"reads_normed": fields["normalise_features"]}

    @property
    def traits(self) -> NetworkTraits:
        return NetworkTraits(int(self.reads_normed), RankHeadShape(from_draft=True))


class MTPStructure(FusedStructure):
    """Structure of the module: SpecBlock's input layer for blocks of one position, with position queries of 0."""

    serving = BlockForward
    training = TrainingForward


_COUNTS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers")
"""Keys for the number of modules. Configs of Qwen3-Next have none."""
_NORMS = ("model.norm.weight", "model.language_model.norm.weight")
"""Names of the target's output norm."""
_NAMES = {
    **dict.fromkeys(("hidden_layernorm.", "hnorm.", "pre_fc_norm_hidden."), "input_layer.condition_norm."),
    **dict.fromkeys(("token_layernorm.", "enorm.", "pre_fc_norm_embedding."), "input_layer.token_norm."),
    **dict.fromkeys(("input_proj.", "eh_proj.", "fc."), "input_layer.fuse."),
    **dict.fromkeys(("final_layernorm.", "shared_head.norm.", "norm."), "decoder.norm."),
    **dict.fromkeys(("", "layers.0."), "decoder.layers.0."),
}
_COPIES = ("embed_tokens.weight", "shared_head.head.weight")
"""Tensors of a module that are the target's, and not read."""
_PREFIX = re.compile(r"model\.mtp_layers\.0\.|model\.layers\.\d+\.|mtp\.")
_EXPERT = re.compile(r"(?P<place>.*\.experts\.)(?P<number>\d+)\.(?P<name>gate|up|down)_proj\.weight")


def _text(described: Described) -> Described:
    """Return the config of the language model within one of several modalities."""
    text: Described = described.get("text_config") or described
    return text


def _count(described: Described) -> int:
    text = _text(described)
    return int(next((text[key] for key in _COUNTS if text.get(key) is not None), text.get("model_type") in _QWEN))


def _is_mtp(described: Described) -> bool:
    return _text(described).get("model_type") in (*_MIMO, *_NEXTN, *_QWEN) and _count(described) > 0


def _prefix(described: Described) -> str:
    """Return what the names of the module's tensors begin with."""
    text = _text(described)
    if text["model_type"] in _MIMO:
        return "model.mtp_layers.0."
    return "mtp." if text["model_type"] in _QWEN else f"model.layers.{text['num_hidden_layers']}."


def _config(described: Described, tensors: Tensors, target: TargetParts) -> MTPConfig:
    """Return the config: it taps the target's last layer, and can draft every token. Raises ValueError for several
    modules, of which each predicts one position further."""
    layers, text = target.config, _text(described)
    if _count(described) > 1 and text["model_type"] not in _MIMO:
        raise ValueError(f"it has {_count(described)} modules, and only one is supported")
    if text.get("mtp_use_dedicated_embeddings"):
        raise ValueError("its config sets mtp_use_dedicated_embeddings, which is not supported")
    alike = {"layer_types": ["full_attention"] * layers["num_hidden_layers"]}
    sparse = {"first_k_dense_replace": 0, "decoder_sparse_step": 1, "mlp_only_layers": []}
    return MTPConfig(
        layers if text["model_type"] in _MIMO else {**layers, **alike, **sparse},
        (layers["num_hidden_layers"] - 1,),
        layers["vocab_size"],
        num_layers=1,
        block_size=1,
        trained_length=layers["max_position_embeddings"],
        reads_normed=text["model_type"] not in _MIMO,
    )


def _weights(tensors: dict[str, Any], config: DrafterConfig, target: TargetParts) -> dict[str, Any]:
    """Return the weights: the condition is the tapped state itself, and position queries are 0."""
    hidden = config.hidden_size
    if config.target["model_type"] in _QWEN:
        tensors = {name: value.float() + 1.0 if "norm" in name else value for name, value in tensors.items()}
    head = tensors.pop(HEAD, None)  # files with tied weights have no head
    norms = [tensors.pop(name) for name in _NORMS if name in tensors]
    own = {_PREFIX.sub("", name, count=1): value for name, value in tensors.items()}
    own = _stacked(renamed({name: value for name, value in own.items() if name not in _COPIES}, _NAMES))
    joined = own.pop("input_layer.fuse.weight")
    if config.traits.normed_parts:
        own["input_layer.feature_norms.0.weight"] = norms[0]
        joined = joined.roll(hidden, dims=1)  # columns of the state, then of the token
    return {
        **own,
        "input_layer.condition_proj.weight": torch.eye(hidden),
        "input_layer.position_queries": torch.zeros(1, hidden),
        "input_layer.query_norm.weight": torch.ones(hidden),
        "input_layer.fuse.weight": torch.cat([joined, joined.new_zeros(hidden, hidden)], dim=1),
        HEAD: target.table if head is None else head,
        VOCABULARY: torch.arange(config.draft_vocab_size),
    }


def _stacked(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Stack the matrices of all experts, gate rows before up rows. # [...] each"""
    found = dict(tensors)
    experts = [(match, found.pop(name)) for name in tensors if (match := _EXPERT.fullmatch(name))]
    by_name: dict[str, dict[int, Any]] = {"gate": {}, "up": {}, "down": {}}
    for match, value in experts:
        by_name[match["name"]][int(match["number"])] = value
    if experts:
        gate, up, down = (torch.stack([value for _, value in sorted(one.items())]) for one in by_name.values())
        place = experts[0][0]["place"]
        found |= {f"{place}gate_up_proj": torch.cat([gate, up], dim=1), f"{place}down_proj": down}
    return found


FORM = PublishedForm("mtp", _is_mtp, lambda _: "mtp", _config, _weights, prefix=_prefix, shared=(HEAD, *_NORMS))

KIND = TrainedKind(MTPConfig, {"block_size": 1, "num_layers": 1, **_OPTIONS}, (FORM,))
