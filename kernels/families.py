"""How the layers of each model family are described.

A family is a function from a model's transformers config to the records of its layers (`kernels.specs`). To add a
family, write its function and enter it in `FAMILIES`; what a record cannot say runs by the model's own modules.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import inf
from typing import Any

from kernels.experts import Router
from kernels.layers import GateForm
from kernels.specs import (
    BOTH_NORMS,
    POST_NORM,
    PRE_NORM,
    AttentionSpec,
    FeedForwardSpec,
    LayerSpec,
    ModelSpec,
    Norms,
    QueryScaling,
    RecurrentSpec,
    Renamed,
)

Config = Mapping[str, Any]
"""A transformers config as a dict, with all default values filled in."""


def spec_of(config: Config) -> ModelSpec:
    """Return the records of a model; a family that is not in `FAMILIES` is described as Llama. Raises ValueError or
    KeyError for options that records cannot say."""
    return FAMILIES.get(config["model_type"], llama)(config)


def windows_of(config: Config) -> list[int | None]:
    """Return the window of each layer's attention, None where it sees all positions."""
    window = config.get("sliding_window") if config.get("use_sliding_window", True) else None
    kinds = config.get("layer_types") or ["sliding_attention"] * config["num_hidden_layers"]
    return [window if kind == "sliding_attention" else None for kind in kinds]


def sources_of(config: Config) -> list[int | None]:
    """Return for each layer the earlier one of its kind whose keys and values it reads, None where it has its own."""
    count, kinds = config["num_hidden_layers"], config.get("layer_types") or ()
    first = count - (config.get("num_kv_shared_layers") or 0)
    last = {kind: index for index, kind in enumerate(kinds[:first])}
    return [None if index < first else last[kinds[index]] for index in range(count)]


RECURRENT = frozenset({"linear_attention", "conv"})
"""Kinds of layers with a state in place of attention, as configs name them."""


def recurrent_of(config: Config) -> list[RecurrentSpec | None]:
    """Return for each layer how its state goes on, None where it attends. Raises ValueError or KeyError as `spec_of`
    does."""
    kinds = config.get("layer_types") or ["full_attention"] * config["num_hidden_layers"]
    if RECURRENT.isdisjoint(kinds):
        return [None] * len(kinds)
    mixers = (layer.mixer for layer in spec_of(config).layers)
    return [mixer if isinstance(mixer, RecurrentSpec) else None for mixer in mixers]


def _layer(config: Config, window: int | None, attention: Config, **others: Any) -> LayerSpec:
    """Describe a layer of Llama with other fields of its attention, and other fields."""
    heads: int = config["num_attention_heads"]
    dim: int = config.get("head_dim") or config["hidden_size"] // heads
    biased = bool(config.get("attention_bias"))
    kv_heads: int = config.get("num_key_value_heads") or heads
    spec = AttentionSpec(heads, kv_heads, dim, **{"scale": dim**-0.5, "window": window, **attention})
    return LayerSpec(spec, **{"biases": (biased, biased, bool(config.get("mlp_bias"))), **others})


def _layers(
    config: Config, attention: Config, ropes: Sequence[str | None] | None = None, **others: Any
) -> list[LayerSpec]:
    """Describe layers that differ in their windows, and in their rotary embeddings if these are given."""
    windows = windows_of(config)
    pairs = zip(windows, ropes or [""] * len(windows), strict=True)
    return [_layer(config, window, {"rope": rope, **attention}, **others) for window, rope in pairs]


def _with_states(config: Config, layers: list[LayerSpec], mixer: RecurrentSpec) -> list[LayerSpec]:
    """Replace the attention of the layers that have a state."""
    pairs = zip(layers, config["layer_types"], strict=True)
    return [replace(layer, mixer=mixer) if kind in RECURRENT else layer for layer, kind in pairs]


def _model(config: Config, layers: list[LayerSpec], **other: Any) -> ModelSpec:
    return ModelSpec(tuple(layers), float(config.get("rms_norm_eps") or config.get("norm_eps") or 1e-6), **other)


def llama(config: Config) -> ModelSpec:
    """Llama, Mistral and others alike."""
    return _model(config, _layers(config, {}))


def qwen2(config: Config) -> ModelSpec:
    return _model(config, [replace(layer, biases=(True, *layer.biases[1:])) for layer in _layers(config, {})])


def qwen3(config: Config) -> ModelSpec:
    return _model(config, _layers(config, {"norms": "head"}))


def olmo2(config: Config) -> ModelSpec:
    """OLMo 2, and OLMo 3 with a rotary embedding for each layer type."""
    kinds = config["layer_types"] if config["model_type"] == "olmo3" else None
    return _model(config, _layers(config, {"norms": "projection"}, kinds, norms=POST_NORM))


def exaone4(config: Config) -> ModelSpec:
    """With windows, layers without one do not rotate."""
    rope = "" if config.get("sliding_window") is None else None
    ropes = ["" if window else rope for window in windows_of(config)]
    return _model(config, _layers(config, {"norms": "head"}, ropes, norms=POST_NORM))


def smollm3(config: Config) -> ModelSpec:
    return _model(config, _layers(config, {}, ["" if rotates else None for rotates in config["no_rope_layers"]]))


def granite(config: Config) -> ModelSpec:
    layers = _layers(config, {"scale": config["attention_multiplier"]}, residual=config["residual_multiplier"])
    scale, divisor = config["embedding_multiplier"], config["logits_scaling"]
    return _model(config, layers, embedding_scale=scale, logit_divisor=divisor)


def ministral3(config: Config) -> ModelSpec:
    rope = config["rope_parameters"]
    scaling = QueryScaling(rope["llama_4_scaling_beta"], rope["original_max_position_embeddings"])
    return _model(config, _layers(config, {"query_scaling": scaling}))


def gemma(config: Config) -> ModelSpec:
    """Gemma 1 to 3: norms on both sides from Gemma 2 on, norms of heads and two rotary embeddings from Gemma 3 on."""
    kind = config["model_type"]
    ropes = config["layer_types"] if kind == "gemma3_text" else None
    attention: dict[str, Any] = {"softcap": config.get("attn_logit_softcapping")}
    if kind != "gemma":
        attention["scale"] = config["query_pre_attn_scalar"] ** -0.5
    if kind == "gemma3_text":
        attention["norms"] = "head"
    norms, gate = PRE_NORM if kind == "gemma" else BOTH_NORMS, FeedForwardSpec(GateForm("gelu_tanh"))
    layers = _layers(config, attention, ropes, norms=norms, norm_offset=1.0, feed_forward=gate)
    scale = config["hidden_size"] ** 0.5
    return _model(config, layers, embedding_scale=scale, logit_softcap=config.get("final_logit_softcapping"))


def gemma4(config: Config) -> ModelSpec:
    """Gemma 4: layers without a window have other heads, the last ones read the keys and values of earlier ones; small
    models embed tokens for each layer, others have experts beside each dense feed-forward."""
    feed_forward = FeedForwardSpec(GateForm("gelu_tanh"))
    if config["enable_moe_block"]:
        router = Router(config["top_k_experts"], "softmax", normalised=True)
        feed_forward = replace(feed_forward, router=router, beside=True)
    width, layers = config["hidden_size_per_layer_input"], list[LayerSpec]()
    described = zip(config["layer_types"], windows_of(config), sources_of(config), strict=True)
    for index, (kind, window, source) in enumerate(described):
        attention = {"scale": 1.0, "rope": kind, "norms": "head", "value_norm": True, "source": source}
        attention["keys_are_values"] = config["attention_k_eq_v"] and window is None
        own, place = {**config, **config["per_layer_config"].get(str(index), {})}, index if width else None
        others = {"feed_forward": feed_forward, "norms": BOTH_NORMS, "norm_offset": 0.0, "scaled": True}
        layers.append(_layer(own, window, attention, per_layer=place, **others))
    scale, cap = config["hidden_size"] ** 0.5, config.get("final_logit_softcapping")
    return _model(config, layers, embedding_scale=scale, logit_softcap=cap, per_layer_width=width)


def _sparse(config: Config, router: Router, **other: Any) -> FeedForwardSpec:
    if config.get("hidden_act", "silu") != "silu":
        raise ValueError(f"experts are gated by {config['hidden_act']}")
    return FeedForwardSpec(router=router, **other)


def mixtral(config: Config) -> ModelSpec:
    experts = _sparse(config, Router(config["num_experts_per_tok"], "softmax", normalised=True))
    return _model(config, _layers(config, {}, feed_forward=experts))


def _with_experts(config: Config, layers: list[LayerSpec], **other: Any) -> list[LayerSpec]:
    """Give experts to every `decoder_sparse_step`-th layer that is not in `mlp_only_layers`."""
    router = Router(config["num_experts_per_tok"], "softmax", normalised=bool(config.get("norm_topk_prob", True)))
    experts, dense = _sparse(config, router, **other), config.get("mlp_only_layers") or ()
    step = config.get("decoder_sparse_step", 1)
    return [
        replace(layer, feed_forward=experts) if index not in dense and (index + 1) % step == 0 else layer
        for index, layer in enumerate(layers)
    ]


def qwen3_moe(config: Config) -> ModelSpec:
    return _model(config, _with_experts(config, _layers(config, {"norms": "head"})))


def olmoe(config: Config) -> ModelSpec:
    if config.get("clip_qkv") is not None:
        raise ValueError("queries, keys and values are clipped")
    router = Router(config["num_experts_per_tok"], "softmax", normalised=bool(config["norm_topk_prob"]))
    return _model(config, _layers(config, {"norms": "projection"}, feed_forward=_sparse(config, router)))


def glm4_moe(config: Config) -> ModelSpec:
    """GLM-4.5: the first layers are dense, the others have experts and a shared one."""
    router = Router(
        config["num_experts_per_tok"],
        "sigmoid",
        normalised=bool(config["norm_topk_prob"]),
        scale=config["routed_scaling_factor"],
        groups=config["n_group"],
        chosen_groups=config["topk_group"],
    )
    experts, dense = _sparse(config, router, shared="shared_experts"), config["first_k_dense_replace"]
    layer = _layer(config, None, {"norms": "head" if config["use_qk_norm"] else None})
    layer = replace(layer, biases=(layer.biases[0], False, False))
    sparse = replace(layer, feed_forward=experts)
    return _model(config, [layer if index < dense else sparse for index in range(config["num_hidden_layers"])])


def gpt_oss(config: Config) -> ModelSpec:
    experts = FeedForwardSpec(
        GateForm("clamped_swiglu", config["swiglu_limit"]),
        Router(config["num_experts_per_tok"], "softmax_of_chosen", normalised=False),
        router_name="router",
    )
    return _model(config, _layers(config, {"sinks": True}, feed_forward=experts), halved_angles=True)


def qwen3_next(config: Config) -> ModelSpec:
    """Qwen3-Next and Qwen3.5: most layers are gated delta nets, the others have gated attention."""
    keys, heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
    sizes = keys, heads, (key_dim := config["linear_key_head_dim"]), (value_dim := config["linear_value_head_dim"])
    columns = 2 * keys * key_dim + heads * value_dim
    delta = RecurrentSpec("linear_attn", config["linear_conv_kernel_dim"], columns, *sizes, corrects=True)
    layers = _layers(config, {"norms": "head", "gated": True}, norm_offset=1.0)
    if config.get("num_experts"):
        layers = _with_experts(config, layers, shared="shared_expert", shared_gated=True)
    return _model(config, _with_states(config, layers, delta))


_LFM2_NAMES: Renamed = (
    ("self_attn.q_layernorm.", "self_attn.q_norm."),
    ("self_attn.k_layernorm.", "self_attn.k_norm."),
)
_LFM2_NAMES += (("feed_forward.w1.", "mlp.gate_proj."), ("feed_forward.w3.", "mlp.up_proj."))
_LFM2_NAMES += (("feed_forward.w2.", "mlp.down_proj."), ("self_attn.out_proj.", "self_attn.o_proj."))
_LFM2_NAMES += (("conv.conv.", "conv.conv1d."),)


def lfm2(config: Config) -> ModelSpec:
    """LFM2: most layers are short convolutions."""
    convolution = RecurrentSpec("conv", config["conv_L_cache"], config["hidden_size"])
    norms = Norms("operator_norm", None, "ffn_norm", None)
    layers = _layers(config, {"norms": "head"}, norms=norms, renamed=_LFM2_NAMES)
    return _model(config, _with_states(config, layers, convolution))


def granite_hybrid(config: Config) -> ModelSpec:
    """Granite 4: most layers are Mamba-2; a dense feed-forward in all, beside experts in the larger models."""
    heads, groups, state = config["mamba_n_heads"], config["mamba_n_groups"], config["mamba_d_state"]
    columns = heads * config["mamba_d_head"] + 2 * groups * state
    sizes = groups, heads, state, config["mamba_d_head"]
    low, high = config["time_step_limit"] or (0.0, inf)
    mamba = RecurrentSpec("mamba", config["mamba_d_conv"], columns, *sizes, time_limits=(low, high))
    rope = "" if config["position_embedding_type"] == "rope" else None
    model, part, feed_forward = granite(config), "mlp", FeedForwardSpec()
    if config["num_local_experts"]:
        router, part = Router(config["num_experts_per_tok"], "softmax_of_chosen", normalised=False), "mlp.shared"
        feed_forward = _sparse(config, router, shared="shared")
    names: Renamed = (("block_sparse_moe.router.", "mlp.gate."), ("block_sparse_moe.experts.", "mlp.experts."))
    names += (
        ("shared_mlp.input_linear.", f"{part}.gate_up_proj."),
        ("shared_mlp.output_linear.", f"{part}.down_proj."),
    )
    layers = [
        replace(layer, mixer=replace(layer.attention, rope=rope), feed_forward=feed_forward, renamed=names)
        for layer in model.layers
    ]
    return replace(model, layers=tuple(_with_states(config, layers, mamba)))


FAMILIES: Mapping[str, Callable[[Config], ModelSpec]] = {
    "llama": llama,
    "mistral": llama,
    "phi3": llama,
    "qwen2": qwen2,
    "qwen3": qwen3,
    "olmo2": olmo2,
    "olmo3": olmo2,
    "exaone4": exaone4,
    "smollm3": smollm3,
    "granite": granite,
    "ministral3": ministral3,
    "gemma": gemma,
    "gemma2": gemma,
    "gemma3_text": gemma,
    "gemma4_text": gemma4,
    "mixtral": mixtral,
    "qwen3_moe": qwen3_moe,
    "olmoe": olmoe,
    "glm4_moe": glm4_moe,
    "gpt_oss": gpt_oss,
    "qwen3_next": qwen3_next,
    "qwen3_5_text": qwen3_next,
    "qwen3_5_moe_text": qwen3_next,
    "lfm2": lfm2,
    "granitemoehybrid": granite_hybrid,
}
"""Families whose layers can run as ops, by their `model_type` in transformers."""

OF_DRAFTERS = ("llama", "mistral", "qwen2", "qwen3", "olmo2")
"""Families whose layers a drafter can have: dense, with one rotary embedding."""
