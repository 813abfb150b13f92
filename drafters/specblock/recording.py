"""What a SpecBlock drafter said of the positions that came to be committed, for whoever learns from it.

A tree's first block speaks of the positions right behind the root whatever path is accepted; later blocks hang on
tokens that may not come, and are not kept. What steps committed is worked up several steps at a time: beside a forward
that leaves nothing in the caches, most operations on a single position take longer to begin than to compute.
Legend: batch, rows = sequences of the engine's table, block = K, depth = longest accepted path, draft_vocab,
positions = those that steps made permanent.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from drafters.feedback import FeedbackRecorder, Permanent, Predicted, target_tops
from drafters.protocol import Committed, DraftContext, Read, Scores

_NEVER = -1
_TOGETHER = 16
"""Positions that are worked up together, at least: that costs a CPU less than half of what it does one by one. Not more
than the shortest window, so that no two of a sequence have the same place in the tables."""


class Recorder:
    """Observes what a drafter observes, and what it said. This one keeps nothing, and asks nothing of the target."""

    @property
    def wants_scores(self) -> bool:
        return False

    def start(self, contexts: Sequence[DraftContext]) -> None:
        """Begin these sequences."""

    def read(self, read: Read) -> None:
        """A piece of a prompt."""

    def grown(self, rows: Tensor, roots: Tensor, states: Tensor, logprobs: Tensor) -> None:
        """The first block of a tree. # rows, roots [batch]; states [batch, block, hidden];
        logprobs [batch, block, draft_vocab]"""

    def commit(self, committed: Committed, *, grown: bool) -> None:
        """`grown` says whether blocks were drafted since the last call."""

    def finish(self, rows: Sequence[int]) -> None:
        """These sequences have ended."""


class BlockRecorder(Recorder):
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
        self._waiting: list[tuple[_Step, Predicted]] = []
        self._tables = tables
        self._t2d = t2d
        shape = (max_sequences + 1, block_size)
        draft_vocab = int(t2d.max()) + 1
        self._roots = torch.full(shape[:1], _NEVER, dtype=torch.int64, device=t2d.device)
        self._states = torch.zeros(*shape, hidden, dtype=tables.dtype, device=t2d.device)
        self._logprobs = torch.zeros(*shape, draft_vocab, device=t2d.device)
        known = torch.zeros(1, dtype=torch.bool, device=t2d.device)
        self._unpredicted = Predicted(known, self._states.new_zeros(1, hidden), self._logprobs.new_zeros(1))

    @property
    def wants_scores(self) -> bool:
        return bool(self._recorded)

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
    def commit(self, committed: Committed, *, grown: bool) -> None:
        if not self._recorded:
            return
        assert committed.scores is not None, "the engine was not asked for the target's scores"
        step = _Step(committed, committed.scores)
        predicted = self._predicted(step) if grown else _all_alike(self._unpredicted, step.num_positions)
        self._waiting.append((step, predicted))
        if sum(step.num_positions for step, _ in self._waiting) >= _TOGETHER:
            self._work_up()

    @torch.inference_mode()
    def finish(self, rows: Sequence[int]) -> None:
        """Nothing more comes of these; what was kept of them lies in the tables until it is taken out."""
        if self._waiting and not self._recorded.isdisjoint(rows):
            self._work_up()
        self._recorded.difference_update(rows)

    def _work_up(self) -> None:
        """Put what waits into the tables."""
        steps = [step for step, _ in self._waiting]
        permanent = Permanent(*map(torch.cat, zip(*(step.permanent() for step in steps), strict=True)))
        predicted = Predicted(*map(torch.cat, zip(*(predicted for _, predicted in self._waiting), strict=True)))
        tops = target_tops(torch.cat([step.scores.logits for step in steps]), self._target_top)
        self._waiting = []
        self._tables.commit(permanent, predicted, tops)

    def _predicted(self, step: "_Step") -> Predicted:
        """What the blocks of this very step said, before others take their places."""
        line, ahead = step.lines_and_depths()
        rows, tokens = step.committed.rows[line], step.tokens()
        fresh = self._roots[rows] == step.committed.positions[line]
        block_size = self._states.shape[1]
        entry = ahead.clamp(max=block_size - 1)
        drafted = self._t2d[tokens]
        return Predicted(
            known=fresh & (ahead < block_size),
            states=self._states[rows, entry],
            chances=self._logprobs[rows, entry, drafted.clamp(min=0)].exp() * (drafted >= 0),
        )


@dataclass(frozen=True, slots=True)
class _Step:
    """What one step made permanent, as it lies in the step's own tensors."""

    committed: Committed
    scores: Scores

    @property
    def num_positions(self) -> int:
        return self.scores.places.shape[0]

    def lines_and_depths(self) -> tuple[Tensor, Tensor]:
        """Whose positions these are, and how far behind the root. # -> two [positions] int64"""
        width = self.committed.tokens.shape[1]
        return self.scores.places // width, self.scores.places % width

    def tokens(self) -> Tensor:
        """# -> [positions] int64"""
        return self.committed.tokens.flatten()[self.scores.places]

    def permanent(self) -> Permanent:
        committed, features = self.committed, self.committed.features
        assert features is not None, "the target taps no features to learn from"
        line, depth = self.lines_and_depths()
        return Permanent(
            rows=committed.rows[line],
            roots=committed.positions[line] + depth,
            features=features.flatten(0, 1)[self.scores.places],
            tokens=self.tokens(),
            rejected=(depth == committed.counts[line] - 1) & (committed.tree.num_nodes[line] > 0),
        )


def _all_alike(one: Predicted, count: int) -> Predicted:
    """The same of so many positions. # one [1, ...]"""
    return Predicted(*(part.expand(count, *part.shape[1:]) for part in one))
