"""Tree attention of a CPU against plain attention written row by row, and, where it is compiled, a row's bits alone
against the same row in company."""

import random

import pytest
import torch

from kernels.ops import Ops
from kernels.tree_attention import MAX_DEPTH, MAX_NODES, AttentionRows
from tests.kernels.attention_parts import LONGEST, Heads, Part, Vectors, attend, naive, random_part, tree_around

torch.set_num_threads(1)

TOLERANCE = 2e-5  # scores of unscaled queries reach 100, of which float32 keeps 1e-5
SHAPES = [Heads(1, 1, 8), Heads(2, 2, 16), Heads(1, 3, 24), Heads(3, 3, 64), Heads(1, 8, 80), Heads(2, 20, 16)]
EXACT = [Heads(2, 2, 16), Heads(3, 3, 64), Heads(1, 5, 40), Heads(1, 16, 16), Heads(1, 20, 24), Heads(1, 2, 256)]


@pytest.mark.parametrize("seed", range(12))
def test_equals_plain_attention(seed: int, on_cpu: Ops) -> None:
    rng = random.Random(seed)
    heads = SHAPES[seed % len(SHAPES)]
    parts = [random_part(rng, heads) for _ in range(rng.randrange(1, 5))]
    window, softcap = rng.choice([None, 1, 20, 150, 500]), rng.choice([None, None, 5.0])
    outputs = attend(parts, heads, on_cpu.plan_attention, window=window, softcap=softcap, seed=seed)
    for part, output in zip(parts, outputs, strict=True):
        torch.testing.assert_close(output, naive(part, heads, window, softcap), atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("dim", [1, 15, 16, 17, 48, 96, 112, 144, 192, 208, 240, 256])
def test_heads_of_any_width(dim: int, on_cpu: Ops) -> None:
    heads = Heads(2, 3, dim)
    part = Part(Vectors.draw(37, heads, dim), 33, 37, Vectors.draw(3, heads, dim + 1), [-1, 0, 0])
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


def test_queries_and_results_in_bf16(on_cpu: Ops) -> None:
    """From bits that bf16 holds exactly, the result is the rounded one of float32."""
    heads, rng = Heads(2, 3, 40), random.Random(1)
    parts = [random_part(rng, heads) for _ in range(4)]
    for part in parts:
        for vectors in (part.text, part.nodes):
            if vectors is not None:
                vectors.queries.copy_(vectors.queries.bfloat16())
    precise = attend(parts, heads, on_cpu.plan_attention)
    for whole, half in zip(
        precise, attend(parts, heads, on_cpu.plan_attention, query_dtype=torch.bfloat16), strict=True
    ):
        assert torch.equal(half, whole.bfloat16().float())


def test_no_rows(on_cpu: Ops) -> None:
    none = torch.zeros(0, dtype=torch.int64)
    rows = AttentionRows(
        sequence=none, positions=none, node=none, table_rows=none, extend_end=none,
        node_slots=none.view(0, 0), node_depths=none.view(0, 0), ancestors=none.view(0, 0, 0).bool(),
    )  # fmt: skip
    plan = on_cpu.plan_attention(rows, torch.zeros(3, 9, dtype=torch.int64), query_heads=4, kv_heads=2)
    assert plan.attend(torch.zeros(0, 4, 16), torch.zeros(2, 5, 2, 16), scale=1.0).shape == (0, 4, 16)


@pytest.mark.parametrize("window", [None, 150])
@pytest.mark.parametrize("heads", EXACT, ids=str)
def test_a_chunk_of_any_size_gives_the_bits_of_single_rows(heads: Heads, window: int | None, compiled: Ops) -> None:
    text, plan = Vectors.draw(330, heads, seed=1), compiled.plan_attention
    alone = torch.cat([attend([Part(text, p, p + 1)], heads, plan, window=window, seed=p)[0] for p in range(330)])
    for chunk in (2, 7, 48, 129, 330):
        for start in range(0, 330, chunk):
            (output,) = attend([Part(text, start, min(start + chunk, 330))], heads, plan, window=window, seed=chunk)
            assert torch.equal(output, alone[start : start + chunk])


@pytest.mark.parametrize(("window", "softcap"), [(None, None), (40, 5.0)])
@pytest.mark.parametrize("heads", EXACT, ids=str)
@pytest.mark.parametrize("end", [1, 2, 3, 4, 5, 65, 333, 2900])
def test_a_path_in_a_tree_in_company_gives_the_bits_of_single_rows(
    end: int, heads: Heads, window: int | None, softcap: float | None, compiled: Ops
) -> None:
    rng, plan = random.Random(end), compiled.plan_attention
    text = Vectors.draw(end + MAX_DEPTH, heads, seed=end)
    places = [*range(end - 1, end + MAX_DEPTH)]
    alone = [attend([Part(text, p, p + 1)], heads, plan, window=window, softcap=softcap)[0] for p in places]
    part, nodes = tree_around(text, end, heads, rng)
    company = [random_part(rng, heads) for _ in range(rng.randrange(4))]
    where = rng.randrange(len(company) + 1)
    parts = [*company[:where], part, *company[where:]]
    outputs = attend(parts, heads, plan, window=window, softcap=softcap, seed=end)
    assert torch.equal(outputs[where][[0, *(1 + node for node in nodes)]], torch.cat(alone))


@pytest.mark.parametrize("threads", [1, 2])
def test_the_same_bits_in_any_slots_and_any_line(threads: int, compiled: Ops) -> None:
    heads, rng, plan = Heads(2, 2, 16), random.Random(3), compiled.plan_attention
    parts = [random_part(rng, heads) for _ in range(4)]
    once = attend(parts, heads, plan, seed=1)
    torch.set_num_threads(threads)
    again = attend(parts[::-1], heads, plan, seed=2)[::-1]
    torch.set_num_threads(1)
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
    assert plan.attend(torch.ones(1, 4, 16, device=device), pool, scale=1.0).isfinite().all()
