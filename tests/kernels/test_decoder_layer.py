"""A decoder layer as a list of ops against transformers' own layers of every family, on random weights."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from kernels.decoder_layer import DecoderLayer, RowPlaces
from kernels.families import FUSED_FAMILIES, Family
from kernels.layers import RunLayers
from kernels.ops import REFERENCE, Ops
from kernels.tree_attention import AttentionRows

torch.set_num_threads(1)

HEADS, KV_HEADS, DIM, ROWS = 6, 2, 12, 19
SIZES: dict[str, Any] = {
    "hidden_size": 72,
    "intermediate_size": 100,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": DIM,
    "rms_norm_eps": 1e-5,
    "num_hidden_layers": 2,
    "vocab_size": 8,
    "attn_implementation": "eager",
}
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 0.04}  # of the deviation of results, after some twenty roundings


class Layers:
    """Two layers of a family, random in all weights."""

    def __init__(self, family: str, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(len(family))
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **SIZES), dtype=dtype).eval()
        self.family, self.modules = FUSED_FAMILIES[family], list(model.get_decoder().layers)
        for weight in (weight for module in self.modules for weight in module.parameters()):
            spread = weight.shape[-1] ** -0.5 if weight.dim() == 2 else 0.3
            drawn = torch.randn(weight.shape, generator=generator) * spread
            weight.data = (drawn + (weight.dim() == 1 and bool((weight == 1).all()))).to(dtype)
        self.hidden = torch.randn(ROWS, 72, generator=generator).to(dtype)
        cos, sin = LlamaRotaryEmbedding(LlamaConfig(**SIZES))(self.hidden[None], torch.arange(ROWS)[None])
        self.cos, self.sin = cos[0], sin[0]

    def expected(self) -> Tensor:
        """A prompt's rows after both."""
        hidden, past = self.hidden[None], torch.ones(ROWS, ROWS, dtype=torch.bool).tril()
        mask = torch.zeros(1, 1, ROWS, ROWS).masked_fill(~past, float("-inf")).to(hidden.dtype)
        with torch.no_grad():
            for module in self.modules:
                hidden = module(hidden, attention_mask=mask, position_embeddings=(self.cos[None], self.sin[None]))
        return hidden[0]

    def found(self, ops: Ops, plan: Callable[..., RunLayers] | None = None) -> Tensor:
        plan = plan or ops.plan_layers
        hidden, slots, ends = self.hidden.clone(), torch.randperm(ROWS + 5)[:ROWS], torch.tensor([ROWS - 1])
        none = torch.zeros(1, 0, dtype=torch.int64)
        positions = torch.arange(ROWS)
        rows = AttentionRows(
            sequence=torch.zeros_like(positions), positions=positions, node=torch.full_like(positions, -1),
            table_rows=torch.tensor([0]), extend_end=ends, node_slots=none, node_depths=none,
            ancestors=none[..., None].bool(),
        )  # fmt: skip
        attention = ops.plan_attention(rows, slots[None].clone(), query_heads=HEADS, kv_heads=KV_HEADS)
        places = RowPlaces(self.cos, self.sin, slots, attention)
        layers = [_layer_of(module.state_dict(), ops, self.family) for module in self.modules]
        run = plan(layers, [torch.zeros(2, ROWS + 5, KV_HEADS, DIM) for _ in layers])
        return hidden + run(hidden, None, places)


def _layer_of(weights: dict[str, Tensor], ops: Ops, family: Family) -> DecoderLayer:
    return DecoderLayer.of(weights, ops, family, query_heads=HEADS, epsilon=1e-5, scale=DIM**-0.5, window=None)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("family", FUSED_FAMILIES)
def test_equals_transformers(family: str, dtype: torch.dtype, on_cpu: Ops) -> None:
    layers = Layers(family, dtype)
    found, expected = layers.found(on_cpu), layers.expected()
    assert found.dtype == dtype
    atol = TOLERANCES[dtype] * float(expected.float().std())
    torch.testing.assert_close(found, expected, atol=atol, rtol=TOLERANCES[dtype])


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("family", FUSED_FAMILIES)
@pytest.mark.parametrize("intermediate", [100, 99])
def test_layers_in_one_call_have_the_bits_of_ops_one_by_one(
    family: str, dtype: torch.dtype, intermediate: int, on_cpu: Ops, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SIZES, "intermediate_size", intermediate)  # an odd one is no whole number of pairs
    layers = Layers(family, dtype)
    torch.manual_seed(0)
    found = layers.found(on_cpu)
    torch.manual_seed(0)
    assert torch.equal(found, layers.found(on_cpu, REFERENCE.plan_layers))


@pytest.mark.parametrize(
    ("family", "change"),
    [
        ("llama", {"mlp.down_proj.weight": None}),
        ("llama", {"self_attn.k_proj.weight": None}),
        ("llama", {"input_layernorm.weight": None}),
        ("llama", {"pre_feedforward_layernorm.weight": torch.ones(72)}),
        ("llama", {"self_attn.q_proj.bias": torch.ones(72)}),
        ("qwen3", {"self_attn.k_norm.weight": None}),
    ],
)
def test_other_layers_are_refused(family: str, change: dict[str, Tensor | None]) -> None:
    weights = Layers(family, torch.float32).modules[0].state_dict() | change
    known = {name: value for name, value in weights.items() if value is not None}
    with pytest.raises(ValueError, match=r"weight|norm"):
        _layer_of(known, REFERENCE, FUSED_FAMILIES[family])
