"""Layers in their short form: the same bits, and only where they are the same."""

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from kernels.layers import rotary
from service.engine.fused_ops import FusedRMSNorm, GatedMLP, fuse_layers
from service.engine.linear import PlannedLinear, replace_linears
from tests.tiny_models import FAMILIES, tiny_model


class ScaledTwice(nn.Module):
    """Looks like the norm that is replaced and computes another."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16))
        self.variance_epsilon = 1e-5

    def forward(self, x: Tensor) -> Tensor:
        return 2 * torch.rms_norm(x, (16,), self.weight, self.variance_epsilon)


def fuse(model: nn.Module, dtype: torch.dtype = torch.float32) -> dict[str, int]:
    return fuse_layers(model, torch.device("cpu"), dtype)


@pytest.mark.parametrize("kind", [LlamaRMSNorm, Qwen3RMSNorm])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_the_fused_op_gives_equal_bits(kind: type[nn.Module], dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    norm = kind(64, 1e-5).to(dtype)
    norm.get_parameter("weight").copy_(torch.rand(64, generator=generator) * 2)
    model = nn.Sequential(norm)
    assert fuse(model, dtype)["norms"] == 1
    assert isinstance(model[0], FusedRMSNorm)
    for rows in (1, 2, 7, 33, 128):
        x = (torch.randn(1, rows, 64, generator=generator) * 20).to(dtype)
        assert torch.equal(model(x), norm(x))


@pytest.mark.parametrize("norm", [ScaledTwice(), GemmaRMSNorm(16), nn.LayerNorm(16), nn.Linear(16, 16)])
def test_whatever_computes_something_else_stays(norm: nn.Module) -> None:
    model = nn.Sequential(norm)
    assert fuse(model)["norms"] == 0
    assert model[0] is norm


def test_weights_keep_their_names() -> None:
    model = nn.Sequential(LlamaRMSNorm(16))
    names = list(model.state_dict())
    fuse(model)
    assert list(model.state_dict()) == names


def gated(activation: str, kind: type[LlamaMLP] = LlamaMLP) -> LlamaMLP:
    torch.manual_seed(0)
    config = LlamaConfig(hidden_size=16, intermediate_size=24, num_attention_heads=2, hidden_act=activation)
    return kind(config).requires_grad_(False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gate_reads_the_joined_product(dtype: torch.dtype) -> None:
    model = nn.Sequential(gated("silu").to(dtype))
    replace_linears(model, PlannedLinear)
    plain = model[0]
    assert fuse(model, dtype)["gates"] == 1
    assert isinstance(model[0], GatedMLP)
    for rows in (1, 2, 33):
        x = torch.randn(1, rows, 16).to(dtype)
        assert torch.equal(model(x), plain(x))


class Doubled(LlamaMLP):
    """Has the parts of a gated layer and computes something else with them."""

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.act_fn(self.gate_proj(x)), self.up_proj(x)
        out: Tensor = 2 * self.down_proj(gate * up)
        return out


class Resized(LlamaMLP):
    """Asks for more than the parts of a gated layer."""

    def forward(self, x: Tensor) -> Tensor:
        x = x[..., : self.hidden_size]
        out: Tensor = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
        return out


@pytest.mark.parametrize("mlp", [gated("gelu"), gated("silu", Doubled), gated("silu", Resized)])
def test_a_layer_of_another_kind_stays(mlp: LlamaMLP) -> None:
    model = nn.Sequential(mlp)
    replace_linears(model, PlannedLinear)
    assert fuse(model)["gates"] == 0
    assert model[0] is mlp


def test_separate_products_stay() -> None:
    assert fuse(nn.Sequential(gated("silu")))["gates"] == 0


SHORT = {"llama": (True, True), "qwen2": (True, True), "qwen3": (True, True), "mistral": (True, True)}
"""Of which families gates and rotary embeddings are fused; Gemma's gate is a GELU."""


@pytest.mark.parametrize("family", FAMILIES)
def test_a_whole_model_computes_what_it_did(family: str, tmp_path: Path) -> None:
    folder = tiny_model(family, tmp_path)
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model = copy.deepcopy(plain)
    replace_linears(model, PlannedLinear)
    counts = fuse(model)
    gates, rotaries = SHORT.get(family, (False, True))
    layers = model.config.get_text_config().num_hidden_layers
    assert (counts["gates"], counts["rotary embeddings"]) == (layers * gates, layers * rotaries)
    tokens = torch.arange(30)[None]
    with torch.inference_mode():
        torch.testing.assert_close(model(tokens).logits, plain(tokens).logits, atol=1e-5, rtol=1e-5)


def test_other_models_of_the_family_keep_their_rotary_embedding(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model("llama", tmp_path), dtype=torch.float32)
    before = modeling_llama.apply_rotary_pos_emb
    assert fuse(model)["rotary embeddings"] > 0
    attention = model.model.layers[0].self_attn
    assert attention.forward.__globals__["apply_rotary_pos_emb"] is not before
    assert type(attention).forward.__globals__["apply_rotary_pos_emb"] is before


def in_part(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """As many numbers of a head as there are angles, as Phi-3 rotates."""
    width = cos.shape[-1]
    turned = rotary(query[..., :width], key[..., :width], cos, sin)
    return torch.cat([turned[0], query[..., width:]], -1), torch.cat([turned[1], key[..., width:]], -1)


def test_heads_that_are_rotated_in_part_are_left_to_the_family(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model("llama", tmp_path), dtype=torch.float32)
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", in_part)
    assert fuse(model)["rotary embeddings"] > 0
    found = model.model.layers[0].self_attn.forward.__globals__["apply_rotary_pos_emb"]
    query, key, angles = torch.randn(1, 4, 7, 16), torch.randn(1, 2, 7, 16), torch.randn(1, 7, 8)
    for part, expected in zip(found(query, key, angles, angles), in_part(query, key, angles, angles), strict=True):
        assert torch.equal(part, expected)


def interleaved(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Neighbours against neighbours, as GLM rotates."""
    turned = [torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2) for x in (query, key)]
    return query * cos[:, None] + turned[0] * sin[:, None], key * cos[:, None] + turned[1] * sin[:, None]


@pytest.mark.parametrize("theirs", [interleaved, lambda query, cos, sin: query, lambda query, key, cos, sin: query])
def test_another_rotation_stays(theirs: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model("llama", tmp_path), dtype=torch.float32)
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", theirs)
    assert fuse(model)["rotary embeddings"] == 0
