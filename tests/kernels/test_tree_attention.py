"""Tree attention against plain attention written row by row, and a row's bits alone against the same row in company."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from kernels.exact_rows import exact_row_multiple
from kernels.tree_attention import (
    MAX_DEPTH,
    MAX_NODES,
    NULL_SLOT,
    SPAN,
    WIDTH,
    AttentionRows,
    plan_attention,
    tree_attention,
)

torch.set_num_threads(1)

TOLERANCE = 1e-5
LONGEST = 1024


@dataclass(frozen=True)
class Heads:
    """Shape of one layer's attention."""

    kv: int
    group: int
    dim: int

    @property
    def query(self) -> int:
        return self.kv * self.group


@dataclass(frozen=True)
class Vectors:
    """Queries, keys and values of some tokens."""

    queries: Tensor  # [tokens, query heads, dim]
    keys: Tensor  # [tokens, kv heads, dim]
    values: Tensor  # [tokens, kv heads, dim]

    @staticmethod
    def draw(count: int, heads: Heads, seed: int) -> "Vectors":
        generator = torch.Generator().manual_seed(seed)
        sizes = (heads.query, heads.kv, heads.kv)
        return Vectors(*(torch.randn(count, size, heads.dim, generator=generator) for size in sizes))

    def take(self, idx: Sequence[int] | slice) -> "Vectors":
        return Vectors(self.queries[idx], self.keys[idx], self.values[idx])


@dataclass(frozen=True)
class Part:
    """One sequence's share of a step: chain rows `start` to `end` of its text, then a tree below the last of them."""

    text: Vectors
    start: int
    end: int
    nodes: Vectors | None = None
    parents: list[int] = field(default_factory=list)

    @property
    def depths(self) -> list[int]:
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent < 0 else depths[parent] + 1)
        return depths

    def path(self, node: int) -> list[int]:
        """Nodes from the root's child down to this one."""
        return [] if node < 0 else [*self.path(self.parents[node]), node]

    def stacked(self, name: str) -> Tensor:
        """Vectors of all committed positions, then of all nodes."""
        committed: Tensor = getattr(self.text, name)[: self.end]
        return committed if self.nodes is None else torch.cat([committed, getattr(self.nodes, name)])


def attend(
    parts: Sequence[Part],
    heads: Heads,
    *,
    window: int | None = None,
    softcap: float | None = None,
    seed: int = 0,
    multiples: int = 1,
) -> list[Tensor]:
    """Run the kernel on a step in scrambled slots, with everything else in the pool NaN and chain rows before nodes.

    Members are padded to so many times the multiple that is exact here.

    Returns per part [rows, query heads, dim].
    """
    lengths = [part.stacked("keys").shape[0] for part in parts]
    num_slots = sum(lengths) + 50
    slots = 1 + torch.randperm(num_slots - 1, generator=torch.Generator().manual_seed(seed))
    places = list(slots[: sum(lengths)].split(lengths))
    pool = torch.full((2, num_slots, heads.kv, heads.dim), torch.nan)
    pool[:, NULL_SLOT] = 0
    for part, own in zip(parts, places, strict=True):
        pool[0, own], pool[1, own] = part.stacked("keys"), part.stacked("values")
    rows, table, order = _layout(parts, places)
    queries = torch.cat([part.stacked("queries")[part.start :] for part in parts])
    plan = plan_attention(
        rows,
        table,
        num_slots=num_slots,
        query_heads=heads.query,
        kv_heads=heads.kv,
        member_multiple=multiples * exact_row_multiple(WIDTH, heads.dim, pool.device),
    )
    out = torch.empty_like(queries)
    out[order] = tree_attention(queries[order], pool, plan, scale=1.0, window=window, softcap=softcap)
    return list(out.split([length - part.start for length, part in zip(lengths, parts, strict=True)]))


def _layout(parts: Sequence[Part], places: Sequence[Tensor]) -> tuple[AttentionRows, Tensor, Tensor]:
    """What the kernel is told of the parts' rows, the slot table, and which row of the parts comes when."""
    lines = random.Random(len(parts)).sample(range(len(parts) + 2), len(parts))
    table = torch.full((len(parts) + 2, LONGEST), NULL_SLOT)
    sequence, positions, node = [], [], []
    node_slots, node_depths = torch.zeros(2, len(parts), MAX_NODES, dtype=torch.int64)
    ancestors = torch.zeros(len(parts), MAX_NODES, MAX_NODES, dtype=torch.bool)
    for idx, (part, own) in enumerate(zip(parts, places, strict=True)):
        count = len(part.parents)
        table[lines[idx], : part.end] = own[: part.end]
        node_slots[idx, :count], node_depths[idx, :count] = own[part.end :], torch.tensor(part.depths)
        for n in range(count):
            ancestors[idx, n, part.path(n)] = True
        sequence += [idx] * (part.end - part.start + count)
        positions += [*range(part.start, part.end), *(part.end - 1 + depth for depth in part.depths)]
        node += [-1] * (part.end - part.start) + [*range(count)]
    ends = [part.end - 1 for part in parts]
    order = torch.argsort((torch.tensor(node) >= 0).int(), stable=True)
    rows = AttentionRows(
        sequence=torch.tensor(sequence)[order],
        positions=torch.tensor(positions)[order],
        node=torch.tensor(node)[order],
        table_rows=torch.tensor(lines),
        chain_end=torch.tensor(ends),
        node_slots=node_slots,
        node_depths=node_depths,
        ancestors=ancestors,
    )
    return rows, table, order


def naive(part: Part, heads: Heads, window: int | None, softcap: float | None) -> Tensor:
    """Plain attention of every row of the part, in double precision. # -> [rows, query heads, dim]"""
    keys, values = part.stacked("keys").double(), part.stacked("values").double()
    outputs = []
    for row in range(part.start, part.end + len(part.parents)):
        node = row - part.end
        depth = part.depths[node] if node >= 0 else 0
        position = part.end - 1 + depth if node >= 0 else row
        seen = [*range(min(row + 1, part.end)), *(part.end + above for above in (part.path(node) if node >= 0 else []))]
        where = [at if at < part.end else part.end - 1 + part.depths[at - part.end] for at in seen]
        seen = [at for at, p in zip(seen, where, strict=True) if window is None or position - p < window]
        query = part.stacked("queries")[row].double()  # [query heads, dim]
        for head in range(heads.query):
            scores = keys[seen, head // heads.group] @ query[head]
            scores = scores if softcap is None else torch.tanh(scores / softcap) * softcap
            outputs.append(scores.softmax(0) @ values[seen, head // heads.group])
    return torch.stack(outputs).view(-1, heads.query, heads.dim).float()


def random_parents(rng: random.Random, count: int) -> list[int]:
    parents: list[int] = []
    depths: list[int] = []
    bushy = rng.random()
    for node in range(count):
        allowed = [above for above in range(node) if depths[above] < MAX_DEPTH]
        parents.append(-1 if not allowed or rng.random() < bushy / 3 else rng.choice(allowed[-1 - int(9 * bushy) :]))
        depths.append(1 + (depths[parents[-1]] if parents[-1] >= 0 else 0))
    return parents


def random_part(rng: random.Random, heads: Heads) -> Part:
    """A decoding sequence with a tree, or a prompt chunk, with a context that often ends at a border of the layout."""
    near_border = rng.choice([WIDTH, SPAN, WIDTH + MAX_DEPTH, 2 * WIDTH, SPAN + MAX_DEPTH]) + rng.randrange(-2, 3)
    start = rng.choice([0, rng.randrange(1, 700), near_border])
    chunk = rng.choice([1, 1, 1, rng.randrange(2, 60), 200])
    count = rng.choice([0, 1, 5, 23, MAX_NODES]) if chunk == 1 else 0
    text = Vectors.draw(start + chunk, heads, rng.randrange(1 << 30))
    nodes = Vectors.draw(count, heads, rng.randrange(1 << 30)) if count else None
    return Part(text, start, start + chunk, nodes, random_parents(rng, count))


SHAPES = [Heads(1, 1, 8), Heads(2, 2, 16), Heads(1, 3, 16), Heads(3, 3, 64), Heads(1, 8, 16), Heads(2, 8, 8)]


@pytest.mark.parametrize("seed", range(18))
def test_equals_plain_attention(seed: int) -> None:
    rng = random.Random(seed)
    heads = SHAPES[seed % len(SHAPES)]
    parts = [random_part(rng, heads) for _ in range(rng.randrange(1, 6))]
    window, softcap = rng.choice([None, 1, 20, 150, 500]), rng.choice([None, None, 5.0])
    outputs = attend(parts, heads, window=window, softcap=softcap, seed=seed)
    for part, output in zip(parts, outputs, strict=True):
        torch.testing.assert_close(output, naive(part, heads, window, softcap), atol=TOLERANCE, rtol=TOLERANCE)


def test_the_deepest_and_fullest_tree() -> None:
    heads = Heads(2, 3, 16)
    chain = [-1, *range(MAX_DEPTH - 1)]
    parents = [*chain, *(MAX_DEPTH - 2 for _ in range(MAX_NODES - MAX_DEPTH))]
    for end in (1, SPAN, SPAN + 1, SPAN + MAX_DEPTH, WIDTH, WIDTH + MAX_DEPTH, 3 * SPAN + MAX_DEPTH):
        text, nodes = Vectors.draw(end, heads, end), Vectors.draw(MAX_NODES, heads, end + 1)
        part = Part(text, end - 1, end, nodes, parents)
        assert max(part.depths) == MAX_DEPTH
        (output,) = attend([part], heads)
        torch.testing.assert_close(output, naive(part, heads, None, None), atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("window", [None, 150])
@pytest.mark.parametrize("heads", [Heads(2, 2, 16), Heads(3, 3, 64), Heads(1, 1, 8), Heads(1, 8, 16)], ids=str)
def test_a_chunk_of_any_size_gives_the_bits_of_single_rows(heads: Heads, window: int | None) -> None:
    text = Vectors.draw(420, heads, seed=1)
    alone = torch.cat([attend([Part(text, p, p + 1)], heads, window=window, seed=p)[0] for p in range(420)])
    for chunk in (7, 48, 129, 420):
        for start in range(0, 420, chunk):
            (output,) = attend([Part(text, start, min(start + chunk, 420))], heads, window=window, seed=chunk)
            assert torch.equal(output, alone[start : start + chunk])


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("heads", [Heads(2, 2, 16), Heads(3, 3, 64), Heads(1, 1, 8), Heads(1, 8, 16)], ids=str)
@pytest.mark.parametrize("end", [1, 30, 63, 64, 65, 128, 144, 333, 500])
def test_a_path_in_a_tree_in_company_gives_the_bits_of_single_rows(end: int, heads: Heads, window: int | None) -> None:
    rng = random.Random(end)
    text = Vectors.draw(end + MAX_DEPTH, heads, seed=end)
    alone = torch.cat(
        [attend([Part(text, p, p + 1)], heads, window=window)[0] for p in range(end - 1, end + MAX_DEPTH)]
    )
    part, places = tree_around(text, end, heads, rng)
    company = [random_part(rng, heads) for _ in range(rng.randrange(4))]
    where = rng.randrange(len(company) + 1)
    outputs = attend([*company[:where], part, *company[where:]], heads, window=window, seed=end)
    assert torch.equal(outputs[where][[0, *(1 + place for place in places)]], alone)


def tree_around(text: Vectors, end: int, heads: Heads, rng: random.Random) -> tuple[Part, list[int]]:
    """A tree of MAX_NODES random nodes among which, in their order, stands the text's own continuation."""
    places = sorted(rng.sample(range(MAX_NODES), MAX_DEPTH))
    nodes, parents = Vectors.draw(MAX_NODES, heads, seed=rng.randrange(1 << 30)), random_parents(rng, MAX_NODES)
    for depth, place in enumerate(places):
        parents[place] = places[depth - 1] if depth else -1
        nodes.queries[place] = text.queries[end + depth]
        nodes.keys[place], nodes.values[place] = text.keys[end + depth], text.values[end + depth]
    part = Part(text, end - 1, end, nodes, parents)
    for node in range(MAX_NODES):
        if part.depths[node] > MAX_DEPTH:
            parents[node] = -1
    return part, places


def test_the_same_bits_in_any_slots_and_any_line() -> None:
    heads, rng = Heads(2, 2, 16), random.Random(3)
    parts = [random_part(rng, heads) for _ in range(4)]
    once, again = attend(parts, heads, seed=1), attend(parts[::-1], heads, seed=2)[::-1]
    assert all(torch.equal(a, b) for a, b in zip(once, again, strict=True))


@pytest.mark.parametrize("heads", SHAPES, ids=str)
def test_more_padding_changes_no_bit(heads: Heads) -> None:
    parts = [random_part(random.Random(seed), heads) for seed in range(3)]
    once, again = attend(parts, heads), attend(parts, heads, multiples=3)
    assert all(torch.equal(a, b) for a, b in zip(once, again, strict=True))


def test_another_branch_of_the_tree_is_not_seen() -> None:
    """Changing one node changes exactly the rows at and below it."""
    heads = Heads(1, 2, 16)
    text, nodes = Vectors.draw(100, heads, 1), Vectors.draw(6, heads, 2)
    parents = [-1, -1, 0, 1, 2, 3]
    (before,) = attend([Part(text, 99, 100, nodes, parents)], heads)
    nodes.values[1] += 1
    (after,) = attend([Part(text, 99, 100, nodes, parents)], heads)
    changed = (before != after).flatten(1).any(1).tolist()
    assert changed == [False, False, True, False, True, False, True]
