"""DFlash, and JetSpec, which is DFlash with causal attention within a block: Qwen3's layers on mask tokens, with the
target's features as keys and values. Read and written as z-lab and SpecForge publish it (`dflash_config`, the target's
head and whole vocabulary), and as speculators does (nested layer config, head and vocabulary of its own)."""

from typing import Any

from torch import Tensor

from drafters.network.checkpoint import HEAD, VOCABULARY, TargetParts
from drafters.network.config import SpecBlockConfig
from drafters.published import form
from drafters.published.form import Described, PublishedForm, Tensors
from drafters.trained_kinds import TRAINED_KINDS

_NAMES = {
    "fc.": "input_layer.condition_proj.",
    "hidden_norm.": "input_layer.condition_norm.",
    "layers.": "decoder.layers.",
    "norm.": "decoder.norm.",
    HEAD: HEAD,
}
_NESTED = "transformer_layer_config"
_READ = {"mask_token_id", "target_layer_ids", "causal", "block_size"}
"""Keys of `dflash_config`. Those of later designs stand beside them, and change the result."""
_UNREAD = ("target_hidden_size", "is_causal", "add_swa_attention_sink_bias")


def _kind(described: Described) -> str:
    return "jetspec" if (described.get("dflash_config") or {}).get("causal") else "dflash"


def _config(described: Described, tensors: Tensors, target: TargetParts) -> SpecBlockConfig:
    """Number i of a DFlash file's taps is the output of layer i; number k of speculators' is that of layer k - 1."""
    nested, kind = _NESTED in described, _kind(described)
    own = described if nested else described["dflash_config"]
    layers = form.layers_of({"model_type": "qwen3", **described.get(_NESTED, described)}, target)
    form.refuse_set(described, _UNREAD, layers["hidden_size"])
    form.refuse_set(own, () if nested else sorted(own.keys() - _READ))
    if own.get("mask_token_id") is None:
        raise ValueError("its config has no mask_token_id")
    if "gemma" in target.config["model_type"]:
        raise ValueError("its target multiplies embeddings by a number, which is not done here")
    silent = not described.get("sample_from_anchor")
    size = (described.get("block_size") or own["block_size"]) - silent
    shape = {"block_size": size, "num_layers": layers["num_hidden_layers"], "silent_first": silent}
    return SpecBlockConfig(
        {**layers, "model_type": "qwen3", "num_hidden_layers": target.config["num_hidden_layers"]},
        form.taps_of(own["aux_hidden_state_layer_ids" if nested else "target_layer_ids"], target, first=int(nested)),
        draft_vocab_size=described.get("draft_vocab_size") or layers["vocab_size"],
        trained_length=described.get(form.TRAINED_LENGTH) or layers["max_position_embeddings"],
        kind=kind,
        mask_token=own["mask_token_id"],
        ranks_from_draft=True,
        **{**TRAINED_KINDS[kind].shape, **shape},
    )


def _weights(tensors: dict[str, Tensor], config: SpecBlockConfig, target: TargetParts) -> dict[str, Tensor]:
    form.drop_embedding(tensors, target)
    found = form.vocabulary(tensors, config)
    if HEAD not in tensors:
        if target.head is None:
            raise ValueError("it has no head of its own, and the target's is not held unpacked")
        tensors[HEAD] = target.head[found[VOCABULARY].to(target.head.device)].cpu()  # planned transfer: at the start
    assert config.mask_token is not None
    mask = target.embedding[config.mask_token].cpu()  # planned transfer: at the start
    return {**form.renamed(tensors, _NAMES), **found, "input_layer.mask_embedding": mask}


def _tensors(config: SpecBlockConfig, weights: Tensors) -> dict[str, Tensor]:
    """Return what both forms write. Raises ValueError for another network."""
    if config.mask_token is None or config.token_beside or config.normalise_features:
        raise ValueError(f"its mask_token and normalise_features are not DFlash's, in one of kind {config.kind}")
    if config.target["model_type"] != "qwen3":
        raise ValueError(f"its layers are of model_type {config.target['model_type']}, and DFlash's are of qwen3")
    names = {ours: theirs for theirs, ours in _NAMES.items()}
    tensors = form.renamed({name: weights[name] for name in weights if name.startswith(tuple(names))}, names)
    if config.draft_vocab_size == config.target_vocab_size:
        return tensors
    if HEAD not in weights:
        raise ValueError("its lm_head is some rows of the target's, and not stored: these forms store it")
    return {**tensors, **form.written_vocabulary(weights, config)}


def _write_dflash(config: SpecBlockConfig, weights: Tensors, target: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """As z-lab and SpecForge write it. Only vLLM reads a head and a vocabulary in it."""
    tensors = _tensors(config, weights)
    if not config.silent_first:
        raise ValueError("its silent_first is not this form's: write speculators")
    own: dict[str, Any] = {"mask_token_id": config.mask_token, "target_layer_ids": list(config.tap_layers)}
    own |= {"causal": True} if config.kind == "jetspec" else {}
    described = {
        "architectures": ["DFlashDraftModel"],
        **form.written_layers(config),
        "block_size": config.forward_size,
        "draft_vocab_size": config.draft_vocab_size,
        "num_target_layers": config.target["num_hidden_layers"],
        "dflash_config": own,
        form.TRAINED_LENGTH: config.trained_length,
    }
    return described, tensors


def _write_speculators(
    config: SpecBlockConfig, weights: Tensors, target: str
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    tensors = _tensors(config, weights)
    if config.kind != "dflash":
        raise ValueError(f"its kind is {config.kind}, and this form has no causal attention: write {DFLASH.name}")
    described = {
        "architectures": ["DFlashDraftModel"],
        **form.speculators_config("dflash", config, target),
        "block_size": config.forward_size,
        "aux_hidden_state_layer_ids": [tap + 1 for tap in config.tap_layers],
        "mask_token_id": config.mask_token,
        "sample_from_anchor": not config.silent_first,
        "sliding_window_non_causal": True,  # vLLM: of all layers; without it they are causal
    }
    return described, tensors


DFLASH = PublishedForm(
    "dflash",
    lambda described: "DFlashDraftModel" in form.named(described),
    _kind,
    _config,
    _weights,
    write=_write_dflash,
    writes=("dflash", "jetspec"),
)
SPECULATORS_DFLASH = DFLASH._replace(
    name="speculators",
    recognises=lambda described: "dflash" in form.named(described),
    write=_write_speculators,
    writes=("dflash",),
)
