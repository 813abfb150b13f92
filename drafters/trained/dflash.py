"""DFlash (arXiv 2602.06036), and JetSpec (arXiv 2606.18394), which is DFlash with causal attention inside a block.

One forward drafts all positions of a block, and a tree has one block. The rows of a block are embeddings only: that of
the newest token, whose row predicts nothing, and mask tokens, each of which predicts the token at its own position.
Committed positions run through no layer: each layer computes their keys and values from their condition, after a norm
that all layers share. A tree continues the likeliest paths at each position.
Legend: hidden."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from drafters.network import form
from drafters.network.checkpoint import HEAD, VOCABULARY, TargetParts, vocabulary
from drafters.network.config import DrafterConfig, Fields, NetworkTraits, RankHeadShape
from drafters.network.form import Described, PublishedForm, Tensors, TrainedKind
from drafters.network.layers import Embed, Input, LayerShape, Norm
from drafters.network.serving import InjectedForward
from drafters.network.structure import ServedInput, ServedLayer, Structure, WeightPlanner
from drafters.training.forward import InjectedTraining
from kernels.decoder_layer import DecoderLayer


@dataclass(frozen=True, slots=True, kw_only=True)
class DFlashConfig(DrafterConfig):
    """Config of a DFlash drafter."""

    kind: ClassVar[str] = "dflash"
    trained_blocks: ClassVar[int] = 1
    family: ClassVar[str | None] = "qwen3"
    fixed: ClassVar[Fields] = {"normalise_features": False, "shift": False, "broadcast": False}
    two_way: ClassVar[bool] = True  # entries of a block attend to all of it

    mask_token: int  # target token whose embedding is the input of the entries
    silent_first: bool = True  # the first row of a block, the newest token, predicts nothing
    ranks_from_draft: bool = False  # the rank head corrects the class probabilities under the draft distribution

    def __post_init__(self) -> None:
        DrafterConfig.__post_init__(self)
        if not 0 <= self.mask_token < self.target_vocab_size:
            raise ValueError(f"drafter config: mask_token {self.mask_token} is not in the target's vocabulary")

    def structure(self) -> Structure:
        return MaskTokenStructure(self)

    @classmethod
    def options_of(cls, fields: Fields) -> Fields:
        if fields["mask_token"] is None:
            raise ValueError(f"drafter config: kind {cls.kind} needs a mask_token")
        return super(DFlashConfig, cls).options_of(fields)

    @property
    def traits(self) -> NetworkTraits:
        ranks = RankHeadShape(from_draft=self.ranks_from_draft)
        silent = int(self.silent_first)
        return NetworkTraits(0, ranks, injected=True, silent=silent, two_way=self.two_way, paths=4)


@dataclass(frozen=True, slots=True, kw_only=True)
class JetSpecConfig(DFlashConfig):
    """Config of a JetSpec drafter, in which entries of a block attend only to earlier ones."""

    kind: ClassVar[str] = "jetspec"
    two_way: ClassVar[bool] = False


class MaskTokens(Input):
    """Input layer of blocks: the embeddings of the newest token and, for all other rows, of the mask token."""

    is_solved = False

    def __init__(self, config: DFlashConfig, shape: LayerShape) -> None:
        super().__init__()
        self.condition_proj = nn.Linear(config.features_size, shape.hidden, bias=False)
        self.condition_norm = Norm(shape.hidden, shape.epsilon)
        self.mask_embedding = nn.Parameter(torch.randn(shape.hidden))  # the target's embedding of the mask token
        self.feature_norms = nn.ModuleList()
        self._mask_token, self._masked = config.mask_token, config.forward_size - 1

    def blocks(self, context: Tensor, embedded: Tensor, entries: slice) -> Tensor:
        token = embedded.to(self.mask_embedding.dtype)[..., None, :]
        masks = self.mask_embedding.detach().expand(*token.shape[:-2], self._masked, -1)  # the target's: not trained
        return torch.cat([token, masks], dim=-2)[..., entries, :]

    @torch.no_grad()
    def start(self, embed: Embed) -> None:
        """Copy the mask token's embedding from the target."""
        self.mask_embedding.copy_(embed(torch.tensor(self._mask_token, device=self.mask_embedding.device)))


class MaskTokenStructure(Structure):
    """Structure of the DFlash network."""

    serving = InjectedForward
    training = InjectedTraining

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__(config)
        self._own = config

    def input_layer(self) -> Input:
        return MaskTokens(self._own, self.shape)

    def served_input(self, planner: WeightPlanner) -> ServedInput:
        mask, masked = planner.tensor(planner.weights["input_layer.mask_embedding"]), self.config.forward_size - 1

        def blocks(context: Tensor, embedded: Tensor) -> Tensor:
            return torch.cat([embedded.to(mask.dtype)[:, None], mask.expand(len(embedded), masked, -1)], dim=1)

        return blocks

    def injection_norm(self, layer: Input) -> nn.Module | None:
        return layer.get_submodule("condition_norm")

    def injected_into(self, layers: Sequence[ServedLayer], planner: WeightPlanner) -> Sequence[ServedLayer]:
        norm = planner.tensor(planner.weights["input_layer.condition_norm.weight"])
        known = [layer for layer in layers if isinstance(layer, DecoderLayer)]
        return [replace(layer, norms=layer.norms._replace(attention_input=norm)) for layer in known]


# Published forms. Files of z-lab and SpecForge have a `dflash_config`, and use the target's head and whole vocabulary.
# Files of speculators have a nested layer config, and a head and draft vocabulary of their own.

_NAMES = {
    "fc.": "input_layer.condition_proj.",
    "hidden_norm.": "input_layer.condition_norm.",
    "layers.": "decoder.layers.",
    "norm.": "decoder.norm.",
    HEAD: HEAD,
}
_NESTED = "transformer_layer_config"
_READ = {"mask_token_id", "target_layer_ids", "causal", "block_size"}
"""Supported keys of `dflash_config`. Others, of later designs, would change the result and are refused."""
_UNREAD = ("target_hidden_size", "is_causal", "add_swa_attention_sink_bias")


def _kind(described: Described) -> str:
    return "jetspec" if (described.get("dflash_config") or {}).get("causal") else "dflash"


def _config(described: Described, tensors: Tensors, target: TargetParts) -> DrafterConfig:
    """Read the config. Tap i is the output of layer i in a DFlash file, and of layer i - 1 in a speculators file."""
    nested = _NESTED in described
    own = described if nested else described["dflash_config"]
    layers = form.layers_of({"model_type": "qwen3", **described.get(_NESTED, described)}, target)
    form.refuse_set(described, _UNREAD, layers["hidden_size"])
    form.refuse_set(own, () if nested else sorted(own.keys() - _READ))
    if own.get("mask_token_id") is None:
        raise ValueError("its config has no mask_token_id")
    if "gemma" in target.config["model_type"]:
        raise ValueError("its target scales embeddings (gemma), which DFlash drafters do not support here")
    silent = not described.get("sample_from_anchor")
    make = JetSpecConfig if _kind(described) == "jetspec" else DFlashConfig
    return make(
        target={**layers, "model_type": "qwen3", "num_hidden_layers": target.config["num_hidden_layers"]},
        tap_layers=form.taps_of(
            own["aux_hidden_state_layer_ids" if nested else "target_layer_ids"], target, first=int(nested)
        ),
        draft_vocab_size=described.get("draft_vocab_size") or layers["vocab_size"],
        num_layers=layers["num_hidden_layers"],
        block_size=(described.get("block_size") or own["block_size"]) - silent,
        trained_length=described.get(form.TRAINED_LENGTH) or layers["max_position_embeddings"],
        mask_token=own["mask_token_id"],
        silent_first=silent,
        ranks_from_draft=True,
    )


def _weights(tensors: dict[str, Tensor], config: DrafterConfig, target: TargetParts) -> dict[str, Tensor]:
    assert isinstance(config, DFlashConfig), "the config was read by this form"
    form.drop_embedding(tensors, target)
    found = vocabulary(tensors, config)
    if HEAD not in tensors:
        if target.head is None:
            raise ValueError("it has no head of its own, and the target's head is repacked")
        tensors[HEAD] = target.head[found[VOCABULARY].to(target.head.device)].cpu()  # planned transfer: at the start
    mask = target.embedding[config.mask_token].cpu()  # planned transfer: at the start
    return {**form.renamed(tensors, _NAMES), **found, "input_layer.mask_embedding": mask}


FORM = PublishedForm(
    "dflash",
    lambda described: not {"DFlashDraftModel", "dflash"}.isdisjoint(form.named(described)),
    _kind,
    _config,
    _weights,
)

_SHAPE = {"block_size": 8, "num_layers": 2, "silent_first": True, **DFlashConfig.fixed}

DFLASH = TrainedKind(DFlashConfig, _SHAPE, (FORM,))
JETSPEC = TrainedKind(JetSpecConfig, _SHAPE)
