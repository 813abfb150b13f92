"""DFlash, and JetSpec, which is DFlash with causal attention within a block: Qwen3's layers on mask tokens, with the
target's features as keys and values. Read and written as z-lab and SpecForge publish it (`dflash_config`, the target's
head and whole vocabulary), and as speculators does (nested layer config, head and vocabulary of its own)."""

from typing import Any

import torch
from torch import Tensor

from drafters.published import form
from drafters.published.form import HEAD, Described, PublishedForm, Tensors
from drafters.specblock.checkpoint import VOCABULARY, TargetParts
from drafters.specblock.config import SpecBlockConfig
from drafters.specblock.layers import LayerShape
from drafters.trained_kinds import TRAINED_KINDS

_LAYER_KEYS = (
    *("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size"),
    *("rms_norm_eps", "attention_bias", "max_position_embeddings", "rope_parameters"),
)
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
_UNREAD = ("target_hidden_size", "is_causal", "add_swa_attention_sink_bias", "sliding_window_non_causal")


def _kind(described: Described) -> str:
    return "jetspec" if (described.get("dflash_config") or {}).get("causal") else "dflash"


def _config(described: Described, tensors: Tensors, target: TargetParts) -> SpecBlockConfig:
    """Number i of a DFlash file's taps is the output of layer i; number k of speculators' is that of layer k - 1."""
    nested, kind = _NESTED in described, _kind(described)
    own = described if nested else described["dflash_config"]
    layers = form.layers_of({"model_type": "qwen3", **described.get(_NESTED, described)}, target)
    form.refuse_set({key: value for key, value in described.items() if value != layers["hidden_size"]}, _UNREAD)
    form.refuse_set(own, () if nested else sorted(own.keys() - _READ))
    if set(layers.get("layer_types") or ()) - {"full_attention"}:
        raise ValueError("its config sets layer_types other than full_attention, which are not read")
    if own.get("mask_token_id") is None:
        raise ValueError("its config has no mask_token_id")
    if "gemma" in target.config["model_type"]:
        raise ValueError("its target multiplies embeddings by a number, which is not done here")
    silent = not described.get("sample_from_anchor")
    size = (described.get("block_size") or own["block_size"]) - silent
    shape = {"block_size": size, "num_layers": layers["num_hidden_layers"], "silent_first": silent}
    kept = {key: layers[key] for key in _LAYER_KEYS if key in layers}
    return SpecBlockConfig(
        {**kept, "model_type": "qwen3", "num_hidden_layers": target.config["num_hidden_layers"]},
        form.taps_of(own["aux_hidden_state_layer_ids" if nested else "target_layer_ids"], target, first=int(nested)),
        draft_vocab_size=described.get("draft_vocab_size") or layers["vocab_size"],
        trained_length=layers.get("trained_length") or layers["max_position_embeddings"],
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


def _written(config: SpecBlockConfig, weights: Tensors) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return what both forms write: the config of layers, and tensors. Raises ValueError for another network."""
    layers = {key: config.target[key] for key in ("model_type", *_LAYER_KEYS) if key in config.target}
    if config.mask_token is None or config.token_beside or config.normalise_features:
        raise ValueError(f"its mask_token and normalise_features are not DFlash's, in one of kind {config.kind}")
    if layers["model_type"] != "qwen3":
        raise ValueError(f"its layers are of model_type {layers['model_type']}, and DFlash's are of qwen3")
    rope = layers["rope_parameters"]  # as transformers before release 5 read it:
    layers |= {"rope_theta": rope["rope_theta"], "rope_scaling": None if rope["rope_type"] == "default" else rope}
    layers |= {"num_hidden_layers": config.num_layers, "trained_length": config.trained_length}
    layers["head_dim"] = LayerShape.of(config.target).head_dim
    names = {ours: theirs for theirs, ours in _NAMES.items()}
    return layers, form.renamed({name: weights[name] for name in weights if name.startswith(tuple(names))}, names)


def _write_dflash(config: SpecBlockConfig, weights: Tensors, target: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    layers, tensors = _written(config, weights)
    whole = config.draft_vocab_size == config.target_vocab_size
    fits = {"lm_head": HEAD not in weights, "draft_vocab_size": whole, "silent_first": config.silent_first}
    for name in (name for name, fit in fits.items() if not fit):
        raise ValueError(f"its {name} has no place in this form, which has the target's head: write {SPECULATORS.name}")
    own: dict[str, Any] = {"mask_token_id": config.mask_token, "target_layer_ids": list(config.tap_layers)}
    own |= {"causal": True} if config.kind == "jetspec" else {}
    sizes = {"block_size": config.forward_size, "num_target_layers": config.target["num_hidden_layers"]}
    return {**layers, **sizes, "architectures": ["DFlashDraftModel"], "dflash_config": own}, tensors


def _write_speculators(
    config: SpecBlockConfig, weights: Tensors, target: str
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    layers, tensors = _written(config, weights)
    if config.kind != "dflash":
        raise ValueError(f"its kind is {config.kind}, and this form has no causal attention: write {DFLASH.name}")
    if config.draft_vocab_size != config.target_vocab_size:
        if HEAD not in weights:
            raise ValueError("its lm_head is not stored: it is some rows of the target's, and this form has its own")
        d2t = weights[VOCABULARY].cpu()  # planned transfer: a command writes
        tensors |= {"d2t": d2t - torch.arange(len(d2t)), "t2d": torch.isin(torch.arange(config.target_vocab_size), d2t)}
    sizes = {"draft_vocab_size": config.draft_vocab_size, "block_size": config.forward_size}
    proposals = [{"proposal_type": "greedy", "speculative_tokens": config.block_size}]
    verifier = {"name_or_path": target, "architectures": []}
    serving = {"algorithm": "dflash", "proposal_methods": proposals, "default_proposal_method": "greedy"}
    return {
        **{"architectures": ["DFlashDraftModel"], "speculators_model_type": "dflash", _NESTED: layers, **sizes},
        "aux_hidden_state_layer_ids": [tap + 1 for tap in config.tap_layers],
        "mask_token_id": config.mask_token,
        "sample_from_anchor": not config.silent_first,
        "speculators_config": {**serving, "verifier": verifier},
    }, tensors


DFLASH = PublishedForm(
    "dflash",
    lambda described: "DFlashDraftModel" in form.named(described),
    _kind,
    _config,
    _weights,
    write=_write_dflash,
)
SPECULATORS = DFLASH._replace(
    name="speculators-dflash", recognises=lambda described: "dflash" in form.named(described), write=_write_speculators
)
