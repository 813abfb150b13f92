"""Architectures of GGUF files with recurrent layers: config fields, and tensors in transformers' layout.

As llama.cpp's converter writes them (conversion/qwen.py, granite.py, mamba.py, lfm2.py): decays as -exp(A_log); value
heads of Qwen3.5 by turns of their key heads instead of one key head's after another's; queries, keys, values and
output gates of Qwen3-Next apart.
"""

from collections.abc import Iterator, Mapping

import numpy as np
from gguf import GGMLQuantizationType, dequantize
from numpy.typing import NDArray
from transformers import PreTrainedConfig

from service.engine.gguf_families import (
    ARCHITECTURES,
    GATE,
    HEAD_NORMS,
    POST_NORM,
    Architecture,
    Metadata,
    More,
    Values,
    granite,
)
from service.engine.gguf_reader import GGUFFile, GGUFTensor
from service.errors import StartupError

_DELTA = HEAD_NORMS | POST_NORM | {"attn_qkv": "linear_attn.in_proj_qkv", "attn_gate": "linear_attn.in_proj_z"}
_DELTA |= {"ssm_beta": "linear_attn.in_proj_b", "ssm_alpha": "linear_attn.in_proj_a", "ssm_out": "linear_attn.out_proj"}
_DELTA |= {"ssm_conv1d": "linear_attn.conv1d", "ssm_norm": "linear_attn.norm", "ssm_a.weight": "linear_attn.A_log"}
_DELTA |= {"ssm_dt.bias": "linear_attn.dt_bias"}
_DELTA_MOE = _DELTA | GATE | {f"ffn_{part}_shexp": f"mlp.shared_expert.{part}_proj" for part in ("gate", "up", "down")}
_DELTA_MOE |= {"ffn_gate_inp_shexp": "mlp.shared_expert_gate"}
_LFM2 = {"attn_norm": "operator_norm", "ffn_norm": "ffn_norm", "attn_output": "self_attn.out_proj"}
_LFM2 |= {"ffn_gate": "feed_forward.w1", "ffn_down": "feed_forward.w2", "ffn_up": "feed_forward.w3"}
_LFM2 |= {f"attn_{part}_norm": f"self_attn.{part}_layernorm" for part in ("q", "k")}
_LFM2 |= {f"shortconv.{part}": f"conv.{part}" for part in ("conv", "in_proj", "out_proj")}
_GRANITE = {"ssm_in": "mamba.in_proj", "ssm_conv1d": "mamba.conv1d", "ssm_out": "mamba.out_proj"}
_GRANITE |= {"ssm_norm": "mamba.norm", "ssm_a.weight": "mamba.A_log", "ssm_d.weight": "mamba.D"}
_GRANITE |= {"ssm_dt.bias": "mamba.dt_bias", "ffn_gate_inp": "block_sparse_moe.router"}
_GRANITE |= {"ffn_gate_up": "shared_mlp.input_linear", "ffn_down": "shared_mlp.output_linear"}
_GRANITE |= {"ffn_down_shexp": "shared_mlp.output_linear"}


def _delta(values: Values, keys: Metadata, file: GGUFFile) -> Values:
    """Config fields of Qwen3-Next and Qwen3.5. The last blocks may be a drafter's."""
    keys.take("rope.dimension_sections", by_layer=True)  # of images: text has one position for all sections
    drafter, every = keys.take("nextn_predict_layers", 0), keys.take("full_attention_interval", 4)
    count, heads = values["num_hidden_layers"] - drafter, keys.need("ssm.time_step_rank")
    usual = [(index + 1) % every != 0 for index in range(count)]
    recurrent = keys.take("attention.recurrent_layers", usual, by_layer=True)[:count]
    return {
        "num_hidden_layers": count,
        "num_mtp_layers": drafter,
        "layer_types": ["linear_attention" if one else "full_attention" for one in recurrent],
        "num_key_value_heads": _most(values["num_key_value_heads"]),
        "linear_conv_kernel_dim": keys.need("ssm.conv_kernel"),
        "linear_key_head_dim": keys.need("ssm.state_size"),
        "linear_value_head_dim": keys.need("ssm.inner_size") // heads,
        "linear_num_key_heads": keys.need("ssm.group_count"),
        "linear_num_value_heads": heads,
    }


def _delta_moe(values: Values, keys: Metadata, file: GGUFFile) -> Values:
    """Config fields of the models with experts, of which llama.cpp always divides weights by their sum."""
    width = keys.need("expert_feed_forward_length")
    return _delta(values, keys, file) | {
        "num_experts": keys.need("expert_count"),
        "num_experts_per_tok": keys.need("expert_used_count"),
        "moe_intermediate_size": width,
        "shared_expert_intermediate_size": keys.take("expert_shared_feed_forward_length", width),
    }


def _lfm2(values: Values, keys: Metadata, file: GGUFFile) -> Values:
    """Config fields of LFM2, in whose convolutions there are no keys."""
    heads = values["num_key_value_heads"]
    return {
        "num_key_value_heads": _most(heads),
        "layer_types": ["full_attention" if count else "conv" for count in heads],
        "conv_L_cache": keys.need("shortconv.l_cache"),
        "conv_bias": "blk.0.shortconv.in_proj.bias" in file.tensors,
        "block_auto_adjust_ff_dim": False,
    }


def _granite_hybrid(values: Values, keys: Metadata, file: GGUFFile) -> Values:
    """Config fields of Granite 4, in whose Mamba-2 layers there are no keys."""
    heads, count = values["num_key_value_heads"], keys.need("ssm.time_step_rank")
    inner, experts = keys.need("ssm.inner_size"), keys.take("expert_count", 0)
    return granite(values, keys, file) | {
        "num_key_value_heads": _most(heads),
        "layer_types": ["full_attention" if own else "linear_attention" for own in heads],
        "mamba_n_heads": count,
        "mamba_d_head": inner // count,
        "mamba_expand": inner // values["hidden_size"],
        "mamba_n_groups": keys.need("ssm.group_count"),
        "mamba_d_state": keys.need("ssm.state_size"),
        "mamba_d_conv": keys.need("ssm.conv_kernel"),
        "mamba_conv_bias": any(name.endswith("ssm_conv1d.bias") for name in file.tensors),
        "num_local_experts": experts,
        "num_experts_per_tok": keys.take("expert_used_count", 0),
        "shared_intermediate_size": keys.take("expert_shared_feed_forward_length") or values["intermediate_size"],
        "position_embedding_type": "rope" if keys.take("rope.scaling.finetuned", True) else "nope",
    }


def _most(heads: int | list[int]) -> int:
    return max(heads) if isinstance(heads, list) else heads


def tensors_of(file: GGUFFile, config: PreTrainedConfig) -> Iterator[tuple[str, GGUFTensor]]:
    """Iterate over the tensors of a file, those of recurrent layers in transformers' layout. Raises StartupError for
    tensors that have none."""
    if file.architecture not in RECURRENT:
        yield from file.tensors.items()
        return
    layout = _FileLayout(config, file)
    for name, tensor in file.tensors.items():
        try:
            yield from layout.of(name, tensor)
        except (ArithmeticError, IndexError, ValueError) as error:
            raise StartupError(f"{file.path.name}: tensor {name!r} cannot be used: {error}") from error


class _FileLayout:
    """Where transformers has the rows and columns of a file's tensors."""

    def __init__(self, config: PreTrainedConfig, file: GGUFFile) -> None:
        self._tensors, self._turned = file.tensors, file.architecture in ("qwen35", "qwen35moe")
        self._joins = file.architecture == "granitehybrid"
        self._heads = getattr(config, "linear_num_key_heads", 1), getattr(config, "linear_num_value_heads", 1)
        self._dims = getattr(config, "linear_key_head_dim", 1), getattr(config, "linear_value_head_dim", 1)

    def of(self, name: str, tensor: GGUFTensor) -> Iterator[tuple[str, GGUFTensor]]:
        """Convert one tensor. Raises ValueError if the other half of a gate is missing or has another format."""
        place, _, kind = name.rpartition(".")
        if kind not in ("weight", "bias"):  # decays and skips have names without a kind
            place, kind = name, "weight"
        block, _, own = place.rpartition(".")
        if own == "ssm_ba":
            yield from self._parted(block, tensor)
        elif self._joins and own in ("ffn_gate", "ffn_gate_shexp"):
            yield f"{block}.ffn_gate_up.{kind}", self._joined(tensor, name.replace("ffn_gate", "ffn_up"))
        elif not (self._joins and own in ("ffn_up", "ffn_up_shexp")):
            yield f"{place}.{kind}", self._sorted(own, tensor)

    def _joined(self, gate: GGUFTensor, name: str) -> GGUFTensor:
        up = self._tensors.get(name)
        if up is None or (up.kind, up.shape) != (gate.kind, gate.shape):
            raise ValueError(f"{name} is missing, or has another shape or type")
        return GGUFTensor((2 * gate.shape[0], *gate.shape[1:]), gate.kind, np.concatenate((gate.data, up.data)))

    def _parted(self, block: str, tensor: GGUFTensor) -> Iterator[tuple[str, GGUFTensor]]:
        """Part the rows of b and a, which are together by key heads."""
        keys, heads = self._heads
        rows = tensor.data.reshape(keys, 2, heads // keys, *tensor.data.shape[1:])
        for part, name in enumerate(("ssm_beta", "ssm_alpha")):
            data = rows[:, part].reshape(heads, *tensor.data.shape[1:])
            yield f"{block}.{name}.weight", GGUFTensor((heads, *tensor.shape[1:]), tensor.kind, data)

    def _sorted(self, name: str, tensor: GGUFTensor) -> GGUFTensor:
        """Sort rows or columns; `name`: without block and kind."""
        if name == "ssm_a":
            decays = dequantize(tensor.data, tensor.kind).astype(np.float32)
            if not (decays < 0).all():
                raise ValueError("decays are not negative")
            tensor = GGUFTensor(tensor.shape, GGMLQuantizationType.F32, np.log(-decays))
        if name == "ssm_norm":  # Mamba-2's are apart by groups
            tensor = tensor._replace(shape=(tensor.data.size,), data=tensor.data.reshape(-1))
        if not self._turned or self._heads[0] == self._heads[1]:
            return tensor
        if name == "ssm_out":
            return tensor._replace(columns=self._value_order(self._dims[1]))
        if name in ("attn_qkv", "ssm_conv1d"):
            keys = 2 * self._heads[0] * self._dims[0]
            order = np.concatenate((np.arange(keys), keys + self._value_order(self._dims[1])))
        elif name in ("ssm_a", "ssm_dt", "ssm_alpha", "ssm_beta", "attn_gate"):
            order = self._value_order(self._dims[1] if name == "attn_gate" else 1)
        else:
            return tensor
        return tensor._replace(data=tensor.data[order])

    def _value_order(self, dim: int) -> NDArray[np.int64]:
        """Places in the file of the rows of all value heads, key head by key head. # -> [value heads * dim]"""
        keys, values = self._heads
        return np.arange(values * dim).reshape(values // keys, keys, dim).swapaxes(0, 1).reshape(-1)


def _of_qwen(model_type: str, tensors: Mapping[str, str], more: More) -> Architecture:
    return Architecture(model_type, tensors, more, rotary_part=True, layers_differ=True, norms_plus_one=True)


RECURRENT: Mapping[str, Architecture] = {
    "qwen3next": _of_qwen("qwen3_5_moe_text", _DELTA_MOE, _delta_moe),
    "qwen35": _of_qwen("qwen3_5_text", _DELTA, _delta),
    "qwen35moe": _of_qwen("qwen3_5_moe_text", _DELTA_MOE, _delta_moe),
    "lfm2": Architecture("lfm2", _LFM2, _lfm2, ("attention.layer_norm_rms_epsilon", "norm_eps"), layers_differ=True),
    "granitehybrid": Architecture(
        "granitemoehybrid", tensors=_GRANITE, more=_granite_hybrid, layers_differ=True, pairs_adjacent=True
    ),
}
"""Supported architectures with recurrent layers by their names in GGUF files. Qwen3-Next is read as Qwen3.5 with
experts, which computes the same from weights in the order of files."""

KNOWN: Mapping[str, Architecture] = {**ARCHITECTURES, **RECURRENT}
"""All supported architectures."""
