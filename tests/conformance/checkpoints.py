"""Tiny random checkpoints of each family, with the options that real configurations of it have; and how to be loud.

A loud checkpoint has peaked attention and spread logits, and most of its 512 positions lie beyond every window and
beyond `original_max_position_embeddings`: an option that is not applied changes scores everywhere.
"""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
    PreTrainedModel,
)

from tests.tiny_models import EOS_ID, VOCAB_SIZE, tiny_tokenizer

POSITIONS = 512
_WINDOW, _TRAINED = 64, 128
_LOGIT_SPREAD = 3.0
Values = dict[str, Any]
"""Fields of a configuration."""
Option = Values | str
"""How to drop an option: what the configuration says instead, or whose vectors become neutral (0, or 1 of a norm)."""
Options = dict[str, Option]


@dataclass(frozen=True, slots=True, eq=False)
class Checkpoint:
    """One kind of model of a family."""

    family: str
    kind: str  # what it has beyond the family's others
    model_type: str
    config: Values = field(default_factory=dict)
    options: Options = field(default_factory=dict)
    gguf: str = ""  # the architecture as llama.cpp names it; empty: llama.cpp's converter makes no such file
    left_out: str = ""  # why llama.cpp does not apply the options, which the makers' code does
    within: str = ""  # the multimodal type in whose files it comes as the text model

    def __str__(self) -> str:
        return f"{self.family}, {self.kind}" if self.kind else self.family

    def described(self, *without: str) -> PreTrainedConfig:
        """Return its configuration, some options dropped."""
        values = _COMMON | self.config
        for option in map(self.options.__getitem__, without):
            values |= {} if isinstance(option, str) else option
        return AutoConfig.for_model(self.model_type, **values)


def _rope(theta: float = 10_000.0, kind: str = "default", **more: object) -> Values:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": theta, **more}}


_SIZES = {"vocab_size": VOCAB_SIZE, "hidden_size": 256, "intermediate_size": 512, "max_position_embeddings": POSITIONS}
_HEADS = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
_TOKENS: Values = {"bos_token_id": 1, "eos_token_id": EOS_ID, "pad_token_id": None, "tie_word_embeddings": False}
_COMMON = _SIZES | _HEADS | _TOKENS
_TIED: Values = {"tie_word_embeddings": True}
_ALL_HEADS: Values = {"num_key_value_heads": 4}
_WINDOWED: Values = {"sliding_window": _WINDOW}
_NO_WINDOW: Values = {"sliding_window": None}
_WIDE: Values = {"sliding_window": 4 * POSITIONS}
_YARN: Values = {"factor": 4.0, "original_max_position_embeddings": _TRAINED}
_LLAMA3 = _YARN | {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_BIASES: Values = {"attention_bias": True, "mlp_bias": True}
_GEMMA = _TIED | {"head_dim": 128}
_GEMMA2 = _GEMMA | _WINDOWED | {"query_pre_attn_scalar": 128}
_CAPS: Values = {"attn_logit_softcapping": 12.0, "final_logit_softcapping": 6.0}
_DEFAULT = {theta: _rope(theta)["rope_parameters"] for theta in (1e4, 5e5, 1e6)}
_GLOBAL = _rope(1e6, "linear", factor=8.0)["rope_parameters"]
_QWEN2_WINDOW = _WINDOWED | {"use_sliding_window": True, "max_window_layers": 1}
_OLMO3: Values = {"layer_types": ["sliding_attention"] * 3 + ["full_attention"], "num_hidden_layers": 4, **_WINDOWED}
_GRANITE: Values = {"embedding_multiplier": 12.0, "residual_multiplier": 0.22, "logits_scaling": 8.0}
_GRANITE_SCALE: Values = {"attention_multiplier": 0.03125}


def _by_layers(whole: Values, windowed: Values) -> Values:
    return {"rope_parameters": {"full_attention": whole, "sliding_attention": windowed}}


_BASE: Options = {"rope base": _rope(300.0)}
_USUAL_BASE: Options = {"rope base": _rope()}
_UNTIED: Options = {"tied output": {"tie_word_embeddings": False}}
_PLAIN_ROPE: Options = {"llama3 rope": _rope(5e5)}
_UNSCALED: Options = {"YaRN": _rope(1e6)}
_UNNORMED: Options = {"query and key norms": "_norm."}
_UNBIASED: Options = {"attention bias": "attn", "feed-forward bias": "mlp"}
_WHOLE_ROPE: Options = {"partial rope": {"partial_rotary_factor": 1.0}}
_NO_WINDOWS: Options = {"windows": _WIDE}
_UNCAPPED: Options = {name.replace("_logit", ""): {name: None} for name in _CAPS}
_NO_MULTIPLIERS: Options = {name: {name: 1.0} for name in _GRANITE}
_GEMMA3_PLAIN: Options = {
    "linear rope": _by_layers(_DEFAULT[1e6], _DEFAULT[1e4]),
    "local rope base": _by_layers(_GLOBAL, _DEFAULT[1e6]),
}
_GEMMA3 = _GEMMA2 | {"num_hidden_layers": 6} | _by_layers(_GLOBAL, _DEFAULT[1e4])
_OLMO3_ROPE = _by_layers(_DEFAULT[5e5] | _YARN | {"rope_type": "yarn"}, _DEFAULT[5e5])
_OLMO3_PLAIN: Options = {"YaRN": _by_layers(_DEFAULT[5e5], _DEFAULT[5e5]), **_NO_WINDOWS}
_GRANITE_PLAIN: Options = {**_NO_MULTIPLIERS, "attention_multiplier": {"attention_multiplier": 0.125}, **_UNTIED}
_SMOLLM3_PLAIN: Options = {"layers without rope": {"no_rope_layers": [1] * 4}, **_UNTIED}

_EXPERTS: Values = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 32}
_MIXTRAL: Values = {"num_local_experts": 8, **_NO_WINDOW, **_rope(1e6)}
_QWEN3_MOE = _EXPERTS | {"head_dim": 64, "norm_topk_prob": True} | _rope(1e6)
_OLMOE: Values = {"num_experts": 16, "num_experts_per_tok": 4, "intermediate_size": 128, **_ALL_HEADS}
_GLM45: Values = {"num_local_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 128, "head_dim": 64}
_GLM45 |= {"attention_bias": True} | _rope(1e6, partial_rotary_factor=0.5)
_GLM45_FULL = _GLM45 | {"use_qk_norm": True, "routed_scaling_factor": 2.5, "n_group": 4, "topk_group": 2}
_GPT_OSS: Values = {"num_local_experts": 16, "num_experts_per_tok": 4, "head_dim": 64, **_WINDOWED, "swiglu_limit": 2.0}
_GPT_OSS |= {"intermediate_size": 128} | _rope(150_000.0, "yarn", truncate=False, **_YARN)
_EXAONE4: Values = {"num_hidden_layers": 4, **_WINDOWED, **_rope(1e6, "llama3", **_LLAMA3)}
_EXAONE4_FULL: Values = {"sliding_window": None, "layer_types": ["full_attention"] * 4}
_COHERE2: Values = {"num_hidden_layers": 4, **_WINDOWED, **_TIED, "logit_scale": 0.25, **_rope(5e4)}
_MINISTRAL3_ROPE: Values = {**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.5}
_MINISTRAL3: Values = {"head_dim": 32, **_rope(1e6, "yarn", **_MINISTRAL3_ROPE)}
_UNSCALED_QUERIES: Options = {
    "scale by position": _rope(1e6, "yarn", **(_MINISTRAL3_ROPE | {"llama_4_scaling_beta": 0}))
}
_LONGROPE: Values = {"original_max_position_embeddings": _TRAINED, **_NO_WINDOW}


def _factors(count: int) -> Values:
    """Factors of longrope for so many frequencies, as the makers have searched them: growing, from 1 up."""
    longer = [1.0 + 20.0 * (place / count) ** 2 for place in range(count)]
    return {"short_factor": [1.0 + 0.1 * place / count for place in range(count)], "long_factor": longer}


_PHI35 = _LONGROPE | _ALL_HEADS | _rope(1e4, "longrope", **_factors(32))
_PHI4 = _LONGROPE | _TIED | _rope(1e4, "longrope", partial_rotary_factor=0.75, **_factors(24))
_GEMMA4_ROPE = _by_layers(_rope(1e6, "proportional", partial_rotary_factor=0.25)["rope_parameters"], _DEFAULT[1e4])
_GEMMA4_WHOLE = _by_layers(_rope(1e6, "proportional", partial_rotary_factor=1.0)["rope_parameters"], _DEFAULT[1e4])
_GEMMA4: Values = {**_TIED, "pad_token_id": 0, **_WINDOWED, **_GEMMA4_ROPE, "head_dim": 64, "global_head_dim": 128}
_GEMMA4 |= {"layer_types": (["sliding_attention"] * 2 + ["full_attention"]) * 2, "final_logit_softcapping": 6.0}
_GEMMA4 |= {"num_hidden_layers": 6}
_EDGE4 = _GEMMA4 | {"hidden_size_per_layer_input": 32, "vocab_size_per_layer_input": VOCAB_SIZE}
_EDGE4 |= {"num_kv_shared_layers": 3, "use_double_wide_mlp": True, "num_key_value_heads": 1}
_LARGE4 = _GEMMA4 | {"hidden_size_per_layer_input": 0, "attention_k_eq_v": True, "num_global_key_value_heads": 1}
_MOE4 = _LARGE4 | {"enable_moe_block": True, "num_experts": 16, "top_k_experts": 4, "moe_intermediate_size": 128}
_PLAIN4: Options = {"partial rope": _GEMMA4_WHOLE, "final_softcapping": {"final_logit_softcapping": None}}
_PLAIN4 |= _NO_WINDOWS
_FEWER_EXPERTS: Options = {"experts": {"num_experts_per_tok": 1}}
_QWEN3_MOE_PLAIN: Options = {**_UNNORMED, "sum of scores": {"norm_topk_prob": False}, **_FEWER_EXPERTS}
_GLM45_PLAIN: Options = {"scale": {"routed_scaling_factor": 1.0}, **_UNNORMED}
_FEWER4: Options = {"experts": {"top_k_experts": 1}}
_GPT_OSS_FILE = _GPT_OSS | {"swiglu_limit": 7.0}  # which files do not say
_GPT_OSS_ALL = _GPT_OSS_FILE | {"num_experts_per_tok": 16}  # no rounding chooses others
_GPT_OSS_PLAIN: Options = {"sinks": "sinks", "biases": "bias", "windows": _WIDE, **_FEWER_EXPERTS}
_BORDERS: Options = {"borders of YaRN": _rope(150_000.0, "yarn", truncate=True, **_YARN)}

_DELTA: Values = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "head_dim": 64, "num_hidden_layers": 4}
_DELTA |= {"linear_key_head_dim": 32, "linear_value_head_dim": 32, **_rope(1e7, partial_rotary_factor=0.25)}
_DELTA_MOE = _DELTA | _EXPERTS | {"shared_expert_intermediate_size": 128}
_QWEN35_ROPE: Values = {"partial_rotary_factor": 0.25, "mrope_section": [4, 2, 2], "mrope_interleaved": True}
_QWEN35 = _DELTA | _rope(1e7, **_QWEN35_ROPE)
_MOE35 = _DELTA_MOE | _rope(1e7, **_QWEN35_ROPE)
_DELTA_PLAIN: Options = {"time bias": "dt_bias", "decay": "A_log"}
_QWEN35_PLAIN: Options = {"partial rope": _rope(1e7, partial_rotary_factor=1.0), **_DELTA_PLAIN}
_LFM2: Values = {"num_hidden_layers": 4, "layer_types": ["conv", "full_attention"] * 2, **_TIED, **_rope(1e6)}
_GRANITE4: Values = {"mamba_n_heads": 16, "mamba_d_state": 32, "mamba_n_groups": 2, "num_hidden_layers": 4, **_TIED}
_GRANITE4 |= {"layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"]}
_GRANITE4 |= (
    _GRANITE
    | _GRANITE_SCALE
    | {"shared_intermediate_size": 256, "num_local_experts": 0, "position_embedding_type": "nope"}
)
_MOE4H = _GRANITE4 | {"num_local_experts": 16, "num_experts_per_tok": 4, "intermediate_size": 128}
_GRANITE4_PLAIN: Options = {"skip": ".D", "time bias": "dt_bias", "bias of the convolution": "conv1d.bias"}

CHECKPOINTS = (
    Checkpoint("Llama 2", "", "llama", _ALL_HEADS, _BASE, "llama"),
    Checkpoint("Llama 2", "linear rope", "llama", _rope(1e4, "linear", factor=4.0), {"linear": _rope()}, "llama"),
    Checkpoint("Llama 2", "YaRN", "llama", _rope(1e6, "yarn", **_YARN), _UNSCALED, "llama"),
    Checkpoint("Llama 3", "", "llama", _rope(5e5), _USUAL_BASE, "llama"),
    Checkpoint("Llama 3.1", "", "llama", _rope(5e5, "llama3", **_LLAMA3), _PLAIN_ROPE, "llama"),
    Checkpoint("Llama 3.2", "tied", "llama", _TIED | _rope(5e5, "llama3", **_LLAMA3), _PLAIN_ROPE | _UNTIED, "llama"),
    Checkpoint("Llama 3", "biases", "llama", _BIASES, _UNBIASED, "llama"),
    Checkpoint("Mistral", "", "mistral", _NO_WINDOW | _rope(1e6), _USUAL_BASE, "llama"),
    Checkpoint("Mistral", "head_dim of Nemo", "mistral", _NO_WINDOW | {"head_dim": 32}, _BASE, "llama"),
    Checkpoint("Mistral", "window of 0.1", "mistral", _WINDOWED, {"window": _NO_WINDOW}),
    Checkpoint("Qwen2", "", "qwen2", _rope(1e6), {"qkv bias": "attn", **_USUAL_BASE}, "qwen2"),
    Checkpoint("Qwen2", "window", "qwen2", _QWEN2_WINDOW, {"window": {"use_sliding_window": False}}),
    Checkpoint("Qwen2.5", "tied", "qwen2", _TIED | _rope(1e6), _UNTIED, "qwen2"),
    Checkpoint("Qwen2.5", "YaRN", "qwen2", _rope(1e6, "yarn", **_YARN), _UNSCALED, "qwen2"),
    Checkpoint("Qwen3", "", "qwen3", _TIED | {"head_dim": 128}, _UNNORMED | _UNTIED, "qwen3"),
    Checkpoint("Qwen3", "YaRN", "qwen3", {"head_dim": 64} | _rope(1e6, "yarn", **_YARN), _UNSCALED, "qwen3"),
    Checkpoint("Gemma", "", "gemma", _GEMMA | {"num_key_value_heads": 1}, _BASE, "gemma"),
    Checkpoint("Gemma 2", "", "gemma2", _GEMMA2 | _CAPS, _UNCAPPED | _NO_WINDOWS, "gemma2"),
    Checkpoint("Gemma 2", "attention scale", "gemma2", _GEMMA2 | {"query_pre_attn_scalar": 32}, {"scale": _GEMMA2}),
    Checkpoint("Gemma 3", "", "gemma3_text", _GEMMA3, _GEMMA3_PLAIN | _NO_WINDOWS, "gemma3"),
    Checkpoint("Phi-3", "", "phi3", _ALL_HEADS | _NO_WINDOW, _BASE, "phi3"),
    Checkpoint("Phi-3", "window", "phi3", _WINDOWED, {"window": _NO_WINDOW}, "phi3", "it warns of windows and goes on"),
    Checkpoint("Phi-4 mini", "", "phi3", _TIED | {"partial_rotary_factor": 0.75}, _WHOLE_ROPE | _UNTIED, "phi3"),
    Checkpoint("SmolLM3", "", "smollm3", _TIED | _rope() | {"num_hidden_layers": 4}, _SMOLLM3_PLAIN, "smollm3"),
    Checkpoint("OLMo 2", "", "olmo2", _ALL_HEADS | _rope(5e5), _UNNORMED | _USUAL_BASE, "olmo2"),
    Checkpoint("OLMo 3", "", "olmo3", _OLMO3 | _OLMO3_ROPE, _OLMO3_PLAIN, "olmo2"),
    Checkpoint("Granite 3", "", "granite", _TIED | _GRANITE | _GRANITE_SCALE, _GRANITE_PLAIN, "granite"),
    Checkpoint("GLM-4", "0414", "glm4", {"head_dim": 64}, {"qkv bias": "proj.bias", **_WHOLE_ROPE}, "glm4"),
    Checkpoint("StarCoder2", "", "starcoder2", _TIED | _rope(1e5), {"biases": "bias", **_UNTIED}, "starcoder2"),
    Checkpoint("StarCoder2", "window", "starcoder2", _WINDOWED, {"window": _NO_WINDOW}),
    Checkpoint("Gemma 3", "in a multimodal model", "gemma3_text", _GEMMA3, _GEMMA3_PLAIN, "gemma3", within="gemma3"),
    Checkpoint("Mistral Small 3", "", "mistral", _NO_WINDOW | {"head_dim": 32}, _BASE, "mistral3", within="mistral3"),
    Checkpoint("Ministral 3", "", "ministral3", _MINISTRAL3, _UNSCALED_QUERIES, "mistral3", within="mistral3"),
    Checkpoint("Phi-3.5", "longrope", "phi3", _PHI35, {"longrope": _rope()}, "phi3"),
    Checkpoint("Phi-4 mini", "longrope", "phi3", _PHI4, {"longrope": _rope(partial_rotary_factor=0.75)}, "phi3"),
    Checkpoint("Mixtral", "", "mixtral", _MIXTRAL, _FEWER_EXPERTS | _USUAL_BASE, "llama"),
    Checkpoint("Qwen3, experts", "", "qwen3_moe", _QWEN3_MOE, _QWEN3_MOE_PLAIN, "qwen3moe"),
    Checkpoint("OLMoE", "", "olmoe", _OLMOE, _UNNORMED | _FEWER_EXPERTS, "olmoe"),
    Checkpoint("GLM-4.5", "Air", "glm4_moe", _GLM45, {"qkv bias": "proj.bias", **_FEWER_EXPERTS}, "glm4moe"),
    Checkpoint("GLM-4.5", "", "glm4_moe", _GLM45_FULL, _GLM45_PLAIN, "glm4moe"),
    Checkpoint("gpt-oss", "", "gpt_oss", _GPT_OSS, {"sinks": "sinks", "biases": "bias", "windows": _WIDE}),
    Checkpoint("gpt-oss", "plain rope", "gpt_oss", _GPT_OSS_FILE | _rope(150_000.0), _GPT_OSS_PLAIN, "gpt-oss"),
    Checkpoint("gpt-oss", "YaRN", "gpt_oss", _GPT_OSS_ALL, _BORDERS, "gpt-oss", "it rounds the borders of YaRN"),
    Checkpoint("EXAONE 4", "1.2B", "exaone4", _EXAONE4 | _EXAONE4_FULL, _UNNORMED, "exaone4"),
    Checkpoint("EXAONE 4", "", "exaone4", _EXAONE4, {"windows": _EXAONE4_FULL}, "exaone4", "only with 64 layers"),
    Checkpoint("Command R7B", "", "cohere2", _COHERE2, {"logit_scale": {"logit_scale": 1.0}, **_NO_WINDOWS}, "cohere2"),
    Checkpoint("Gemma 4", "per-layer embeddings", "gemma4_text", _EDGE4, _PLAIN4, "gemma4", within="gemma4"),
    Checkpoint("Gemma 4", "dense", "gemma4_text", _LARGE4, _PLAIN4, "gemma4", within="gemma4"),
    Checkpoint("Gemma 4", "experts", "gemma4_text", _MOE4, _FEWER4, "gemma4", within="gemma4"),
    Checkpoint("Qwen3-Next", "", "qwen3_next", _DELTA_MOE, _DELTA_PLAIN | _FEWER_EXPERTS, "qwen3next"),
    Checkpoint("Qwen3.5", "", "qwen3_5_text", _QWEN35, _QWEN35_PLAIN, "qwen35", within="qwen3_5"),
    Checkpoint("Qwen3.5", "experts", "qwen3_5_moe_text", _MOE35, _FEWER_EXPERTS, "qwen35moe", within="qwen3_5_moe"),
    Checkpoint("LFM2", "", "lfm2", _LFM2, {"query and key norms": "_layernorm.", **_UNTIED}, "lfm2"),
    Checkpoint("Granite 4", "", "granitemoehybrid", _GRANITE4, _GRANITE4_PLAIN, "granitehybrid"),
    Checkpoint(
        "Granite 4",
        "experts",
        "granitemoehybrid",
        _MOE4H,
        _FEWER_EXPERTS,
        "granitehybrid",
    ),
)


_VISION: Values = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
_VISION |= {"image_size": 32, "patch_size": 8}
_QWEN_VISION: Values = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 256}
_TOWERS: dict[str, Values] = {
    "qwen3_5": {"vision_config": {"model_type": "qwen3_5_vision", **_QWEN_VISION}},
    "qwen3_5_moe": {"vision_config": {"model_type": "qwen3_5_moe_vision", **_QWEN_VISION}},
    "gemma3": {"vision_config": {"model_type": "siglip_vision_model", **_VISION}, "mm_tokens_per_image": 4},
    "gemma4": {"vision_config": {"model_type": "gemma4_vision", **_VISION}},
    "mistral3": {"vision_config": {"model_type": "pixtral", **_VISION}},
}


def made(checkpoint: Checkpoint, *without: str) -> PreTrainedModel:
    """Return a loud model in float32; with options dropped it has the same weights otherwise."""
    model = _loud(checkpoint.described())
    if not without:
        return model
    other, state = _loud(checkpoint.described(*without)), model.state_dict()
    if other.config.tie_word_embeddings != model.config.tie_word_embeddings:
        del state["lm_head.weight"]
    other.load_state_dict(state, strict=False)
    for option in map(checkpoint.options.__getitem__, without):
        for name, weight in other.named_parameters():
            if isinstance(option, str) and option in name and weight.ndim == 1:
                nn.init.constant_(weight, float("norm" in name and not name.endswith("bias")))
    return other


def save(
    model: PreTrainedModel,
    folder: Path,
    dtype: torch.dtype = torch.float32,
    *,
    sharded: bool = False,
    within: str = "",
) -> Path:
    """Save a model and a tokenizer, as transformers does, `within` a multimodal model of that type or alone. Returns
    the folder."""
    text = model.config
    shared: Values = {"text_config": text.to_dict(), "tie_word_embeddings": text.tie_word_embeddings}
    whole = AutoConfig.for_model(within, **shared, **_TOWERS[within]) if within else text
    kind: Any = AutoModelForImageTextToText if within else AutoModelForCausalLM
    copied = kind.from_config(whole, dtype=dtype)
    (copied.model.language_model if within else copied.model).load_state_dict(model.model.state_dict())
    copied.lm_head.load_state_dict(model.lm_head.state_dict())
    copied.save_pretrained(folder, max_shard_size="1MB" if sharded else "1GB")
    tiny_tokenizer().save_pretrained(folder)
    return folder


@torch.no_grad()
def _loud(config: PreTrainedConfig) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    gain = _gain(config)
    normed = any("q_norm" in name or "q_layernorm" in name for name, _ in model.named_parameters())
    for name, weight in model.named_parameters():
        noise = torch.randn(weight.shape, generator=torch.Generator().manual_seed(crc32(name.encode())))
        if weight.ndim == 1 or name.endswith("bias"):
            weight.copy_(_vector(name, noise, gain, config))
        else:
            inputs = weight.shape[-2 if "gpt_oss" in config.model_type and weight.ndim == 3 else -1]
            weight.copy_(_matrix(name, noise / math.sqrt(inputs), 1.0 if normed else gain, config))
    for name, buffer in model.named_buffers():
        if name.endswith(("layer_scalar", "correction_bias")):
            buffer.add_(torch.randn(buffer.shape, generator=torch.Generator().manual_seed(crc32(name.encode()))) / 4)
    model.eval()
    return model


def _gain(config: PreTrainedConfig) -> float:
    """Return how much larger queries and keys are than 1, so that scores of attention spread."""
    one = config.per_layer_config[0]
    dim = getattr(one, "head_dim", None) or config.hidden_size // config.num_attention_heads
    usual = 1.0 if config.model_type == "gemma4_text" else getattr(config, "query_pre_attn_scalar", dim) ** -0.5
    scale = getattr(config, "attention_multiplier", None) or usual
    recurrent = not {"linear_attention", "conv"}.isdisjoint(getattr(config, "layer_types", None) or ())
    # What rounds differently grows from layer to layer.
    spread = 4.0 if recurrent else 5.0 if config.num_hidden_layers == 2 else 2.5
    return math.sqrt(spread / (scale * math.sqrt(dim)))


def _matrix(name: str, noise: Tensor, gain: float, config: PreTrainedConfig) -> Tensor:
    """Weights of a product that keeps the size of its input, or of the embedding. # noise [out, in]"""
    outputs, inputs = noise.shape[-2:]
    if outputs == config.vocab_size:
        apart = "embed" in name and not config.tie_word_embeddings
        scale = getattr(config, "logits_scaling", 1.0) / getattr(config, "logit_scale", 1.0)
        spread = _LOGIT_SPREAD * scale * _tied_size(config)
        return noise * (math.sqrt(inputs) if apart else spread)
    if any(part in name for part in ("o_proj", "down_proj", "c_proj", "out_proj", ".w2.", "output_linear")):
        return noise * 2.0 / getattr(config, "residual_multiplier", 1.0)
    if "qkv_proj" in name:
        values = config.num_key_value_heads * config.hidden_size // config.num_attention_heads
        return torch.cat([gain * noise[:-values], noise[-values:]])
    return noise * gain if "q_proj" in name or "k_proj" in name else noise


def _tied_size(config: PreTrainedConfig) -> float:
    """Return by how much an embedding is larger that is the output layer too, so that it counts beside the layers'
    outputs; by as much the last norm is smaller."""
    scaled = "gemma" in config.model_type or hasattr(config, "embedding_multiplier")
    return 4.0 if config.tie_word_embeddings and not scaled else 1.0


def _vector(name: str, noise: Tensor, gain: float, config: PreTrainedConfig) -> Tensor:
    """A norm's weights or a bias. The last norm has random signs: with a tied output layer each token would otherwise
    be its own likeliest successor."""
    of_scores = any(part in name for part in ("q_proj", "k_proj", "q_norm", "k_norm", "q_layernorm", "k_layernorm"))
    if "A_log" in name or "dt_bias" in name:
        return noise if "bias" in name else noise - 2.0  # texts are remembered for some tens of tokens
    if name.endswith("bias"):
        return 0.5 * noise * (gain if of_scores else 1.0)
    if "sinks" in name:
        return 10.5 + noise  # as large as peaked scores are
    value = (1.0 + 0.2 * noise) * (gain if of_scores else 1.0)
    if name in ("model.norm.weight", "model.embedding_norm.weight"):
        value = value * noise.sign() / _tied_size(config)
    is_offset = "gemma" in config.model_type and "gemma4" not in config.model_type
    is_offset |= config.model_type.startswith(("qwen3_next", "qwen3_5")) and "linear_attn" not in name
    return value - float(is_offset)  # these multiply by 1 + weight
