"""Steps of tree attention for tests: sequences with their text and tree, any way to attend, and plain attention row by
row in double precision."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from kernels.tree_attention import MAX_DEPTH, MAX_NODES, NULL_SLOT, Attention, AttentionForm, AttentionRows

LONGEST = 1024
Plan = Callable[..., Attention]


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
    """One sequence's share of a step: extend rows `start` to `end` of its text, then a tree below the last of them."""

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

    def mapped(self, change: Callable[[Vectors], Vectors]) -> "Part":
        return replace(self, text=change(self.text), nodes=None if self.nodes is None else change(self.nodes))

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
    plan_with: Plan,
    *,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    seed: int = 0,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    query_dtype: torch.dtype = torch.float32,
) -> list[Tensor]:
    """Run a step in scrambled slots, with everything else in the pool NaN and extend rows before nodes.

    Keys and values are kept as `dtype`, queries are asked and answered as `query_dtype`.
    Returns per part [rows, query heads, dim] float32.
    """
    lengths = [part.stacked("keys").shape[0] for part in parts]
    num_slots = sum(lengths) + 50
    slots = 1 + torch.randperm(num_slots - 1, generator=torch.Generator().manual_seed(seed))
    places = list(slots[: sum(lengths)].split(lengths))
    pool = torch.full((2, num_slots, heads.kv, heads.dim), torch.nan, dtype=dtype)
    pool[:, NULL_SLOT] = 0
    for part, own in zip(parts, places, strict=True):
        pool[0, own], pool[1, own] = part.stacked("keys").to(dtype), part.stacked("values").to(dtype)
    rows, table, order = _layout(parts, places)
    queries = torch.cat([part.stacked("queries")[part.start :] for part in parts])
    plan = plan_with(
        AttentionRows(*(getattr(rows, name).to(device) for name in AttentionRows.__slots__)),
        table.to(device),
        query_heads=heads.query,
        kv_heads=heads.kv,
    )
    out = torch.empty_like(queries)
    ordered = queries[order].to(query_dtype).to(device)
    form = AttentionForm(1.0, window, softcap, None if sinks is None else sinks.to(device))
    answered = plan.attend(ordered, pool.to(device), form)
    assert answered.dtype == query_dtype, "results have the type of the queries"
    out[order] = answered.cpu().float()
    return list(out.split([length - part.start for length, part in zip(lengths, parts, strict=True)]))


def _layout(parts: Sequence[Part], places: Sequence[Tensor]) -> tuple[AttentionRows, Tensor, Tensor]:
    """What the kernel is given of the parts' rows, the slot table, and which row of the parts comes when."""
    lines = random.Random(len(parts)).sample(range(len(parts) + 2), len(parts))
    table = torch.full((len(parts) + 2, max([LONGEST, *(part.end for part in parts)])), NULL_SLOT)
    sequence, positions, node = [], [], []
    width = max(len(part.parents) for part in parts)
    # with gaps between lines, as views of wider tensors have
    node_slots, node_depths = torch.zeros(2, len(parts), width + 1, dtype=torch.int64)[:, :, :width]
    ancestors = torch.zeros(len(parts), width + 1, width, dtype=torch.bool)[:, :width]
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
        extend_end=torch.tensor(ends),
        node_slots=node_slots,
        node_depths=node_depths,
        ancestors=ancestors,
    )
    return rows, table, order


def naive(part: Part, heads: Heads, window: int | None, softcap: float | None, sinks: Tensor | None = None) -> Tensor:
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
            more = scores[:0] if sinks is None else sinks[head, None].double()  # a logit without a value
            weights = torch.cat([scores, more]).softmax(0)[: len(seen)]
            outputs.append(weights @ values[seen, head // heads.group])
    return torch.stack(outputs).view(-1, heads.query, heads.dim).float()


def draw_sinks(heads: Heads, seed: int) -> Tensor:
    """Sinks of some heads that are small beside all scores, or large. # -> [query heads]"""
    return 20 * torch.randn(heads.query, generator=torch.Generator().manual_seed(seed))


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
    """A decoding sequence with a tree, or a prompt chunk."""
    start = rng.choice([0, rng.randrange(1, 40), rng.randrange(40, 700)])
    chunk = rng.choice([1, 1, 1, rng.randrange(2, 60), 200])
    count = rng.choice([0, 1, 5, 23, MAX_NODES]) if chunk == 1 else 0
    text = Vectors.draw(start + chunk, heads, rng.randrange(1 << 30))
    nodes = Vectors.draw(count, heads, rng.randrange(1 << 30)) if count else None
    return Part(text, start, start + chunk, nodes, random_parents(rng, count))


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
