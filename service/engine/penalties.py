"""Repetition, frequency and presence penalties over prompt, generated text and the drafted tokens of a row's path.

Only the tokens that a row has seen are touched, so the price follows the text and not the vocabulary. Knows nothing
of the other stages of sampling.

Legend: rows = logits of one step that choose a token, batch = sequences in the step, vocab = token ids,
depth = padded length of a row's path, width = padded number of distinct tokens seen.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from service.engine.requests import SamplingParams


class TokenHistory:
    """Which tokens a sequence has seen and how often it wrote them: what its penalties are computed from."""

    __slots__ = ("_seen", "counts", "ids", "in_prompt")

    def __init__(self, prompt: Sequence[int], vocab: int, device: torch.device) -> None:
        self._seen = set(prompt)
        self.ids = torch.tensor(sorted(self._seen), dtype=torch.int64, device=device)  # [seen], each once
        self.in_prompt = torch.zeros(vocab, dtype=torch.bool, device=device)  # [vocab]
        self.in_prompt[self.ids] = True
        self.counts = torch.zeros(vocab, device=device)  # [vocab] float32

    def extend(self, tokens: Sequence[int]) -> None:
        """Count tokens that were committed."""
        written = torch.tensor(tokens, dtype=torch.int64, device=self.ids.device)
        self.counts.index_add_(0, written, torch.ones(len(tokens), device=self.ids.device))
        new = set(tokens) - self._seen
        self._seen |= new
        self.ids = torch.cat((self.ids, torch.tensor(sorted(new), dtype=torch.int64, device=self.ids.device)))


@dataclass(frozen=True, slots=True)
class PenaltyTable:
    """Repetition penalty (Keskar et al., "CTRL", 2019, section 4.1) over prompt, text and path; OpenAI's frequency and
    presence penalties over text and path."""

    histories: tuple[TokenHistory, ...]
    history_idx: Tensor  # [batch] int64, any for sequences without penalties, whose numbers below are neutral
    repetition: Tensor  # [batch] float32
    frequency: Tensor  # [batch] float32
    presence: Tensor  # [batch] float32

    @staticmethod
    def build(params: Sequence[SamplingParams], histories: Sequence[TokenHistory | None]) -> "PenaltyTable":
        """The penalties of a batch, at least one of whose sequences has a history."""
        kept = tuple(h for h in histories if h is not None)
        device = kept[0].ids.device
        has_history = torch.tensor([h is not None for h in histories], device=device)
        return PenaltyTable(
            kept,
            (has_history.cumsum(0) - 1).clamp(min=0),
            _floats([p.repetition_penalty for p in params], device),
            _floats([p.frequency_penalty for p in params], device),
            _floats([p.presence_penalty for p in params], device),
        )

    def penalise(self, scores: Tensor, sequence_idx: Tensor, path_tokens: Tensor) -> None:
        """Change, in place, the scores of tokens that stand before each row's own."""
        # scores [rows, vocab] float32; sequence_idx [rows] int64; path_tokens [rows, depth] int64, -1 padded
        histories = self.history_idx[sequence_idx]  # [rows]
        ids = self._seen_ids(histories, path_tokens)
        counts = torch.stack([h.counts for h in self.histories])[histories[:, None], ids]
        counts += (ids[:, :, None] == path_tokens[:, None, :]).sum(-1)
        in_prompt = torch.stack([h.in_prompt for h in self.histories])[histories[:, None], ids]
        # an id may stand here twice, with the same new score both times; padding is id 0, which changes only if seen
        scores.scatter_(1, ids, self._penalised(scores.gather(1, ids), counts, in_prompt, sequence_idx))

    def _seen_ids(self, histories: Tensor, path_tokens: Tensor) -> Tensor:
        """Every token that stands before the row's own, 0 padded. # [rows, width + depth]"""
        ids = nn.utils.rnn.pad_sequence([h.ids for h in self.histories], batch_first=True)
        return torch.cat((ids[histories], path_tokens.clamp(min=0)), 1)

    def _penalised(self, scores: Tensor, counts: Tensor, in_prompt: Tensor, sequence_idx: Tensor) -> Tensor:
        # all [rows, width + depth]
        repetition = self.repetition[sequence_idx, None]
        written = counts > 0
        repeated = torch.where(scores > 0, scores / repetition, scores * repetition)
        scores = torch.where(written | in_prompt, repeated, scores)
        return scores - counts * self.frequency[sequence_idx, None] - written * self.presence[sequence_idx, None]


def _floats(values: Sequence[float], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.float32, device=device)
