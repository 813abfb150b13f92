"""Bookkeeping of a drafter's own KV pool: which entries each sequence has computed, and which positions are pending.
Legend: rows = rows of the tables, one per sequence and a last one for padding; batch = the rows of one call; entries =
pool entries per position; count = positions; size = entries of a block."""

from typing import NamedTuple

import torch
from torch import Tensor

from kernels.tree_attention import NULL_SLOT


class EntryTables(NamedTuple):
    """Tables of computed entries and waiting positions, one row per sequence. The ops change them in place."""

    places: Tensor  # [rows, positions + 1, entries] int64, pool indices; the last column takes padding
    known: Tensor  # [rows] int64, number of positions in `places`
    ends: Tensor  # [rows] int64, one past the newest position
    waiting: Tensor  # [rows] int64, how many of the newest positions are still to be computed
    features: Tensor  # [rows, room + 1, width], the target's features of waiting positions; last column for padding
    tokens: Tensor  # [rows, room + 1] int64, the token after each waiting position
    held: Tensor  # [slots] bool, whether the entries of a slot are computed


class Waiting(NamedTuple):
    """Positions whose entries a forward computes, right-aligned: the last column is the newest position, the anchor of
    the next block."""

    features: Tensor  # [batch, count, width]
    tokens: Tensor  # [batch, count] int64, the token after each position
    positions: Tensor  # [batch, count] int64, below 0 for padding
    slots: Tensor  # [batch, count] int64, NULL_SLOT for padding


class Placed(NamedTuple):
    """Placement of a forward's rows: for each sequence its waiting entries, then a block at the newest position."""

    end: Tensor  # [batch] int64, index of the last entry before the block, among the sequence's entries
    live: Tensor  # [batch, size] int64, pool indices that the block's keys and values are written to
    at: Tensor  # [batch, rows of a sequence] int64, index among the sequence's entries; arbitrary for padding
    positions: Tensor  # [batch, rows of a sequence] int64, absolute position that the entry predicts
    slots: Tensor  # [batch, rows of a sequence] int64, pool indices that keys and values are written to


def add_entries(
    tables: EntryTables,
    rows: Tensor,
    starts: Tensor,
    counts: Tensor,
    slots: Tensor,
    features: Tensor | None,
    tokens: Tensor | None,
) -> None:
    """Append the committed positions starts to starts + counts - 1, and mark their slots as not computed. With features
    and tokens, the positions become waiting ones; there must be room for them. A row whose `ends` differs from its
    start is emptied first.
    # rows, starts, counts [batch] int64; slots, tokens [batch, count] int64 with arbitrary padding; features [batch,
    count, width]"""
    offsets = torch.arange(slots.shape[1], device=rows.device)
    exists = offsets < counts[:, None]
    follows = tables.ends[rows] == starts  # otherwise the positions before are unknown
    known, waiting = tables.known[rows] * follows, tables.waiting[rows] * follows
    lines, taken = rows[:, None], slots.where(exists, NULL_SLOT)
    columns = (known[:, None] + offsets).where(exists, tables.places.shape[1] - 1)
    tables.places[lines, columns] = places_of(taken, tables.places.shape[2])
    tables.held.index_fill_(0, taken.flatten(), False)
    tables.known.index_copy_(0, rows, known + counts)
    tables.ends.index_copy_(0, rows, starts + counts)
    if features is not None and tokens is not None:
        columns = (waiting[:, None] + offsets).where(exists, tables.tokens.shape[1] - 1)
        tables.features[lines, columns] = features.to(tables.features.dtype)
        tables.tokens[lines, columns] = tokens
        waiting = waiting + counts
    tables.waiting.index_copy_(0, rows, waiting)


def take_entries(tables: EntryTables, rows: Tensor, most: int) -> Waiting:
    """Remove and return the waiting positions of these rows, at most `most` of each, and mark their slots as computed.
    # rows [batch] int64 -> [batch, most]"""
    counts, lines = tables.waiting[rows], rows[:, None]
    column = torch.arange(most, device=rows.device) - (most - counts[:, None])  # [batch, most], negative for padding
    present = column >= 0
    column = column.clamp(min=0)
    positions = torch.where(present, tables.ends[lines] - counts[:, None] + column, -1)
    newest = (tables.known[lines] - counts[:, None] + column).clamp(min=0)
    slots = (tables.places[lines, newest, 0] // tables.places.shape[2]).masked_fill(~present, NULL_SLOT)
    tables.waiting.index_fill_(0, rows, 0)
    tables.held.index_fill_(0, slots.flatten(), True)
    return Waiting(tables.features[lines, column], tables.tokens[lines, column], positions, slots)


def place_entries(
    tables: EntryTables, rows: Tensor, positions: Tensor, slots: Tensor, scratch: Tensor, size: int
) -> Placed:
    """Compute indices, positions and slots of the waiting entries, and of a block of `size` entries at the newest
    position (no block if `size` is 0). The block's first entries are kept in the pool, the others go to `scratch`.
    # rows [batch] int64; positions, slots [batch, count] as in `Waiting`; scratch [batch, others] int64"""
    entries, count = tables.places.shape[2], slots.shape[1]
    before = (count - 1 if size else count) * entries
    ahead = torch.arange(1, max(size, entries) + 1, device=rows.device)
    stored = places_of(slots, entries).flatten(1)  # [batch, count * entries]
    live = torch.cat([stored[:, before:], scratch], dim=1)
    end = ((tables.known[rows] - (1 if size else 0)) * entries - 1).clamp(min=-1)
    committed = (end[:, None] + torch.arange(1 - before, 1, device=rows.device)).clamp(min=0)
    reached = positions.clamp(min=0)[:, :, None] + ahead  # [batch, count, entries or more]
    standing = reached[:, :, :entries].flatten(1)[:, :before]
    return Placed(
        end,
        live,
        torch.cat([committed, end[:, None] + ahead[:size]], dim=1),
        torch.cat([standing, reached[:, -1, :size]], dim=1),
        torch.cat([stored[:, :before], live], dim=1),
    )


def places_of(slots: Tensor, entries: int) -> Tensor:
    """Compute the pool indices of the entries that belong to slots. # slots [...] -> [..., entries] int64"""
    return slots[..., None] * entries + torch.arange(entries, device=slots.device)
