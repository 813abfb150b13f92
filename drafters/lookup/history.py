"""The texts of all running sequences in one table, laid out as in kernels/lookup.py. Legend: rows = its lines."""

from collections.abc import Sequence

import torch
from torch import Tensor

from drafters.protocol import DraftContext
from drafters.tree import MAX_DEPTH
from kernels.lookup import CONTEXT, SEPARATOR, Texts


class History:
    """What sequences have said, and what their clients predict."""

    def __init__(
        self, max_sequences: int, max_length: int, device: torch.device | str, *, is_fixed: bool = False
    ) -> None:
        """`is_fixed`: what looks through it takes all columns there are, in use or not."""
        self._max_length, self._is_fixed = max_length, is_fixed
        width = 2 * CONTEXT + 2 * max_length + 1 + MAX_DEPTH + 1
        rows = max_sequences + 1  # the last one is nobody's, which pads batches
        tokens = torch.full((rows, width), SEPARATOR, dtype=torch.int32, device=device)
        ends, origins, cursors = (torch.full((rows,), CONTEXT, device=device) for _ in range(3))
        ends[max_sequences] += 1  # a text has a last token
        self.texts = Texts(tokens, ends, origins, cursors)

    def start(self, contexts: Sequence[DraftContext]) -> None:
        """Lay out these sequences' texts."""
        for context in contexts:
            self._write(context)

    def columns(self, at_least: int) -> int:
        """All columns in use and one more, at least so many as asked."""
        if self._is_fixed:
            return self.width
        in_use = int(self.texts.ends.max())  # planned transfer: where nothing is captured
        return min(max(in_use + 1, at_least), self.width)

    @property
    def width(self) -> int:
        """All columns there are."""
        return self.texts.tokens.shape[1]

    def append(self, rows: Tensor, tokens: Tensor, counts: Tensor) -> None:
        """Add counts[b] tokens to each text. # rows [batch], tokens [batch, depth + 1], counts [batch]"""
        ends = self.texts.ends[rows]
        columns = ends[:, None] + torch.arange(tokens.shape[1], device=rows.device)
        # Padding lands behind the new end, where the next tokens overwrite it: behind a text stand only separators.
        self.texts.tokens[rows[:, None], columns] = tokens.to(torch.int32)
        self.texts.ends.index_add_(0, rows, counts)
        self.texts.cursors.index_add_(0, rows, counts)

    def finish(self, rows: Sequence[int]) -> None:
        """Forget these texts."""
        self.texts.ends[list(rows)] = CONTEXT

    def _write(self, context: DraftContext) -> None:
        num_prompt = len(context.tokens) - context.num_generated
        before: list[int] = []
        if context.prediction:
            tail = context.tokens[max(0, num_prompt - CONTEXT) : num_prompt]
            before = [*tail, *context.prediction[: self._max_length], SEPARATOR]
        assert len(context.tokens) <= self._max_length, f"{len(context.tokens)} tokens in a table of {self._max_length}"
        text = torch.tensor([*before, *context.tokens], dtype=torch.int32)
        end = CONTEXT + len(text)
        tokens, ends, origins, cursors = self.texts
        tokens[context.row, end:] = SEPARATOR
        tokens[context.row, CONTEXT:end] = text.to(tokens.device)
        ends[context.row], origins[context.row] = end, CONTEXT + len(before)
        if before:
            cursors[context.row] = CONTEXT + min(CONTEXT, num_prompt) - 1 + context.num_generated
