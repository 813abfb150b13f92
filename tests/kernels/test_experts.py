"""Mixtures of experts: references against transformers, kernels against references, rows `==` in any company."""

from collections.abc import Callable
from itertools import cycle
from typing import Any, Literal

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig
from transformers.models.gemma4.configuration_gemma4 import Gemma4TextConfig
from transformers.models.gemma4.modeling_gemma4 import Gemma4TextExperts, Gemma4TextRouter
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeExperts, Glm4MoeTopkRouter
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts, GptOssTopKRouter
from transformers.models.mixtral.modeling_mixtral import MixtralExperts, MixtralTopKRouter
from transformers.models.olmoe.modeling_olmoe import OlmoeExperts, OlmoeTopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts, Qwen3MoeTopKRouter

from kernels.cpu.library import use_threads
from kernels.experts import QuantisedStack, Router, StackedWeight
from kernels.layers import BlockFormat, GateForm
from kernels.ops import REFERENCE, Ops
from kernels.pieces import Pieces, TensorShard, added, finished, pieces_of
from kernels.triton import experts as kernel
from kernels.triton.experts import plan_experts
from tests.kernels.conftest import BUILDS, of_build
from tests.kernels.test_cpu_quantised import FORMS, assert_close, pieces, random_blocks

EXPERTS, WIDTH, HIDDEN = 8, 34, 48
GATED: Literal["clamped_swiglu"] = "clamped_swiglu"
GATES = [GateForm("silu"), GateForm("gelu_tanh"), GateForm(GATED, 0.7)]
SIZES: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "intermediate_size": WIDTH,
    "moe_intermediate_size": WIDTH,
    "num_local_experts": EXPERTS,
    "num_experts": EXPERTS,
    "n_routed_experts": EXPERTS,
    "num_experts_per_tok": 3,
    "top_k_experts": 3,
}


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator).div(shape[-1] ** 0.5).to(dtype)


def choices(rows: int, chosen: int = 3, experts: int = EXPERTS) -> tuple[Tensor, Tensor]:
    router = Router(chosen, "softmax", normalised=True)
    return REFERENCE.choose_experts(drawn(rows, experts, seed=1) * 4, router)


def quantised(ops: Ops, form: BlockFormat, out: int, columns: int, dtype: torch.dtype) -> QuantisedStack:
    blocks = random_blocks(form, EXPERTS * out, columns)
    each = [pieces(one, 32) for one in pieces(blocks, out)]
    return QuantisedStack([ops.keep_blocks(form, (out, columns), dtype, one) for one in each])


def stacks_of(ops: Ops, form: BlockFormat | None, dtype: torch.dtype) -> list[StackedWeight]:
    """Weights before and after the gate: dense, or in blocks."""
    shapes = (2 * WIDTH, HIDDEN), (HIDDEN, WIDTH)
    if form is None:
        return [drawn(EXPERTS, *shape, dtype=dtype) for shape in shapes]
    return [quantised(ops, form, *shape, dtype) for shape in shapes]


@pytest.mark.parametrize(
    ("family", "build", "router", "options"),
    [
        ("mixtral", MixtralTopKRouter, Router(3, "softmax", normalised=True), {}),
        ("qwen3_moe", Qwen3MoeTopKRouter, Router(3, "softmax", normalised=True), {"norm_topk_prob": True}),
        ("olmoe", OlmoeTopKRouter, Router(3, "softmax", normalised=False), {"norm_topk_prob": False}),
        ("gpt_oss", GptOssTopKRouter, Router(3, "softmax_of_chosen", normalised=False), {}),
        (
            "glm4_moe",
            Glm4MoeTopkRouter,
            Router(3, "sigmoid", normalised=True, scale=2.5, groups=4, chosen_groups=2),
            {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5, "norm_topk_prob": True},
        ),
        ("glm4_moe", Glm4MoeTopkRouter, Router(3, "sigmoid", normalised=True), {"norm_topk_prob": True}),
    ],
)
def test_routers_of_transformers(
    on_cpu: Ops, family: str, build: Callable[[Any], torch.nn.Module], router: Router, options: dict[str, Any]
) -> None:
    module = build(AutoConfig.for_model(family, **SIZES, **options)).requires_grad_(False)
    for place, parameter in enumerate((*module.parameters(), *module.buffers())):
        parameter.copy_(drawn(*parameter.shape, seed=place))
    x = drawn(40, HIDDEN) * 20
    logits, weights, indices = module(x)
    expected, order = indices.sort(-1)
    correction = dict(module.named_buffers()).get("e_score_correction_bias")
    found = on_cpu.choose_experts(logits, router, correction)
    assert torch.equal(found[0], expected)
    torch.testing.assert_close(found[1], weights.gather(-1, order))


def test_a_router_that_scales_each_expert(on_cpu: Ops) -> None:
    module = Gemma4TextRouter(Gemma4TextConfig(**SIZES)).requires_grad_(False)
    module.per_expert_scale.copy_(torch.rand(EXPERTS) + 0.5)
    x = drawn(40, HIDDEN) * 20
    _, weights, indices = module(x)
    logits = module.proj(module.norm(x) * module.scale * module.scalar_root_size)
    found = on_cpu.choose_experts(logits, Router(3, "softmax", normalised=True), None, module.per_expert_scale)
    expected, order = indices.sort(-1)
    assert torch.equal(found[0], expected)
    torch.testing.assert_close(found[1], weights.gather(-1, order))


@pytest.mark.parametrize("scores", ["softmax", "sigmoid", "softmax_of_chosen"])
def test_of_equal_experts_the_first_are_chosen(on_cpu: Ops, scores: Any) -> None:
    logits = torch.tensor([[1.0, 3.0, 1.0, 1.0, 3.0, 1.0], [-9e9, -9e9, -9e9, -9e9, -9e9, -9e9]])
    for dtype in (torch.float32, torch.bfloat16):
        indices, weights = on_cpu.choose_experts(logits.to(dtype), Router(3, scores, normalised=True))
        assert indices.tolist() == [[0, 1, 4], [0, 1, 2]]
        assert weights.isfinite().all()
    correction = torch.tensor([0.0, -9.0, 0.0, 0.0, 0.0, 5.0])
    if scores != "softmax_of_chosen":
        indices, _ = on_cpu.choose_experts(logits, Router(3, scores, normalised=True), correction)
        assert indices.tolist() == [[0, 4, 5], [0, 2, 5]]


def test_broken_logits_choose_some_experts(on_cpu: Ops) -> None:
    logits = torch.full((2, 8), torch.nan)
    logits[1, 3:] = 1.0
    indices, _ = on_cpu.choose_experts(logits, Router(3, "sigmoid", False, groups=2), torch.zeros(8))
    assert ((indices >= 0) & (indices < 8)).all()
    assert (indices.diff() > 0).all()


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "olmoe", "glm4_moe", "gpt_oss", "gemma4_text"])
def test_equals_experts_of_transformers(on_cpu: Ops, family: str) -> None:
    kinds = {
        "mixtral": MixtralExperts, "qwen3_moe": Qwen3MoeExperts, "olmoe": OlmoeExperts, "glm4_moe": Glm4MoeExperts,
        "gpt_oss": GptOssExperts, "gemma4_text": Gemma4TextExperts,
    }  # fmt: skip
    module = kinds[family](AutoConfig.for_model(family, **SIZES)).requires_grad_(False)
    for place, parameter in enumerate(module.parameters()):
        parameter.copy_(drawn(*parameter.shape, seed=place) * 3)
    gate_up, down, gate = module.gate_up_proj, module.down_proj, GateForm("gelu_tanh" if "gemma" in family else "silu")
    biases: tuple[Tensor | None, Tensor | None] = None, None
    if family == "gpt_oss":  # gate and up are interleaved, weights transposed
        halves = [*range(0, 2 * WIDTH, 2), *range(1, 2 * WIDTH, 2)]
        gate_up, down = gate_up.mT[:, halves], down.mT
        biases, gate = (module.gate_up_proj_bias[:, halves], module.down_proj_bias), GateForm(GATED, module.limit)
    x, (indices, weights) = drawn(21, HIDDEN) * 20, choices(21)
    found = on_cpu.plan_experts(gate_up, down, *biases, gate)(x, indices, weights)
    torch.testing.assert_close(found, module(x, indices, weights), atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("gate", GATES, ids=str)
@pytest.mark.parametrize("form", [None, *FORMS], ids=str)
def test_equals_the_reference(compiled: Ops, form: BlockFormat | None, gate: GateForm, dtype: torch.dtype) -> None:
    x, chosen, found = drawn(21, HIDDEN, dtype=dtype), choices(21), list[Tensor]()
    biases = drawn(EXPERTS, 2 * WIDTH, dtype=dtype), drawn(EXPERTS, HIDDEN, dtype=dtype)
    for ops in (compiled, REFERENCE):
        stacks = stacks_of(ops, form, dtype)
        found.append(ops.plan_experts(stacks[0], stacks[1], *biases, gate)(x, *chosen))
    assert found[0].dtype == dtype
    assert_close(*found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", [None, *FORMS], ids=str)
def test_a_row_has_the_same_bits_in_any_company(compiled: Ops, form: BlockFormat | None, dtype: torch.dtype) -> None:
    stacks = stacks_of(compiled, form, dtype)
    run = compiled.plan_experts(stacks[0], stacks[1], None, drawn(EXPERTS, HIDDEN, dtype=dtype), GateForm("silu"))
    x, logits = drawn(40, HIDDEN, dtype=dtype), drawn(40, EXPERTS, seed=1, dtype=dtype) * 4

    def rows(places: Tensor) -> Tensor:
        return run(x[places], *compiled.choose_experts(logits[places], Router(3, "softmax", normalised=True)))

    alone = torch.cat([rows(torch.tensor([row])) for row in range(40)])
    for threads in (2, 1):
        use_threads(threads)
        for count in range(2, 41):
            places = torch.randperm(40)[:count]
            assert torch.equal(rows(places), alone[places])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("gate", GATES, ids=str)
@pytest.mark.parametrize("rows", [1, 21, 140])
def test_a_device_equals_the_reference(rows: int, gate: GateForm, dtype: torch.dtype, device: str) -> None:
    x, (indices, weights) = drawn(rows, HIDDEN, dtype=dtype), choices(rows)
    shapes = (2 * WIDTH, HIDDEN), (HIDDEN, WIDTH), (2 * WIDTH,)
    up, down, bias = (drawn(EXPERTS, *shape, dtype=dtype) for shape in shapes)
    expected = REFERENCE.plan_experts(up, down, bias, None, gate)(x, indices, weights)
    run = plan_experts(up.to(device), down.to(device), bias.to(device), None, gate)
    assert_close(run(x.to(device), indices.to(device), weights.to(device)).cpu(), expected)
    assert run(x[:0].to(device), indices[:0].to(device), weights[:0].to(device)).shape == (0, HIDDEN)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_device_every_tile_and_company_gives_the_same_bits(
    dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    up, down = (drawn(4, *shape, dtype=dtype).to(device) for shape in ((64, 300), (300, 32)))
    given = [value.to(device) for value in (drawn(70, 300, dtype=dtype), *choices(70, 2, 4))]
    run = plan_experts(up, down, None, None, GateForm("silu"))
    whole = run(*given)
    for places in (torch.tensor([7]), torch.randperm(70)[:20], torch.randperm(70)):
        assert torch.equal(run(*(value[places.to(device)] for value in given)), whole[places.to(device)])
    for tile in (kernel._FEW, kernel._MANY):
        if dtype == torch.bfloat16:
            monkeypatch.setattr(kernel, "_tile_for", lambda *_, tile=tile: tile)
            assert torch.equal(run(*given), whole)


@pytest.mark.parametrize(("experts", "dtype"), [(6, torch.float32), (12, torch.bfloat16)])
def test_parts_of_any_number_of_devices_add_up_to_the_whole(experts: int, dtype: torch.dtype, device: str) -> None:
    shapes = (2 * 16, 24), (20, 16), (2 * 16,), (20,)
    up, down, *biases = (drawn(experts, *shape, dtype=dtype).to(device) for shape in shapes)
    x, indices, weights = (value.to(device) for value in (drawn(5, 24, dtype=dtype), *choices(5, 4, experts)))
    whole = plan_experts(up, down, biases[0], biases[1], GATES[0])(x, indices, weights)
    given = [value.cpu() for value in (up, down, *biases, x, indices, weights)]
    assert_close(whole.cpu(), REFERENCE.plan_experts(given[0], given[1], given[2], given[3], GATES[0])(*given[4:]))
    far = 2**40  # experts of other devices, whose weights cannot be read
    for size in (2, 4, 8):  # of 8 devices some have none of 6 experts
        sums = []
        for rank in range(size):
            shard, pieces = TensorShard(rank, size), pieces_of(experts, 1)
            own, cut = shard.span(pieces), shard.part(pieces)
            run = plan_experts(up[own], down[own], biases[0][own], biases[1][own], GATES[0], cut)
            there = (indices - own.start).masked_fill(indices < own.start, -far).masked_fill(indices >= own.stop, far)
            sums.append(run(x, there, weights))
            assert torch.equal(run(x[-1:], there[-1:], weights[-1:]), sums[-1][-1:])
        assert {one.dtype for one in sums} == {torch.float32}
        assert torch.equal(finished(added(sums), None, dtype), whole)


def test_stacks_of_different_forms_are_joined(compiled: Ops) -> None:
    gate, up = (quantised(compiled, form, WIDTH, HIDDEN, torch.float32) for form in (FORMS[1], FORMS[4]))
    kind, down = type(gate[0]), drawn(EXPERTS, HIDDEN, WIDTH)
    joined = QuantisedStack([kind.joined(both) for both in zip(gate.weights, up.weights, strict=True)])
    assert joined.shape == (EXPERTS, 2 * WIDTH, HIDDEN)
    assert joined.num_bytes == gate.num_bytes + up.num_bytes
    x, chosen = drawn(9, HIDDEN), choices(9)
    found = compiled.plan_experts(joined, down, None, None, GATES[0])(x, *chosen)
    whole = torch.cat((gate.dense(), up.dense()), dim=1)
    expected = REFERENCE.plan_experts(whole, down, None, None, GATES[0])(x, *chosen)
    assert (found - expected).norm() < 0.02 * expected.norm()


def test_dense_experts_in_8_bits(on_cpu: Ops) -> None:
    x, chosen = drawn(21, HIDDEN), choices(21)
    up, down = stacks_of(on_cpu, None, torch.float32)
    kinds = on_cpu, on_cpu.in_8_bits()
    whole, found = (ops.plan_experts(up, down, None, None, GATES[0])(x, *chosen) for ops in kinds)
    assert not torch.equal(found, whole)
    assert (found - whole).norm() < 0.03 * whole.norm()


def test_no_rows_and_odd_widths(on_cpu: Ops) -> None:
    stacks = drawn(EXPERTS, 2 * WIDTH, HIDDEN), drawn(EXPERTS, HIDDEN, WIDTH)
    none = on_cpu.plan_experts(*stacks, None, None, GATES[0])(drawn(0, HIDDEN), *choices(0))
    assert none.shape == (0, HIDDEN)
    if on_cpu.plan_experts is not REFERENCE.plan_experts:
        with pytest.raises(ValueError, match="pairs"):
            on_cpu.plan_experts(drawn(2, 6, 5), drawn(2, 5, 3), None, None, GATES[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_build_for_x86_gives_the_same_bits(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """With weights in blocks, in which no sum depends on the size of registers."""
    x, found = drawn(21, HIDDEN, dtype=dtype), list[list[Tensor]]()
    for build in (name for name in BUILDS if name != "neon"):
        for ops in of_build(build, monkeypatch):
            stacks = [
                (quantised(ops, form, 2 * WIDTH, HIDDEN, dtype), quantised(ops, form, HIDDEN, WIDTH, dtype))
                for form in FORMS
            ]
            chosen = ops.choose_experts(drawn(21, EXPERTS, dtype=dtype), Router(3, "sigmoid", normalised=True))
            results = [
                ops.plan_experts(*pair, None, None, gate)(x, *chosen)
                for pair, gate in zip(stacks, cycle(GATES), strict=False)
            ]
            found.append([*chosen, *results])
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))


@pytest.mark.parametrize("form", [None, FORMS[1]], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parts_of_experts_add_up_to_all(compiled: Ops, form: BlockFormat | None, dtype: torch.dtype) -> None:
    """Of uneven parts too: eleven experts are of two, four or eight devices."""
    number, gate = 11, GATES[2]
    up, down = ([stack[i % EXPERTS] for i in range(number)] for stack in stacks_of(compiled, form, dtype))
    biases = drawn(number, 2 * WIDTH, dtype=dtype), drawn(number, HIDDEN, dtype=dtype)

    def stack(weights: list[Any], own: slice) -> StackedWeight:
        return torch.stack(weights[own]) if form is None else QuantisedStack(weights[own])

    def run(own: slice, pieces: Pieces | None, first: int = 0) -> Tensor:
        given = stack(up, own), stack(down, own), biases[0][own], biases[1][own]
        return compiled.plan_experts(*given, gate, pieces)(x, indices - first, weights)

    x, (indices, weights) = drawn(21, HIDDEN, dtype=dtype), choices(21, 5, number)
    whole, pieces = run(slice(None), None), pieces_of(number, 1)
    for size in (2, 4, 8):
        sums = []
        for rank in range(size):
            shard = TensorShard(rank, size)
            own = shard.span(pieces)
            sums.append(run(own, shard.part(pieces), own.start))
        assert {one.dtype for one in sums} == {torch.float32}
        assert torch.equal(finished(added(sums), None, dtype), whole)
