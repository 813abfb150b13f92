"""Sums of eight pieces: the kernels' are the reference's up to rounding, and those of parts, added by the tree, are the
whole one's bits."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from kernels.layers import BlockFormat, QuantisedBlocks, Weight
from kernels.ops import REFERENCE, Ops, implementation
from kernels.pieces import NUM_PIECES, Pieces, TensorShard, added, finished, pieces_of
from kernels.triton import layers as kernel
from tests.kernels.test_cpu_quantised import assert_close, random_blocks

UNITS = BlockFormat(4, 0, has_minima=True, has_units=True)


@pytest.mark.parametrize(("columns", "unit"), [(576, 64), (1536, 32), (70, 32), (4096, 128), (96, 96)])
def test_pieces_are_whole_units_and_all_columns(columns: int, unit: int) -> None:
    ends = pieces_of(columns, unit).ends
    assert len(ends) == NUM_PIECES + 1
    assert (ends[0], ends[-1]) == (0, columns)
    assert sorted(ends) == list(ends)
    assert all(end % unit == 0 for end in ends[:-1])


def test_the_sum_is_a_tree_of_neighbours() -> None:
    values = [torch.tensor(float(10**power)) for power in (8, 0, -8, 0, 8, 0, -8, 1)]
    one, two, three, four, five, six, seven, eight = values
    assert added(values) == ((one + two) + (three + four)) + ((five + six) + (seven + eight))


def sums_of(ops: Ops, parts: Sequence[Weight], x: Tensor, pieces: Pieces) -> list[Tensor]:
    """Sums of each device. `parts`: their weights. # x [rows, columns]"""
    sums = []
    for rank, weight in enumerate(parts):
        shard = TensorShard(rank, len(parts))
        product = ops.plan_linear(weight, None, shard.part(pieces))
        sums.append(product(x[:, shard.span(pieces)]))
    assert {one.dtype for one in sums} == {torch.float32}
    return sums


def assert_parts_add_up(ops: Ops, whole: Weight, parts: Sequence[Weight], x: Tensor, unit: int) -> None:
    """`parts`: the weights of each device. # x [rows, columns]"""
    bias = torch.randn(whole.shape[0]).to(x.dtype)
    expected, sums = ops.plan_row_product(whole, bias, unit)(x), sums_of(ops, parts, x, pieces_of(x.shape[1], unit))
    assert torch.equal(finished(added(sums), bias, x.dtype), expected)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("outputs", "columns", "unit"), [(72, 576, 64), (33, 1536, 32), (40, 131, 32)])
def test_parts_of_dense_weights_add_up_to_the_whole(
    compiled: Ops, size: int, dtype: torch.dtype, outputs: int, columns: int, unit: int
) -> None:
    weight, x = torch.randn(outputs, columns).to(dtype), torch.randn(17, columns).to(dtype)
    spans = [TensorShard(rank, size).span(pieces_of(columns, unit)) for rank in range(size)]
    assert_parts_add_up(compiled, weight, [weight[:, own] for own in spans], x, unit)
    found, plain = compiled.plan_row_product(weight, None, unit)(x), REFERENCE.plan_row_product(weight, None, unit)(x)
    torch.testing.assert_close(found, plain, rtol=2e-2, atol=1e-3 if dtype == torch.float32 else 0.1)


@pytest.mark.parametrize(("form", "unit"), [(BlockFormat(4, 8), 32), (UNITS, 256)], ids=["Q4_0", "Q4_K"])
def test_parts_of_quantised_weights_add_up_to_the_whole(compiled: Ops, form: BlockFormat, unit: int) -> None:
    blocks, x, half = random_blocks(form, 70, 2048), torch.randn(9, 2048), []
    for number in range(2):
        own = QuantisedBlocks._make(None if one is None else one.chunk(2, dim=1)[number] for one in blocks)
        half.append(compiled.keep_blocks(form, (70, 1024), torch.float32, [own]))
    whole, other = (table.keep_blocks(form, (70, 2048), torch.float32, [blocks]) for table in (compiled, REFERENCE))
    assert whole.unit == other.unit == unit
    assert_parts_add_up(compiled, whole, half, x, unit)
    assert_close(compiled.plan_row_product(whole, None, 1)(x), REFERENCE.plan_row_product(other, None, 1)(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("columns", "unit", "sizes"), [(576, 64, (2, 4, 8)), (131, 32, (2, 4)), (70, 7, (2, 4, 8))])
def test_parts_of_any_number_of_devices_add_up_to_the_same_bits(
    columns: int, unit: int, sizes: tuple[int, ...], dtype: torch.dtype, device: str
) -> None:
    weight, x = (torch.randn(rows, columns).to(device, dtype) for rows in (40, 19))
    pieces, ops = pieces_of(columns, unit), implementation("triton")
    (whole,) = sums_of(ops, [weight], x, pieces)
    (plain,) = sums_of(REFERENCE, [weight.cpu()], x.cpu(), pieces)
    torch.testing.assert_close(whole.cpu(), plain, rtol=1e-4, atol=1e-3)
    for size in sizes:
        sums = sums_of(ops, [weight[:, TensorShard(rank, size).span(pieces)] for rank in range(size)], x, pieces)
        assert torch.equal(added(sums), whole)


@pytest.mark.parametrize("ends", [(0, 32, 32, 100, 150), (0, 128, 128)])
def test_on_a_device_every_tile_and_company_gives_a_part_the_same_bits(
    ends: tuple[int, ...], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight, x = (torch.randn(count, ends[-1]).to(device, torch.bfloat16) for count in (70, 70))
    product = kernel.plan_linear(weight, None, Pieces(ends, whole=False))
    whole = product(x)
    for rows in (0, 1, 20):
        assert torch.equal(product(x[:rows]), whole[:rows])
    for tile in kernel._TILES:
        monkeypatch.setattr(kernel, "_TILES", (tile,))
        assert torch.equal(product(x), whole)
