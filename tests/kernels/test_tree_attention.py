"""Tree attention of a CPU against plain attention written row by row, and, where it is compiled, a row's bits alone
against the same row in company."""

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.cpu.library import use_threads
from kernels.ops import Ops
from kernels.tree_attention import MAX_DEPTH, MAX_NODES, AttentionForm, AttentionRows
from kernels.triton.tree_attention import plan_attention
from tests.kernels.attention_parts import (
    LONGEST,
    Heads,
    Part,
    Vectors,
    attend,
    draw_sinks,
    naive,
    random_parents,
    random_part,
    tree_around,
)

Options = dict[str, Any]
TOLERANCE = 2e-5  # scores of unscaled queries reach 100, of which float32 keeps 1e-5
SHAPES = [Heads(1, 1, 8), Heads(2, 2, 16), Heads(1, 3, 24), Heads(3, 3, 64), Heads(1, 8, 80), Heads(2, 20, 16)]
EXACT = [
    Heads(2, 2, 16),
    Heads(3, 3, 64),
    Heads(1, 5, 40),
    Heads(1, 16, 16),
    Heads(1, 20, 24),
    Heads(1, 2, 256),
    Heads(1, 3, 512),
]


def test_equals_plain_attention(on_cpu: Ops) -> None:
    for seed in range(12):
        rng = random.Random(seed)
        heads = SHAPES[seed % len(SHAPES)]
        parts = [random_part(rng, heads) for _ in range(rng.randrange(1, 5))]
        window, softcap = rng.choice([None, 1, 20, 150, 500]), rng.choice([None, None, 5.0])
        sinks = draw_sinks(heads, seed) if seed % 3 == 0 else None
        how: Options = {"window": window, "softcap": softcap, "sinks": sinks}
        outputs = attend(parts, heads, on_cpu.plan_attention, **how, seed=seed)
        for part, output in zip(parts, outputs, strict=True):
            torch.testing.assert_close(output, naive(part, heads, **how), atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("size", [-1e4, -3.0, 0.0, 30.0, 1e4])
def test_a_sink_takes_weight_and_has_no_value(size: float, on_cpu: Ops) -> None:
    heads, sinks = Heads(2, 3, 16), torch.tensor([0.0, size, -size, size / 2, 1.0, size])
    parts = [Part(Vectors.draw(n, heads, n), n - 4, n, Vectors.draw(3, heads, 1), [-1, 0, 0]) for n in (5, 90)]
    plain = attend(parts, heads, on_cpu.plan_attention)
    for part, output, other in zip(parts, attend(parts, heads, on_cpu.plan_attention, sinks=sinks), plain, strict=True):
        torch.testing.assert_close(output, naive(part, heads, None, None, sinks), atol=TOLERANCE, rtol=TOLERANCE)
        assert torch.equal(output[:, sinks == -1e4], other[:, sinks == -1e4])


@pytest.mark.parametrize("dim", [1, 15, 16, 17, 48, 80, 96, 112, 144, 192, 208, 240, 256, 320, 511, 512])
def test_heads_of_any_width(dim: int, on_cpu: Ops) -> None:
    heads = Heads(2, 3, dim)
    part = Part(Vectors.draw(37, heads, dim), 33, 37, Vectors.draw(3, heads, dim + 1), [-1, 0, 0])
    part = part.mapped(lambda v: replace(v, queries=v.queries * 64 / max(64, dim)))  # see TOLERANCE
    (output,) = attend([part], heads, on_cpu.plan_attention)
    torch.testing.assert_close(output, naive(part, heads, None, None), atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("group", [1, 2, 6, 7, 16, 17, 32, 48])
def test_groups_of_any_size(group: int, on_cpu: Ops) -> None:
    heads = Heads(2, group, 32)
    part = Part(Vectors.draw(20, heads, group), 15, 20, Vectors.draw(4, heads, group + 1), [-1, 0, 0, 2])
    (output,) = attend([part], heads, on_cpu.plan_attention, softcap=3.0)
    torch.testing.assert_close(output, naive(part, heads, None, 3.0), atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("context", [1, 2, 3, 5, 500, 3000])
def test_the_deepest_and_fullest_tree(context: int, on_cpu: Ops) -> None:
    heads = Heads(1, 3, 16)
    chain = [-1, *range(MAX_DEPTH - 1)]
    parents = [*chain, *(MAX_DEPTH - 2 for _ in range(MAX_NODES - MAX_DEPTH))]
    nodes = Vectors.draw(MAX_NODES, heads, context + 1)
    part = Part(Vectors.draw(context, heads, context), context - 1, context, nodes, parents)
    assert max(part.depths) == MAX_DEPTH
    (output,) = attend([part], heads, on_cpu.plan_attention)
    torch.testing.assert_close(output, naive(part, heads, None, None), atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("kept", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dim", [1, 7, 12, 15, 16, 40, 72, 100, 128, 256, 512])
def test_in_bf16_everything_is_summed_in_float32(dim: int, kept: torch.dtype, on_cpu: Ops) -> None:
    """From bits that bf16 holds exactly, the result is the rounded one of float32."""
    heads, rng, how = Heads(2, 3, dim), random.Random(dim), {"softcap": 5.0} if dim == 40 else {"window": 150}
    parts = [rounded(random_part(rng, heads), torch.bfloat16) for _ in range(4)]
    precise = attend(parts, heads, on_cpu.plan_attention, **how)
    halves = attend(parts, heads, on_cpu.plan_attention, dtype=kept, query_dtype=torch.bfloat16, **how)
    for whole, half in zip(precise, halves, strict=True):
        assert torch.equal(half, whole.bfloat16().float())


def test_no_rows(on_cpu: Ops) -> None:
    none = torch.zeros(0, dtype=torch.int64)
    rows = AttentionRows(
        sequence=none, positions=none, node=none, table_rows=none, extend_end=none,
        node_slots=none.view(0, 0), node_depths=none.view(0, 0), ancestors=none.view(0, 0, 0).bool(),
    )  # fmt: skip
    plan = on_cpu.plan_attention(rows, torch.zeros(3, 9, dtype=torch.int64), query_heads=4, kv_heads=2)
    assert plan.attend(torch.zeros(0, 4, 16), torch.zeros(2, 5, 2, 16), AttentionForm(1.0)).shape == (0, 4, 16)


@pytest.mark.parametrize(("window", "sinking"), [(None, False), (150, True)])
@pytest.mark.parametrize("heads", EXACT, ids=str)
def test_a_chunk_of_any_size_gives_the_bits_of_single_rows(
    heads: Heads, window: int | None, sinking: bool, compiled: Ops
) -> None:
    text, plan = Vectors.draw(330, heads, seed=1), compiled.plan_attention
    how: Options = {"window": window, "sinks": draw_sinks(heads, 1) if sinking else None}
    alone = torch.cat([attend([Part(text, p, p + 1)], heads, plan, **how, seed=p)[0] for p in range(330)])
    for chunk in (2, 7, 48, 129, 330):
        for start in range(0, 330, chunk):
            (output,) = attend([Part(text, start, min(start + chunk, 330))], heads, plan, **how, seed=chunk)
            assert torch.equal(output, alone[start : start + chunk])


@pytest.mark.parametrize(("window", "softcap", "sinking"), [(None, None, False), (40, 5.0, False), (None, None, True)])
@pytest.mark.parametrize("heads", EXACT, ids=str)
@pytest.mark.parametrize("end", [1, 2, 3, 4, 5, 65, 333, 2900])
def test_a_path_in_a_tree_in_company_gives_the_bits_of_single_rows(
    end: int, heads: Heads, window: int | None, softcap: float | None, sinking: bool, compiled: Ops
) -> None:
    how: Options = {"window": window, "softcap": softcap, "sinks": draw_sinks(heads, end) if sinking else None}
    rng, plan = random.Random(end), compiled.plan_attention
    text = Vectors.draw(end + MAX_DEPTH, heads, seed=end)
    places = [*range(end - 1, end + MAX_DEPTH)]
    alone = [attend([Part(text, p, p + 1)], heads, plan, **how)[0] for p in places]
    part, nodes = tree_around(text, end, heads, rng)
    company = [random_part(rng, heads) for _ in range(rng.randrange(4))]
    where = rng.randrange(len(company) + 1)
    parts = [*company[:where], part, *company[where:]]
    outputs = attend(parts, heads, plan, **how, seed=end)
    assert torch.equal(outputs[where][[0, *(1 + node for node in nodes)]], torch.cat(alone))


@pytest.mark.parametrize("threads", [1, 2])
def test_the_same_bits_in_any_slots_and_any_line(threads: int, compiled: Ops) -> None:
    heads, rng, plan = Heads(2, 2, 16), random.Random(3), compiled.plan_attention
    parts = [random_part(rng, heads) for _ in range(4)]
    once = attend(parts, heads, plan, seed=1)
    use_threads(threads)
    again = attend(parts[::-1], heads, plan, seed=2)[::-1]
    use_threads(1)
    assert all(torch.equal(a, b) for a, b in zip(once, again, strict=True))


def test_another_branch_of_the_tree_is_not_seen(on_cpu: Ops) -> None:
    """Changing one node changes exactly the rows at and below it."""
    heads = Heads(1, 2, 16)
    text, nodes = Vectors.draw(100, heads, 1), Vectors.draw(6, heads, 2)
    parents = [-1, -1, 0, 1, 2, 3]
    (before,) = attend([Part(text, 99, 100, nodes, parents)], heads, on_cpu.plan_attention)
    nodes.values[1] += 1
    (after,) = attend([Part(text, 99, 100, nodes, parents)], heads, on_cpu.plan_attention)
    changed = (before != after).flatten(1).any(1).tolist()
    assert changed == [False, False, True, False, True, False, True]


def test_a_row_that_sees_nothing_gets_numbers(anywhere: tuple[Ops, str]) -> None:
    """Padding before a text's beginning: what it computes must be numbers, for they may be stored where others look."""
    ops, device = anywhere
    zeros, none = torch.zeros(1, 1, dtype=torch.int64, device=device), torch.zeros(1, dtype=torch.int64, device=device)
    rows = AttentionRows(none, none, none - 1, none, none - 1, zeros, zeros, zeros[..., None].bool())
    table = torch.zeros(1, LONGEST, dtype=torch.int64, device=device)
    plan = ops.plan_attention(rows, table, query_heads=4, kv_heads=2)
    pool = torch.full((2, 4, 2, 16), 3.0, device=device)
    for sinks in (None, zeros[0].float().expand(4).contiguous()):
        assert plan.attend(torch.ones(1, 4, 16, device=device), pool, AttentionForm(1.0, sinks=sinks)).isfinite().all()


# The device's tree attention against plain attention in double precision, and a row's bits alone and in company.

TOLERANCES = {torch.float32: (1e-5, 1e-5), torch.bfloat16: (5e-3, 5e-3)}  # atol, rtol; bf16: of weights in the prefix
DEVICE_SHAPES = [Heads(1, 1, 8), Heads(2, 2, 16), Heads(1, 3, 24), Heads(1, 5, 64), Heads(1, 8, 16), Heads(1, 20, 16)]


def decoding(rng: random.Random, heads: Heads, context: int, count: int) -> Part:
    text = Vectors.draw(context, heads, rng.randrange(1 << 30))
    nodes = Vectors.draw(count, heads, rng.randrange(1 << 30))
    return Part(text, context - 1, context, nodes, random_parents(rng, count))


def chunk(rng: random.Random, heads: Heads, start: int, count: int) -> Part:
    return Part(Vectors.draw(start + count, heads, rng.randrange(1 << 30)), start, start + count)


def rounded(part: Part, dtype: torch.dtype) -> Part:
    """The same with vectors that `dtype` holds exactly."""
    return part.mapped(lambda v: Vectors(*(value.to(dtype).float() for value in (v.queries, v.keys, v.values))))


def check(
    parts: list[Part],
    heads: Heads,
    device: str,
    dtype: torch.dtype = torch.float32,
    *,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> None:
    how: Options = {"window": window, "softcap": softcap, "sinks": sinks}
    parts = [rounded(part, dtype) for part in parts]
    outputs = attend(parts, heads, plan_attention, **how, device=device, dtype=dtype)
    atol, rtol = TOLERANCES[dtype]
    for part, output in zip(parts, outputs, strict=True):
        torch.testing.assert_close(output, naive(part, heads, **how), atol=atol, rtol=rtol)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("heads", DEVICE_SHAPES, ids=str)
def test_a_device_equals_plain_attention(heads: Heads, dtype: torch.dtype, device: str) -> None:
    rng = random.Random(heads.query)
    parts = [decoding(rng, heads, 66, 3), chunk(rng, heads, 61, 5), decoding(rng, heads, 1, 0)]
    check(parts, heads, device, dtype)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("heads", [Heads(2, 2, 80), Heads(1, 3, 96), Heads(1, 2, 256), Heads(2, 1, 512)], ids=str)
def test_wide_heads_and_sinks_on_a_device(heads: Heads, dtype: torch.dtype, device: str) -> None:
    rng, sinks = random.Random(heads.dim), draw_sinks(heads, heads.dim) / 4
    parts = [decoding(rng, heads, 630, 3), chunk(rng, heads, 61, 5), decoding(rng, heads, 1, 0)]
    parts = [part.mapped(lambda v: replace(v, queries=v.queries * heads.dim**-0.5)) for part in parts]
    check(parts, heads, device, dtype, sinks=sinks)
    check(parts, heads, device, dtype, sinks=sinks, window=70, softcap=5.0)


@pytest.mark.parametrize("count", [0, 1, 17, 33, MAX_NODES])
def test_trees_of_any_size(count: int, device: str) -> None:
    heads = Heads(1, 1, 8)
    check([decoding(random.Random(count), heads, 70, count)], heads, device)


@pytest.mark.parametrize(("window", "softcap"), [(1, None), (20, 5.0), (150, None), (500, 5.0)])
def test_windows_and_caps(window: int, softcap: float | None, device: str) -> None:
    heads = Heads(1, 2, 16)
    parts = [decoding(random.Random(window), heads, 600, 9), decoding(random.Random(window), heads, 100, 4)]
    check(parts, heads, device, window=window, softcap=softcap)


@pytest.mark.parametrize("context", [1, 63, 64, 65, 66, 128, 129, 512, 576, 577, 1008])
def test_contexts_at_borders(context: int, device: str) -> None:
    heads = Heads(1, 1, 8)
    check([decoding(random.Random(context), heads, context, 5)], heads, device)


@pytest.mark.parametrize("batch", [2, 64])
def test_many_sequences(batch: int, device: str) -> None:
    heads, rng = Heads(1, 2, 8), random.Random(batch)
    check([decoding(rng, heads, rng.randrange(1, 40), rng.randrange(3)) for _ in range(batch)], heads, device)


@pytest.mark.parametrize("context", [4096, pytest.param(32_768, marks=pytest.mark.slow)])
def test_long_contexts(context: int, device: str) -> None:
    heads = Heads(1, 2, 8)
    check([decoding(random.Random(1), heads, context, 2)], heads, device)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("seed", range(12))
def test_mixed_steps_of_real_shapes(seed: int, dtype: torch.dtype, device: str) -> None:
    """With scores of a model's size: unscaled, rounding them to fp32 alone would cost more than the tolerance."""
    rng = random.Random(seed)
    heads = rng.choice([Heads(3, 3, 64), Heads(8, 4, 128), Heads(2, 7, 96)])
    parts = [decoding(rng, heads, rng.randrange(1, 700), rng.randrange(MAX_NODES + 1)) for _ in range(3)]
    window, softcap = rng.choice([None, 150, 500]), rng.choice([None, 5.0])
    parts = [*parts, chunk(rng, heads, rng.randrange(300), 40)]
    parts = [part.mapped(lambda v: replace(v, queries=v.queries * heads.dim**-0.5)) for part in parts]
    check(parts, heads, device, dtype, window=window, softcap=softcap)


@pytest.mark.parametrize(
    ("heads", "end", "window"),
    [
        (Heads(1, 2, 16), 1, None),
        (Heads(1, 1, 8), 63, None),
        (Heads(1, 3, 16), 130, 40),
        (Heads(1, 1, 512), 130, None),
        pytest.param(Heads(1, 4, 8), 575, None, marks=pytest.mark.slow),
    ],
)
def test_on_a_device_a_path_in_a_tree_gives_the_bits_of_single_rows(
    heads: Heads, end: int, window: int | None, device: str
) -> None:
    rng = random.Random(end)
    text = Vectors.draw(end + MAX_DEPTH, heads, seed=end)
    depths = [0, 1, 2, *rng.sample(range(3, MAX_DEPTH), 4), MAX_DEPTH]
    how: Options = {"window": window, "sinks": draw_sinks(heads, end)}
    ends = [end + depth for depth in depths]
    alone = [attend([Part(text, p - 1, p)], heads, plan_attention, **how, device=device)[0] for p in ends]
    part, nodes = tree_around(text, end, heads, rng)
    company = [decoding(rng, heads, 50, 7), chunk(rng, heads, 90, 6)]
    parts = [company[0], part, company[1]]
    outputs = attend(parts, heads, plan_attention, **how, seed=end, device=device)
    path = [0, *(1 + node for node in nodes)]
    assert torch.equal(outputs[1][[path[depth] for depth in depths]], torch.cat(alone))


def test_on_a_device_a_chunk_of_any_size_gives_the_bits_of_single_rows(device: str) -> None:
    heads = Heads(1, 3, 16)
    text = Vectors.draw(150, heads, seed=1)
    (whole,) = attend([Part(text, 0, 150)], heads, plan_attention, device=device)
    for start, size in ((0, 7), (60, 29), (143, 7), (149, 1)):
        (output,) = attend([Part(text, start, start + size)], heads, plan_attention, seed=start, device=device)
        assert torch.equal(output, whole[start : start + size])


def test_few_tiles_at_a_time_are_the_same_bits(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    heads, rng = Heads(1, 4, 16), random.Random(5)
    parts = [decoding(rng, heads, 200, 12), decoding(rng, heads, 90, 5)]
    whole = attend(parts, heads, plan_attention, device=device)
    monkeypatch.setattr("kernels.triton.tree_attention._PARTIAL_BYTES", 1)
    assert all(
        torch.equal(a, b) for a, b in zip(attend(parts, heads, plan_attention, device=device), whole, strict=True)
    )


def test_results_have_the_type_of_the_queries(device: str) -> None:
    heads, rng = Heads(2, 2, 16), random.Random(3)
    parts = [rounded(decoding(rng, heads, context, count), torch.bfloat16) for context, count in ((90, 5), (600, 0))]
    whole = attend(parts, heads, plan_attention, device=device, dtype=torch.bfloat16)
    halves = attend(parts, heads, plan_attention, device=device, dtype=torch.bfloat16, query_dtype=torch.bfloat16)
    for precise, half in zip(whole, halves, strict=True):
        assert torch.equal(half, precise.bfloat16().float())


def test_rows_may_stand_in_any_order_and_more_than_once(device: str) -> None:
    """A recorded shape is filled up with copies of its first row, behind the nodes."""
    heads = Heads(1, 2, 16)
    part = decoding(random.Random(2), heads, 70, 6)
    (expected,) = attend([part], heads, plan_attention, device=device)

    def shuffled(rows: AttentionRows, slot_table: Tensor, **sizes: int) -> "_Reordered":
        return _Reordered(rows, slot_table, sizes)

    (output,) = attend([part], heads, shuffled, device=device)
    assert torch.equal(output, expected)


class _Reordered:
    """Attends with two more copies of the first row and all rows reversed, then undoes it."""

    def __init__(self, rows: AttentionRows, slot_table: Tensor, sizes: dict[str, int]) -> None:
        count = rows.sequence.shape[0]
        self._order = torch.tensor([0, 0, *range(count)], device=slot_table.device).flip(0)
        mixed = {name: getattr(rows, name)[self._order] for name in ("sequence", "positions", "node")}
        others = {name: getattr(rows, name) for name in AttentionRows.__slots__ if name not in mixed}
        self._plan = plan_attention(AttentionRows(**mixed, **others), slot_table, **sizes)

    def attend(self, query: Tensor, pool: Tensor, form: AttentionForm) -> Tensor:
        mixed = self._plan.attend(query[self._order], pool, form)
        out = torch.full_like(query, torch.nan)
        out[self._order] = mixed
        return out


def test_the_deepest_path(device: str) -> None:
    heads, parents = Heads(1, 1, 8), [-1, *range(MAX_DEPTH - 1)]
    check([Part(Vectors.draw(90, heads, 1), 89, 90, Vectors.draw(MAX_DEPTH, heads, 2), parents)], heads, device)
