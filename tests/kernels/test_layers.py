"""Ops of a decoder layer: references against transformers, kernels against references."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding, apply_rotary_pos_emb

from kernels.decoder_layer import DecoderLayer, RowPlaces
from kernels.families import OF_DRAFTERS, spec_of
from kernels.layers import GateForm, Heads, RotaryRows, RunLayers
from kernels.ops import REFERENCE, Ops
from kernels.specs import LayerSpec
from kernels.tree_attention import AttentionRows, KVRows
from kernels.triton.layers import rotary_store
from tests.kernels.layer_parts import gate_bounds, norm_bounds, rotary_parts, within

DTYPES = [torch.float32, torch.bfloat16]
Everywhere = tuple[Ops, str]
SILU = GateForm("silu")
SHAPES = [(1, 1), (1, 64), (7, 576), (300, 48), (2, 4097)]


def _rows(shape: tuple[int, int], dtype: torch.dtype, spread: float = 3.0) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))) * spread).to(dtype)


def _moved(parts: dict[str, Any], device: str) -> dict[str, Any]:
    """A copy of `rotary_parts` on a device."""
    turn = RotaryRows(*(None if one is None else one.to(device) for one in parts["rotary"]))  # type: ignore[arg-type]
    return {name: turn if name == "rotary" else value.clone().to(device) for name, value in parts.items()}


def _weight(width: int, dtype: torch.dtype) -> Tensor:
    return (torch.rand(width, generator=torch.Generator().manual_seed(width)) * 3 - 1).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_references_round_as_transformers_does(dtype: torch.dtype) -> None:
    hidden, joined = _rows((5, 72), dtype), _rows((5, 200), dtype)
    norm = LlamaRMSNorm(72, 1e-5).to(dtype)
    norm.weight.data = _weight(72, dtype)
    torch.testing.assert_close(
        REFERENCE.add_rms_norm(hidden.clone(), None, norm.weight, 1e-5), norm(hidden), atol=0, rtol=_last_bit(dtype)
    )
    gate, up = joined.chunk(2, dim=-1)
    assert torch.equal(REFERENCE.gate_mul(joined, GateForm("silu")), functional.silu(gate) * up)
    parts = rotary_parts(5, (4, 2), 24, dtype)
    heads = parts["joined"].view(1, 5, 8, 24).transpose(1, 2)
    query, key = apply_rotary_pos_emb(heads[:, :4], heads[:, 4:6], *(angle[None] for angle in parts["rotary"][:2]))
    assert torch.equal(REFERENCE.rotary_store(**parts, heads=Heads(4)), query[0].transpose(0, 1))
    assert torch.equal(parts["pool"][0, parts["slots"]], key[0].transpose(0, 1))
    assert torch.equal(parts["pool"][1, parts["slots"]], heads[0, 6:].transpose(0, 1))


def _last_bit(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps


@pytest.mark.parametrize(("added", "offset"), [(False, None), (True, None), (True, 0.0), (False, 1.0)])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_sums_are_added_and_normed(
    shape: tuple[int, int], dtype: torch.dtype, added: bool, offset: float | None, everywhere: Everywhere
) -> None:
    ops, device = everywhere
    hidden, delta, weight = _rows(shape, dtype), _rows(shape, dtype, 0.7).flip(0), _weight(shape[1], dtype)
    expected = hidden + delta if added else hidden.clone()
    hidden = hidden.to(device)
    found = ops.add_rms_norm(hidden, delta.to(device) if added else None, weight.to(device), 1e-5, offset)
    assert torch.equal(hidden.cpu(), expected)
    assert within(found.cpu(), norm_bounds(expected, weight, 1e-5, offset))


def test_epsilon_counts(everywhere: Everywhere) -> None:
    ops, device = everywhere
    x, weight = torch.full((2, 16), 1e-3, device=device), torch.ones(16, device=device)
    torch.testing.assert_close(ops.add_rms_norm(x, None, weight, 1e-6), torch.full_like(x, 0.5**0.5))


@pytest.mark.parametrize(
    "gate",
    [SILU, GateForm("gelu_tanh"), GateForm("clamped_swiglu", 7.0), GateForm("sigmoid")],
    ids=lambda gate: gate.activation,
)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 2), (1, 96), (5, 2 * 1536), (300, 34), (3, 2 * 1025), (2, 28_672)])
def test_gates(shape: tuple[int, int], dtype: torch.dtype, gate: GateForm, everywhere: Everywhere) -> None:
    ops, device = everywhere
    joined = _rows(shape, dtype, 6.0)
    assert within(ops.gate_mul(joined.to(device), gate).cpu(), gate_bounds(joined, gate))


def test_large_gates_are_open_or_shut(everywhere: Everywhere) -> None:
    ops, device = everywhere
    joined = torch.tensor([[80.0, -80.0, 0.0, 3.0, 3.0, 3.0]], device=device)
    opened, shut, nothing = ops.gate_mul(joined, SILU)[0].tolist()
    assert (opened, nothing) == (240.0, 0.0)
    assert -1e-30 < shut <= 0.0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [(9, 3), (4, 1), (2, 2)])
@pytest.mark.parametrize(("rows", "dim"), [(1, 64), (5, 256), (33, 24), (2, 6)])
def test_rows_are_rotated_and_stored(
    rows: int, dim: int, heads: tuple[int, int], dtype: torch.dtype, everywhere: Everywhere
) -> None:
    """In bf16 each product is rounded; in float32 one of two may be fused with the sum: the last bit of the largest."""
    ops, device = everywhere
    expected = rotary_parts(rows, heads, dim, dtype)
    given = _moved(expected, device)
    found = ops.rotary_store(**given, heads=Heads(heads[0]))
    query = REFERENCE.rotary_store(**expected, heads=Heads(heads[0]))
    atol = 0.0 if dtype == torch.bfloat16 else 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(found.cpu(), query, atol=atol, rtol=0)
    torch.testing.assert_close(given["pool"].cpu(), expected["pool"], atol=atol, rtol=0)
    assert torch.equal(given["pool"][1].cpu(), expected["pool"][1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [16, 24, 128])
@pytest.mark.parametrize("spans", [(1, 1), (4, 2)])
def test_heads_are_normed_before_they_are_rotated(
    spans: tuple[int, int], dim: int, dtype: torch.dtype, compiled: Ops
) -> None:
    """As by the norm of rows: the same bits, from the same sum."""
    given, normed = (rotary_parts(7, (4, 2), dim, dtype) for _ in range(2))
    weights = (_weight(spans[0] * dim, dtype), _weight(spans[1] * dim + 1, dtype)[1:].clone())
    heads = normed["joined"].view(7, 8, dim)
    for part, weight in zip((slice(4), slice(4, 6)), weights, strict=True):
        flat = heads[:, part].reshape(-1, len(weight)).contiguous()
        heads[:, part] = compiled.add_rms_norm(flat, None, weight, 1e-5).view(7, -1, dim)
    found = compiled.rotary_store(**given, heads=Heads(4, weights, 1e-5))
    assert torch.equal(found, compiled.rotary_store(**normed, heads=Heads(4)))
    assert torch.equal(given["pool"], normed["pool"])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [48, 200])
def test_a_row_does_not_depend_on_its_company(width: int, dtype: torch.dtype, everywhere: Everywhere) -> None:
    ops, device = everywhere
    x, weight = _rows((130, width), dtype).to(device), _weight(width, dtype).to(device)
    gates, norms = ops.gate_mul(x, SILU), ops.add_rms_norm(x.clone(), x.flip(0), weight, 1e-5)
    parts = _moved(rotary_parts(130, (3, 1), 24, dtype), device)
    head_norms = (weight[:24].contiguous(), weight[24:48].contiguous())
    turned = ops.rotary_store(**parts, heads=Heads(3, head_norms, 1e-5))
    for row in (0, 7, 64, 129):
        one = slice(row, row + 1)
        assert torch.equal(ops.gate_mul(x[one], SILU), gates[one])
        assert torch.equal(ops.add_rms_norm(x[one].clone(), x.flip(0)[one], weight, 1e-5), norms[one])
        rotary = RotaryRows(parts["rotary"].cos[one], parts["rotary"].sin[one])
        alone = {"joined": parts["joined"][one], "slots": parts["slots"][one], "pool": parts["pool"].clone()}
        again = ops.rotary_store(**alone, rotary=rotary, heads=Heads(3, head_norms, 1e-5))
        assert torch.equal(again, turned[one])
        assert torch.equal(alone["pool"], parts["pool"])


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_rows(dtype: torch.dtype, everywhere: Everywhere) -> None:
    ops, device = everywhere
    none = torch.zeros(0, 8, dtype=dtype, device=device)
    assert ops.add_rms_norm(none, None, torch.ones(8, dtype=dtype, device=device), 1e-5).shape == (0, 8)
    assert ops.gate_mul(none, SILU).shape == (0, 4)
    parts = _moved(rotary_parts(0, (4, 2), 8, dtype), device)
    before = parts["pool"].clone()
    assert ops.rotary_store(**parts, heads=Heads(4)).shape == (0, 4, 8)
    assert torch.equal(parts["pool"], before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [16, 24, 128])
@pytest.mark.parametrize("spans", [(1, 1), (4, 2)])
def test_heads_are_normed_before_they_are_rotated_on_a_device(
    spans: tuple[int, int], dim: int, dtype: torch.dtype, device: str
) -> None:
    """A norm may fall to the other side of a rounding, and so may each product and their sum."""
    expected = rotary_parts(7, (4, 2), dim, dtype)
    norms = (_weight(spans[0] * dim, dtype), _weight(spans[1] * dim + 1, dtype)[1:].clone())
    given = _moved(expected, device)
    query = REFERENCE.rotary_store(**expected, heads=Heads(4, norms, 1e-5))
    on_device = (norms[0].to(device), norms[1].to(device))
    found = rotary_store(**given, heads=Heads(4, on_device, 1e-5))
    largest = 4 * query.abs().max().item() * torch.finfo(dtype).eps
    torch.testing.assert_close(found.cpu(), query, atol=largest, rtol=0)
    torch.testing.assert_close(given["pool"].cpu(), expected["pool"], atol=largest, rtol=0)


# A decoder layer as a list of ops against transformers' own layers, on random weights.

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
        self.spec, self.modules = spec_of(model.config.to_dict()).layers[0], list(model.get_decoder().layers)
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

    def found(self, ops: Ops, plan: Callable[..., RunLayers] | None = None) -> tuple[Tensor, Tensor]:
        """The rows after both layers, and after the second and the first side by side, as tapped."""
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
        places = RowPlaces({"": RotaryRows(self.cos, self.sin)}, (KVRows(slots, attention),))
        layers = [_layer_of(module.state_dict(), ops, self.spec) for module in self.modules]
        run = plan(layers, [hidden.new_zeros(2, ROWS + 5, KV_HEADS, DIM) for _ in layers], (1, 0))
        tapped = hidden.new_empty(ROWS, 2 * hidden.shape[1])
        return hidden + run(hidden, None, places, tapped), tapped


def _layer_of(weights: dict[str, Tensor], ops: Ops, spec: LayerSpec) -> DecoderLayer:
    return DecoderLayer.of(weights, ops, spec, epsilon=1e-5)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("family", OF_DRAFTERS)
def test_equals_transformers(family: str, dtype: torch.dtype, on_cpu: Ops) -> None:
    layers = Layers(family, dtype)
    (found, tapped), expected = layers.found(on_cpu), layers.expected()
    assert torch.equal(tapped[:, : found.shape[1]], found)
    assert found.dtype == dtype
    atol = TOLERANCES[dtype] * float(expected.float().std())
    torch.testing.assert_close(found, expected, atol=atol, rtol=TOLERANCES[dtype])


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize(("family", "intermediate"), [("llama", 99), *((family, 100) for family in OF_DRAFTERS)])
def test_layers_in_one_call_have_the_bits_of_ops_one_by_one(
    family: str, intermediate: int, dtype: torch.dtype, compiled: Ops, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SIZES, "intermediate_size", intermediate)  # an odd one is no whole number of pairs
    layers = Layers(family, dtype)
    torch.manual_seed(0)
    found = layers.found(compiled)
    torch.manual_seed(0)
    assert all(map(torch.equal, found, layers.found(compiled, REFERENCE.plan_layers)))


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
    layers = Layers(family, torch.float32)
    weights = layers.modules[0].state_dict() | change
    known = {name: value for name, value in weights.items() if value is not None}
    with pytest.raises(ValueError, match=r"weight|norm"):
        _layer_of(known, REFERENCE, layers.spec)
