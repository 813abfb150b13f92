"""Log-probabilities of prompts, for requests that ask: they come of the forwards that read them, a chunk at a time, so
that no more rows of logits are held than one chunk has."""

from collections.abc import Iterator
from collections.abc import Sequence as Items
from typing import NamedTuple

import torch
from torch import Tensor

from service.engine.requests import TokenLogprob
from service.engine.sampling import logprobs
from service.engine.scheduler import Scheduled
from service.engine.sequence import Sequence


class Scored(NamedTuple):
    """Positions of one prompt whose tokens a step gives a score, and the rows before them."""

    sequence: Sequence
    first_row: int  # of the step's extend rows; the others follow
    positions: range


def scored_in(items: Items[Scheduled]) -> list[Scored]:
    """What of the step's prompts gets a score: all tokens but the first, for which there is nothing to go by."""
    return [one for one in _found(items) if one.positions]


def _found(items: Items[Scheduled]) -> Iterator[Scored]:
    row = 0
    for item in items:
        sequence = item.sequence
        if sequence.request.scores_prompt and not sequence.num_generated:
            last = min(item.start + item.num_rows, sequence.num_prompt - 1)
            yield Scored(sequence, row, range(item.start + 1, last + 1))
        row += item.num_rows


def rows_of(scored: Items[Scored], device: torch.device) -> Tensor | None:
    """Rows whose logits are wanted; None: no rows. # -> [scored] int64"""
    rows = [row for one in scored for row in range(one.first_row, one.first_row + len(one.positions))]
    return torch.tensor(rows, device=device) if rows else None


def note_scores(scored: Items[Scored], logits: Tensor) -> None:
    """Write down the scores of a step's prompts. # logits [scored, vocab]"""
    first = 0
    for sequence, _, positions in scored:
        tokens = sequence.tokens[positions.start : positions.stop]
        lines = logits[first : first + len(positions)]
        count = sequence.request.sampling.num_logprobs or 0
        sequence.prompt_scores.update(zip(positions, shown(lines, tokens, count), strict=True))
        first += len(positions)


def shown(logits: Tensor, tokens: Items[int], count: int) -> Iterator[TokenLogprob]:
    """Log-probabilities of tokens and of the likeliest ones beside them. # logits [tokens, vocab]"""
    found = logprobs(logits, torch.tensor(tokens, device=logits.device), count)
    rows = zip(
        tokens,
        found.logprob.tolist(),  # planned transfer: only for requests that ask
        found.rank.tolist(),  # planned transfer
        found.top_ids.tolist(),  # planned transfer
        found.top_logprobs.tolist(),  # planned transfer
        strict=True,
    )
    for token, logprob, rank, ids, values in rows:
        yield TokenLogprob(token, logprob, rank, tuple(zip(ids, values, strict=True)))
