"""Checkpoints as GGUF files, in the names, the layout and with the keys of llama.cpp's converter; and read back."""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from gguf import GGML_QUANT_SIZES, MODEL_ARCH_NAMES, GGUFReader, GGUFWriter, dequantize, get_tensor_name_map, quantize
from gguf import GGMLQuantizationType as Kind
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from tests.conformance.gguf_recurrent import QWEN, metadata_of, parts_of

Array = npt.NDArray[Any]
Value = str | bool | int | float | list[str] | list[int] | list[float] | list[bool]
Quantise = Callable[[Array, Kind], Array]
View = Callable[[Array], Array]
"""The part of a weight that is a tensor of the file, in the order of its rows."""

# llama.cpp rotates neighbours there, transformers the halves of a head.
_PERMUTED = ("llama", "smollm3", "granite", "granitehybrid", "mistral3")
_PLUS_ONE = ("gemma", "gemma2", "gemma3", *QWEN)
_TRAINED = "original_max_position_embeddings"
_ADD = {bool: "add_bool", int: "add_uint32", float: "add_float32", str: "add_string", list: "add_array"}
_ARCHITECTURES = {name: number for number, name in MODEL_ARCH_NAMES.items()}


@dataclass(frozen=True, slots=True)
class Contents:
    """What is in a GGUF file."""

    keys: dict[str, Value]
    tensors: dict[str, tuple[Array, Kind]]  # # [rows, bytes] of blocks, else of float16 or float32

    def write(self, file: Path, max_tensors: int = 0) -> Path:
        """Write the file, or files of so many tensors; returns the first."""
        arch = str(self.keys["general.architecture"])
        writer = GGUFWriter(file, arch, split_max_tensors=max_tensors)
        for key, value in self.keys.items():
            if key != "general.architecture":
                getattr(writer, _ADD[type(value)])(key, value)
        for name, (data, kind) in self.tensors.items():
            writer.add_tensor(name, np.ascontiguousarray(data), raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return file if not max_tensors else min(file.parent.glob(f"{file.stem}-*.gguf"))


def contents(
    model: PreTrainedModel, arch: str, kind: Kind, tokenizer: Mapping[str, Value], by: Quantise = quantize
) -> Contents:
    """Return what llama.cpp's converter makes of a model, matrices quantised to this type."""
    tensors = dict[str, tuple[Array, Kind]]()
    state = {name: weight.detach().numpy() for name, weight in model.state_dict().items()}
    for gguf_name, (name, view) in _places(model, arch).items():
        tensors[gguf_name] = stored_as(gguf_name, view(state[name]), model.config, arch, kind, by)
    for name, factors in _rope_factors(model.config).items():
        tensors[name] = np.asarray(factors, np.float32), Kind.F32
    described = {f"{arch}.{key}": value for key, value in _metadata(model.config, arch).items() if value is not None}
    general: dict[str, Value] = {"general.architecture": arch, "general.type": "model", "general.name": "Tiny"}
    return Contents({**general, **described, **tokenizer}, tensors)


def read_back(file: Path, config: PreTrainedConfig, arch: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Return transformers' model of a file's dequantised weights."""
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=dtype)
    tensors = {tensor.name: tensor for tensor in GGUFReader(file).tensors}
    state = {name: weight.float().numpy() for name, weight in model.state_dict().items()}
    for gguf_name, (name, view) in _places(model, arch).items():
        data = dequantize(tensors[gguf_name].data, tensors[gguf_name].tensor_type)
        places = view(np.arange(state[name].size).reshape(state[name].shape))
        own = _permuted(gguf_name, data.reshape(places.shape), config, arch, back=True) - _shift(gguf_name, arch)
        state[name].reshape(-1)[places] = np.log(-own) if gguf_name.endswith("ssm_a") else own
    if config.tie_word_embeddings:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict({name: torch.from_numpy(data) for name, data in state.items()})
    model.eval()
    return model


def _places(model: PreTrainedModel, arch: str) -> dict[str, tuple[str, View]]:
    """The weight of the model for each tensor of the file, and its part of it."""
    known = get_tensor_name_map(_ARCHITECTURES[arch], model.config.num_hidden_layers)
    places = dict[str, tuple[str, View]]()
    for name in model.state_dict():
        if ".experts." in name:
            places |= {tensor: (name, view) for tensor, view in _of_experts(name, model.config).items()}
        elif parts := parts_of(name, model.config, arch):
            places |= {tensor: (name, view) for tensor, view in parts.items()}
        elif not (name == "lm_head.weight" and model.config.tie_word_embeddings):
            usual = re.sub("|".join(_USUAL), lambda end: _USUAL[end[0]], name)
            found = known.get_name(usual, try_suffixes=(".weight", ".bias", ".scale"))
            assert found is not None, name
            places[found] = name, lambda weight: weight
    return places


_USUAL = {"sinks": "sinks.weight", "e_score_correction_bias": "e_score_correction.bias"}
_USUAL |= {"layer_scalar": "layer_scalar.weight", "router.scale": "router.proj.scale"}
_USUAL |= {"router.per_expert_scale": "experts.down_proj.scale", "dt_bias": "dt_proj.bias"}
_USUAL |= {"block_sparse_moe.router": "block_sparse_moe.router.layer"}


def _of_experts(name: str, config: PreTrainedConfig) -> dict[str, View]:
    """The tensors with a weight of experts; llama.cpp's converter has gate and up rows apart, but not of Gemma 4."""
    layer, kind = name.split(".")[2], "bias" if name.endswith("_bias") else "weight"
    mixed = config.model_type == "gpt_oss"  # has gate and up columns by turns

    def rows(weight: Array) -> Array:
        return weight.swapaxes(1, 2) if mixed and kind == "weight" else weight

    def half(weight: Array, which: int) -> slice:
        width = weight.shape[1] // 2
        return slice(which, None, 2) if mixed else slice(which * width, (which + 1) * width)

    if "down_proj" in name:
        return {f"blk.{layer}.ffn_down_exps.{kind}": rows}
    if config.model_type == "gemma4_text":
        return {f"blk.{layer}.ffn_gate_up_exps.{kind}": rows}
    gate = {f"blk.{layer}.ffn_gate_exps.{kind}": lambda weight: rows(weight)[:, half(rows(weight), 0)]}
    return gate | {f"blk.{layer}.ffn_up_exps.{kind}": lambda weight: rows(weight)[:, half(rows(weight), 1)]}


def stored_as(
    name: str, data: Array, config: PreTrainedConfig, arch: str, kind: Kind, by: Quantise
) -> tuple[Array, Kind]:
    """Return a tensor as the converter writes it, a matrix quantised to this type."""
    if name.endswith("ssm_a"):
        data = -np.exp(data)
    if data.ndim == 1 or name.endswith(_WHOLE):
        return _permuted(name, data + np.float32(_shift(name, arch)), config, arch), Kind.F32
    if kind == Kind.MXFP4 and "_exps." not in name:
        kind = Kind.Q8_0  # as in the files of gpt-oss's makers
    if data.shape[-1] % GGML_QUANT_SIZES[kind][0]:
        kind = Kind.F16
    stored = by(np.ascontiguousarray(data).reshape(-1, data.shape[-1]), kind)
    return _permuted(name, stored.reshape(*data.shape[:-1], -1), config, arch), kind


_NARROW = "_norm", "ffn_gate_inp", "_inp_shexp", "conv1d", ".conv"
_WHOLE = (*(f"{name}.weight" for name in _NARROW), ".bias", "ssm_a", "ssm_d")


def _shift(name: str, arch: str) -> float:
    """What llama.cpp's converter adds to a weight."""
    return 1.0 if arch in _PLUS_ONE and name.endswith("norm.weight") and "ssm" not in name else 0.0


def _permuted(name: str, data: Array, config: PreTrainedConfig, arch: str, *, back: bool = False) -> Array:
    """Rows of queries and keys in llama.cpp's order, or back in transformers'. # [rows, ...] -> [rows, ...]"""
    module = name.split(".")[-2]
    if arch not in _PERMUTED or module not in ("attn_q", "attn_k"):
        return data
    heads = config.num_attention_heads if module == "attn_q" else config.num_key_value_heads
    half = data.shape[0] // heads // 2
    shape = (heads, half, 2) if back else (heads, 2, half)
    return data.reshape(*shape, *data.shape[1:]).swapaxes(1, 2).reshape(data.shape)


def _rope_factors(config: PreTrainedConfig) -> dict[str, Any]:
    """Tensors of numbers by which frequencies are divided. # [rotated dim / 2] each"""
    rope = config.rope_parameters
    if config.model_type == "gemma4_text":
        half = _head_dim(config) // 2
        turned = int(half * rope["full_attention"]["partial_rotary_factor"])
        return {"rope_freqs.weight": np.where(np.arange(half) < turned, 1.0, 1e30)}
    if rope.get("rope_type") == "longrope":
        return {f"rope_factors_{kind}.weight": rope[f"{kind}_factor"] for kind in ("long", "short")}
    if rope.get("rope_type") != "llama3":
        return {}
    dim = _head_dim(config)
    turns = rope["original_max_position_embeddings"] / (
        2 * math.pi * rope["rope_theta"] ** (np.arange(0, dim, 2) / dim)
    )
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    kept = np.clip((turns - low) / (high - low), 0, 1)
    return {"rope_freqs.weight": 1 / ((1 - kept) / rope["factor"] + kept)}


def _head_dim(config: PreTrainedConfig) -> int:
    one = config.per_layer_config[config.num_hidden_layers - 1]
    return int(getattr(one, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _metadata(config: PreTrainedConfig, arch: str) -> dict[str, Value | None]:
    """Keys of an architecture; None: not in the file."""
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    dim, one = _head_dim(config), config.per_layer_config[config.num_hidden_layers - 1]
    own_dim = None if arch in ("granite", "granitehybrid", "phi3", "cohere2") else getattr(one, "head_dim", None)
    rotated = int(dim * rope.get("partial_rotary_factor", 1.0))
    scaled = rope["rope_type"] in ("linear", "yarn")
    return {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": getattr(config, "intermediate_size", None),
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": one.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": getattr(config, "rms_norm_eps", None),
        "attention.layer_norm_epsilon": getattr(config, "norm_epsilon", getattr(config, "layer_norm_eps", None)),
        "attention.key_length": own_dim,
        "attention.value_length": own_dim,
        "vocab_size": config.vocab_size if arch in _PERMUTED else None,
        "rope.freq_base": None if arch in ("gemma", "gemma2") else rope["rope_theta"],  # which llama.cpp knows
        "rope.dimension_count": rotated if arch in (*_PERMUTED, "phi3", "glm4", "glm4moe", "cohere2") else None,
        "rope.scaling.type": rope["rope_type"] if scaled else None,
        "rope.scaling.factor": rope["factor"] if scaled else None,
        "rope.scaling.original_context_length": (rope if scaled else config.to_dict()).get(_TRAINED),
        "expert_count": (experts := _first(config, "n_routed_experts", "num_local_experts", "num_experts")),
        "expert_used_count": _first(config, "top_k_experts", "num_experts_per_tok") if experts else None,
        **_more_metadata(config, arch),
        **metadata_of(config, arch),
    }


def _first(config: PreTrainedConfig, *names: str) -> int | None:
    return next((getattr(config, name) for name in names if hasattr(config, name)), None)


def _more_metadata(config: PreTrainedConfig, arch: str) -> dict[str, Value | None]:
    """Keys that few have."""
    window = {"attention.sliding_window": getattr(config, "sliding_window", None)}
    windowed: dict[str, Value | None] = {}
    if "sliding_attention" in (getattr(config, "layer_types", None) or ()):
        windowed = window | {"attention.sliding_window_pattern": [k == "sliding_attention" for k in config.layer_types]}
    width: dict[str, Value | None] = {
        "expert_feed_forward_length": _first(config, "moe_intermediate_size", "intermediate_size")
    }
    capped = {"final_logit_softcapping": getattr(config, "final_logit_softcapping", None)}
    match arch:
        case "gemma2":
            return window | capped | {"attn_logit_softcapping": config.attn_logit_softcapping}
        case "gemma3":
            return window | capped
        case "gemma4":
            return windowed | capped | width | _of_gemma4(config)
        case "phi3":
            return {"attention.sliding_window": config.sliding_window or 0, **_longrope(config)}
        case "olmo2" | "exaone4":
            return windowed
        case "cohere2":
            return window | {"logit_scale": config.logit_scale, "rope.scaling.type": "none"}
        case "mistral3" if config.model_type == "ministral3":
            rope = config.rope_parameters
            scale = {"attention.temperature_scale": rope["llama_4_scaling_beta"]}
            return scale | {"rope.scaling.yarn_log_multiplier": rope["mscale_all_dim"]}
        case "qwen3moe":
            return width
        case "gpt-oss":
            return width | window
        case "glm4moe":
            return width | {
                "expert_shared_count": config.n_shared_experts,
                "leading_dense_block_count": config.first_k_dense_replace,
                "expert_gating_func": 2,
                "expert_weights_scale": config.routed_scaling_factor,
                "expert_weights_norm": config.norm_topk_prob,
                "expert_group_count": config.n_group,
                "expert_group_used_count": config.topk_group,
            }
        case "granite":
            scales = {"embedding_scale": config.embedding_multiplier, "residual_scale": config.residual_multiplier}
            return scales | {"attention.scale": config.attention_multiplier, "logit_scale": config.logits_scaling}
    return {}


def _of_gemma4(config: PreTrainedConfig) -> dict[str, Value | None]:
    layers = [config.per_layer_config[index] for index in range(config.num_hidden_layers)]
    heads, first = [one.num_key_value_heads for one in layers], len(layers) - config.num_kv_shared_layers
    widths = [config.intermediate_size * (1 if index < first else 2) for index in range(len(layers))]
    dims: dict[str, Value | None] = dict.fromkeys(
        ("attention.key_length_swa", "attention.value_length_swa", "rope.dimension_count_swa"), layers[0].head_dim
    )
    return dims | {
        "rope.dimension_count": layers[-1].head_dim,
        "rope.freq_base_swa": config.rope_parameters["sliding_attention"]["rope_theta"],
        "attention.shared_kv_layers": config.num_kv_shared_layers,
        "attention.head_count_kv": heads if len(set(heads)) > 1 else heads[0],
        "embedding_length_per_layer_input": config.hidden_size_per_layer_input,
        "feed_forward_length": widths if config.use_double_wide_mlp else config.intermediate_size,
    }


def _longrope(config: PreTrainedConfig) -> dict[str, Value | None]:
    if config.rope_parameters["rope_type"] != "longrope":
        return {}
    trained = config.rope_parameters[_TRAINED]
    scale = math.log(config.max_position_embeddings / trained) / math.log(trained)
    return {"rope.scaling.attn_factor": math.sqrt(1 + scale), "rope.scaling.original_context_length": trained}
