"""Records a drafter's states and probabilities for positions that get committed, for learning. They are taken from a
tree's first block, which covers the positions after the root whatever path is accepted.
Legend: batch, rows = sequences of the engine's table, block = K, draft_vocab, positions = committed ones."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from drafters.feedback import NOWHERE, DraftLabels, FeedbackRecorder, target_tops
from drafters.protocol import Committed, DraftContext, Read

_TOGETHER = 16
"""Positions that are processed together, at least: on a CPU less than half the cost of one by one. At most the shortest
window, so that no two of a sequence have the same index in the tables."""


class _Committed(NamedTuple):
    """What one step committed, of recorded sequences and others; each field [positions, ...]."""

    rows: Tensor
    roots: Tensor  # int64, absolute; the token is at the next position
    features: Tensor
    known: Tensor  # bool, a block had a state for the position
    states: Tensor
    tokens: Tensor
    chances: Tensor
    rejected: Tensor
    logits: Tensor


class BlockRecorder:
    """Keeps each row's last first block until the next commit shows which tokens its positions got. The last row is a
    dummy that pads batches."""

    def __init__(
        self, tables: FeedbackRecorder, t2d: Tensor, *, block_size: int, wanted: Callable[[], bool] = lambda: True
    ) -> None:
        """`t2d` [target_vocab] int64, draft id of a target token, -1 if it cannot be drafted; `wanted` decides for each
        sequence that begins, and may be stored, whether to record it."""
        self._tables = tables
        self._wanted = wanted
        self._recorded: set[int] = set()  # rows
        self._waiting: list[_Committed] = []
        self._t2d = t2d
        rows, device = tables.max_sequences + 1, t2d.device
        self._roots = torch.full((rows,), NOWHERE, dtype=torch.int64, device=device)
        self._states = torch.zeros(rows, block_size, tables.hidden, dtype=tables.dtype, device=device)
        draft_vocab = int(t2d.max()) + 1  # planned transfer: at the start
        self._logits = torch.zeros(rows, block_size, draft_vocab, dtype=tables.dtype, device=device)

    @property
    def wants_scores(self) -> bool:
        """Whether any running sequence is recorded."""
        return bool(self._recorded)

    def start(self, contexts: Sequence[DraftContext]) -> None:
        """Begin these sequences, and decide which to record."""
        self._process()  # steps that wait may be of a sequence, perhaps a private one, that had one of these rows
        rows = [context.row for context in contexts]
        wanted = [context for context in contexts if context.store and self._wanted()]
        self._recorded.difference_update(rows)
        self._recorded.update(context.row for context in wanted)
        self._roots[rows] = NOWHERE
        self._tables.forget(rows)
        self._tables.start(wanted)

    def read(self, read: Read) -> None:
        """Record a piece of a prompt."""
        if read.row in self._recorded:
            self._tables.read(read)

    def grown(self, rows: Tensor, roots: Tensor, states: Tensor, logits: Tensor) -> None:
        """Keep the first blocks of trees. # rows, roots [batch]; states [batch, block, hidden];
        logits [batch, block, draft_vocab]"""
        self._roots.index_copy_(0, rows, roots)
        self._states.index_copy_(0, rows, states.to(self._states.dtype))
        self._logits.index_copy_(0, rows, logits.to(self._logits.dtype))

    @torch.inference_mode()
    def commit(self, committed: Committed, *, grown: bool) -> None:
        """Record a step; `grown`: whether blocks were drafted since the last call."""
        if not self._recorded:
            return
        scores, features = committed.scores, committed.features
        assert scores is not None, "the engine was not asked for the target's scores"
        assert features is not None, "the target taps no features to learn from"
        width = committed.tokens.shape[1]
        index, depth = scores.places // width, scores.places % width  # sequence, and distance from the root
        rows, roots = committed.rows[index], committed.positions[index]
        tokens = committed.tokens.flatten()[scores.places]
        if grown:  # before the next step overwrites the blocks
            block = self._states.shape[1]
            entry, drafted = depth.clamp(max=block - 1), self._t2d[tokens]
            known = (self._roots[rows] == roots) & (depth < block)
            states = self._states[rows, entry]
            logits = self._logits[rows, entry].float()
            chances = (logits.gather(1, drafted.clamp(min=0)[:, None])[:, 0] - logits.logsumexp(1)).exp() * (
                drafted >= 0
            )
        else:
            known = torch.zeros_like(tokens, dtype=torch.bool)
            states, chances = self._states.new_zeros(1, 1).expand(len(tokens), self._states.shape[2]), known.float()
        self._waiting.append(
            _Committed(
                rows=rows,
                roots=roots + depth,
                features=features.flatten(0, 1)[scores.places],
                known=known,
                states=states,
                tokens=tokens,
                chances=chances,
                rejected=(depth == committed.counts[index] - 1) & (committed.tree.num_nodes[index] > 0),
                logits=scores.logits,
            )
        )
        if sum(len(step.rows) for step in self._waiting) >= _TOGETHER:
            self._process()

    def finish(self, rows: Sequence[int]) -> None:
        """End these sequences; what was recorded stays in the tables until `FeedbackRecorder.finish`."""
        if not self._recorded.isdisjoint(rows):
            self._process()
        self._recorded.difference_update(rows)

    @torch.inference_mode()
    def _process(self) -> None:
        """Write waiting steps to the tables."""
        if not self._waiting:
            return
        of = _Committed(*map(torch.cat, zip(*self._waiting, strict=True)))
        self._waiting = []
        positions = (of.roots + 1).where(of.known, NOWHERE)
        labels = DraftLabels(
            positions, of.states, of.tokens, of.chances, of.rejected, *target_tops(of.logits, self._tables.top)
        )
        self._tables.commit(of.rows, of.roots, of.features, labels)
