"""Packed linear layers: the products of plain ones, in every shape, without the plain weights."""

import pytest
import torch
from torch import nn

from service.engine.linear import (
    FEWEST_ROWS,
    PackedLinear,
    PlannedLinear,
    can_pack,
    fewest_rows,
    pack_linears,
    plan_linears,
)

torch.set_num_threads(1)

CPU = torch.device("cpu")
needs_bf16 = pytest.mark.skipif(not can_pack(torch.bfloat16, CPU), reason="this CPU has no native bf16")


def linear(inputs: int, outputs: int, *, bias: bool = False) -> nn.Linear:
    torch.manual_seed(inputs)
    return nn.Linear(inputs, outputs, bias=bias).to(torch.bfloat16).requires_grad_(False)


@needs_bf16
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [2, 8, 33, 256])
@pytest.mark.parametrize(("inputs", "outputs"), [(64, 192), (576, 320), (48, 20)])
def test_products_equal_plain_ones(inputs: int, outputs: int, rows: int, bias: bool) -> None:
    plain = linear(inputs, outputs, bias=bias)
    x = torch.randn(1, rows, inputs, dtype=torch.bfloat16)
    torch.testing.assert_close(PackedLinear(plain.weight, plain.bias)(x), plain(x), atol=0.02, rtol=0.01)


@needs_bf16
@pytest.mark.parametrize(("inputs", "outputs"), [(64, 192), (576, 320), (48, 20), (576, 8192), (1152, 576)])
def test_a_row_has_the_same_bits_among_any_number_of_rows(inputs: int, outputs: int) -> None:
    packed = PackedLinear(linear(inputs, outputs).weight, None)
    x = torch.randn(1, 300, inputs, dtype=torch.bfloat16)
    whole = packed(x)
    for rows in (*range(FEWEST_ROWS, 70), 256, 299):
        assert torch.equal(packed(x[:, -rows:].contiguous()), whole[:, -rows:])


@needs_bf16
def test_only_packed_models_want_more_than_one_row() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Sequential(nn.Linear(16, 16))).to(torch.bfloat16)
    assert fewest_rows(model) == 1
    pack_linears(model)
    assert fewest_rows(model) == FEWEST_ROWS


@needs_bf16
def test_every_plain_linear_is_replaced_and_the_embedding_keeps_its_weights() -> None:
    model = nn.ModuleDict({"embed": nn.Embedding(32, 16), "inner": nn.Sequential(nn.Linear(16, 16), nn.ReLU())})
    model["head"] = nn.Linear(16, 32, bias=False)
    model.to(torch.bfloat16)
    embedding = model["embed"].weight
    assert isinstance(embedding, nn.Parameter)
    model["head"].weight = embedding
    ids, expected = torch.arange(8), embedding.clone()
    before = model["head"](model["inner"](model["embed"](ids)))
    assert pack_linears(model) == 2
    assert not any(type(module) is nn.Linear for module in model.modules())
    assert torch.equal(embedding, expected)
    assert model["embed"].weight is embedding
    torch.testing.assert_close(model["head"](model["inner"](model["embed"](ids))), before, atol=0.02, rtol=0.01)


class Gated(nn.Module):
    """Two layers of one input, as decoders have them."""

    def __init__(self, *, bias: bool, width: int = 32) -> None:
        super().__init__()
        self.gate_proj: nn.Module = linear(16, 48, bias=bias)
        self.up_proj: nn.Module = linear(width, 32, bias=bias)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.gate_proj(x), self.up_proj(x)


@needs_bf16
@pytest.mark.parametrize("bias", [False, True])
def test_layers_of_one_input_become_one_product(bias: bool) -> None:
    model = Gated(bias=bias, width=16)
    inputs = [torch.randn(1, rows, 16, dtype=torch.bfloat16) for rows in (2, 5, 2)]
    before = [model(x) for x in inputs]
    assert pack_linears(model) == 2
    assert model.gate_proj.fused is model.up_proj.fused
    for x, expected in zip(inputs, before, strict=True):
        for out, reference in zip(model(x), expected, strict=True):
            torch.testing.assert_close(out, reference, atol=0.02, rtol=0.01)


@needs_bf16
def test_a_changed_tensor_at_the_same_address_is_not_mistaken_for_the_old_input() -> None:
    model = Gated(bias=False, width=16)
    pack_linears(model)
    x = torch.randn(1, 2, 16, dtype=torch.bfloat16)
    first = model(x)[0].clone()
    assert not torch.equal(model(x.mul_(2))[0], first)


@needs_bf16
def test_layers_of_different_inputs_are_packed_apart() -> None:
    model = Gated(bias=False)
    assert pack_linears(model) == 2
    assert isinstance(model.gate_proj, PackedLinear)
    assert isinstance(model.up_proj, PackedLinear)


@needs_bf16
def test_a_subclass_of_linear_is_left_alone() -> None:
    class Special(nn.Linear):
        pass

    model = nn.Sequential(Special(8, 8)).to(torch.bfloat16)
    assert pack_linears(model) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_types_are_not_packed(dtype: torch.dtype) -> None:
    assert not can_pack(dtype, CPU)


def test_other_devices_are_not_packed() -> None:
    assert not can_pack(torch.bfloat16, torch.device("cuda"))


@pytest.mark.parametrize("bias", [False, True])
def test_layers_of_one_input_are_joined_in_any_type(bias: bool) -> None:
    model = Gated(bias=bias, width=16).float()
    x = torch.randn(1, 5, 16)
    before = model(x)
    assert plan_linears(model) == 2
    assert model.gate_proj.fused is model.up_proj.fused
    assert fewest_rows(model) == 1
    for out, reference in zip(model(x), before, strict=True):
        torch.testing.assert_close(out, reference)


def test_layers_of_different_inputs_are_not_joined() -> None:
    model = Gated(bias=False)
    assert plan_linears(model) == 2
    assert isinstance(model.gate_proj, PlannedLinear)
    assert isinstance(model.up_proj, PlannedLinear)
