"""Packed linear layers: the products of plain ones, in every shape, without the plain weights."""

import copy
import threading

import pytest
import torch
from torch import Tensor, nn

from service.engine.linear import (
    FEWEST_ROWS,
    PackedLinear,
    PlannedLinear,
    can_pack,
    fewest_rows,
    has_tiles,
    repacking,
    replace_linears,
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
    replace_linears(model, PackedLinear)
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
    assert replace_linears(model, PackedLinear) == 2
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
    assert replace_linears(model, PackedLinear) == 2
    assert model.gate_proj.fused is model.up_proj.fused
    for x, expected in zip(inputs, before, strict=True):
        for out, reference in zip(model(x), expected, strict=True):
            torch.testing.assert_close(out, reference, atol=0.02, rtol=0.01)


@needs_bf16
def test_a_changed_tensor_at_the_same_address_is_not_mistaken_for_the_old_input() -> None:
    model = Gated(bias=False, width=16)
    replace_linears(model, PackedLinear)
    x = torch.randn(1, 2, 16, dtype=torch.bfloat16)
    first = model(x)[0].clone()
    assert not torch.equal(model(x.mul_(2))[0], first)


@needs_bf16
def test_layers_of_different_inputs_are_packed_apart() -> None:
    model = Gated(bias=False)
    assert replace_linears(model, PackedLinear) == 2
    assert isinstance(model.gate_proj, PackedLinear)
    assert isinstance(model.up_proj, PackedLinear)


@needs_bf16
def test_a_subclass_of_linear_is_left_alone() -> None:
    class Special(nn.Linear):
        pass

    model = nn.Sequential(Special(8, 8)).to(torch.bfloat16)
    assert replace_linears(model, PackedLinear) == 0


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
    assert replace_linears(model, PlannedLinear) == 2
    assert model.gate_proj.fused is model.up_proj.fused
    assert fewest_rows(model) == 1
    for out, reference in zip(model(x), before, strict=True):
        torch.testing.assert_close(out, reference)


def test_layers_of_different_inputs_are_not_joined() -> None:
    model = Gated(bias=False)
    assert replace_linears(model, PlannedLinear) == 2
    assert isinstance(model.gate_proj, PlannedLinear)
    assert isinstance(model.up_proj, PlannedLinear)


@pytest.mark.parametrize(
    ("limit", "allowed"),
    [
        (None, True),
        ("ALL", True),
        ("default", True),
        ("AVX512_CORE_AMX", True),
        ("avx10_1_512_amx_fp16", True),
        ("AVX512_CORE_FP16", False),
        ("AVX2", False),
    ],
)
def test_a_limit_below_them_counts(limit: str | None, allowed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    if limit is not None:
        monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", limit)
    else:
        monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    assert has_tiles.__wrapped__() is allowed


def test_a_cpu_without_them_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    assert not has_tiles.__wrapped__()


HIDDEN = 96


class Layers(nn.Module):
    """Every kind of layer that is packed, or not, with and without bias."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(HIDDEN)
        self.q_proj = nn.Linear(HIDDEN, HIDDEN, bias=bias)
        self.k_proj = nn.Linear(HIDDEN, 32, bias=bias)
        self.v_proj = nn.Linear(HIDDEN, 32, bias=bias)
        self.head = nn.Sequential(nn.Linear(HIDDEN, 64), nn.SiLU(), nn.Linear(64, 4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        return torch.cat([self.q_proj(x), self.k_proj(x), self.v_proj(x), self.head(x)], dim=-1)


def layers(seed: int, bias: bool = True) -> Layers:
    torch.manual_seed(seed)
    model = Layers(bias).to(torch.bfloat16).requires_grad_(False)
    for parameter in model.parameters():
        parameter.normal_(std=0.3)
    return model


def weights_by_name(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.named_parameters()}


def repacked(model: Layers) -> Layers:
    loaded = copy.deepcopy(model)
    assert replace_linears(loaded, PackedLinear) == 5
    return loaded


@needs_bf16
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [1, 4, 33])
def test_products_are_those_of_a_fresh_load(bias: bool, rows: int) -> None:
    served, new = repacked(layers(1, bias)), layers(2, bias)
    x = torch.randn(rows, HIDDEN).to(torch.bfloat16)
    before = served(x)
    write = repacking(served)(weights_by_name(new))
    assert torch.equal(served(x), before)
    write()
    assert torch.equal(served(x), repacked(new)(x))
    assert not torch.equal(served(x), before)


@needs_bf16
def test_weights_made_ready_by_a_thread_with_other_threads_are_the_same() -> None:
    served, new = repacked(layers(1)), layers(2)
    x = torch.randn(5, HIDDEN).to(torch.bfloat16)
    usual = torch.get_num_threads()

    def exchange() -> None:
        torch.set_num_threads(2)
        repacking(served)(weights_by_name(new))()
        torch.set_num_threads(usual)

    thread = threading.Thread(target=exchange)
    thread.start()
    thread.join()
    assert torch.equal(served(x), repacked(new)(x))


@needs_bf16
def test_what_was_brought_may_change_afterwards() -> None:
    served, new = repacked(layers(1)), layers(2)
    brought = weights_by_name(new)
    repacking(served)(brought)()
    x = torch.randn(3, HIDDEN).to(torch.bfloat16)
    for value in brought.values():
        value.zero_()
    assert torch.equal(served(x), repacked(new)(x))
