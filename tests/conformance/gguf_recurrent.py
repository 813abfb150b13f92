"""What llama.cpp's converter makes of weights and configurations with recurrent layers."""

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
from transformers import PreTrainedConfig

Array = npt.NDArray[Any]
QWEN = ("qwen3next", "qwen35", "qwen35moe")


def parts_of(name: str, config: PreTrainedConfig, arch: str) -> dict[str, Callable[[Array], Array]]:
    """The tensors of a file with the rows or columns of a weight; none if the weight is one, as it is."""
    layer, mamba = f"blk.{name.split('.')[2]}" if ".layers." in name else "", arch == "granitehybrid"
    if name.endswith("shared_mlp.input_linear.weight"):
        end = "_shexp" if config.num_local_experts else ""
        return {
            f"{layer}.ffn_gate{end}.weight": lambda weight: np.split(weight, 2)[0],
            f"{layer}.ffn_up{end}.weight": lambda weight: np.split(weight, 2)[1],
        }
    if name.endswith("shared_mlp.output_linear.weight") and not config.num_local_experts:
        return {f"{layer}.ffn_down.weight": lambda weight: weight}
    if name.endswith(("conv1d.weight", "conv.conv.weight")):
        own = "ssm_conv1d" if "conv1d" in name else "shortconv.conv"
        return {f"{layer}.{own}.weight": lambda weight: _turned(weight[:, 0], "qkv", config, arch)}
    if mamba and name.endswith((".A_log", ".D")):
        return {f"{layer}.ssm_{'a' if 'A_log' in name else 'd'}": lambda weight: weight[:, None]}
    if mamba and name.endswith("mamba.norm.weight"):
        return {f"{layer}.ssm_norm.weight": lambda weight: weight.reshape(config.mamba_n_groups, -1)}
    if arch not in QWEN or "linear_attn" not in name:
        return {}
    own = name.partition("linear_attn.")[2]
    if own == "in_proj_qkvz.weight":
        return {
            f"{layer}.attn_qkv.weight": lambda weight: np.concatenate(_by_kind(weight, config)[:3]),
            f"{layer}.attn_gate.weight": lambda weight: _by_kind(weight, config)[3],
        }
    kinds = {"in_proj_qkv.weight": "attn_qkv.weight", "in_proj_z.weight": "attn_gate.weight", "A_log": "ssm_a"}
    kinds |= {"in_proj_b.weight": "ssm_beta.weight", "in_proj_a.weight": "ssm_alpha.weight", "dt_bias": "ssm_dt.bias"}
    if own == "out_proj.weight":
        return {f"{layer}.ssm_out.weight": lambda weight: _turned(weight.T, "z", config, arch).T}
    kind = "qkv" if "qkv" in own else "z" if "_z" in own else "heads"
    return {f"{layer}.{kinds[own]}": lambda weight: _turned(weight, kind, config, arch)} if own in kinds else {}


def _turned(weight: Array, kind: str, config: PreTrainedConfig, arch: str) -> Array:
    """Rows of value heads by turns of their key heads, as Qwen3.5's files have them."""
    if arch not in ("qwen35", "qwen35moe"):
        return weight
    keys, values = config.linear_num_key_heads, config.linear_num_value_heads
    first = 2 * keys * config.linear_key_head_dim if kind == "qkv" else 0
    dim = 1 if kind == "heads" else config.linear_value_head_dim
    by_head = weight[first:].reshape(keys, values // keys, dim, *weight.shape[1:])
    return np.concatenate((weight[:first], by_head.swapaxes(0, 1).reshape(weight[first:].shape)))


def _by_kind(weight: Array, config: PreTrainedConfig) -> list[Array]:
    """Queries, keys, values and gates of all key heads."""
    keys = config.linear_num_key_heads
    key, value = config.linear_key_head_dim, config.linear_value_head_dim * config.linear_num_value_heads // keys
    parts = np.split(weight.reshape(keys, -1, weight.shape[1]), np.cumsum([key, key, value]), axis=1)
    return [part.reshape(-1, weight.shape[1]) for part in parts]


def metadata_of(config: PreTrainedConfig, arch: str) -> dict[str, Any]:
    """Keys of recurrent layers."""
    if arch not in (*QWEN, "lfm2", "granitehybrid"):
        return {}
    heads = [config.num_key_value_heads * (kind == "full_attention") for kind in config.layer_types]
    if arch == "lfm2":
        keys = {"shortconv.l_cache": config.conv_L_cache, "attention.head_count_kv": heads}
        wide = 256 * -(-int(2 * config.intermediate_size / 3) // 256)
        return keys | {"feed_forward_length": wide, "attention.layer_norm_rms_epsilon": config.norm_eps}
    if arch == "granitehybrid":
        shared = "shared_intermediate_size"
        return {
            "attention.head_count_kv": heads,
            "ssm.conv_kernel": config.mamba_d_conv,
            "ssm.state_size": config.mamba_d_state,
            "ssm.group_count": config.mamba_n_groups,
            "ssm.inner_size": config.mamba_n_heads * config.mamba_d_head,
            "ssm.time_step_rank": config.mamba_n_heads,
            "expert_shared_feed_forward_length": getattr(config, shared),
            "feed_forward_length": getattr(config, "intermediate_size" if config.num_local_experts else shared),
            "rope.scaling.finetuned": False,
            "embedding_scale": config.embedding_multiplier,
            "residual_scale": config.residual_multiplier,
            "attention.scale": config.attention_multiplier,
            "logit_scale": config.logits_scaling,
        }
    sections = config.rope_parameters.get("mrope_section", (1, 1, 0))
    return {
        "ssm.conv_kernel": config.linear_conv_kernel_dim,
        "ssm.state_size": config.linear_key_head_dim,
        "ssm.group_count": config.linear_num_key_heads,
        "ssm.time_step_rank": config.linear_num_value_heads,
        "ssm.inner_size": config.linear_value_head_dim * config.linear_num_value_heads,
        "full_attention_interval": 4,
        "rope.dimension_count": int(config.head_dim * config.rope_parameters["partial_rotary_factor"]),
        "rope.dimension_sections": None if arch == "qwen3next" else [*sections, 0],
        "expert_feed_forward_length": getattr(config, "moe_intermediate_size", None),
        "expert_shared_feed_forward_length": getattr(config, "shared_expert_intermediate_size", None),
    }
