"""What followed which tokens in texts and behind nodes of their trees, and one tree of what may follow now.

A table with places for every row, as a cache has them: the hash of a context names a bucket, its successor one of the
ways in it. The newest to come to a place has it; hence a row is bounded per context and in all, and nobody counts.

Legend: batch = some rows, nodes as in kernels/trees.py; orders = lengths of contexts, the longest first; ways = places
of a context; context = CONTEXT tokens; beam = nodes of a level.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from kernels.trees import ROOT, DraftTree

ORDERS = (4, 2, 1)
CONTEXT = max(ORDERS)
WAYS = 4
"""Successors of a context that are kept at most."""
BUCKETS = 2048

NOTHING = -1
"""Stands where no token is."""

_TOKEN_BITS = 20
_TOKENS = (1 << _TOKEN_BITS) - 1
_BUCKET_SHIFT = 48  # the tag in an entry is of the hash's lowest bits


class Ngrams(NamedTuple):
    """The n-grams of all rows, the last of which is nobody's."""

    entries: Tensor  # [rows * buckets * ways] int64, tag and successor, NOTHING where there is none
    counts: Tensor  # float32 like it, what its sightings weigh together
    times: Tensor  # int64 like it, of the last one
    factors: Tensor  # [orders, context] int64, of a context's hash, by age of the token; 0 beyond the order

    @staticmethod
    def empty(rows: int, device: torch.device | str) -> "Ngrams":
        places = rows * BUCKETS * WAYS
        entries = torch.full((places,), NOTHING, device=device)
        return Ngrams(entries, torch.zeros(places, device=device), torch.zeros_like(entries), _factors().to(device))

    def forget(self, row: int) -> None:
        """Forget what this row has said."""
        mine = slice(row * BUCKETS * WAYS, (row + 1) * BUCKETS * WAYS)
        self.entries[mine] = NOTHING
        self.counts[mine] = 0.0
        self.times[mine] = 0


class Spoken(NamedTuple):
    """Texts' last tokens, a tree behind each, and what was said behind root and nodes."""

    tails: Tensor  # [batch, context] int64, the newest last, NOTHING where there is none
    tokens: Tensor  # [batch, nodes] int64
    parents: Tensor  # [batch, nodes] int64
    choices: Tensor  # [batch, nodes + 1] int64, NOTHING where nothing was said


class Ahead(NamedTuple):
    """What trees grow from."""

    tails: Tensor  # as of `Spoken`
    guesses: Tensor  # [batch, levels] int64, of the token at each position behind the root, NOTHING where there is none
    stable: Tensor  # [batch, levels] bool, whether the same was guessed before
    temperatures: Tensor  # [batch] float32


@dataclass(frozen=True, slots=True)
class NgramEvidence:
    """What says how often a successor comes true, and the rates by bucket. A bucket is a sum of what each kind of
    evidence adds."""

    rates: Tensor  # [buckets] float32
    share_edges: Tensor  # [any] float32, of the part of what was seen behind the context
    count_edges: Tensor  # [any] float32, of what its sightings weigh
    of_depth: Tensor  # [levels] int64
    sampled: int  # what a temperature above 0 adds
    kind: int  # times orders * own order's place + the place of the longest that is known; orders ** 2 for a guess
    share: int  # what each edge that is passed adds
    count: int
    latest: int  # of its context's successors, or guessed before
    agrees: int  # with the guess for its position


def add_ngrams(known: Ngrams, rows: Tensor, spoken: Spoken, weights: Tensor, times: Tensor) -> None:
    """Take in what was said, a sighting each. # rows, times [batch] int64; weights [batch, nodes + 1] float32"""
    tags, buckets = _hashed(known, rows, _contexts(spoken))
    token = spoken.choices[:, :, None]
    nobody = len(known.entries) - BUCKETS * WAYS
    places = torch.where(token < 0, nobody, buckets * WAYS + token.remainder(WAYS)).flatten()
    entries = (tags | token).flatten()
    counts = known.counts[places] * (known.entries[places] == entries)
    # Where several come to a place at once, one of them has it: whichever, it is only a guess.
    known.entries.index_copy_(0, places, entries)
    known.counts.index_copy_(0, places, counts)
    came = known.entries[places] == entries
    known.counts.index_add_(0, places, came * weights[:, :, None].expand_as(tags).flatten())
    known.times.scatter_reduce_(0, places, times[:, None, None].expand_as(tags).flatten(), "amax")


def grow_ngrams(
    known: Ngrams, rows: Tensor, ahead: Ahead, evidence: NgramEvidence, beam: int, least: float
) -> tuple[DraftTree, Tensor]:
    """Level by level the likeliest successors of all nodes of the level above, as far as they survive with probability
    `least`; the guess for a position is a child of the likeliest node before it. # rows [batch] -> a raw tree without
    equal paths, [batch, levels * beam] int64, the bucket of each node; those that survive with 0 mean nothing"""
    contexts = ahead.tails.flip(1)[:, None]  # [batch, 1, context], the newest first
    survival = torch.ones_like(rows, dtype=torch.float32)[:, None]
    levels = []
    for depth in range(ahead.guesses.shape[1]):
        tokens, buckets = _children(known, rows, contexts, ahead, evidence, depth)
        chances = evidence.rates[buckets] * survival[:, :, None]
        chances = chances.masked_fill_(_is_repeated(tokens) | (chances < least), 0.0).flatten(1)
        best = chances.sort(dim=1, descending=True, stable=True)
        survival, chosen = best.values[:, :beam], best.indices[:, :beam]
        parents = chosen // tokens.shape[2]
        token, bucket = (values.flatten(1).gather(1, chosen) for values in (tokens, buckets))
        above = contexts.gather(1, parents[:, :, None].expand(-1, -1, CONTEXT))
        contexts = torch.cat([token[:, :, None], above[:, :, :-1]], dim=2)
        parents = parents + (depth - 1) * beam if depth else torch.full_like(parents, ROOT)
        levels.append((token, parents, torch.full_like(parents, depth + 1), survival, bucket))
    tokens, parents, depths, survival, buckets = (torch.cat(values, dim=1) for values in zip(*levels, strict=True))
    return DraftTree(tokens, parents, depths, survival, torch.zeros_like(rows)), buckets


def _children(
    known: Ngrams, rows: Tensor, contexts: Tensor, ahead: Ahead, evidence: NgramEvidence, depth: int
) -> tuple[Tensor, Tensor]:
    """Successors of each context by order and way, then the guess, and their buckets.
    # contexts [batch, beam, context] -> two [batch, beam, orders * ways + 1] int64"""
    tags, first = _hashed(known, rows, contexts)
    places = (first * WAYS)[..., None] + torch.arange(WAYS, device=rows.device)  # [batch, beam, orders, ways]
    entries = known.entries[places]
    absent = (entries & ~_TOKENS) != tags[..., None]
    tokens = (entries & _TOKENS).masked_fill_(absent, NOTHING)
    counts = known.counts[places].masked_fill_(absent, 0.0)
    times = known.times[places].masked_fill_(absent, NOTHING)
    others = contexts.shape[1] - 1  # than the likeliest
    guesses = pad(ahead.guesses[:, depth : depth + 1], (0, others), value=NOTHING)
    stable = pad(ahead.stable[:, depth : depth + 1], (0, others))
    total = counts.sum(3, keepdim=True)
    longest = (total > 0).view(torch.uint8).argmax(2, keepdim=True)
    orders = torch.arange(len(ORDERS), device=rows.device)[:, None]
    buckets = (longest + len(ORDERS) * orders) * evidence.kind
    buckets = buckets + torch.bucketize(counts / total, evidence.share_edges) * evidence.share
    buckets.add_(torch.bucketize(counts, evidence.count_edges), alpha=evidence.count)
    buckets.add_(times == times.amax(3, keepdim=True), alpha=evidence.latest)
    buckets.add_(tokens == guesses[:, :, None, None], alpha=evidence.agrees)
    guessed = len(ORDERS) ** 2 * evidence.kind + stable * evidence.latest
    buckets = torch.cat([buckets.flatten(2), guessed[:, :, None]], dim=2)
    buckets += ((ahead.temperatures > 0) * evidence.sampled + evidence.of_depth[depth])[:, None, None]
    return torch.cat([tokens.flatten(2), guesses[:, :, None]], dim=2), buckets


def _is_repeated(tokens: Tensor) -> Tensor:
    """Whether a token stands before among its siblings, or is none. # tokens, result [batch, beam, siblings]"""
    same = tokens[..., :, None] == tokens[..., None, :]
    return same.tril_(-1).any(3) | (tokens == NOTHING)


def _contexts(spoken: Spoken) -> Tensor:
    """Behind root and nodes, the newest token first. # -> [batch, nodes + 1, context]"""
    (batch, nodes), device = spoken.tokens.shape, spoken.tokens.device
    tokens = torch.cat([spoken.tails, spoken.tokens], dim=1)
    before = torch.arange(-1, CONTEXT - 1, device=device).clamp(min=0).expand(batch, -1)
    before = torch.cat([before, spoken.parents + CONTEXT], dim=1)  # below the root: behind the tail's last token
    place = torch.arange(CONTEXT - 1, CONTEXT + nodes, device=device).expand(batch, -1)
    path = []
    for _ in range(CONTEXT):
        path.append(tokens.gather(1, place))
        place = before.gather(1, place)
    return torch.stack(path, dim=2)


def _hashed(known: Ngrams, rows: Tensor, contexts: Tensor) -> tuple[Tensor, Tensor]:
    """Tags and buckets, counted over all rows. # contexts [batch, any, context] -> two [batch, any, orders] int64"""
    hashes = ((contexts + 1)[:, :, None] * known.factors).sum(3)
    buckets = (hashes >> _BUCKET_SHIFT) & (BUCKETS - 1)
    return hashes << _TOKEN_BITS, buckets + (rows * BUCKETS)[:, None, None]


def _factors() -> Tensor:
    """# -> [orders, context] int64"""
    generator = torch.Generator().manual_seed(3)
    odd = torch.randint(-(2**62), 2**62, (len(ORDERS), CONTEXT), generator=generator) | 1
    reached = torch.arange(CONTEXT) < torch.tensor(ORDERS)[:, None]
    return odd * reached
