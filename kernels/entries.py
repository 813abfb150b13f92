"""Entries of a drafter with keys and values of its own: which of each text lie where, and which wait to be run.
Legend: rows = lines of the tables, one per sequence and a last one that pads batches, batch = some of them, entries =
pool entries of a position, count = positions, size = entries of a block."""

from typing import NamedTuple

import torch
from torch import Tensor

from kernels.tree_attention import NULL_SLOT


class EntryTables(NamedTuple):
    """What is known of each row; changed in place."""

    places: Tensor  # [rows, positions + 1, entries] int64, in the pool; the last column takes padding
    known: Tensor  # [rows] int64, positions in `places`
    ends: Tensor  # [rows] int64, one past the newest position
    waiting: Tensor  # [rows] int64, how many of the newest positions are still to be run
    features: Tensor  # [rows, room + 1, width], of those that wait; the last column takes padding
    tokens: Tensor  # [rows, room + 1] int64, the token after each of them
    held: Tensor  # [slots] bool, in which lie entries that were run


class Waiting(NamedTuple):
    """Entries to run, right-aligned: the last column is the newest position, the anchor of the next block."""

    features: Tensor  # [batch, count, width]
    tokens: Tensor  # [batch, count] int64, the token after each position
    positions: Tensor  # [batch, count] int64, below 0 for padding
    slots: Tensor  # [batch, count] int64, NULL_SLOT for padding


class Placed(NamedTuple):
    """Where the rows of a forward stand: of each sequence the entries that wait, then those of a block at the newest.
    The last three [batch, rows of a sequence] int64."""

    end: Tensor  # [batch] int64, place in its line of entries of the last one before the block
    live: Tensor  # [batch, size] int64, where keys and values of the block go
    at: Tensor  # places in the line; where there are fewer than rows, padding rows see some of others'
    positions: Tensor  # absolute, of what an entry predicts
    slots: Tensor  # where keys and values go


def add_entries(
    tables: EntryTables,
    rows: Tensor,
    starts: Tensor,
    counts: Tensor,
    slots: Tensor,
    features: Tensor | None,
    tokens: Tensor | None,
) -> None:
    """Positions starts..starts + counts - 1 are committed, and what their slots held is forgotten. Where features and
    tokens are given, the positions wait to be run; there must be room for them.
    # rows, starts, counts [batch] int64; slots, tokens [batch, count] int64, padded with any; features [batch, count,
    width]"""
    offsets = torch.arange(slots.shape[1], device=rows.device)
    exists = offsets < counts[:, None]
    follows = tables.ends[rows] == starts  # otherwise nothing is known of what stands before
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
    """The waiting entries of these rows, at most so many of each, which stop waiting and are held from now on.
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
    """Where entries that wait are run, and at the newest of them a block of `size` entries, or none of size 0. The
    first entries of the block stay in the pool, the others go to `scratch`.
    # rows [batch] int64; positions, slots [batch, count] as of `Waiting`; scratch [batch, others] int64"""
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
    """Where in the pool the entries of slots lie. # [...] -> [..., entries] int64"""
    return slots[..., None] * entries + torch.arange(entries, device=slots.device)
