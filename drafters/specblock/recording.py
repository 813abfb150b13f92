"""What a SpecBlock drafter said of the positions that came to be committed, for whoever learns from it.

A tree's first block speaks of the positions right behind the root whatever path is accepted; later blocks hang on
tokens that may not come, and are not kept.
Legend: batch, rows = sequences of the engine's table, block = K, depth = longest accepted path, draft_vocab.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from drafters.feedback import FeedbackRecorder, Foretold
from drafters.protocol import Committed, DraftContext, Read

_NEVER = -1


class Recorder(Protocol):
    """Hears what a drafter hears, and what it said."""

    @property
    def target_top(self) -> int: ...

    def start(self, contexts: Sequence[DraftContext]) -> None: ...

    def read(self, read: Read) -> None: ...

    def grown(self, rows: Tensor, roots: Tensor, states: Tensor, logprobs: Tensor) -> None:
        """The first block of a tree. # rows, roots [batch]; states [batch, block, hidden];
        logprobs [batch, block, draft_vocab]"""
        ...

    def commit(self, committed: Committed) -> None: ...

    def finish(self, rows: Sequence[int]) -> None: ...


class NoRecorder:
    """Nobody learns: nothing is kept, and nothing is asked of the target."""

    target_top = 0

    def start(self, contexts: Sequence[DraftContext]) -> None:
        """Nothing to begin."""

    def read(self, read: Read) -> None:
        """Nothing to keep."""

    def grown(self, rows: Tensor, roots: Tensor, states: Tensor, logprobs: Tensor) -> None:
        """Nothing to keep."""

    def commit(self, committed: Committed) -> None:
        """Nothing to keep."""

    def finish(self, rows: Sequence[int]) -> None:
        """Nothing was kept."""


class BlockRecorder:
    """Keeps each row's last first block until the next step says what became of its positions.

    Steps without a sequence that is recorded cost next to nothing. Behind the rows of sequences stands one of nobody's,
    which pads batches.
    """

    def __init__(
        self,
        tables: FeedbackRecorder,
        *,
        t2d: Tensor,
        max_sequences: int,
        block_size: int,
        hidden: int,
        target_top: int,
        wanted: Callable[[], bool],
    ) -> None:
        """`t2d` [target_vocab] int64, draft id of a target token, -1 where it cannot be drafted; `wanted` says of each
        sequence that begins, and may be stored, whether it is recorded"""
        self._target_top = target_top
        self._wanted = wanted
        self._recorded: set[int] = set()  # rows
        self._tables = tables
        self._t2d = t2d
        shape = (max_sequences + 1, block_size)
        draft_vocab = int(t2d.max()) + 1
        self._roots = torch.full(shape[:1], _NEVER, dtype=torch.int64, device=t2d.device)
        self._states = torch.zeros(*shape, hidden, dtype=tables.dtype, device=t2d.device)
        self._logprobs = torch.zeros(*shape, draft_vocab, device=t2d.device)

    @property
    def target_top(self) -> int:
        return self._target_top if self._recorded else 0

    def start(self, contexts: Sequence[DraftContext]) -> None:
        rows = [context.row for context in contexts]
        wanted = [context for context in contexts if context.store and self._wanted()]
        self._recorded.difference_update(rows)
        self._recorded.update(context.row for context in wanted)
        self._roots[rows] = _NEVER
        self._tables.forget(rows)
        self._tables.start(wanted)

    def read(self, read: Read) -> None:
        if read.row in self._recorded:
            self._tables.read(read)

    def grown(self, rows: Tensor, roots: Tensor, states: Tensor, logprobs: Tensor) -> None:
        self._roots.index_copy_(0, rows, roots)
        self._states.index_copy_(0, rows, states.to(self._states.dtype))
        self._logprobs.index_copy_(0, rows, logprobs)

    @torch.inference_mode()
    def commit(self, committed: Committed) -> None:
        if not self._recorded:
            return
        assert committed.tops is not None, "the engine was not asked for the target's likeliest tokens"
        self._tables.commit(committed, committed.tops, self._foretold(committed))

    def finish(self, rows: Sequence[int]) -> None:
        """Nothing more comes of these; what was kept of them lies in the tables until it is taken out."""
        self._recorded.difference_update(rows)

    def _foretold(self, committed: Committed) -> Foretold:
        rows, tokens = committed.rows, committed.tokens
        ahead = torch.arange(tokens.shape[1], device=tokens.device)
        block_size = self._states.shape[1]
        fresh = self._roots[rows] == committed.positions  # [batch], the tree of this very step
        entry = ahead.clamp(max=block_size - 1).expand_as(tokens)
        drafted = torch.where(tokens >= 0, self._t2d[tokens.clamp(min=0)], -1)
        logprobs = self._logprobs[rows[:, None], entry, drafted.clamp(min=0)]
        return Foretold(
            known=fresh[:, None] & (ahead < committed.counts[:, None]) & (ahead < block_size),
            states=self._states[rows[:, None], entry],
            chances=logprobs.exp() * (drafted >= 0),
        )
