"""Safetensors folders: weights that are missing, left over, doubled or of another shape refuse the start by name."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from service.engine.checks import VERIFIED
from service.errors import StartupError
from tests.service.engine.test_weights import changed
from tests.tiny_models import EOS_ID, SMALL, VOCAB_SIZE, load, save_model, tiny_model

FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"
EXPERT = "model.layers.1.mlp.experts.{}.up_proj.weight"
SIZES: dict[str, Any] = {
    **SMALL,
    "vocab_size": VOCAB_SIZE,
    "eos_token_id": EOS_ID,
    "head_dim": 16,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}
DOWN = "model.layers.1.mlp.down_proj.weight"


def rewritten(folder: Path, without: str = "", more: str = "") -> Path:
    """The checkpoint without a tensor, and with another."""
    weights = load_file(folder / FILE)
    weights.pop(without, None)
    save_file(weights | ({more: torch.zeros(3)} if more else {}), folder / FILE)
    return folder


def of_experts(folder: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> Path:
    """A changed checkpoint with experts, as files have them: one by one."""
    config = AutoConfig.for_model("qwen3_moe", **SIZES)
    save_model(AutoModelForCausalLM.from_config(config), folder)
    save_file(change(load_file(folder / FILE)), folder / FILE, {"format": "pt"})
    return folder


@pytest.mark.parametrize("number", [0, 3])
def test_an_expert_without_a_tensor_is_named(number: int, tmp_path: Path) -> None:
    name = EXPERT.format(number)
    folder = of_experts(tmp_path, lambda weights: {key: value for key, value in weights.items() if key != name})
    with pytest.raises(StartupError, match=rf"no weights for {name} \(1 in all\)"):
        load(folder)


def test_experts_with_a_gap_in_their_numbers_are_named(tmp_path: Path) -> None:
    folder = of_experts(
        tmp_path, lambda weights: {key.replace("experts.3.", "experts.4."): value for key, value in weights.items()}
    )
    with pytest.raises(StartupError, match=r"no weights for model\.layers\.0\.mlp\.experts\.3\..*6 in all"):
        load(folder)


def test_an_expert_of_another_shape_is_named(tmp_path: Path) -> None:
    name = EXPERT.format(2)
    folder = of_experts(tmp_path, lambda weights: weights | {name: weights[name][:-1].clone()})
    with pytest.raises(StartupError, match=rf"'{name}' has the shape \[15, 32\].*other experts \[16, 32\]"):
        load(folder)


def sharded(folder: Path) -> Path:
    AutoModelForCausalLM.from_pretrained(folder).save_pretrained(folder, max_shard_size="100KB")
    (folder / FILE).unlink()
    return folder


def test_an_output_layer_that_is_missing_is_refused(tmp_path: Path) -> None:
    folder = rewritten(tiny_model("llama", tmp_path), without="lm_head.weight")
    with pytest.raises(StartupError, match=r"no weights for lm_head\.weight .*set tie_word_embeddings to true"):
        load(folder)
    tied = load(changed(folder, tie_word_embeddings=True)).model
    assert tied.get_output_embeddings().weight is tied.get_input_embeddings().weight


@pytest.mark.parametrize("name", [DOWN, "model.norm.weight", "model.embed_tokens.weight"])
def test_a_missing_weight_is_named(name: str, tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=rf"no weights for {name}"):
        load(rewritten(tiny_model("llama", tmp_path), without=name))


@pytest.mark.parametrize(
    "name", ["model.layers.3.mlp.down_proj.weight", "model.layers.0.self_attn.q_proj.bias", "lm_head.bias"]
)
def test_a_weight_too_many_is_named(name: str, tmp_path: Path) -> None:
    folder = rewritten(tiny_model("llama", tmp_path), more=name)
    with pytest.raises(StartupError, match=f"the files contain {name}"):
        load(folder)


def test_another_shape_is_named(tmp_path: Path) -> None:
    folder = changed(tiny_model("llama", tmp_path), intermediate_size=64)
    with pytest.raises(
        StartupError, match=r"tensor 'model\.layers\.\d\.mlp\..*has the shape .*but config\.json requires"
    ):
        load(folder)


def test_frequencies_that_old_files_hold_are_no_weights(tmp_path: Path) -> None:
    load(rewritten(tiny_model("llama", tmp_path), more="model.layers.0.self_attn.rotary_emb.inv_freq"))


def test_a_doubled_tensor_in_one_file_is_named(tmp_path: Path) -> None:
    folder = tiny_model("llama", tmp_path)
    data = (folder / FILE).read_bytes()
    name = b'"model.layers.1.mlp.down_proj.weight"'
    assert name in data
    (folder / FILE).write_bytes(data.replace(name, b'"model.layers.0.mlp.down_proj.weight"'))
    with pytest.raises(StartupError, match=r"'model\.layers\.0\.mlp\.down_proj\.weight' occurs twice"):
        load(folder)


def test_shards_are_read_and_a_tensor_in_two_of_them_is_named(tmp_path: Path) -> None:
    folder = sharded(tiny_model("llama", tmp_path))
    whole = load(folder)
    weight_map: dict[str, Any] = json.loads((folder / INDEX).read_text())["weight_map"]
    files = sorted(set(weight_map.values()))
    assert len(files) > 1
    shard = folder / next(file for file in files if file != weight_map[DOWN])
    save_file({**load_file(shard), DOWN: whole.model.get_parameter(DOWN).clone()}, shard)
    with pytest.raises(StartupError, match=f"{DOWN}' occurs twice"):
        load(folder)


@pytest.mark.parametrize("text", ["version https://git-lfs.github.com/spec/v1", "[" * 8 + "[]"])
def test_a_file_that_is_no_checkpoint_is_named(text: str, tmp_path: Path) -> None:
    folder = tiny_model("llama", tmp_path)
    (folder / FILE).write_text(text)
    with pytest.raises(StartupError, match="the weights are damaged"):
        load(folder)


def test_an_index_without_a_map_is_named(tmp_path: Path) -> None:
    folder = sharded(tiny_model("llama", tmp_path))
    (folder / INDEX).write_text("{}")
    with pytest.raises(StartupError, match="no valid weight_map"):
        load(folder)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    folder = sharded(tiny_model("llama", tmp_path))
    gone = sorted(folder.glob("model-*.safetensors"))[0]
    gone.unlink()
    with pytest.raises(StartupError, match=gone.name):
        load(folder)


def test_a_family_without_a_judge_is_refused_until_it_is_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny_model("llama", tmp_path)
    monkeypatch.setattr("service.engine.checks.VERIFIED", VERIFIED - {"llama"})
    with pytest.raises(StartupError, match=r"'llama' is not verified.*set unverified"):
        load(folder)
    load(folder, unverified=True)
