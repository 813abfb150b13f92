"""Finds where the end of a text occurred before, and what followed there. Knows nothing of trees or odds.

Legend: batch; columns = places of a text as drafters/lookup/history.py lays it out; matches; depth = MAX_DEPTH.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from drafters.lookup.history import CONTEXT, SEPARATOR, History
from drafters.tree import MAX_DEPTH

_PROBE = 3  # tokens compared everywhere; only the best places are followed further back


@dataclass(frozen=True, slots=True)
class Matches:
    """Places whose preceding tokens equal the text's last ones: those in the prediction first, then longest first."""

    columns: Tensor  # [batch, matches] int64, where the last equal token stands
    lengths: Tensor  # [batch, matches] int64, equal tokens (at most CONTEXT), 0 = no match
    predicted: Tensor  # [batch, matches] bool, found in the prediction
    continuations: Tensor  # [batch, depth, matches] int32, SEPARATOR where there is none


class Matcher:
    """Looks up the end of each text in the text itself."""

    def __init__(self, history: History, max_matches: int, *, device: torch.device | str) -> None:
        self._history = history
        self._max_matches = max_matches
        self._back = torch.arange(CONTEXT, device=device)
        self._ahead = torch.arange(MAX_DEPTH, device=device)[:, None]
        self._columns = torch.arange(CONTEXT, history.width, device=device)
        self._latest_first = self._columns.float()

    def find(self, rows: Tensor) -> Matches:
        """The best matches of each sequence. # rows [batch]"""
        texts = self._history.texts(rows, CONTEXT + self._max_matches + 1)
        last = self._history.ends[rows][:, None] - 1  # [batch, 1]
        suffix = texts.gather(1, last - self._back)  # [batch, CONTEXT], last token first
        if self._history.has_predictions:
            return self._find_both(texts, suffix, last, rows)
        columns, lengths = self._best(texts, suffix, last, self._latest_first[: texts.shape[1] - 1 - CONTEXT])
        lengths, order = lengths.sort(dim=1, descending=True, stable=True)
        columns = columns.gather(1, order)
        return Matches(columns, lengths, lengths < 0, self._continuations(texts, columns, lengths, last))

    def _find_both(self, texts: Tensor, suffix: Tensor, last: Tensor, rows: Tensor) -> Matches:
        """As `find`, where some texts come with predictions."""
        origins = self._history.origins[rows][:, None]
        preference = self._prediction_first(texts.shape[1], origins, self._history.cursors[rows][:, None])
        columns, lengths = self._best(texts, suffix, last, preference)
        rank = lengths + 2 * CONTEXT * ((columns < origins) & (lengths > 0))
        order = rank.sort(dim=1, descending=True, stable=True).indices
        columns, lengths = columns.gather(1, order), lengths.gather(1, order)
        predicted = (columns < origins) & (lengths > 0)
        continuations = self._continuations(texts, columns, lengths, last)
        beyond = columns[:, None] + self._ahead + 1 >= origins[:, None] - 1
        return Matches(columns, lengths, predicted, continuations.masked_fill_(beyond & predicted[:, None], SEPARATOR))

    def _prediction_first(self, end: int, origins: Tensor, cursors: Tensor) -> Tensor:
        """Among equals: the prediction before the text, near the cursor before far; the latest text first."""
        columns = self._columns[: end - 1 - CONTEXT]
        near = 3.0 * end - (columns - cursors).abs()
        return torch.where(columns < origins, near, columns)

    def _best(self, texts: Tensor, suffix: Tensor, last: Tensor, preference: Tensor) -> tuple[Tensor, Tensor]:
        """Columns and lengths of the matches that a first look of _PROBE tokens prefers. # two [batch, matches]"""
        scale = 4.0 * texts.shape[1]  # above every preference
        keys = (_grades(texts, suffix) * scale).add_(preference)
        keys.scatter_(1, last - CONTEXT, 0.0)  # the end of the text matches itself
        best = keys.topk(self._max_matches, dim=1)
        columns = best.indices + CONTEXT
        contexts = texts.gather(1, (columns[:, :, None] - self._back).flatten(1)).view(*columns.shape, CONTEXT)
        lengths = (contexts == suffix[:, None]).cumprod(2).sum(2)
        return columns, lengths * (best.values >= scale)

    def _continuations(self, texts: Tensor, columns: Tensor, lengths: Tensor, last: Tensor) -> Tensor:
        # A match close to the end of the text is a period: copying goes on into what it has just copied.
        period = (last - columns).clamp_(min=1)[:, None]
        places = self._ahead % period + (columns[:, None] + 1)  # [batch, depth, matches]
        tokens = texts.gather(1, places.flatten(1)).view(places.shape)
        return tokens.masked_fill_((lengths == 0)[:, None], SEPARATOR)


def _grades(texts: Tensor, suffix: Tensor) -> Tensor:
    """How many of the last _PROBE tokens are equal at each place but the last one, which nothing follows.

    -> [batch, columns - 1 - CONTEXT] uint8
    """
    end = texts.shape[1] - 1
    grades = (texts[:, CONTEXT - _PROBE + 1 : end - _PROBE + 1] == suffix[:, _PROBE - 1 : _PROBE]).view(torch.uint8)
    for back in range(_PROBE - 2, -1, -1):
        grades.add_(1).mul_(texts[:, CONTEXT - back : end - back] == suffix[:, back : back + 1])
    return grades
