"""Drafters in the form in which their authors publish them, read without conversion. A form recognises a `config.json`,
and maps its numbers to `SpecBlockConfig` and its tensors to our names. Published drafters have no rank head: one is
added, which repeats the rank classes of the draft distribution until it has been trained."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from drafters.specblock import checkpoint
from drafters.specblock.checkpoint import CONFIG_FILE, VOCABULARY, DrafterError, TargetParts, names_tokens
from drafters.specblock.config import SpecBlockConfig
from drafters.specblock.model import SpecBlock
from drafters.trained_kinds import TRAINED_KINDS

_RANK_HEAD = ("rank_head.", "rank_norm.")
_LAST_OF_RANKS = "rank_head.2."
_HEAD = "lm_head.weight"

Described = Mapping[str, Any]
"""The content of a `config.json`."""
Tensors = Mapping[str, Tensor]


class PublishedForm(NamedTuple):
    """One published form. `config` and `weights` raise KeyError for what is missing and ValueError for what cannot
    be."""

    kind: str  # of `TRAINED_KINDS`
    recognises: Callable[[Described], bool]
    reads: Callable[[str], bool]  # whether a tensor of this name is the drafter's
    config: Callable[[Described, Tensors, TargetParts], SpecBlockConfig]
    weights: Callable[[dict[str, Tensor], SpecBlockConfig, TargetParts], dict[str, Tensor]]
    """By the names of `checkpoint.weights_of`, without a rank head."""


def form_of(folder: Path) -> PublishedForm | None:
    """Return the published form of a folder's drafter; None if it has our own form or an unknown one."""
    try:
        described = json.loads((folder / CONFIG_FILE).read_text())
    except (OSError, ValueError):
        return None  # loading it reports the reason
    return next((form for form in FORMS if form.recognises(described)), None) if isinstance(described, dict) else None


def kind_of(folder: Path) -> str:
    """Return the kind of a folder's drafter. Raises DrafterError."""
    form = form_of(folder)
    return checkpoint.describe(folder).config.kind if form is None else form.kind


def load(folder: Path, target: TargetParts, *, dtype: torch.dtype, device: torch.device | str) -> SpecBlock:
    """Load a folder's drafter for this target, in whatever form it is. Raises DrafterError."""
    form = form_of(folder)
    if form is None:
        return checkpoint.load(folder, target, dtype=dtype, device=device)
    described: dict[str, Any] = json.loads((folder / CONFIG_FILE).read_text())
    tensors = read_tensors(folder, form)
    with checkpoint.refusing(folder, f"is no drafter of kind {form.kind} for this target", KeyError, ValueError):
        config = form.config(described, tensors, target)
        weights = form.weights(tensors, config, target)
    checkpoint.refuse_misfits(folder, weights, checkpoint.shapes_of(config), may_lack=_RANK_HEAD)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # the rank head's first weights
        model = SpecBlock(config)
    own = checkpoint.weights_of(model)
    untrained = {name: torch.zeros_like(value) for name, value in own.items() if name.startswith(_LAST_OF_RANKS)}
    checkpoint.write_weights(model, {**own, **untrained, **weights})
    return model.to(device=device, dtype=dtype).eval().requires_grad_(False)


def weights_bytes(folder: Path) -> bytes:
    """Return bytes that are equal for folders with the same weights. Raises OSError and DrafterError."""
    form = form_of(folder)
    if form is None:
        return (folder / checkpoint.WEIGHTS_FILE).read_bytes()
    tensors = sorted(read_tensors(folder, form).items())
    return b"".join(name.encode() + value.flatten().view(torch.uint8).numpy().tobytes() for name, value in tensors)


def read_tensors(folder: Path, form: PublishedForm) -> dict[str, Tensor]:
    """Read the drafter's tensors from one file or several. Raises DrafterError. # -> [...] each"""
    found = dict[str, Tensor]()
    with checkpoint.refusing(folder, "its weights cannot be read", OSError, SafetensorError):
        for file in sorted(folder.glob("*.safetensors")):
            with safe_open(file, framework="pt") as stored:
                found |= {name: stored.get_tensor(name) for name in stored.keys() if form.reads(name)}  # noqa: SIM118
    if not found:
        raise DrafterError(f"drafter {folder}: holds no .safetensors file with its weights; convert others to it")
    return found


def _renamed(tensors: Tensors, names: Mapping[str, str]) -> dict[str, Tensor]:
    """Return tensors by our names; `names` maps their prefixes to ours, the longest match counts."""
    found = dict[str, Tensor]()
    for name, tensor in tensors.items():
        prefix = max((theirs for theirs in names if name.startswith(theirs)), key=len, default="")
        found[names.get(prefix, "") + name.removeprefix(prefix)] = tensor
    return found


def _on_last_layer(target: TargetParts, **numbers: Any) -> SpecBlockConfig:
    """Return the config of a drafter that reads the target's last layer and can draft every token."""
    last, vocab = target.config["num_hidden_layers"] - 1, target.config["vocab_size"]
    return SpecBlockConfig(target.config, (last,), vocab, ranks_from_draft=True, **numbers)


# EAGLE-3: `midlayer`, whose attention reads the token's embedding beside the state, `fc` of three target layers, and a
# draft vocabulary.

_EAGLE3_EMBEDDING = "embed_tokens.weight"
_EAGLE3_NAMES = {
    "fc.": "input_layer.condition_proj.",
    "midlayer.input_layernorm.": "input_layer.token_norm.",
    "midlayer.hidden_norm.": "decoder.layers.0.input_layernorm.",
    "midlayer.": "decoder.layers.0.",
    "norm.": "decoder.norm.",
}
_EAGLE3_UNSUPPORTED = ("norm_before_residual", "eagle_config", "eagle_aux_hidden_state_layer_ids")
"""Config keys that would change the result."""


def _is_eagle3(described: Described) -> bool:
    named = any("eagle3" in name.lower() for name in described.get("architectures") or ())
    return named or "draft_vocab_size" in described


def _eagle3_config(described: Described, tensors: Tensors, target: TargetParts) -> SpecBlockConfig:
    """It taps the inputs of target layers 2, L / 2 and L - 3."""
    for name in _EAGLE3_UNSUPPORTED:
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
        **TRAINED_KINDS["eagle3"].shape,
    )


def _eagle3_weights(tensors: dict[str, Tensor], config: SpecBlockConfig, target: TargetParts) -> dict[str, Tensor]:
    """`d2t` holds target ids minus draft ids; without it every token can be drafted."""
    embedding = tensors.pop(_EAGLE3_EMBEDDING, None)
    if embedding is not None and not _same_values(embedding, target.embedding):
        raise ValueError(f"its {_EAGLE3_EMBEDDING} is not the target's")
    tensors.pop("t2d", None)
    tokens = torch.arange(config.draft_vocab_size)
    zeros = torch.zeros(len(tokens) if len(tokens) == config.target_vocab_size else 0)
    distances = tensors.pop("d2t", zeros)
    if distances.shape != tokens.shape:
        raise ValueError(f"its d2t must list {len(tokens)} tokens, and lists {distances.numel()}")
    d2t = tokens + distances.long()
    if not names_tokens(d2t, config.target_vocab_size):
        raise ValueError("its d2t names tokens that the target does not have, or one twice")
    return {**_renamed(tensors, _EAGLE3_NAMES), VOCABULARY: d2t}


def _same_values(embedding: Tensor, other: Tensor) -> bool:
    """Whether two embeddings are equal in bf16. # both [vocab, hidden]"""
    other = other.cpu()  # planned transfer: at the start
    return embedding.shape == other.shape and torch.equal(embedding.bfloat16(), other.bfloat16())


# Medusa: for each head a residual block and an output layer, on the target's last state after the output norm.

_MEDUSA_KEY = "medusa_num_heads"
"""Some configs state fewer heads than there are."""
_MEDUSA_PARTS = ("0.linear.weight", "0.linear.bias", "1.weight")


def _medusa_config(described: Described, tensors: Tensors, target: TargetParts) -> SpecBlockConfig:
    if described.get("medusa_num_layers", 1) != 1:
        raise ValueError("its heads have more than one residual block each, which are not read")
    block_size = len({name.partition(".")[0] for name in _by_head(tensors)})
    return _on_last_layer(target, kind="medusa", num_layers=0, block_size=block_size, shift=False, own_heads=True)


def _medusa_weights(tensors: dict[str, Tensor], config: SpecBlockConfig, target: TargetParts) -> dict[str, Tensor]:
    if target.norm is None:
        raise ValueError("its target ends in a norm of another kind")
    own, heads = _by_head(tensors), range(config.block_size)
    unknown = sorted(own.keys() - {f"{head}.{part}" for head in heads for part in _MEDUSA_PARTS})
    if unknown:
        raise ValueError(f"it has tensors that are not read: {', '.join(unknown)}")
    weight, bias, output = (torch.stack([own[f"{head}.{part}"] for head in heads]) for part in _MEDUSA_PARTS)
    return {
        "input_layer.feature_norms.0.weight": target.norm,
        "input_layer.condition_proj.weight": torch.eye(config.hidden_size),
        "input_layer.heads_weight": weight,
        "input_layer.heads_bias": bias,
        _HEAD: output,
        VOCABULARY: torch.arange(config.draft_vocab_size),
    }


def _by_head(tensors: Tensors) -> dict[str, Tensor]:
    """Return tensors by names that begin with the number of the head."""
    return {name.removeprefix("medusa_head."): value for name, value in tensors.items()}


# MiMo's multi-token prediction module, among its target's weights: one layer on a projection of the last layer's
# output, before the output norm, and the next token's embedding; the target's own head reads it.

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
    length = target.config["max_position_embeddings"]
    shape = TRAINED_KINDS["mtp"].shape
    return _on_last_layer(target, kind="mtp", trained_length=length, normalise_features=False, **shape)


def _mtp_weights(tensors: dict[str, Tensor], config: SpecBlockConfig, target: TargetParts) -> dict[str, Tensor]:
    """The condition is the tapped state itself; position queries are 0."""
    own = {name.removeprefix(_MTP_MODULE): value for name, value in tensors.items() if name.startswith(_MTP_MODULE)}
    joined, hidden = own.pop("input_proj.weight"), config.hidden_size  # columns of the state, then of the token
    return {
        **_renamed(own, _MTP_NAMES),
        "input_layer.condition_proj.weight": torch.eye(hidden),
        "input_layer.position_queries": torch.zeros(1, hidden),
        "input_layer.query_norm.weight": torch.ones(hidden),
        "input_layer.fuse.weight": torch.cat([joined, joined.new_zeros(hidden, hidden)], dim=1),
        _HEAD: tensors.get(_HEAD, target.embedding),  # files with tied weights have no head
        VOCABULARY: torch.arange(config.draft_vocab_size),
    }


FORMS = (
    PublishedForm(
        "mtp", _is_mtp, lambda name: name.startswith(_MTP_MODULE) or name == _HEAD, _mtp_config, _mtp_weights
    ),
    PublishedForm("eagle3", _is_eagle3, lambda name: True, _eagle3_config, _eagle3_weights),
    PublishedForm(
        "medusa", lambda described: _MEDUSA_KEY in described, lambda name: True, _medusa_config, _medusa_weights
    ),
)
