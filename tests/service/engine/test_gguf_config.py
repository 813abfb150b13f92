"""What a GGUF file's keys mean: each is read, known to have no effect, or refuses the start."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from transformers import PreTrainedConfig

from service.engine.gguf_config import config_of
from service.engine.gguf_families import ARCHITECTURES
from service.engine.gguf_reader import GGUFFile, GGUFTensor
from service.errors import StartupError

EMBEDDING = GGUFTensor((320, 64), GGMLQuantizationType.F32, np.zeros((320, 64), dtype=np.float32))
KEYS: dict[str, Any] = {
    "context_length": 4096,
    "embedding_length": 64,
    "block_count": 6,
    "feed_forward_length": 128,
    "attention.head_count": 4,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "attention.layer_norm_epsilon": 1e-5,
}
GEMMA4: dict[str, Any] = {
    "attention__sliding_window": 512,
    "attention__key_length_swa": 16,
    "attention__value_length_swa": 16,
}
GEMMA4 |= {"attention__key_length": 32, "attention__value_length": 32, "attention__shared_kv_layers": 0}
GEMMA4 |= {"rope__dimension_count_swa": 16, "rope__freq_base_swa": 1e4, "embedding_length_per_layer_input": 0}


def file_of(architecture: str = "llama", *tensors: str, **keys: object) -> GGUFFile:
    """A file of these keys, `a__b` for `a.b`; None: without the key."""
    epsilon = ARCHITECTURES[architecture].epsilon[0] if architecture in ARCHITECTURES else ""
    own = {name: value for name, value in KEYS.items() if "epsilon" not in name or name == epsilon}
    own |= {name.replace("__", "."): value for name, value in keys.items()}
    given = {f"{architecture}.{name}": value for name, value in own.items() if value is not None}
    found = dict.fromkeys(["token_embd.weight", "output.weight", *tensors], EMBEDDING)
    return GGUFFile(Path("a.gguf"), {"general.architecture": architecture, **given}, found, ())


def rope(config: PreTrainedConfig) -> dict[str, Any]:
    return dict(config.rope_parameters)


def test_sizes_of_a_llama() -> None:
    config = config_of(
        file_of(
            attention__head_count_kv=2, attention__key_length=32, attention__value_length=32, rope__dimension_count=32
        )
    )
    assert (config.model_type, config.vocab_size, config.hidden_size, config.head_dim) == ("llama", 320, 64, 32)
    assert (config.num_hidden_layers, config.num_key_value_heads, config.max_position_embeddings) == (6, 2, 4096)
    assert (config.tie_word_embeddings, config.attention_bias, config.mlp_bias) == (False, False, False)
    assert rope(config) == {"rope_type": "default", "rope_theta": 10_000.0}


def test_what_is_not_stated_is_as_in_llama_cpp() -> None:
    config = config_of(file_of())
    assert (config.num_key_value_heads, config.head_dim, config.rope_parameters["rope_theta"]) == (4, 16, 10_000.0)


def test_biases_are_there_if_their_tensors_are() -> None:
    config = config_of(file_of("llama", "blk.0.attn_q.bias", "blk.0.ffn_up.bias"))
    assert (config.attention_bias, config.mlp_bias) == (True, True)


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"rope__scaling__type": "linear", "rope__scaling__factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        ({"rope__scaling__factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        ({"rope__scale_linear": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        ({"rope__scaling__type": "none", "rope__scaling__factor": 4.0}, {"rope_type": "default"}),
        ({"rope__scaling__type": "linear", "rope__scaling__factor": 0.0}, {"rope_type": "default"}),
        (
            {
                "rope__scaling__type": "yarn",
                "rope__scaling__factor": 4.0,
                "rope__scaling__original_context_length": 1024,
            },
            {
                "rope_type": "yarn",
                "factor": 4.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "original_max_position_embeddings": 1024,
            },
        ),
    ],
)
def test_scaled_positions(keys: dict[str, Any], expected: dict[str, Any]) -> None:
    assert rope(config_of(file_of("llama", **keys))) == {"rope_theta": 10_000.0, **expected}


def test_yarn_has_the_attention_factor_of_the_file() -> None:
    keys = {"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0, "rope__scaling__attn_factor": 0.5}
    found = rope(config_of(file_of("qwen2", **keys)))
    assert found["attention_factor"] == pytest.approx(0.5 * 1.1386294)
    assert found["original_max_position_embeddings"] == 4096


@pytest.mark.parametrize(
    ("architecture", "keys", "complaint"),
    [
        ("llama", {"context_length": None}, r"llama\.context_length is missing"),
        ("llama", {"expert_count": 8}, r"llama\.expert_used_count is missing"),
        ("qwen2", {"expert_count": 8}, "expert_count is 8"),
        ("mistral3", {"expert_count": 8}, "expert_count is 8"),
        ("glm4moe", {"expert_gating_func": 1}, "expert_gating_func is 1"),
        ("llama", {"attention__causal": False}, "attention.causal is False"),
        ("llama", {"attention__sliding_window": 4096}, r"does not support the key llama\.attention\.sliding_window"),
        ("llama", {"attention__value_length": 8}, "value_length is 8"),
        ("llama", {"rope__dimension_count": 8}, "dimension_count is 8"),
        ("llama", {"rope__scaling__type": "longrope"}, "scaling.type is 'longrope'"),
        ("llama", {"rope__scaling__attn_factor": 2.0}, "attn_factor is 2.0"),
        ("llama", {"attention__head_count": [4, 4, 4, 4, 4, 8]}, "head_count differs between layers"),
        ("gemma3", {}, r"gemma3\.attention\.sliding_window is missing"),
        ("gemma4", GEMMA4 | {"attention__sliding_window_pattern": [True] * 6}, "sliding_window_pattern is"),
        ("gemma4", GEMMA4, "rope_freqs.weight' is missing"),
        ("phi3", {"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0}, "scaling.type is 'yarn'"),
        ("llama", {"attention__head_count": 0}, "a value of the wrong type"),
        ("llama", {"block_count": "two"}, "a value of the wrong type"),
        ("mamba", {}, "does not read GGUF files of architecture 'mamba'"),
    ],
)
def test_what_would_change_the_forward_is_refused(architecture: str, keys: dict[str, Any], complaint: str) -> None:
    with pytest.raises(StartupError, match=complaint):
        config_of(file_of(architecture, **keys))


def test_keys_without_effect_are_passed_over() -> None:
    without = {"vocab_size": 320, "expert_count": 0, "expert_used_count": 0, "attention__causal": True}
    assert (
        config_of(file_of("llama", rope__scaling__finetuned=False, **without)).to_dict()
        == config_of(file_of()).to_dict()
    )


def test_lists_of_one_value_are_that_value() -> None:
    assert config_of(file_of(attention__head_count_kv=[2] * 6)).num_key_value_heads == 2


def lists(*kinds: str) -> dict[str, GGUFTensor]:
    """Tensors of longrope."""
    numbers = {"long": np.array([1.0, 8.0], np.float32), "short": np.array([1.0, 2.0], np.float32)}
    return {f"rope_factors_{kind}.weight": GGUFTensor((2,), GGMLQuantizationType.F32, numbers[kind]) for kind in kinds}


def test_longrope_has_two_lists() -> None:
    keys = {"rope__scaling__attn_factor": 1.2, "rope__scaling__original_context_length": 64, "rope__dimension_count": 4}
    file = file_of("phi3", **keys)
    config = config_of(replace(file, tensors={**file.tensors, **lists("long", "short")}))
    expected = {"rope_type": "longrope", "long_factor": [1.0, 8.0], "short_factor": [1.0, 2.0], "attention_factor": 1.2}
    assert rope(config).items() >= (expected | {"original_max_position_embeddings": 64}).items()
    with pytest.raises(StartupError, match=r"'linear' with factor 1\.0 and 1 lists of factors"):
        config_of(replace(file, tensors={**file.tensors, **lists("long")}))


def test_mistral_of_multimodal_files() -> None:
    yarn = {"rope__scaling__type": "yarn", "rope__scaling__factor": 16.0, "rope__scaling__yarn_log_multiplier": 1.0}
    third = config_of(file_of("mistral3", attention__temperature_scale=0.1, **yarn))
    assert (third.model_type, rope(third)["llama_4_scaling_beta"], rope(third)["attention_factor"]) == (
        "ministral3",
        0.1,
        1.0,
    )
    small = config_of(file_of("mistral3"))
    assert (small.model_type, small.sliding_window) == ("mistral", None)


EXPERTS = {"expert_count": 8, "expert_used_count": 2}
GLM = {"expert_shared_count": 1, "expert_feed_forward_length": 32, "nextn_predict_layers": 1, "expert_gating_func": 2}


@pytest.mark.parametrize(
    ("architecture", "keys", "expected"),
    [
        ("llama", {}, {"model_type": "mixtral", "num_local_experts": 8, "intermediate_size": 128}),
        ("qwen3moe", {}, {"model_type": "qwen3_moe", "moe_intermediate_size": 64, "norm_topk_prob": True}),
        ("qwen3moe", {"expert_feed_forward_length": 32}, {"num_experts": 8, "moe_intermediate_size": 32}),
        ("olmoe", {}, {"num_experts": 8, "intermediate_size": 128, "norm_topk_prob": False}),
        (
            "glm4moe",
            GLM | {"expert_weights_scale": 2.5, "expert_weights_norm": True, "leading_dense_block_count": 1},
            {"num_hidden_layers": 5, "routed_scaling_factor": 2.5, "norm_topk_prob": True, "first_k_dense_replace": 1},
        ),
        ("glm4moe", GLM, {"routed_scaling_factor": 1.0, "norm_topk_prob": False, "first_k_dense_replace": 0}),
        (
            "gpt-oss",
            {"expert_feed_forward_length": 96, "attention__sliding_window": 128},
            {"intermediate_size": 96, "layer_types": ["sliding_attention", "full_attention"] * 3},
        ),
    ],
)
def test_experts(architecture: str, keys: dict[str, Any], expected: dict[str, Any]) -> None:
    config = config_of(file_of(architecture, **EXPERTS, **keys))
    assert config.num_experts_per_tok == 2
    assert {name: getattr(config, name) for name in expected} == expected


def test_layers_that_all_have_experts_have_no_other_width() -> None:
    """As in files of Qwen3.5's models with experts."""
    own = {"attention__layer_norm_rms_epsilon": 1e-6, "expert_feed_forward_length": 32, "feed_forward_length": None}
    sizes = {"conv_kernel": 4, "state_size": 16, "group_count": 2, "time_step_rank": 4, "inner_size": 64}
    own |= {f"ssm__{name}": size for name, size in sizes.items()}
    config = config_of(file_of("qwen35moe", **EXPERTS, **own))
    assert (config.model_type, config.moe_intermediate_size, config.num_experts) == ("qwen3_5_moe_text", 32, 8)
    with pytest.raises(StartupError, match=r"feed_forward_length is missing"):
        config_of(file_of(feed_forward_length=None))


def test_borders_of_yarn_are_not_rounded_in_gpt_oss() -> None:
    keys = EXPERTS | {"expert_feed_forward_length": 96, "attention__sliding_window": 128}
    scaled = {"rope__scaling__type": "yarn", "rope__scaling__factor": 32.0}
    assert rope(config_of(file_of("gpt-oss", **keys, **scaled)))["truncate"] is False


def test_windows_in_three_layers_of_four() -> None:
    window = {"attention__sliding_window": 512}
    assert config_of(file_of("exaone4")).layer_types == ["full_attention"] * 6
    windowed = ["sliding_attention"] * 3 + ["full_attention"] + ["sliding_attention"] * 2
    assert config_of(file_of("exaone4", **window)).layer_types == windowed
    command = config_of(file_of("cohere2", logit_scale=0.25, **window))
    assert (command.layer_types, command.logit_scale, command.layer_norm_eps) == (windowed, 0.25, 1e-5)


def test_a_part_of_each_head_is_rotated() -> None:
    assert rope(config_of(file_of("phi3", rope__dimension_count=12)))["partial_rotary_factor"] == 0.75


def test_keys_of_a_part_for_images_are_passed_over() -> None:
    images = {"mm__tokens_per_image": 256, "vision__block_count": 27}
    assert config_of(file_of("gemma3", attention__sliding_window=512, **images)).model_type == "gemma3_text"


def test_windows_of_gemma() -> None:
    second = config_of(file_of("gemma2", attention__key_length=32, attention__value_length=32))
    assert (second.sliding_window, second.attn_logit_softcapping, second.query_pre_attn_scalar) == (4096, 50.0, 32)
    assert second.layer_types == ["sliding_attention", "full_attention"] * 3
    scaled = {"rope__freq_base": 1e6, "rope__scaling__type": "linear", "rope__scaling__factor": 8.0}
    third = config_of(file_of("gemma3", attention__sliding_window=512, **scaled))
    assert third.layer_types == ["sliding_attention"] * 5 + ["full_attention"]
    assert third.rope_parameters["full_attention"] == {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0}
    assert third.rope_parameters["sliding_attention"] == {"rope_type": "default", "rope_theta": 10_000.0}


def test_layers_of_gemma_4() -> None:
    dense = config_of(file_of("gemma4", "rope_freqs.weight", "blk.5.attn_v.weight", **GEMMA4))
    assert [dense.per_layer_config[index].head_dim for index in range(6)] == [16] * 5 + [32]
    assert (dense.attention_k_eq_v, dense.enable_moe_block, dense.hidden_size_per_layer_input) == (False, False, 0)
    differ: dict[str, Any] = {"attention__head_count_kv": [4, 4, 2] * 2, "feed_forward_length": [128] * 3 + [256] * 3}
    differ |= {"attention__sliding_window_pattern": [True, True, False] * 2, "attention__shared_kv_layers": 3}
    differ |= {"expert_feed_forward_length": 32}
    other = config_of(
        file_of("gemma4", "rope_freqs.weight", "blk.0.ffn_gate_inp.weight", **(GEMMA4 | differ), **EXPERTS)
    )
    assert [other.per_layer_config[index].num_key_value_heads for index in range(6)] == [4, 4, 2] * 2
    assert (other.intermediate_size, other.use_double_wide_mlp, other.num_kv_shared_layers) == (128, True, 3)
    assert (other.attention_k_eq_v, other.enable_moe_block, other.top_k_experts) == (True, True, 2)


def test_olmo_with_windows_is_the_third() -> None:
    pattern = {"attention__sliding_window": 512, "attention__sliding_window_pattern": [True, False, True] * 2}
    scaled = {"rope__scaling__type": "yarn", "rope__scaling__factor": 8.0, "rope__freq_base": 5e5}
    config = config_of(file_of("olmo2", **pattern, **scaled))
    assert (config.model_type, config.sliding_window) == ("olmo3", 512)
    assert config.layer_types == ["sliding_attention", "full_attention", "sliding_attention"] * 2
    assert config.rope_parameters["full_attention"]["rope_type"] == "yarn"
    assert config.rope_parameters["sliding_attention"] == {"rope_type": "default", "rope_theta": 5e5}
    assert config_of(file_of("olmo2")).model_type == "olmo2"


def test_the_largest_gemmas_scale_scores_by_the_width_of_all_heads() -> None:
    config = config_of(file_of("gemma2", block_count=46, attention__key_length=32, attention__value_length=32))
    assert config.query_pre_attn_scalar == 16


def test_multipliers_of_granite() -> None:
    keys = {"attention__scale": 0.02, "embedding_scale": 12.0, "residual_scale": 0.22, "logit_scale": 8.0}
    config = config_of(file_of("granite", **keys))
    found = (
        config.attention_multiplier,
        config.embedding_multiplier,
        config.residual_multiplier,
        config.logits_scaling,
    )
    assert found == (0.02, 12.0, 0.22, 8.0)
    assert config_of(file_of("granite", logit_scale=1.0)).attention_multiplier == 0.25
