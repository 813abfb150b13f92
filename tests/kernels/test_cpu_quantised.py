"""Products with quantised weights: those of the reference up to rounding, close to those of whole weights, `==` in
company, and of the same bits on every build that this processor runs."""

from collections.abc import Iterator

import pytest
import torch
from gguf import GGMLQuantizationType, dequantize
from torch import Tensor

from kernels.layers import (
    EIGHT_BITS,
    MXFP4,
    BlockFormat,
    GateForm,
    QuantisedBlocks,
    QuantisedWeight,
    in_8_bits,
    join,
)
from kernels.ops import REFERENCE, Ops
from service.engine.gguf_blocks import mxfp4_blocks
from tests.kernels.conftest import BUILDS, of_build

FORMS = [
    BlockFormat(4, 8),
    BlockFormat(4, 0, has_minima=True),
    BlockFormat(6, 16),
    BlockFormat(6, 0, has_minima=True),
    BlockFormat(4, 0, has_minima=True, has_units=True),
    BlockFormat(6, 0, has_minima=True, has_units=True),
    BlockFormat(6, 32, size=16, has_units=True),
    EIGHT_BITS,
    MXFP4,
]


def random_blocks(form: BlockFormat, out: int, columns: int) -> QuantisedBlocks:
    generator = torch.Generator().manual_seed(out)
    blocks = -(-columns // 32)
    codes = torch.randint(0, 1 << form.bits, (out, blocks, 32), generator=generator).to(torch.uint8)
    shape = out, blocks, 32 // form.size
    scales = (torch.randn(shape, generator=generator) / 100).half()
    minima = (torch.randn(shape, generator=generator) / 10).half() if form.has_minima else None
    if not form.has_units:
        return QuantisedBlocks(codes, scales, minima)
    numbers = torch.randint(-128, 128, (2, *shape), generator=generator).to(torch.int8)[: 1 + form.has_minima]
    units = (torch.randn(out, -(-blocks // 8), 2, generator=generator) / 3000).half()[..., : 1 + form.has_minima]
    return QuantisedBlocks(codes, numbers[0], numbers[1] if form.has_minima else None, units)


def pieces(blocks: QuantisedBlocks, rows: int) -> Iterator[QuantisedBlocks]:
    for first in range(0, blocks.codes.shape[0], rows):
        yield QuantisedBlocks._make(None if value is None else value[first : first + rows] for value in blocks)


def weight_of(table: Ops, form: BlockFormat, out: int, columns: int, dtype: torch.dtype) -> QuantisedWeight:
    kept = table.keep_blocks(form, (out, columns), dtype, pieces(random_blocks(form, out, columns), 32))
    assert isinstance(kept, QuantisedWeight)
    return kept


def assert_close(found: Tensor, expected: Tensor) -> None:
    tolerance = 2e-5 if found.dtype == torch.float32 else 2**-7
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("columns", [32, 96, 576, 50])
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_products_and_rows_are_those_of_the_reference(
    compiled: Ops, form: BlockFormat, columns: int, dtype: torch.dtype
) -> None:
    ours, theirs = (weight_of(table, form, 75, columns, dtype) for table in (compiled, REFERENCE))
    outputs = torch.randint(75, (3, 4))
    assert torch.equal(ours.lookup(outputs), theirs.lookup(outputs))
    assert torch.equal(ours.dense(), theirs.dense())
    x = torch.randn(2, 9, columns).to(dtype)
    x[0, 0] = 0
    bias = torch.randn(75).to(dtype)
    assert_close(compiled.plan_linear(ours, bias)(x), REFERENCE.plan_linear(theirs, bias)(x))


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_products_are_close_to_those_of_the_weights_themselves(compiled: Ops, form: BlockFormat) -> None:
    weight, x = weight_of(compiled, form, 64, 576, torch.float32), torch.randn(5, 576)
    found, expected = compiled.plan_linear(weight, None)(x), x @ weight.dense().T
    assert (found - expected).norm() < 0.01 * expected.norm()


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_a_row_has_the_same_bits_in_any_company(compiled: Ops, form: BlockFormat) -> None:
    product = compiled.plan_linear(weight_of(compiled, form, 70, 96, torch.bfloat16), None)
    x = torch.randn(40, 96, generator=torch.Generator().manual_seed(0)).bfloat16()
    whole = product(x)
    for first in range(0, 40, 3):
        for count in (1, 2, 5, 13, 30):
            assert torch.equal(product(x[first : first + count]), whole[first : first + count])


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_the_largest_codes_and_activations_fit_into_their_sums(
    form: BlockFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    largest = form.numbers(torch.arange(1 << form.bits).to(torch.uint8)).argmax()
    blocks, ones = random_blocks(form, 32, 64), torch.ones(1, 64)
    blocks = blocks._replace(codes=torch.full_like(blocks.codes, int(largest)))
    for build in BUILDS:
        for ops in of_build(build, monkeypatch):
            weight = ops.keep_blocks(form, (32, 64), torch.float32, [blocks])
            torch.testing.assert_close(ops.plan_linear(weight, None)(ones)[0], weight.dense().sum(1))


def test_joined_matrices_may_be_of_different_forms(compiled: Ops) -> None:
    parts = [weight_of(compiled, form, 20 + 12 * place, 64, torch.float32) for place, form in enumerate(FORMS)]
    x = torch.randn(7, 64)
    expected = torch.cat([compiled.plan_linear(part, None)(x) for part in parts], dim=1)
    assert torch.equal(compiled.plan_linear(join(parts), None)(x), expected)
    with_a_tensor = join([parts[0], torch.ones(3, 64)])
    assert isinstance(with_a_tensor, Tensor)
    assert torch.equal(with_a_tensor[:20], parts[0].dense())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("width", "out"), [(64, 32), (576, 960), (50, 33), (1536, 70)])
@pytest.mark.parametrize("with_bias", [False, True])
def test_tensors_in_8_bits_are_close_to_what_they_were(
    compiled: Ops, width: int, out: int, with_bias: bool, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(width)
    weight = (torch.randn(out, width, generator=generator) / width**0.5).to(dtype)
    bias = torch.randn(out, generator=generator).to(dtype) if with_bias else None
    x = torch.randn(2, 7, width, generator=generator).to(dtype)
    found, expected = (table.in_8_bits().plan_linear(weight, bias)(x) for table in (compiled, REFERENCE))
    assert_close(found, expected)
    whole = torch.nn.functional.linear(x.float(), weight.float(), None if bias is None else bias.float())
    assert (found.float() - whole).norm() < 0.02 * whole.norm()


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_chosen_rows_have_the_bits_that_they_had(compiled: Ops, form: BlockFormat) -> None:
    x, rows = torch.randn(3, 96), torch.arange(128).view(4, 32)[[2, 0, 3, 2]].flatten()
    for table in (REFERENCE, compiled):
        whole = weight_of(table, form, 128, 96, torch.float32)
        part = whole.rows(rows)
        assert torch.equal(part.plan(None)(x), whole.plan(None)(x)[:, rows])
        assert torch.equal(part.dense(), whole.dense()[rows])
        with pytest.raises(ValueError, match="groups of 32"):
            whole.rows(rows + 1)


def test_a_block_of_zeros_stays_one() -> None:
    blocks = in_8_bits(torch.zeros(2, 64))
    assert not blocks.weights(EIGHT_BITS).any()


def test_floats_of_4_bits_are_those_of_their_files() -> None:
    raw = torch.randint(256, (6, 3, 17), generator=torch.Generator().manual_seed(1)).to(torch.uint8)
    raw[..., 0] = torch.arange(104, 122).view(6, 3)
    raw[5, 2] = 0  # a block of zeros has any scale
    codes = torch.cat([raw[..., 1:] & 15, raw[..., 1:] >> 4], dim=-1)
    expected = torch.from_numpy(dequantize(raw.view(6, -1).numpy(), GGMLQuantizationType.MXFP4))
    assert torch.equal(mxfp4_blocks(codes, raw[..., 0]).weights(MXFP4).flatten(1), expected)
    for exponent in (103, 144, 255):
        with pytest.raises(ValueError, match="2\\^-23"):
            mxfp4_blocks(codes[:1, :1], torch.tensor([[exponent]], dtype=torch.uint8))


def test_a_row_that_is_broken_stays_so_and_breaks_no_other(compiled: Ops) -> None:
    product = compiled.in_8_bits().plan_linear(torch.randn(40, 64), None)
    x = torch.randn(3, 64)
    expected = product(x)
    x[1, 5] = torch.nan
    assert product(x)[1].isnan().all()
    assert torch.equal(product(x)[0::2], expected[0::2])
    x[1, 5] = torch.inf
    assert not product(x)[1].isfinite().any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_build_for_x86_gives_the_same_bits(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a text goes on elsewhere: products, norms, and what stands between them."""
    builds = [name for name in BUILDS if name != "neon"]
    generator = torch.Generator().manual_seed(3)
    x, gain = torch.randn(5, 576, generator=generator).to(dtype), torch.rand(576, generator=generator).to(dtype)
    found = list[list[Tensor]]()
    for build in builds:
        for table in of_build(build, monkeypatch):
            products = [table.plan_linear(weight_of(table, form, 48, 576, dtype), None)(x) for form in FORMS]
            normed = table.add_rms_norm(x.clone(), x, gain, 1e-5)
            found.append([*products, normed, table.gate_mul(x, GateForm("silu"))])
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))
