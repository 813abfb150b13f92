"""SpecBlock as its authors publish it, read and written: our network with `_SWITCHES`."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from drafters.network.checkpoint import VOCABULARY, TargetParts
from drafters.network.config import SpecBlockConfig
from drafters.network.layers import LayerShape
from drafters.network.model import RANK_CLASSES
from drafters.published import form
from drafters.published.form import Described, PublishedForm, Tensors
from kernels.decoder_layer import FUSED_FAMILIES

_ARCHITECTURES = ("LlamaForCausalLMSpecBlock",), ("LlamaForCausalLMSpecBlockShift",)
"""Names of one network, the first in their training, the second in their fork of SGLang."""
_NAMES = {
    "input_layer.position_queries.weight": "input_layer.position_queries",
    "layers.": "decoder.layers.",
    "norm.": "decoder.norm.",
}
_SWITCHES: dict[str, Any] = {
    "kind": "specblock",
    "shift": True,
    "broadcast": True,
    "prefix_entries": "all",
    "continues_from": "raw",
    "restarts": True,
    "normalise_features": False,
    "normalise_rank_inputs": False,
    "rank_hidden": 256,
    "rank_scores": 20,
    "rank_biases": False,
    "ranks_from_draft": False,
}
_SIZES = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "vocab_size")


def _config(described: Described, tensors: Tensors, target: TargetParts) -> SpecBlockConfig:
    layers, depth = form.layers_of(described, target), target.config["num_hidden_layers"]
    form.refuse_set(described, ("target_hidden_size", "eagle_config"), layers["hidden_size"])
    if described["rank_classes"] != RANK_CLASSES:
        raise ValueError(f"its rank_classes is {described['rank_classes']}, and {RANK_CLASSES} are read")
    _rotary(layers)
    return SpecBlockConfig(
        # Their code divides, whatever head_dim a config has.
        {**layers, "head_dim": layers["hidden_size"] // layers["num_attention_heads"], "num_hidden_layers": depth},
        form.taps_of(_taps(depth), target, first=0),
        described["draft_vocab_size"],
        num_layers=layers["num_hidden_layers"],
        block_size=described["diffspec_draft_token_num"],
        trained_length=layers["max_position_embeddings"],
        coupled=False,
        **_SWITCHES,
    )


def _taps(depth: int) -> tuple[int, int, int]:
    """Return the target layers whose outputs their code reads."""
    return 1, depth // 2 - 1, depth - 4


def _rotary(layers: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config's `rope_theta` and `rope_scaling`. Raises ValueError for a scaling that they do not compute."""
    rope = form.written_rope(layers)
    scaling = rope["rope_scaling"] or {}
    kind = scaling.get("rope_type", scaling.get("type"))
    if kind not in (None, "llama3"):
        raise ValueError(f"its rope_scaling is {kind!r}, and only 'llama3' is in this form")
    return rope


def _weights(tensors: dict[str, Tensor], config: SpecBlockConfig, target: TargetParts) -> dict[str, Tensor]:
    form.drop_embedding(tensors, target, "input_layer.embed_tokens.weight")
    ranks = {name: tensors[name] for name in ("rank_head.0.weight", "rank_head.2.weight")}  # other forms may lack them
    return {**form.vocabulary(tensors, config), **form.renamed(tensors, _NAMES), **ranks}


def _write(config: SpecBlockConfig, weights: Tensors, target: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the content of `config.json`, where the target has no place, and the tensors by name. Raises ValueError
    for another network."""
    shape, depth = LayerShape.of(config.target), config.target["num_hidden_layers"]
    for name, value in {**_SWITCHES, "tap_layers": _taps(depth)}.items():
        if getattr(config, name) != value:
            raise ValueError(f"its {name} is {getattr(config, name)!r}, and must be {value!r} in this form")
    kinds = shape.family, any(shape.biases), shape.query_heads * shape.head_dim
    if kinds != (FUSED_FAMILIES["llama"], False, shape.hidden):
        raise ValueError("its layers have a head_dim, norms or biases that are not in this form")
    described = {
        **{name: config.target[name] for name in _SIZES},
        **_rotary(config.target),
        "architectures": list(_ARCHITECTURES[1]),
        "model_type": "llama",
        "num_hidden_layers": config.num_layers,
        "rms_norm_eps": shape.epsilon,
        "max_position_embeddings": config.trained_length,
        "draft_vocab_size": config.draft_vocab_size,
        "diffspec_draft_token_num": config.block_size,
        "rank_classes": RANK_CLASSES,
    }
    tensors = form.renamed(weights, {ours: theirs for theirs, ours in _NAMES.items()})
    del tensors[VOCABULARY]
    return described, {**tensors, **form.written_vocabulary(weights, config)}


SPECBLOCK = PublishedForm(
    "specblock",
    lambda described: form.named(described) in _ARCHITECTURES,
    lambda _: "specblock",
    _config,
    _weights,
    write=_write,
    writes=("specblock",),
)
