"""Architectures of GGUF files: how each differs from Llama's, in tensors and in config fields.

Key names follow llama.cpp. Every key of the file's architecture must be read or be listed as irrelevant; an unknown key
is a start-up error, because ignoring it could change the model's output.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from service.engine.gguf_reader import GGUFFile
from service.errors import StartupError

Values = dict[str, Any]
"""Fields of a transformers config."""
_NO_EFFECT = frozenset(
    {
        "vocab_size",  # taken from the embedding
        "rope.scaling.finetuned",
        "tensor_data_layout",
        "expert_used_count",  # read with `expert_count`, which is expected to be 0 in models without experts
        "pooling_type",
        "quantize_imatrix",
    }
)


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

    def need(self, name: str, *, by_layer: bool = False) -> Any:
        """Read a required key, as `take` does. Raises StartupError if it is missing."""
        value = self.take(name, by_layer=by_layer)
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


More = Callable[[Values, Metadata, GGUFFile], Values]


@dataclass(frozen=True, slots=True)
class Architecture:
    """Describes how the files of an architecture differ from Llama's."""

    model_type: str  # name of the architecture in transformers
    tensors: Mapping[str, str] | None = None
    """Layer modules by tensor name that differ from `_LAYER`, or parameters if the name ends in `.weight`, `.bias` or
    `.scale`."""
    more: More | None = None
    """Computes additional config fields from the common ones, the metadata and the file."""
    epsilon: tuple[str, str] = ("attention.layer_norm_rms_epsilon", "rms_norm_eps")  # key and config field
    rotary_part: bool = False  # rotary embeddings may cover a part of each head
    pairs_adjacent: bool = False  # whether rotary pairs are interleaved in the file
    layers_differ: bool = False  # KV heads and feed-forward lengths may differ between layers
    norms_plus_one: bool = False  # whether norm weights are stored as 1 + weight

    def names(self, num_layers: int) -> dict[str, str]:
        """Map tensor names to parameter names of transformers, whether or not the model has them. Tensors of experts
        are not among them."""
        layer = {**_LAYER, **(self.tensors or {})}
        names = dict(_MODEL)
        for index in range(num_layers):
            names |= {f"blk.{index}.{theirs}": f"model.layers.{index}.{ours}" for theirs, ours in layer.items()}
        whole = {theirs: ours for theirs, ours in names.items() if theirs.endswith((".weight", ".bias", ".scale"))}
        modules = names.items() - whole.items()
        return whole | {f"{theirs}.{kind}": f"{ours}.{kind}" for theirs, ours in modules for kind in ("weight", "bias")}


_MODEL = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_MODEL |= {"token_embd_norm": "model.embedding_norm"}  # LFM2's last norm
_MODEL |= {"per_layer_token_embd": "model.embed_tokens_per_layer"}
_MODEL |= {"per_layer_model_proj": "model.per_layer_model_projection"}
_MODEL |= {"per_layer_proj_norm": "model.per_layer_projection_norm"}
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
_LOCAL_THETA = 10_000.0  # rotary base of Gemma 3's windowed layers; early files do not contain it
_GEMMA_27B = (46, 62)  # layer counts of the two Gemmas that scale attention scores by hidden_size / heads
HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
POST_NORM = {"post_attention_norm": "post_attention_layernorm"}
_POST_NORMS = POST_NORM | {"post_ffw_norm": "post_feedforward_layernorm"}
_GEMMA_NORMS = _POST_NORMS | {"ffn_norm": "pre_feedforward_layernorm"}
_GEMMA4 = {"inp_gate": "per_layer_input_gate", "proj": "per_layer_projection", "post_norm": "post_per_layer_input_norm"}
_GEMMA4 |= {"layer_output_scale.weight": "layer_scalar", "pre_ffw_norm_2": "pre_feedforward_layernorm_2"}
_GEMMA4 |= {f"post_ffw_norm_{part}": f"post_feedforward_layernorm_{part}" for part in (1, 2)}
_GEMMA4 |= {"ffn_gate_inp": "router.proj", "ffn_gate_inp.scale": "router.scale"}
_GEMMA4 |= {"ffn_down_exps.scale": "router.per_expert_scale"}
GATE = {"ffn_gate_inp": "mlp.gate"}
_FUSED_GATE = {"ffn_up": "mlp.gate_up_proj"}
_GLM4 = {"post_attention_norm": "post_self_attn_layernorm", "post_ffw_norm": "post_mlp_layernorm"}
_GLM4_MOE = {f"ffn_{name}_shexp": f"mlp.shared_experts.{name}_proj" for name in ("gate", "up", "down")}
_GLM4_MOE |= HEAD_NORMS | GATE | POST_NORM | {"exp_probs_b.bias": "mlp.gate.e_score_correction_bias"}
_GPT_OSS = POST_NORM | {"attn_sinks.weight": "self_attn.sinks", "ffn_gate_inp": "mlp.router"}
_SIGMOID = 2  # value of `expert_gating_func`


def _biases(values: Values, keys: Metadata, file: GGUFFile) -> Values:
    """Config fields for biases; layers have biases if the file contains their tensors."""
    return {
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in file.tensors,
    }


def _llama(values: Values, keys: Metadata, file: GGUFFile) -> Values:
    """Config fields of Llama, or of Mixtral if there are experts."""
    if not file.fields.get(f"{keys.prefix}expert_count"):
        return _biases(values, keys, file)
    return {"model_type": "mixtral", **_experts(keys, "num_local_experts"), "sliding_window": None}


def _experts(keys: Metadata, name: str, chosen: str = "num_experts_per_tok") -> Values:
    """Config fields for the number of experts, called `name`, and of those that are `chosen` for a token."""
    return {name: keys.need("expert_count"), chosen: keys.need("expert_used_count")}


def _mistral3(values: Values, keys: Metadata, file: GGUFFile) -> Values:
    """Config fields of Ministral 3, whose queries grow with their position, or of Mistral if they do not."""
    scale = keys.take("attention.temperature_scale", 0.0)
    if not scale:
        return {"model_type": "mistral", "sliding_window": None}
    return {"rope_parameters": values["rope_parameters"] | {"llama_4_scaling_beta": scale}}


def _qwen3_moe(values: Values, keys: Metadata, file: GGUFFile) -> Values:
    chosen = _experts(keys, "num_experts")
    width = keys.take("expert_feed_forward_length", 0) or values["intermediate_size"] // chosen["num_experts_per_tok"]
    return {**chosen, "moe_intermediate_size": width, "norm_topk_prob": True}


def _olmoe(values: Values, keys: Metadata, file: GGUFFile) -> Values:
    return {**_experts(keys, "num_experts"), "norm_topk_prob": False}


def _glm4_moe(values: Values, keys: Metadata, file: GGUFFile) -> Values:
    """Config fields of GLM 4.5. The last blocks may be a drafter's, which llama.cpp does not run either."""
    if (function := keys.take("expert_gating_func", 0)) not in (0, _SIGMOID):
        raise keys.refuse("expert_gating_func", function)
    drafter = keys.take("nextn_predict_layers", 0)
    return {
        **_experts(keys, "n_routed_experts"),
        "num_hidden_layers": values["num_hidden_layers"] - drafter,
        "num_mtp_layers": drafter,
        "first_k_dense_replace": keys.take("leading_dense_block_count", 0),
        "moe_intermediate_size": keys.need("expert_feed_forward_length"),
        "n_shared_experts": keys.need("expert_shared_count"),
        "routed_scaling_factor": keys.take("expert_weights_scale", 0.0) or 1.0,
        "norm_topk_prob": keys.take("expert_weights_norm", False),
        "n_group": keys.take("expert_group_count", 0) or 1,
        "topk_group": keys.take("expert_group_used_count", 0) or 1,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "use_qk_norm": "blk.0.attn_q_norm.weight" in file.tensors,
    }


def _gpt_oss(values: Values, keys: Metadata, file: GGUFFile) -> Values:
    """Config fields of gpt-oss. Its makers do not round the borders of YaRN's frequencies, which files do not say."""
    rope = values["rope_parameters"]
    return {
        **_experts(keys, "num_local_experts"),
        "intermediate_size": keys.need("expert_feed_forward_length"),
        "sliding_window": keys.need("attention.sliding_window"),
        "layer_types": _layer_types(values, keys, period=2),
        "rope_parameters": rope | ({"truncate": False} if rope["rope_type"] == "yarn" else {}),
    }


def _exaone4(values: Values, keys: Metadata, file: GGUFFile) -> Values:
    """Config fields of EXAONE 4; if some layers have windows, the others have no rotary positions."""
    window = keys.take("attention.sliding_window", 0)
    layers = _layer_types(values, keys, period=4) if window else ["full_attention"] * values["num_hidden_layers"]
    return {"sliding_window": window or None, "layer_types": layers}


def _cohere2(values: Values, keys: Metadata, file: GGUFFile) -> Values:
    return {
        "sliding_window": keys.need("attention.sliding_window"),
        "layer_types": _layer_types(values, keys, period=4),
        "logit_scale": keys.need("logit_scale"),
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
    """Config fields of Gemma 3. Keys of the vision tower are ignored."""
    keys.drop("mm.", "vision.")
    theta = keys.take("rope.freq_base_swa", _LOCAL_THETA)
    return _gemma_windows(values, keys, theta) | {"query_pre_attn_scalar": _gemma_scalar(values)}


def _gemma_windows(values: Values, keys: Metadata, theta: float) -> Values:
    """Config fields of Gemma 3 and 4. Rotary scaling applies only to layers without a window; `theta`: of others."""
    return {
        "sliding_window": keys.need("attention.sliding_window"),
        "final_logit_softcapping": keys.take("final_logit_softcapping", 0.0) or None,
        "layer_types": _layer_types(values, keys, period=6),
        "rope_parameters": _rope_by_layer(values, theta),
    }


def _gemma4(values: Values, keys: Metadata, file: GGUFFile) -> Values:
    """Config fields of Gemma 4. Layers without a window have other heads, and may lack a projection of values; the
    last layers read the keys and values of earlier ones, and may have wider feed-forwards. Which columns of a head
    rotate is in `rope_freqs.weight`."""
    windows = _gemma_windows(values, keys, keys.need("rope.freq_base_swa"))
    kinds, windowed = windows["layer_types"], keys.need("attention.key_length_swa")
    dims = {"full_attention": values["head_dim"], "sliding_attention": windowed}
    if kinds[-1] != "full_attention":
        raise keys.refuse("attention.sliding_window_pattern", kinds)
    if "rope_freqs.weight" not in file.tensors:
        raise keys.refuse("rope.dimension_count", "of all columns, as tensor 'rope_freqs.weight' is missing")
    for name in ("attention.value_length_swa", "rope.dimension_count_swa"):
        if (found := keys.need(name)) != windowed:
            raise keys.refuse(name, found)
    lists = (np.broadcast_to(values[name], len(kinds)) for name in ("num_key_value_heads", "intermediate_size"))
    heads, widths = (list(map(int, one)) for one in lists)
    is_sparse = "blk.0.ffn_gate_inp.weight" in file.tensors
    return {
        **windows,
        "per_layer_config": {
            index: {"head_dim": dims[kind], "num_key_value_heads": own}
            for index, (kind, own) in enumerate(zip(kinds, heads, strict=True))
        },
        "head_dim": windowed,
        "num_key_value_heads": heads[0],
        "attention_k_eq_v": f"blk.{kinds.index('full_attention')}.attn_v.weight" not in file.tensors,
        "num_kv_shared_layers": keys.need("attention.shared_kv_layers"),
        "intermediate_size": widths[0],
        "use_double_wide_mlp": widths[-1] != widths[0],
        "hidden_size_per_layer_input": keys.need("embedding_length_per_layer_input"),
        "vocab_size_per_layer_input": values["vocab_size"],
        "enable_moe_block": is_sparse,
        **(_experts(keys, "num_experts", "top_k_experts") if is_sparse else {}),
        "moe_intermediate_size": (keys.need if is_sparse else keys.take)("expert_feed_forward_length"),
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
    if rope["rope_type"] not in ("default", "longrope"):
        raise keys.refuse("rope.scaling.type", repr(rope["rope_type"]))
    trained = rope.get("original_max_position_embeddings", values["max_position_embeddings"])
    window = keys.take("attention.sliding_window", 0)
    return {"sliding_window": window or None, "original_max_position_embeddings": trained}


def granite(values: Values, keys: Metadata, file: GGUFFile) -> Values:
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
    "llama": Architecture("llama", tensors=GATE, more=_llama, pairs_adjacent=True),
    "mistral3": Architecture("ministral3", more=_mistral3, pairs_adjacent=True),
    "qwen2": Architecture("qwen2"),
    "qwen3": Architecture("qwen3", tensors=HEAD_NORMS),
    "qwen3moe": Architecture("qwen3_moe", tensors=HEAD_NORMS | GATE, more=_qwen3_moe),
    "olmoe": Architecture("olmoe", tensors=HEAD_NORMS | GATE, more=_olmoe),
    "gemma": Architecture("gemma", norms_plus_one=True),
    "gemma2": Architecture("gemma2", tensors=_GEMMA_NORMS, more=_gemma2, norms_plus_one=True),
    "gemma3": Architecture("gemma3_text", tensors=HEAD_NORMS | _GEMMA_NORMS, more=_gemma3, norms_plus_one=True),
    "gemma4": Architecture("gemma4_text", HEAD_NORMS | _GEMMA_NORMS | _GEMMA4, more=_gemma4, layers_differ=True),
    "phi3": Architecture("phi3", _FUSED_GATE | {"attn_qkv": "self_attn.qkv_proj"}, more=_phi3, rotary_part=True),
    "smollm3": Architecture("smollm3", more=_biases, pairs_adjacent=True),
    "granite": Architecture("granite", more=granite, pairs_adjacent=True),
    "olmo2": Architecture("olmo2", tensors=HEAD_NORMS | _POST_NORMS, more=_olmo2),
    "exaone4": Architecture("exaone4", tensors=HEAD_NORMS | _POST_NORMS, more=_exaone4),
    "cohere2": Architecture("cohere2", more=_cohere2, epsilon=("attention.layer_norm_epsilon", "layer_norm_eps")),
    "glm4": Architecture("glm4", _FUSED_GATE | _GLM4, more=_biases, rotary_part=True),
    "glm4moe": Architecture("glm4_moe", tensors=_GLM4_MOE, more=_glm4_moe, rotary_part=True),
    "gpt-oss": Architecture("gpt_oss", tensors=_GPT_OSS, more=_gpt_oss),
    "starcoder2": Architecture(
        "starcoder2",
        tensors={"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
        epsilon=("attention.layer_norm_epsilon", "norm_epsilon"),
    ),
}
"""Supported architectures by their names in GGUF files."""
