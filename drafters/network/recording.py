"""Records training data of running sequences: features and labels of committed positions. The drafter's states and
probabilities come from the first block of each tree, which covers the positions after the root for any accepted path.
Legend: batch, rows = sequences of the engine's table, block = K, draft_vocab, positions = committed ones."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from drafters.feedback import DraftLabels, Query, QueryFeedback
from drafters.network.config import DrafterConfig
from drafters.protocol import Committed, DraftContext, Read
from drafters.readback import reached
from drafters.tree import MAX_DEPTH
from kernels import ops
from kernels.entries import NOWHERE, CommittedTokens, FirstBlocks, Recordings
from kernels.memory import FEATURES, ORDERS, WAYS, WEIGHT_SETS

_PAST_END = MAX_DEPTH + 1  # positions that a step may commit beyond the end of an answer


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
        self._wanted, self._window = wanted, window_tokens
        self.captured = False  # whether graphs repeat calls of `grown`, which must then keep every block
        self._recorded: set[int] = set()  # rows
        device, hidden = t2d.device, config.hidden_size

        def table(*shape: int, fill: float = 0, dtype: torch.dtype = dtype) -> Tensor:
            return torch.full((max_sequences, window_tokens + _PAST_END, *shape), fill, dtype=dtype, device=device)

        labels = DraftLabels(
            positions=table(fill=NOWHERE, dtype=torch.int64),
            states=table(hidden),
            tokens=table(fill=-1, dtype=torch.int64),
            chances=table(dtype=torch.float32),
            rejected=table(dtype=torch.bool),
            top_ids=table(top, dtype=torch.int32),
            top_logprobs=table(top, dtype=torch.float32),
        )
        no_rows = torch.zeros(max_sequences + 1, dtype=torch.bool, device=device)
        past, learned = table(len(ORDERS), WAYS, dtype=torch.int64), (max_sequences, 2, WEIGHT_SETS, FEATURES)
        regression = torch.zeros(learned, device=device)
        self._tables = Recordings(no_rows, table(config.features_size), labels, past, regression)
        self._beside_memory = False  # whether a memory drafts too
        self._first, self._prompt = dict[int, int](), dict[int, int]()  # row -> first position with features, and label
        blocks = max_sequences + 1, config.block_size
        draft_vocab = int(t2d.max()) + 1  # planned transfer: at the start
        self._blocks = FirstBlocks(
            roots=torch.full(blocks[:1], NOWHERE, dtype=torch.int64, device=device),
            states=torch.zeros(*blocks, hidden, dtype=dtype, device=device),
            logits=torch.zeros(*blocks, draft_vocab, dtype=dtype, device=device),
            t2d=t2d,
        )
        self._ops = ops.on(device)

    @property
    def wants_scores(self) -> bool:
        """Whether any running sequence is recorded."""
        return bool(self._recorded)

    def forget(self) -> None:
        """Stop recording the running sequences, and discard what was recorded of them."""
        self._tables.wanted.fill_(False)
        for recorded in (self._recorded, self._prompt, self._first):
            recorded.clear()

    @torch.inference_mode()
    def start(self, contexts: Sequence[DraftContext]) -> None:
        """Start these sequences, and decide which to record. Tokens generated before a preemption count as prompt."""
        for context in contexts:
            row = context.row
            self._blocks.roots[row] = NOWHERE
            self.end([row])
            self._prompt.pop(row, None)
            self._first.pop(row, None)
            if context.store and self._wanted():
                self._recorded.add(row)
                self._tables.wanted[row] = True
                self._prompt[row] = len(context.tokens)
                self._first[row] = len(context.tokens) - 1
                self._tables.labels.positions[row] = NOWHERE
                self._beside_memory = context.regression is not None
                if context.regression is not None:
                    self._tables.regression[row] = context.regression()

    @torch.inference_mode()
    def read(self, read: Read) -> None:
        """Keep the features of a prompt chunk, as far as they are within the window."""
        if read.row not in self._recorded:
            return
        self._first[read.row] = min(self._first[read.row], read.start)
        count = min(read.features.shape[0], self._window)
        start = read.start + read.features.shape[0] - count
        features = self._tables.features
        features[read.row, self._range(start, start + count)] = read.features[-count:].to(features.dtype)

    def grown(self, rows: Tensor, roots: Tensor, states: Tensor, logits: Tensor) -> None:
        """Keep the first blocks of new trees. # rows, roots [batch]; states [batch, block, hidden];
        logits [batch, block, draft_vocab]"""
        if self._recorded or self.captured:
            for table, values in zip(self._blocks, (roots, states, logits), strict=False):
                table.index_copy_(0, rows, values.to(table.dtype))

    def commit(self, committed: Committed, *, grown: bool) -> None:
        """Record a step. `grown`: whether blocks were drafted since the last call."""
        if not self._recorded:
            return
        logits, chosen_by, features = committed.logits, committed.chosen_by, committed.features
        assert logits is not None, "the engine was not asked for the target's logits"
        assert chosen_by is not None, "the engine was not asked for the target's logits"
        assert features is not None, "the target taps no features to learn from"
        given = committed.rows, committed.positions, committed.counts, committed.tree.num_nodes, committed.tokens
        of = CommittedTokens(*given, features, logits, chosen_by)
        self._ops.record_tokens(self._tables, self._blocks if grown else None, of)
        if committed.past is not None:  # columns of padding are written again before they are read
            first, places = committed.positions[:, None] + 1, self._tables.past.shape[1]
            columns = torch.arange(committed.past.shape[1], device=first.device) + first
            self._tables.past[committed.rows[:, None], columns % places] = committed.past

    def end(self, rows: Sequence[int]) -> None:
        """Stop recording these sequences. Their recordings stay until `finish`."""
        for row in self._recorded.intersection(rows):
            self._tables.wanted[row] = False
        self._recorded.difference_update(rows)

    @torch.inference_mode(False)
    def finish(self, query: Query) -> QueryFeedback:
        """Return a copy of what was recorded of a finished query."""
        row, length = query.row, len(query.tokens)
        first = max(self._first.pop(row, length - 1), length - self._window)
        prompt = max(self._prompt.pop(row, length), length - self._window)
        features = self._range(first, length - 1)
        labels = self._range(prompt, length)
        kept = DraftLabels(*(table[row, labels] for table in self._tables.labels.fields))
        kept = replace(kept, top_logprobs=kept.top_logprobs.half())
        # The ring buffer may still hold older labels.
        marked = kept.positions == prompt + torch.arange(labels.shape[0], device=labels.device)
        return QueryFeedback(
            query=query,
            prompt=prompt,
            first=first,
            features=self._tables.features[row, features],
            top_ids=kept.top_ids,
            top_logprobs=kept.top_logprobs,
            draft_labels=kept.take(marked.nonzero()[:, 0]),  # planned transfer: number of labels, once per query
            past=self._tables.past[row, labels] if self._beside_memory else None,
            regression=self._tables.regression[row].clone() if self._beside_memory else None,
            ready=reached(self._tables.features),
        )

    def _range(self, start: int, end: int) -> Tensor:
        features = self._tables.features
        return torch.arange(start, max(start, end), device=features.device) % features.shape[1]
