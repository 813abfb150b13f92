"""The text of every running sequence as one token table, the client's predicted answer laid out before it.

    | sentinels | end of the prompt | prediction | separator | prompt and generated text ...
                                                              ^ origin                      ^ end

The prediction follows a copy of the prompt's end, as the real answer will: finding where its beginning belongs is
then ordinary matching. Knows nothing of trees.
Legend: batch; sequences = rows of the table; width = columns of the table.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from drafters.protocol import DraftContext
from drafters.tree import MAX_DEPTH

CONTEXT = 16
"""Tokens that a match is followed back, and sentinels before each text, so that looking back needs no bounds check."""

SEPARATOR = -1
"""Stands where no token is; equals none."""


class History:
    """Slot-addressed texts. `ends`, `origins` and `cursors` are columns of the table. # [sequences] int64

    A cursor is where the prediction is believed to be at: the column of its token that matches the last one of the
    text.
    """

    def __init__(self, max_sequences: int, max_length: int, device: torch.device | str) -> None:
        self._max_length = max_length
        self.width = 2 * CONTEXT + 2 * max_length + 1 + MAX_DEPTH + 1
        self._tokens = torch.full((max_sequences, self.width), SEPARATOR, dtype=torch.int32, device=device)
        self.ends = torch.full((max_sequences,), CONTEXT, dtype=torch.int64, device=device)
        self.origins = torch.full_like(self.ends, CONTEXT)
        self.cursors = torch.full_like(self.ends, CONTEXT)
        self._reach = CONTEXT
        self._predicted: set[int] = set()

    @property
    def has_predictions(self) -> bool:
        """Whether any running sequence came with a prediction."""
        return bool(self._predicted)

    def start(self, contexts: Sequence[DraftContext]) -> None:
        """Lay out these sequences' texts."""
        for context in contexts:
            self._write(context)
        self._reach = int(self.ends.max())

    def append(self, rows: Tensor, tokens: Tensor, counts: Tensor) -> None:
        """Add counts[b] tokens to each text. # rows [batch], tokens [batch, depth + 1], counts [batch]"""
        ends = self.ends[rows]
        columns = ends[:, None] + torch.arange(tokens.shape[1], device=rows.device)
        # Padding lands behind the new end, where the next tokens overwrite it: behind a text stand only separators.
        self._tokens[rows[:, None], columns] = tokens.to(torch.int32)
        self.ends[rows] = ends + counts
        self.cursors[rows] += counts
        self._reach += tokens.shape[1]

    def follow(self, rows: Tensor, columns: Tensor, sure: Tensor) -> None:
        """Move the cursors to where the prediction surely is at. # all [batch]"""
        self.cursors[rows] = torch.where(sure, columns, self.cursors[rows])

    def finish(self, rows: Sequence[int]) -> None:
        """Forget these texts."""
        for row in rows:
            self._predicted.discard(row)
        self.ends[list(rows)] = CONTEXT
        self._reach = int(self.ends.max())

    def texts(self, rows: Tensor, at_least: int) -> Tensor:
        """The texts in all columns that can be in use and one more, at least as many as asked for. # [batch, columns]

        The bound is the host's own and may be too wide: reading the exact one would wait for the device.
        """
        columns = min(max(self._reach + 1, at_least), self.width)
        return self._tokens[:, :columns].index_select(0, rows)

    def _write(self, context: DraftContext) -> None:
        before = self._predicted_text(context)
        assert len(context.tokens) <= self._max_length, f"{len(context.tokens)} tokens in a table of {self._max_length}"
        text = torch.tensor([*before, *context.tokens], dtype=torch.int32)
        end = CONTEXT + len(text)
        self._tokens[context.row, end:] = SEPARATOR
        self._tokens[context.row, CONTEXT:end] = text.to(self._tokens.device)
        self.origins[context.row] = CONTEXT + len(before)
        self.ends[context.row] = end
        self._predicted.discard(context.row)
        if before:
            self._predicted.add(context.row)
            num_prompt = len(context.tokens) - context.num_generated
            self.cursors[context.row] = CONTEXT + min(CONTEXT, num_prompt) - 1 + context.num_generated

    def _predicted_text(self, context: DraftContext) -> list[int]:
        if not context.prediction:
            return []
        num_prompt = len(context.tokens) - context.num_generated
        tail = context.tokens[max(0, num_prompt - CONTEXT) : num_prompt]
        return [*tail, *context.prediction[: self._max_length], SEPARATOR]
