"""Running sequences as a language model reads them: tokens, slots, and which positions it has run itself.
Legend: rows = sequences of the engine's table, batch = some of them."""

import torch
from torch import Tensor

from drafters.protocol import Committed, DraftContext, DraftingSizes, HostMetadata, Read
from drafters.slots import HeldSlots, taken_slots


class SequenceTable:
    """Tokens, and the target's slots of all positions before the last one: `tokens`, `slots` [rows, positions + 1]
    int64, whose last column takes padding."""

    def __init__(self, sizes: DraftingSizes) -> None:
        shape = sizes.max_sequences, sizes.max_length + 2
        self.tokens, self.slots = (torch.zeros(shape, dtype=torch.int64, device=sizes.device) for _ in range(2))

    def start(self, context: DraftContext) -> None:
        """Begin a sequence; slots of positions that are not cached come with `read` and `commit`."""
        tokens = torch.tensor(list(context.tokens), dtype=torch.int64)
        self.tokens[context.row, : len(tokens)] = tokens.to(self.tokens.device)
        if context.cached is not None:
            self.slots[context.row, : len(context.cached)] = context.cached

    def read(self, read: Read) -> None:
        """Take in the slots of a piece of a prompt."""
        self.slots[read.row, read.start : read.start + len(read.slots)] = read.slots

    def commit(self, committed: Committed) -> None:
        """Append committed tokens, and the slots of the positions before them."""
        width = committed.tokens.shape[1]
        offsets = torch.arange(width, device=committed.rows.device)
        valid, rows = offsets < committed.counts[:, None], committed.rows[:, None]
        columns, padding = committed.positions[:, None] + offsets, self.tokens.shape[1] - 1
        self.slots[rows, columns.where(valid, padding)] = committed.slots
        self.tokens[rows, (columns + 1).where(valid, padding)] = committed.tokens


class OwnKeys:
    """Positions that the model has keys and values for: how far it has run each sequence, and which slots still hold
    positions it has run, for sequences that begin with a cached prefix."""

    def __init__(self, sizes: DraftingSizes) -> None:
        self._held = HeldSlots(sizes.num_slots, sizes.device)
        self._until = [0] * sizes.max_sequences

    def start(self, context: DraftContext) -> None:
        """Begin a sequence; the part of its cached prefix that was run need not be run again."""
        self._until[context.row] = 0
        if context.cached is not None:
            held = self._held.holds(context.cached).long().cumprod(0).sum()
            self._until[context.row] = int(held.item())  # planned transfer: once per sequence with a cached prefix

    def take(self, slots: Tensor, counts: Tensor) -> None:
        """Mark slots as not run, because they hold other positions now. # slots [batch, count], counts [batch] as of
        `Committed`"""
        self._held.forget(taken_slots(slots, counts))

    def missing(self, host: HostMetadata) -> list[range]:
        """Positions before each sequence's root without keys and values."""
        return [range(self._until[row], root) for row, root in zip(host.rows, host.roots, strict=True)]

    def run(self, row: int, until: int, slots: Tensor) -> None:
        """Mark keys and values as computed up to `until`, the newest ones in these slots. # slots [count] int64"""
        self._until[row] = until
        self._held.hold(slots)
