"""Finds where the end of a text occurred before, and what followed there. Knows nothing of trees or odds.

Legend: batch; columns = places of a text as drafters/lookup/history.py lays it out; matches; depth = MAX_DEPTH.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from drafters.lookup.history import CONTEXT, SEPARATOR, History
from drafters.tree import MAX_DEPTH

PREDICTED = CONTEXT + 1
"""Added to the strength of a match in the prediction: the shortest one there is stronger than any other."""

NUM_STRENGTHS = PREDICTED + CONTEXT + 1


@dataclass(frozen=True, slots=True)
class Matches:
    """Places whose preceding tokens equal the text's last ones, strongest first.

    Strength is the number of equal tokens (at most CONTEXT, 0 = no match), and PREDICTED more in the prediction.
    Continuations are one token longer than a tree is deep: a prediction may predict the bonus token as well.
    """

    columns: Tensor  # [batch, matches] int64, where the last equal token stands
    strengths: Tensor  # [batch, matches] int64
    continuations: Tensor  # [batch, depth + 1, matches] int64, SEPARATOR where there is none


class Matcher:
    """Looks up the end of each text in the text itself."""

    def __init__(self, history: History, max_matches: int, *, device: torch.device | str) -> None:
        self._history = history
        self._max_matches = max_matches
        self._back = torch.arange(CONTEXT, device=device)
        self._ahead = torch.arange(MAX_DEPTH + 1, device=device)[:, None]
        self._columns = torch.arange(CONTEXT, history.width, device=device)
        self._latest_first = self._columns.float()

    def find(self, rows: Tensor) -> Matches:
        """The best matches of each sequence. # rows [batch]"""
        # Two columns to spare: the end of the text, which matches only itself, and the last one, which nothing follows.
        texts = self._history.texts(rows, CONTEXT + self._max_matches + 2)
        last = self._history.ends[rows][:, None] - 1  # [batch, 1]
        if self._history.has_predictions:
            return self._find_in_both(texts, last, rows)
        columns, lengths = self._best(texts, last, self._latest_first[: texts.shape[1] - 1 - CONTEXT])
        columns, lengths = _strongest_first(columns, lengths)
        return Matches(columns, lengths, self._continuations(texts, columns, lengths, last))

    def _find_in_both(self, texts: Tensor, last: Tensor, rows: Tensor) -> Matches:
        """As `find`, where some texts come with predictions."""
        origins = self._history.origins[rows][:, None]
        preference = self._prediction_first(texts.shape[1], origins, self._history.cursors[rows][:, None])
        columns, lengths = self._best(texts, last, preference)
        predicted = (columns < origins) & (lengths > 0)
        columns, strengths = _strongest_first(columns, lengths + PREDICTED * predicted)
        continuations = self._continuations(texts, columns, strengths, last)
        behind = (columns[:, None] + self._ahead + 2 >= origins[:, None]) & (strengths >= PREDICTED)[:, None]
        return Matches(columns, strengths, continuations.masked_fill_(behind, SEPARATOR))

    def _prediction_first(self, end: int, origins: Tensor, cursors: Tensor) -> Tensor:
        """Among equals: the prediction before the text, near the cursor before far; the latest text first."""
        columns = self._columns[: end - 1 - CONTEXT]
        near = 3.0 * end - (columns - cursors).abs()
        return torch.where(columns < origins, near, columns)

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
    """How many of the last three tokens are equal at each place but the last one.

    -> [batch, columns - 1 - CONTEXT] uint8
    """
    end = texts.shape[1] - 1
    one, two, three = (
        (texts[:, CONTEXT - back : end - back] == suffix[:, back : back + 1]).view(torch.uint8) for back in range(3)
    )
    return torch.addcmul(one, one, torch.addcmul(two, two, three))


def _strongest_first(columns: Tensor, strengths: Tensor) -> tuple[Tensor, Tensor]:
    strengths, order = strengths.sort(dim=1, descending=True, stable=True)
    return columns.gather(1, order), strengths
