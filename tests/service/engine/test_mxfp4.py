"""Experts in MXFP4 as gpt-oss ships them: what is kept in blocks is what transformers dequantises."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, GptOssConfig
from transformers.utils.quantization_config import Mxfp4Config

from kernels.cpu import library
from kernels.experts import QuantisedStack
from service.engine.measuring import check
from service.engine.modules import QuantisedExperts, expert_weights
from service.errors import StartupError
from tests.conformance.judges import loaded
from tests.service.engine.harness import tiny_target
from tests.tiny_models import EOS_ID, VOCAB_SIZE, tiny_tokenizer

pytestmark = pytest.mark.skipif(library.variant() is None, reason="no kernels are compiled")
EXPERTS = "model.layers.1.mlp.experts"


def shipped(folder: Path, method: str = "mxfp4") -> Path:
    """A tiny checkpoint with random blocks."""
    config = GptOssConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_local_experts=8,
        num_experts_per_tok=2,
        max_position_embeddings=1024,
        eos_token_id=EOS_ID,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
    )
    state = dict(AutoModelForCausalLM.from_config(config).state_dict())
    for name in [name for name in state if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, columns, out = state.pop(name).shape
        blocks = experts, out, columns // 32
        state[f"{name}_blocks"] = torch.randint(256, (*blocks, 16), dtype=torch.uint8)
        state[f"{name}_scales"] = torch.randint(118, 124, blocks, dtype=torch.uint8)
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    config.quantization_config = {"quant_method": method}
    config.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def test_blocks_are_worth_what_transformers_says(tmp_path: Path) -> None:
    folder = shipped(tmp_path)
    settings = Mxfp4Config(dequantize=True)
    theirs = AutoModelForCausalLM.from_pretrained(folder, quantization_config=settings, dtype=torch.float32)
    ours = loaded(folder, torch.float32, in_blocks=True)
    experts = ours.model.get_submodule(EXPERTS)
    assert isinstance(experts, QuantisedExperts)
    for found, expected in zip(expert_weights(experts), expert_weights(theirs.get_submodule(EXPERTS)), strict=True):
        dense = found.dense() if isinstance(found, QuantisedStack) else found
        if isinstance(dense, torch.Tensor) and isinstance(expected, torch.Tensor):
            assert torch.equal(dense, expected)
        else:
            assert found == expected
    assert ours.read_bytes < 0.6 * 2 * theirs.num_parameters()


def test_rows_do_not_depend_on_their_company(tmp_path: Path) -> None:
    assert check(tiny_target(loaded(shipped(tmp_path), torch.bfloat16, in_blocks=True), num_slots=600)) == "exact"


def test_other_types_than_blocks_are_dequantised(tmp_path: Path) -> None:
    model = loaded(shipped(tmp_path), torch.bfloat16).model
    weight = model.get_submodule(EXPERTS).get_parameter("down_proj")
    assert (weight.dtype, tuple(weight.shape)) == (torch.bfloat16, (8, 96, 64))


def test_another_method_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="quantised by 'gptq'"):
        loaded(shipped(tmp_path, "gptq"), torch.bfloat16)
