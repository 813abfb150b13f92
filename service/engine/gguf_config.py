"""Translates metadata and tensor names of a GGUF file to the transformers config and its parameter names.

Key names follow llama.cpp. Every key of the file's architecture must be read here or be listed as irrelevant; an
unknown key is a start-up error, because ignoring it could change the model's output.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import CONFIG_MAPPING, PreTrainedConfig

from service.engine.gguf_reader import GGUFFile
from service.errors import StartupError

Values = dict[str, Any]
"""Fields of a transformers config."""

ROPE_FACTORS = "rope_freqs.weight"
"""Name of the tensor that holds divisors of the rotary frequencies, the scaling of Llama 3.1 and later."""
_NO_EFFECT = frozenset(
    {
        "vocab_size",  # taken from the embedding
        "rope.scaling.finetuned",
        "tensor_data_layout",
        "expert_used_count",  # irrelevant: models with experts are refused by `expert_count`
        "pooling_type",
        "quantize_imatrix",
    }
)
_LOCAL_THETA = 10_000.0  # rotary base of Gemma 3's windowed layers; early files do not contain it
_GEMMA_27B = (46, 62)  # layer counts of the two Gemmas that scale attention scores by hidden_size / heads


class Metadata:
    """Reads the metadata keys of a file's architecture, named without its prefix, and tracks which were read."""

    def __init__(self, file: GGUFFile) -> None:
        self._file, self.prefix = file.path.name, f"{file.architecture}."
        own = (name for name in file.fields if name.startswith(self.prefix))
        self._unread = {name.removeprefix(self.prefix): file.fields[name] for name in own}

    def take(self, name: str, default: Any = None, *, by_layer: bool = False) -> Any:
        """Read a key, or return `default`. A list with one value per layer is reduced to this value if all are equal,
        unless `by_layer`. Raises StartupError if they differ."""
        value = self._unread.pop(name, default)
        if by_layer or not isinstance(value, list):
            return value
        if len(set(value)) != 1:
            raise StartupError(f"{self._file}: {self.prefix}{name} differs between layers; adaptree cannot run that")
        return value[0]

    def drop(self, *prefixes: str) -> None:
        """Ignore all keys with these prefixes."""
        self._unread = {name: value for name, value in self._unread.items() if not name.startswith(prefixes)}

    def need(self, name: str) -> Any:
        """Read a required key. Raises StartupError if it is missing."""
        value = self.take(name)
        if value is None:
            raise StartupError(f"{self._file}: key {self.prefix}{name} is missing; convert the model again")
        return value

    def refuse(self, name: str, value: object) -> StartupError:
        """Build the error for an unsupported value of a key."""
        return StartupError(f"{self._file}: {self.prefix}{name} is {value}, which adaptree cannot run")

    def expect(self, name: str, value: object) -> None:
        """Read an optional key. Raises StartupError if it has another value than this one."""
        found = self.take(name, value)
        if found != value:
            raise self.refuse(name, found)

    def refuse_unread(self) -> None:
        """Raise StartupError if a key was not read that may change the model's output."""
        unknown = sorted(self._unread.keys() - _NO_EFFECT)
        if unknown:
            raise StartupError(
                f"{self._file}: adaptree does not support the key {self.prefix}{unknown[0]}, and ignoring it may "
                f"change the model's output ({len(unknown)} such keys in all)"
            )


@dataclass(frozen=True, slots=True)
class Architecture:
    """Describes how the files of an architecture differ from Llama's."""

    model_type: str  # name of the architecture in transformers
    tensors: Mapping[str, str] | None = None
    """Layer modules by tensor name that differ from `_LAYER`."""
    more: Callable[[Values, Metadata, GGUFFile], Values] | None = None
    """Computes additional config fields from the common ones, the metadata and the file."""
    epsilon: tuple[str, str] = ("attention.layer_norm_rms_epsilon", "rms_norm_eps")  # key and config field
    rotary_part: bool = False  # rotary embeddings may cover a part of each head
    pairs_adjacent: bool = False  # whether rotary pairs are interleaved in the file
    norms_plus_one: bool = False  # whether norm weights are stored as 1 + weight

    def names(self, num_layers: int) -> dict[str, str]:
        """Map tensor names to module names of transformers, both without `.weight` and `.bias`."""
        layer = {**_LAYER, **(self.tensors or {})}
        names = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
        for index in range(num_layers):
            names |= {f"blk.{index}.{theirs}": f"model.layers.{index}.{ours}" for theirs, ours in layer.items()}
        return names


_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_GEMMA_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


def config_of(file: GGUFFile) -> PreTrainedConfig:
    """Build the transformers config of a file. Raises StartupError for unsupported architectures, keys and values."""
    try:
        return _config(architecture_of(file), Metadata(file), file)
    except (TypeError, ArithmeticError, StrictDataclassError) as error:
        raise StartupError(
            f"{file.path.name}: a key has a value of the wrong type ({error}); convert the model again"
        ) from error


def _config(architecture: Architecture, keys: Metadata, file: GGUFFile) -> PreTrainedConfig:
    for name in (name for name in file.tensors if name.startswith("rope_factors_")):
        raise StartupError(
            f"{file.path.name}: tensor {name!r}: rotary positions are scaled by the length of the text (longrope), "
            "with which the text of one request depends on the length of others; use a file for a shorter context"
        )
    values = _common(architecture, keys, file)
    if architecture.more is not None:
        values |= architecture.more(values, keys, file)
    keys.expect("attention.causal", True)
    keys.expect("expert_count", 0)
    keys.refuse_unread()
    config: PreTrainedConfig = CONFIG_MAPPING[values.pop("model_type", architecture.model_type)](**values)
    return config


def architecture_of(file: GGUFFile) -> Architecture:
    """Look up a file's architecture. Raises StartupError if it is unsupported."""
    known = ARCHITECTURES.get(file.architecture)
    if known is None:
        raise StartupError(
            f"{file.path.name}: adaptree does not read GGUF files of architecture {file.architecture!r}, only "
            f"{', '.join(ARCHITECTURES)}; give the model's safetensors folder or Hugging Face id instead"
        )
    return known


def _common(architecture: Architecture, keys: Metadata, file: GGUFFile) -> Values:
    """Build the config fields that all architectures share."""
    hidden, heads = keys.need("embedding_length"), keys.need("attention.head_count")
    head_dim = keys.take("attention.key_length", hidden // heads)
    if (values_dim := keys.take("attention.value_length", hidden // heads)) != head_dim:
        raise keys.refuse("attention.value_length", values_dim)
    key, epsilon = architecture.epsilon
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise StartupError(f"{file.path.name}: tensor 'token_embd.weight' is missing; convert the model again")
    tokens = file.fields.get("tokenizer.ggml.tokens")
    if tokens is not None and len(tokens) != embedding.shape[0]:
        raise StartupError(
            f"{file.path.name}: tensor 'token_embd.weight' has {embedding.shape[0]} rows, but the vocabulary has "
            f"{len(tokens)} tokens; convert the model again"
        )
    return {
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": keys.take("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "num_hidden_layers": keys.need("block_count"),
        "intermediate_size": keys.need("feed_forward_length"),
        "max_position_embeddings": keys.need("context_length"),
        epsilon: keys.need(key),
        "vocab_size": embedding.shape[0],
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "rope_parameters": _rope(architecture, head_dim, keys),
        **{name: file.fields.get(f"tokenizer.ggml.{name}") for name in ("bos_token_id", "eos_token_id")},
        "pad_token_id": None,
    }


def _rope(architecture: Architecture, head_dim: int, keys: Metadata) -> Values:
    """Build the rotary parameters with llama.cpp's defaults: a factor without type means linear scaling; YaRN's
    attention factor is the file's times 0.1 ln(factor) + 1 (Peng et al. 2023, equation 22)."""
    found: Values = {"rope_type": "default", "rope_theta": keys.take("rope.freq_base", 10_000.0)}
    rotated = keys.take("rope.dimension_count", head_dim)
    if architecture.rotary_part:
        found["partial_rotary_factor"] = rotated / head_dim
    elif rotated != head_dim:
        raise keys.refuse("rope.dimension_count", rotated)
    linear = keys.take("rope.scale_linear", 0.0)  # name before 2023-09
    factor = keys.take("rope.scaling.factor", linear) or 1.0
    original, kind = keys.take("rope.scaling.original_context_length"), keys.take("rope.scaling.type", "linear")
    fast, slow = keys.take("rope.scaling.yarn_beta_fast", 32.0), keys.take("rope.scaling.yarn_beta_slow", 1.0)
    keys.expect("rope.scaling.yarn_ext_factor", 1.0)
    keys.expect("rope.scaling.yarn_log_multiplier", 0.0)
    own = keys.take("rope.scaling.attn_factor", 1.0) * keys.take("rope.scaling.yarn_attn_factor", 1.0)
    if kind == "yarn":
        scaled = {"factor": factor, "beta_fast": fast, "beta_slow": slow}
        found |= scaled | ({} if original is None else {"original_max_position_embeddings": original})
        found |= {"rope_type": "yarn", **({} if own == 1 else {"attention_factor": own * (1 + 0.1 * math.log(factor))})}
    elif kind not in ("linear", "none"):
        raise keys.refuse("rope.scaling.type", repr(kind))
    elif own != 1:
        raise keys.refuse("rope.scaling.attn_factor", own)
    elif kind == "linear" and factor != 1:
        found |= {"rope_type": "linear", "factor": factor}
    return found


def _biases(values: Values, keys: Metadata, file: GGUFFile) -> Values:
    """Config fields for biases; layers have biases if the file contains their tensors."""
    return {
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in file.tensors,
    }


def _gemma2(values: Values, keys: Metadata, file: GGUFFile) -> Values:
    return {
        "sliding_window": keys.take("attention.sliding_window", 4096),
        "attn_logit_softcapping": keys.take("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": keys.take("final_logit_softcapping", 30.0),
        "query_pre_attn_scalar": _gemma_scalar(values),
        "layer_types": _layer_types(values, keys, period=2),
    }


def _gemma3(values: Values, keys: Metadata, file: GGUFFile) -> Values:
    """Config fields of Gemma 3. Rotary scaling applies only to layers without a window. Keys of the vision tower are
    ignored."""
    keys.drop("mm.", "vision.")
    return {
        "sliding_window": keys.need("attention.sliding_window"),
        "final_logit_softcapping": keys.take("final_logit_softcapping", 0.0) or None,
        "query_pre_attn_scalar": _gemma_scalar(values),
        "layer_types": _layer_types(values, keys, period=6),
        "rope_parameters": _rope_by_layer(values, keys.take("rope.freq_base_swa", _LOCAL_THETA)),
    }


def _rope_by_layer(values: Values, theta: float) -> Values:
    """Rotary parameters by layer type: the file's for full attention, unscaled ones with base `theta` for windows."""
    local = {"rope_type": "default", "rope_theta": theta}
    return {"full_attention": values["rope_parameters"], "sliding_attention": local}


def _gemma_scalar(values: Values) -> int:
    """Value of `query_pre_attn_scalar`, by whose square root attention scores are divided. Files do not contain it; as
    in llama.cpp it follows from the layer count."""
    is_27b = values["num_hidden_layers"] in _GEMMA_27B
    scalar: int = values["hidden_size"] // values["num_attention_heads"] if is_27b else values["head_dim"]
    return scalar


def _layer_types(values: Values, keys: Metadata, *, period: int) -> list[str]:
    """Attention type of each layer, from the file's list. Without one the last of every `period` layers has full
    attention, the others have a window."""
    pattern, count = keys.take("attention.sliding_window_pattern", period, by_layer=True), values["num_hidden_layers"]
    windowed = pattern if isinstance(pattern, list) else [index % pattern < pattern - 1 for index in range(count)]
    return ["sliding_attention" if one else "full_attention" for one in windowed]


def _phi3(values: Values, keys: Metadata, file: GGUFFile) -> Values:
    rope = values["rope_parameters"]
    if rope["rope_type"] != "default":
        raise keys.refuse("rope.scaling.type", repr(rope["rope_type"]))
    return {"sliding_window": keys.take("attention.sliding_window", 0) or None}


def _granite(values: Values, keys: Metadata, file: GGUFFile) -> Values:
    """Config fields of Granite: its multipliers. A missing attention multiplier defaults to head_dim ** -0.5, the
    embedding and residual multipliers to 1."""
    return {
        "attention_multiplier": keys.take("attention.scale") or values["head_dim"] ** -0.5,
        "embedding_multiplier": keys.take("embedding_scale") or 1.0,
        "residual_multiplier": keys.take("residual_scale") or 1.0,
        "logits_scaling": keys.need("logit_scale"),
        **_biases(values, keys, file),
    }


def _olmo2(values: Values, keys: Metadata, file: GGUFFile) -> Values:
    """Config fields of OLMo 2, or of OLMo 3 if the file has a window; windowed layers use unscaled rotary positions."""
    window = keys.take("attention.sliding_window", 0)
    if not window:
        return {}
    return {
        "model_type": "olmo3",
        "sliding_window": window,
        "layer_types": _layer_types(values, keys, period=4),
        "rope_parameters": _rope_by_layer(values, values["rope_parameters"]["rope_theta"]),
    }


ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture("llama", more=_biases, pairs_adjacent=True),
    "qwen2": Architecture("qwen2"),
    "qwen3": Architecture("qwen3", tensors=_HEAD_NORMS),
    "gemma": Architecture("gemma", norms_plus_one=True),
    "gemma2": Architecture("gemma2", tensors=_GEMMA_NORMS, more=_gemma2, norms_plus_one=True),
    "gemma3": Architecture("gemma3_text", tensors=_HEAD_NORMS | _GEMMA_NORMS, more=_gemma3, norms_plus_one=True),
    "phi3": Architecture(
        "phi3",
        tensors={"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
        more=_phi3,
        rotary_part=True,
    ),
    "smollm3": Architecture("smollm3", more=_biases, pairs_adjacent=True),
    "granite": Architecture("granite", more=_granite, pairs_adjacent=True),
    "olmo2": Architecture(
        "olmo2",
        tensors=_HEAD_NORMS
        | {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"},
        more=_olmo2,
    ),
    "glm4": Architecture(
        "glm4",
        tensors={
            "post_attention_norm": "post_self_attn_layernorm",
            "post_ffw_norm": "post_mlp_layernorm",
            "ffn_up": "mlp.gate_up_proj",
        },
        more=_biases,
        rotary_part=True,
    ),
    "starcoder2": Architecture(
        "starcoder2",
        tensors={"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
        epsilon=("attention.layer_norm_epsilon", "norm_epsilon"),
    ),
}
"""Supported architectures by their names in GGUF files."""
