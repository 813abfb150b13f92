"""What followed which tokens in each running sequence: in its text, and behind nodes of its trees.

A table with places for every row, as a cache has them: a context's hash names a bucket, its successor one of the ways
in it. The newest to come to a place has it; hence a pool is bounded per context and in all, and nobody counts.

Legend: rows = sequences of the engine's table, batch = some of them; orders = lengths of contexts, the longest first;
ways = places of a context; context = CONTEXT tokens, the newest first.
"""

from typing import NamedTuple

import torch
from torch import Tensor

ORDERS = (4, 2, 1)
CONTEXT = max(ORDERS)
WAYS = 4
"""Successors of a context that are kept at most."""

NOTHING = -1
"""Stands where no token is."""

_BUCKETS = 2048
REMEMBERED = _BUCKETS * WAYS // len(ORDERS)
"""Tokens of a text whose n-grams fit."""

_TOKEN_BITS = 20
_TOKENS = (1 << _TOKEN_BITS) - 1
_BUCKET_SHIFT = 48  # the tag in an entry is of the hash's lowest bits


class Successors(NamedTuple):
    """What followed contexts; all [batch, contexts, orders, ways]."""

    tokens: Tensor  # int64, NOTHING where there is none
    counts: Tensor  # float32, what its sightings weigh together
    times: Tensor  # int64, of the last one, NOTHING where there is none


class NgramPool:
    """The n-grams of all rows; behind them stands a row of nobody's."""

    def __init__(self, max_sequences: int, device: torch.device | str) -> None:
        self._nobody = max_sequences
        places = (max_sequences + 1) * _BUCKETS * WAYS
        self._entries = torch.full((places,), NOTHING, dtype=torch.int64, device=device)  # tag and successor
        self._counts = torch.zeros(places, device=device)
        self._times = torch.zeros(places, dtype=torch.int64, device=device)
        self._factors = _factors().to(device)
        self._ways = torch.arange(WAYS, device=device)

    def add(self, rows: Tensor, contexts: Tensor, successors: Tensor, weights: Tensor, times: Tensor) -> None:
        """Sightings, each of some weight at some time. # rows [batch], contexts [batch, any, context], the others
        [batch, any]; NOTHING among the successors is none"""
        tags, buckets = self._hashed(rows, contexts)
        token = successors[:, :, None]
        places = torch.where(token < 0, self._nobody * _BUCKETS * WAYS, buckets * WAYS + token.remainder(WAYS))
        places, entries = places.flatten(), (tags | token).flatten()
        counts = self._counts[places] * (self._entries[places] == entries)
        # Where several come to a place at once, one of them has it: whichever, it is only a guess.
        self._entries.index_copy_(0, places, entries)
        self._counts.index_copy_(0, places, counts)
        came = self._entries[places] == entries
        self._counts.index_add_(0, places, came * weights[:, :, None].expand_as(tags).flatten())
        self._times.scatter_reduce_(0, places, times[:, :, None].expand_as(tags).flatten(), "amax")

    def find(self, rows: Tensor, contexts: Tensor) -> Successors:
        """What followed these. # rows [batch], contexts [batch, any, context]"""
        tags, buckets = self._hashed(rows, contexts)
        places = buckets[..., None] * WAYS + self._ways  # [batch, any, orders, ways]
        entries = self._entries[places]
        absent = (entries & ~_TOKENS) != tags[..., None]
        return Successors(
            tokens=(entries & _TOKENS).masked_fill_(absent, NOTHING),
            counts=self._counts[places].masked_fill_(absent, 0.0),
            times=self._times[places].masked_fill_(absent, NOTHING),
        )

    def forget(self, rows: list[int]) -> None:
        """Forget what these rows have said."""
        for table, nothing in ((self._entries, NOTHING), (self._counts, 0), (self._times, 0)):
            for row in rows:
                table.view(-1, _BUCKETS * WAYS)[row] = nothing

    def _hashed(self, rows: Tensor, contexts: Tensor) -> tuple[Tensor, Tensor]:
        """Tags and buckets, counted over all rows. # -> two [batch, any, orders] int64"""
        hashes = ((contexts + 1)[:, :, None] * self._factors).sum(3)
        buckets = (hashes >> _BUCKET_SHIFT) & (_BUCKETS - 1)
        return hashes << _TOKEN_BITS, buckets + (rows * _BUCKETS)[:, None, None]


def contexts_of(text: Tensor) -> Tensor:
    """The context behind each token of a text. # [tokens] int64 -> [tokens, context]"""
    before = text.new_full((CONTEXT - 1,), NOTHING)
    return torch.cat([before, text]).unfold(0, CONTEXT, 1).flip(1)


def _factors() -> Tensor:
    """By order and age; 0 beyond the order. # -> [orders, context] int64"""
    generator = torch.Generator().manual_seed(3)
    odd = torch.randint(-(2**62), 2**62, (len(ORDERS), CONTEXT), generator=generator) | 1
    reached = torch.arange(CONTEXT) < torch.tensor(ORDERS)[:, None]
    return odd * reached
