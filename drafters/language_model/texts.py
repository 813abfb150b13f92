"""Running texts as a language model reads them: tokens, slots, and how far it has run them itself.
Legend: rows = sequences of the engine's table, batch = some of them."""

import torch
from torch import Tensor

from drafters.protocol import Committed, DraftContext, DraftingSizes, HostMetadata, Read
from drafters.slots import HeldSlots, taken_slots


class Texts:
    """Tokens, and the target's slots of all positions before the last one, by row and position. Behind the positions
    stands a column that takes padding."""

    def __init__(self, sizes: DraftingSizes) -> None:
        shape = sizes.max_sequences, sizes.max_length + 2
        self.tokens, self.slots = (torch.zeros(shape, dtype=torch.int64, device=sizes.device) for _ in range(2))

    def start(self, context: DraftContext) -> None:
        """Begin a text; of what is not cached the slots are told later."""
        tokens = torch.tensor(list(context.tokens), dtype=torch.int64)
        self.tokens[context.row, : len(tokens)] = tokens.to(self.tokens.device)
        if context.cached is not None:
            self.slots[context.row, : len(context.cached)] = context.cached

    def read(self, read: Read) -> None:
        self.slots[read.row, read.start : read.start + len(read.slots)] = read.slots

    def commit(self, committed: Committed) -> None:
        width = committed.tokens.shape[1]
        offsets = torch.arange(width, device=committed.rows.device)
        valid, rows = offsets < committed.counts[:, None], committed.rows[:, None]
        columns, padding = committed.positions[:, None] + offsets, self.tokens.shape[1] - 1
        self.slots[rows, columns.where(valid, padding)] = committed.slots
        self.tokens[rows, (columns + 1).where(valid, padding)] = committed.tokens


class TargetKeys:
    """Keys and values are the target's own: they are there as soon as a position is committed."""

    def start(self, context: DraftContext) -> None:
        """Nothing is to be run."""

    def take(self, slots: Tensor, counts: Tensor) -> None:
        """Nothing is to be run."""

    def missing(self, host: HostMetadata) -> list[range]:
        return [range(root, root) for root in host.roots]

    def run(self, row: int, until: int, slots: Tensor) -> None:
        """Nothing was to be run."""


class OwnKeys:
    """Keys and values are the model's own, and so is the work: which positions it has run of each text, and in which
    slots what it has run still lies, for texts that begin with what another one left."""

    def __init__(self, sizes: DraftingSizes) -> None:
        self._held = HeldSlots(sizes.num_slots, sizes.device)
        self._until = [0] * sizes.max_sequences

    def start(self, context: DraftContext) -> None:
        """A text begins: of what is cached, the beginning that was run need not be run again."""
        self._until[context.row] = 0
        if context.cached is not None:
            held = self._held.holds(context.cached).long().cumprod(0).sum()
            self._until[context.row] = int(held.item())  # planned transfer: once per text that is found again

    def take(self, slots: Tensor, counts: Tensor) -> None:
        """These slots hold other positions from now on. # slots [batch, count], counts [batch] as of `Committed`"""
        self._held.forget(taken_slots(slots, counts))

    def missing(self, host: HostMetadata) -> list[range]:
        """Positions before each text's root that are still to be run."""
        return [range(self._until[row], root) for row, root in zip(host.rows, host.roots, strict=True)]

    def run(self, row: int, until: int, slots: Tensor) -> None:
        """A text has been run up to a position, lately in these slots. # [count] int64"""
        self._until[row] = until
        self._held.hold(slots)


Keys = TargetKeys | OwnKeys
