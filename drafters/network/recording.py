"""Records training data of running sequences: features and labels of committed positions. The drafter's states and
probabilities come from the first block of each tree, which covers the positions after the root for any accepted path.
Legend: batch, rows = sequences of the engine's table, block = K, draft_vocab, positions = committed ones."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from drafters.feedback import NOWHERE, DraftLabels, Query, QueryFeedback, target_tops
from drafters.network.config import DrafterConfig
from drafters.protocol import Committed, DraftContext, Read
from drafters.readback import reached
from drafters.tree import MAX_DEPTH

_PAST_END = MAX_DEPTH + 1  # positions that a step may commit beyond the end of an answer
_TOGETHER = 16
"""Minimum number of positions that are processed together, at less than half the cost of one by one on a CPU. It must
not exceed the shortest window, so that no two positions of a sequence have the same index in the tables."""


class _Committed(NamedTuple):
    """The positions that one step committed, of all sequences; each field [positions, ...]."""

    rows: Tensor
    roots: Tensor  # int64, absolute; the token is at the next position
    features: Tensor
    known: Tensor  # bool, whether a block had a state for the position
    states: Tensor
    tokens: Tensor
    chances: Tensor
    rejected: Tensor
    logits: Tensor


class FeedbackRecorder:
    """Collects training data of running sequences in ring buffers of their last positions. It keeps the first block of
    each row's newest tree until the next commit gives the tokens at its positions. The last row of these tables is a
    dummy that pads batches. All calls come from the engine thread."""

    def __init__(
        self,
        config: DrafterConfig,
        t2d: Tensor,
        *,
        max_sequences: int,
        window_tokens: int,
        top: int,
        dtype: torch.dtype,
        wanted: Callable[[], bool] = lambda: True,
    ) -> None:
        """`t2d` [target_vocab] int64, draft id of a target token, -1 if it cannot be drafted; `top`: number of
        the target's likeliest tokens to keep; `wanted`: called for each new sequence that may be stored, decides
        whether it is recorded."""
        self._wanted = wanted
        self._recorded: set[int] = set()  # rows
        self._waiting: list[_Committed] = []
        self._t2d = t2d
        self._window = window_tokens
        device, hidden = t2d.device, config.hidden_size

        def table(*shape: int, fill: float = 0, dtype: torch.dtype = dtype) -> Tensor:
            return torch.full((max_sequences, window_tokens + _PAST_END, *shape), fill, dtype=dtype, device=device)

        self._features = table(config.features_size)
        self._labels = DraftLabels(
            positions=table(fill=NOWHERE, dtype=torch.int64),
            states=table(hidden),
            tokens=table(fill=-1, dtype=torch.int64),
            chances=table(dtype=torch.float32),
            rejected=table(dtype=torch.bool),
            top_ids=table(top, dtype=torch.int32),
            top_logprobs=table(top, dtype=torch.float16),
        )
        self._first: dict[int, int] = {}
        self._prompt: dict[int, int] = {}
        blocks = max_sequences + 1, config.block_size
        self._roots = torch.full(blocks[:1], NOWHERE, dtype=torch.int64, device=device)
        self._states = torch.zeros(*blocks, hidden, dtype=dtype, device=device)
        draft_vocab = int(t2d.max()) + 1  # planned transfer: at the start
        self._logits = torch.zeros(*blocks, draft_vocab, dtype=dtype, device=device)

    @property
    def wants_scores(self) -> bool:
        """Whether any running sequence is recorded."""
        return bool(self._recorded)

    def forget(self) -> None:
        """Stop recording the running sequences, and discard what was recorded of them."""
        for recorded in (self._recorded, self._waiting, self._prompt, self._first):
            recorded.clear()

    @torch.inference_mode()
    def start(self, contexts: Sequence[DraftContext]) -> None:
        """Start these sequences, and decide which to record. Tokens generated before a preemption count as prompt."""
        self._process()  # waiting steps may belong to earlier sequences of these rows
        for context in contexts:
            row = context.row
            self._roots[row] = NOWHERE
            self._recorded.discard(row)
            self._prompt.pop(row, None)
            self._first.pop(row, None)
            if context.store and self._wanted():
                self._recorded.add(row)
                self._prompt[row] = len(context.tokens)
                self._first[row] = len(context.tokens) - 1
                self._labels.positions[row] = NOWHERE

    @torch.inference_mode()
    def read(self, read: Read) -> None:
        """Keep the features of a prompt chunk, as far as they are within the window."""
        if read.row not in self._recorded:
            return
        self._first[read.row] = min(self._first[read.row], read.start)
        count = min(read.features.shape[0], self._window)
        start = read.start + read.features.shape[0] - count
        places = self._range(start, start + count)
        self._features[read.row, places] = read.features[-count:].to(self._features.dtype)

    def grown(self, rows: Tensor, roots: Tensor, states: Tensor, logits: Tensor) -> None:
        """Keep the first blocks of new trees. # rows, roots [batch]; states [batch, block, hidden];
        logits [batch, block, draft_vocab]"""
        self._roots.index_copy_(0, rows, roots)
        self._states.index_copy_(0, rows, states.to(self._states.dtype))
        self._logits.index_copy_(0, rows, logits.to(self._logits.dtype))

    @torch.inference_mode()
    def commit(self, committed: Committed, *, grown: bool) -> None:
        """Record a step. `grown`: whether blocks were drafted since the last call."""
        if not self._recorded:
            return
        scores, features = committed.scores, committed.features
        assert scores is not None, "the engine was not asked for the target's scores"
        assert features is not None, "the target taps no features to learn from"
        width = committed.tokens.shape[1]
        index, depth = scores.places // width, scores.places % width  # index in the batch, and distance from the root
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

    def end(self, rows: Sequence[int]) -> None:
        """Stop recording these sequences. Their recordings stay until `finish`."""
        if not self._recorded.isdisjoint(rows):
            self._process()
        self._recorded.difference_update(rows)

    @torch.inference_mode()
    def store(self, rows: Tensor, roots: Tensor, features: Tensor, labels: DraftLabels) -> None:
        """Write committed positions to the tables, in any order. The positions of one sequence must span less than the
        window plus what one step commits. `labels`: of the token after each position, with position NOWHERE if no block
        had a state. # rows, roots [positions] int64, roots absolute; features [positions, width]"""
        self._features[rows, roots % self._features.shape[1]] = features.to(self._features.dtype)
        places = (roots + 1) % self._features.shape[1]
        for table, values in zip(self._labels.fields, labels.fields, strict=True):
            table[rows, places] = values.to(table.dtype)

    @torch.inference_mode(False)
    def finish(self, query: Query) -> QueryFeedback:
        """Return a copy of what was recorded of a finished query."""
        row, length = query.row, len(query.tokens)
        first = max(self._first.pop(row, length - 1), length - self._window)
        prompt = max(self._prompt.pop(row, length), length - self._window)
        features = self._range(first, length - 1)
        labels = self._range(prompt, length)
        kept = DraftLabels(*(table[row, labels] for table in self._labels.fields))
        # The ring buffer may still hold older labels.
        marked = kept.positions == prompt + torch.arange(labels.shape[0], device=labels.device)
        return QueryFeedback(
            query=query,
            prompt=prompt,
            first=first,
            features=self._features[row, features],
            top_ids=kept.top_ids,
            top_logprobs=kept.top_logprobs,
            draft_labels=kept.take(marked.nonzero()[:, 0]),  # planned transfer: number of labels, once per query
            ready=reached(self._features),
        )

    def _range(self, start: int, end: int) -> Tensor:
        return torch.arange(start, max(start, end), device=self._features.device) % self._features.shape[1]

    @torch.inference_mode()
    def _process(self) -> None:
        """Compute the labels of waiting steps, and write them to the tables."""
        if not self._waiting:
            return
        of = _Committed(*map(torch.cat, zip(*self._waiting, strict=True)))
        self._waiting = []
        positions = (of.roots + 1).where(of.known, NOWHERE)
        tops = target_tops(of.logits, self._labels.top_ids.shape[-1])
        labels = DraftLabels(positions, of.states, of.tokens, of.chances, of.rejected, *tops)
        self.store(of.rows, of.roots, of.features, labels)
