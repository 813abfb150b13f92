"""What is kept of committed positions: in a drafter's own KV pool, which entries each sequence has computed, and which
positions are pending; and recordings to learn from.
Legend: rows = rows of the tables, one per sequence and a last one for padding; batch = the rows of one call; entries =
pool entries per position; count = positions; size = entries of a block."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.tree_attention import NULL_SLOT

NOWHERE = -1
"""Position of a label that is padding."""


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


@dataclass(frozen=True, slots=True)
class DraftLabels:
    """Labels to train output layers on: committed tokens, and what was drafted and expected in their place."""

    positions: Tensor  # [labels] int64, in the query's tokens
    states: Tensor  # [labels, hidden], the input of the drafter's heads at each position
    tokens: Tensor  # [labels] int64, the token that the target chose
    chances: Tensor  # [labels] float32, the drafter's probability of that token (r); 0 if it cannot propose it
    rejected: Tensor  # [labels] bool, the tree had nodes, but none with this token here
    top_ids: Tensor  # [labels, top] int32
    top_logprobs: Tensor  # [labels, top] float16, in ring buffers float32

    def take(self, picked: Tensor) -> "DraftLabels":
        """Return the selected labels. # picked [labels] bool or [picked] int64"""
        return DraftLabels(*(value[picked] for value in self.fields))

    def to(self, device: torch.device | str) -> "DraftLabels":
        """Return these labels on a device."""
        return DraftLabels(*(value.to(device) for value in self.fields))

    @property
    def fields(self) -> tuple[Tensor, ...]:
        """All tensors, [labels, ...] each."""
        return tuple(getattr(self, name) for name in self.__slots__)

    @property
    def count(self) -> int:
        """Number of labels."""
        return self.positions.shape[0]

    @property
    def num_rejected(self) -> int:
        """Number of rejected labels; waits for the device."""
        return int(self.rejected.sum())  # planned transfer: after the sequence has ended


class Recordings(NamedTuple):
    """Ring buffers of each row's last positions: position p is in column p % places."""

    wanted: Tensor  # [rows] bool, whether the row is recorded
    features: Tensor  # [rows, places, width], the target's at each position
    labels: DraftLabels  # [rows, places, ...], of the token at each position; NOWHERE if no block had a state for it
    past: Tensor  # [rows, places, orders, ways] int64, `past_lines` of the token at each position
    regression: Tensor  # [rows, 2, sets, weights] float32, the scope's weights and squares at the row's start


class FirstBlocks(NamedTuple):
    """The first block of each row's newest tree."""

    roots: Tensor  # [rows] int64, positions of the roots
    states: Tensor  # [rows, size, hidden]
    logits: Tensor  # [rows, size, draft_vocab]
    t2d: Tensor  # [vocab] int64, draft id of each token, below 0 if it cannot be drafted


class CommittedTokens(NamedTuple):
    """The tokens that a step committed, and what chose them."""

    rows: Tensor  # [batch] int64
    roots: Tensor  # [batch] int64, positions of the roots
    counts: Tensor  # [batch] int64
    num_nodes: Tensor  # [batch] int64, nodes of the trees
    tokens: Tensor  # [batch, count] int64, after the root
    features: Tensor  # [batch, count, width], of the position before each token
    logits: Tensor  # [logits, vocab], the target's
    chosen_by: Tensor  # [batch, count] int64, index of the logits that chose each token


def record_tokens(to: Recordings, blocks: FirstBlocks | None, of: CommittedTokens) -> None:
    """Record the committed tokens of wanted rows. `blocks` is None if no trees were grown.
    # shapes: see the three arguments"""
    exists = torch.arange(of.tokens.shape[1], device=of.rows.device) < of.counts[:, None]
    index, ahead = (exists & to.wanted[of.rows][:, None]).nonzero(as_tuple=True)  # planned transfer of their number
    rows, roots, places = of.rows[index], of.roots[index], to.features.shape[1]
    tokens, positions = of.tokens[index, ahead], roots + ahead + 1
    to.features[rows, (positions - 1) % places] = of.features[index, ahead].to(to.features.dtype)
    states, chances = torch.zeros_like(to.labels.states[0, :1]), torch.zeros_like(tokens, dtype=torch.float32)
    known = torch.zeros_like(tokens, dtype=torch.bool)
    if blocks is not None:
        size = blocks.states.shape[1]
        entry, drafted = ahead.clamp(max=size - 1), blocks.t2d[tokens]
        known = (blocks.roots[rows] == roots) & (ahead < size)
        states, logits = blocks.states[rows, entry], blocks.logits[rows, entry].float()
        chosen = logits.gather(1, drafted.clamp(min=0)[:, None])[:, 0]
        chances = (chosen - logits.logsumexp(1)).exp() * (known & (drafted >= 0))
    rejected = (ahead == of.counts[index] - 1) & (of.num_nodes[index] > 0)
    logprobs, ids = of.logits[of.chosen_by[index, ahead]].float().log_softmax(1).topk(to.labels.top_ids.shape[2])
    labels = positions.where(known, NOWHERE), states, tokens, chances, rejected, ids, logprobs
    for table, values in zip(to.labels.fields, labels, strict=True):
        table[rows, positions % places] = values.to(table.dtype)
