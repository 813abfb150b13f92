"""The text of every running sequence as one token table, and where the end of a text occurred in it before.

The client's predicted answer is laid out before the text:

    | sentinels | end of the prompt | prediction | separator | prompt and generated text ...
                                                              ^ origin                      ^ end

The prediction follows a copy of the prompt's end, as the real answer will: finding where its beginning belongs is
then ordinary matching.
Legend: batch; sequences = rows of the table; width = columns of the table; matches; depth = REACH.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from drafters.protocol import DraftContext
from drafters.tree import MAX_DEPTH

REACH = 48
"""Tokens that a match is continued: a copy as long as the default budget of nodes. Of 48 instead of 16 a look-up takes
0.44 ms instead of 0.41 (one row, one thread)."""

CONTEXT = 16
"""Tokens that a match is followed back, and sentinels before each text, so that looking back needs no bounds check."""

SEPARATOR = -1
"""Stands where no token is; equals none."""

PREDICTED = CONTEXT + 1
"""Added to the strength of a match in the prediction: the shortest one there is stronger than any other."""

NUM_STRENGTHS = PREDICTED + CONTEXT + 1


class History:
    """Slot-addressed texts. `ends`, `origins` and `cursors` are columns of the table. # [sequences] int64
    A cursor is where the prediction is believed to be at: the column of its token that matches the text's last one."""

    def __init__(self, max_sequences: int, max_length: int, device: torch.device | str) -> None:
        self._max_length = max_length
        self.width = 2 * CONTEXT + 2 * max_length + 1 + MAX_DEPTH + 1
        self._tokens = torch.full((max_sequences, self.width), SEPARATOR, dtype=torch.int32, device=device)
        self.ends = torch.full((max_sequences,), CONTEXT, dtype=torch.int64, device=device)
        self.origins = torch.full_like(self.ends, CONTEXT)
        self.cursors = torch.full_like(self.ends, CONTEXT)
        self._reach = CONTEXT
        self.predicted: set[int] = set()  # rows whose sequences came with a prediction

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
        self.predicted.difference_update(rows)
        self.ends[list(rows)] = CONTEXT
        self._reach = int(self.ends.max())

    def texts(self, rows: Tensor, at_least: int) -> Tensor:
        """The texts in all columns that can be in use and one more, at least so many as asked. # -> [batch, columns]"""
        # The bound is the host's own and may be too wide: reading the exact one would wait for the device.
        columns = min(max(self._reach + 1, at_least), self.width)
        return self._tokens[:, :columns].index_select(0, rows)

    def _write(self, context: DraftContext) -> None:
        num_prompt = len(context.tokens) - context.num_generated
        before: list[int] = []
        if context.prediction:
            tail = context.tokens[max(0, num_prompt - CONTEXT) : num_prompt]
            before = [*tail, *context.prediction[: self._max_length], SEPARATOR]
        assert len(context.tokens) <= self._max_length, f"{len(context.tokens)} tokens in a table of {self._max_length}"
        text = torch.tensor([*before, *context.tokens], dtype=torch.int32)
        end = CONTEXT + len(text)
        self._tokens[context.row, end:] = SEPARATOR
        self._tokens[context.row, CONTEXT:end] = text.to(self._tokens.device)
        self.origins[context.row] = CONTEXT + len(before)
        self.ends[context.row] = end
        self.predicted.discard(context.row)
        if before:
            self.predicted.add(context.row)
            self.cursors[context.row] = CONTEXT + min(CONTEXT, num_prompt) - 1 + context.num_generated


@dataclass(frozen=True, slots=True)
class Matches:
    """Places whose preceding tokens equal the text's last ones, strongest first. Strength is the number of equal tokens
    (at most CONTEXT, 0 = no match), and PREDICTED more in the prediction, which may predict the bonus token as well."""

    columns: Tensor  # [batch, matches] int64, where the last equal token stands
    strengths: Tensor  # [batch, matches] int64
    continuations: Tensor  # [batch, depth + 1, matches] int64, SEPARATOR where there is none


class Matcher:
    """Looks up the end of each text in the text itself."""

    def __init__(self, history: History, max_matches: int, *, device: torch.device | str) -> None:
        self._history = history
        self._max_matches = max_matches
        self._back = torch.arange(CONTEXT, device=device)
        self._ahead = torch.arange(REACH + 1, device=device)[:, None]
        self._columns = torch.arange(CONTEXT, history.width, device=device)
        self._latest_first = self._columns.float()

    def find(self, rows: Tensor) -> Matches:
        """The best matches of each sequence. # rows [batch]"""
        # Two columns to spare: the end of the text, which matches only itself, and the last one, which nothing follows.
        texts = self._history.texts(rows, CONTEXT + self._max_matches + 2)
        last = self._history.ends[rows][:, None] - 1  # [batch, 1]
        if not self._history.predicted:
            columns, lengths = self._best(texts, last, self._latest_first[: texts.shape[1] - 1 - CONTEXT])
            columns, lengths = _strongest_first(columns, lengths)
            return Matches(columns, lengths, self._continuations(texts, columns, lengths, last))
        origins = self._history.origins[rows][:, None]
        # Among equals: the prediction before the text, near the cursor before far; the latest text first.
        places = self._columns[: texts.shape[1] - 1 - CONTEXT]
        near = 3.0 * texts.shape[1] - (places - self._history.cursors[rows][:, None]).abs()
        preference = torch.where(places < origins, near, places)
        columns, lengths = self._best(texts, last, preference)
        predicted = (columns < origins) & (lengths > 0)
        columns, strengths = _strongest_first(columns, lengths + PREDICTED * predicted)
        continuations = self._continuations(texts, columns, strengths, last)
        behind = (columns[:, None] + self._ahead + 2 >= origins[:, None]) & (strengths >= PREDICTED)[:, None]
        return Matches(columns, strengths, continuations.masked_fill_(behind, SEPARATOR))

    def _best(self, texts: Tensor, last: Tensor, preference: Tensor) -> tuple[Tensor, Tensor]:
        """Columns and lengths of the matches that a first look prefers. # two [batch, matches]"""
        suffix = texts.gather(1, last - self._back)  # [batch, CONTEXT], last token first
        scale = 4.0 * texts.shape[1]  # above every preference
        keys = torch.add(preference, _grades(texts, suffix), alpha=scale)
        keys.scatter_(1, last - CONTEXT, -1.0)
        columns = keys.topk(self._max_matches, dim=1).indices + CONTEXT
        contexts = texts.gather(1, (columns[:, :, None] - self._back).flatten(1)).view(*columns.shape, CONTEXT)
        return columns, (contexts == suffix[:, None]).cumprod(2).sum(2)

    def _continuations(self, texts: Tensor, columns: Tensor, strengths: Tensor, last: Tensor) -> Tensor:
        # A match close to the end of the text is a period: copying goes on into what it has just copied.
        period = (last - columns).clamp_(min=1)[:, None]
        places = (self._ahead % period).add_(columns[:, None] + 1)  # [batch, depth + 1, matches]
        tokens = texts.gather(1, places.flatten(1)).view(places.shape).long()
        return tokens.masked_fill_((strengths == 0)[:, None], SEPARATOR)


def _grades(texts: Tensor, suffix: Tensor) -> Tensor:
    """Equal ones of the last three tokens, at each place but the last. # -> [batch, columns - 1 - CONTEXT] uint8"""
    end = texts.shape[1] - 1
    one, two, three = (
        (texts[:, CONTEXT - back : end - back] == suffix[:, back : back + 1]).view(torch.uint8) for back in range(3)
    )
    return torch.addcmul(one, one, torch.addcmul(two, two, three))


def _strongest_first(columns: Tensor, strengths: Tensor) -> tuple[Tensor, Tensor]:
    strengths, order = strengths.sort(dim=1, descending=True, stable=True)
    return columns.gather(1, order), strengths
