"""From the target's logits to the target's tokens: penalties, filters and position-keyed noise, row by row.

A row's token is a function of its own logits and its own sequence, bit for bit: rows of one step may stand in any
order and any company. What nobody asked for is not computed; for those who did not ask a transform changes nothing,
so that no step has to find out which rows are whose. Knows nothing of trees beyond the tokens on a row's path, nor of
stop conditions.

Legend: rows = logits of one step that choose a token, batch = sequences in the step, vocab = token ids,
depth = padded length of a row's path, width = padded length of a list of ids.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from kernels.filters import likeliest
from kernels.sample import Choice
from kernels.sample_filtered import OFF, Filters
from service.engine.requests import SamplingParams
from service.engine.sampler import EAGER_SAMPLER, Sampler

_NEVER = float("-inf")


class Logprobs(NamedTuple):
    """Log-probabilities under the target's unprocessed distribution."""

    logprob: Tensor  # [rows] float32
    rank: Tensor  # [rows] int64, 1 = the likeliest token
    top_ids: Tensor  # [rows, k] int64, likeliest first, lower id first among equals
    top_logprobs: Tensor  # [rows, k] float32


def signed64(seed: int) -> int:
    """The low 64 bits of a seed as a signed integer, the form tensors hold it in."""
    return (seed + 2**63) % 2**64 - 2**63


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


class SamplingState:
    """How one sequence samples. Lives as long as the sequence; `extend` after each commit keeps it current."""

    __slots__ = ("device", "forbidden_at_first", "history", "params", "vocab")

    def __init__(
        self,
        params: SamplingParams,
        prompt: Sequence[int],
        generated: Sequence[int] = (),
        *,
        eos_ids: frozenset[int],
        vocab: int,
        device: torch.device,
    ) -> None:
        self.params = params
        self.vocab = vocab
        self.device = device
        self.forbidden_at_first = tuple(sorted(i for i in eos_ids | params.stop_token_ids if i < vocab))
        self.history = TokenHistory(prompt, vocab, device) if params.has_penalties else None
        self.extend(generated)

    def extend(self, tokens: Sequence[int]) -> None:
        """Hear of tokens that were committed."""
        if self.history is not None and tokens:
            self.history.extend(tokens)


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """What `choose_tokens` must know of each row of logits."""

    table: "SamplingTable"
    sequence_idx: Tensor  # [rows] int64, place of the row's sequence in the table
    positions: Tensor  # [rows] int64, absolute position of the token to be chosen
    num_generated: Tensor  # [rows] int64, tokens generated before that one, drafted ones on the path included
    path_tokens: Tensor  # [rows, depth] int64, drafted tokens from the root's child to this row's node, -1 padded


Transform = Callable[[Tensor, SamplingRows], None]
"""Changes scores [rows, vocab] float32 in place, those of sequences that asked for it."""


_Choose = Callable[[Tensor, Tensor, Tensor, Sampler], Choice]
"""Of scores [rows, vocab], each row's sequence and position [rows]."""


def _likeliest(scores: Tensor, sequence_idx: Tensor, positions: Tensor, sampler: Sampler) -> Choice:
    return sampler.likeliest(scores)


@dataclass(frozen=True, slots=True)
class SamplingTable:
    """The batch's sampling as a list of transforms, none for plain greedy decoding, and how tokens are chosen at their
    end. Built anew only when a sequence joins or leaves; penalties read the states' histories, which
    `SamplingState.extend` keeps current."""

    transforms: tuple[Transform, ...]
    choose: "_Choose" = _likeliest

    @property
    def is_plain(self) -> bool:
        """Whether the likeliest tokens are chosen of the logits as they are."""
        return not self.transforms and self.choose is _likeliest

    @staticmethod
    def build(states: Sequence[SamplingState]) -> "SamplingTable":
        """The transforms these sequences need, in the order in which vLLM applies them."""
        params = [state.params for state in states]
        plan: list[tuple[bool, _Build]] = [
            (any(p.logit_bias for p in params), _LogitBias.build),
            (any(p.min_tokens > 0 for p in params), _MinTokens.build),
            (any(p.has_penalties for p in params), _Penalties.build),
        ]
        return SamplingTable(tuple(build(states) for asked, build in plan if asked), _way_to_choose(states))


def choose_tokens(logits: Tensor, rows: SamplingRows) -> Choice:
    """The target's token for each row of logits, once every transform has changed the scores."""
    # logits [rows, vocab], any float dtype, left as they are
    transforms = rows.table.transforms
    scores = logits.to(torch.float32, copy=True) if transforms else logits
    for transform in transforms:
        transform(scores, rows)
    return rows.table.choose(scores, rows.sequence_idx, rows.positions, EAGER_SAMPLER)


def logprobs(logits: Tensor, token_ids: Tensor, k: int) -> Logprobs:
    """Log-probability and rank of each row's token, and the k likeliest tokens."""
    # logits [rows, vocab]; token_ids [rows] int64
    scores = logits.float()
    normed = scores.log_softmax(-1)
    chosen = token_ids[:, None]
    rank = (scores > scores.gather(1, chosen)).sum(-1) + 1
    top_ids = likeliest(scores, k)
    return Logprobs(normed.gather(1, chosen).squeeze(1), rank, top_ids, normed.gather(1, top_ids))


_Build = Callable[[Sequence[SamplingState]], Transform]


def _way_to_choose(states: Sequence[SamplingState]) -> "_Choose":
    """The cheapest that does for all of them."""
    if any(_filters(state.params) for state in states):
        return _FilteredDraw.build(states)
    return _Draw.build(states) if any(state.params.temperature > 0 for state in states) else _likeliest


@dataclass(frozen=True, slots=True)
class _LogitBias:
    ids: Tensor  # [batch, width] int64, 0 padded
    bias: Tensor  # [batch, width] float32, 0 padded

    @staticmethod
    def build(states: Sequence[SamplingState]) -> "_LogitBias":
        device = states[0].device
        ids = _padded([[i for i, _ in s.params.logit_bias] for s in states], torch.int64, device)
        bias = _padded([[b for _, b in s.params.logit_bias] for s in states], torch.float32, device)
        return _LogitBias(ids, bias)

    def __call__(self, scores: Tensor, rows: SamplingRows) -> None:
        scores.scatter_add_(1, self.ids[rows.sequence_idx], self.bias[rows.sequence_idx])


@dataclass(frozen=True, slots=True)
class _MinTokens:
    ids: Tensor  # [batch, width] int64, 0 padded
    bias: Tensor  # [batch, width] float32, -inf for an id that must wait, 0 padded
    min_tokens: Tensor  # [batch] int64

    @staticmethod
    def build(states: Sequence[SamplingState]) -> "_MinTokens":
        device = states[0].device
        ids = _padded([s.forbidden_at_first for s in states], torch.int64, device)
        bias = _padded([[_NEVER] * len(s.forbidden_at_first) for s in states], torch.float32, device)
        return _MinTokens(ids, bias, torch.tensor([s.params.min_tokens for s in states], device=device))

    def __call__(self, scores: Tensor, rows: SamplingRows) -> None:
        enough = rows.num_generated >= self.min_tokens[rows.sequence_idx]
        bias = self.bias[rows.sequence_idx].masked_fill(enough[:, None], 0.0)
        scores.scatter_add_(1, self.ids[rows.sequence_idx], bias)


@dataclass(frozen=True, slots=True)
class _Penalties:
    """Repetition penalty (Keskar et al., "CTRL", 2019, section 4.1) over prompt, text and path; OpenAI's frequency and
    presence penalties over text and path."""

    histories: tuple[TokenHistory, ...]
    history_idx: Tensor  # [batch] int64, any for sequences without penalties, whose numbers below are neutral
    repetition: Tensor  # [batch] float32
    frequency: Tensor  # [batch] float32
    presence: Tensor  # [batch] float32

    @staticmethod
    def build(states: Sequence[SamplingState]) -> "_Penalties":
        """The penalties of a batch, at least one of whose sequences has a history."""
        params, histories = [s.params for s in states], [s.history for s in states]
        kept = tuple(h for h in histories if h is not None)
        device = kept[0].ids.device
        has_history = torch.tensor([h is not None for h in histories], device=device)
        return _Penalties(
            kept,
            (has_history.cumsum(0) - 1).clamp(min=0),
            _floats([p.repetition_penalty for p in params], device),
            _floats([p.frequency_penalty for p in params], device),
            _floats([p.presence_penalty for p in params], device),
        )

    def __call__(self, scores: Tensor, rows: SamplingRows) -> None:
        """Change the scores of tokens that stand before each row's own."""
        sequence_idx, path_tokens = rows.sequence_idx, rows.path_tokens
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


def _filters(params: SamplingParams) -> bool:
    """Whether tokens are dropped before one is drawn."""
    return params.temperature > 0 and (params.top_p < 1 or params.min_p > 0 or params.top_k > 0)


@dataclass(frozen=True, slots=True)
class _Draw:
    """argmax_v (z[v] / T + g(s, p, v)), the Gumbel-max form of sampling, where nobody in the batch filters."""

    seeds: Tensor  # [batch] int64
    temperatures: Tensor  # [batch] float32, 0 = the likeliest token

    @staticmethod
    def build(states: Sequence[SamplingState]) -> "_Draw":
        return _Draw(_seeds(states), _floats([s.params.temperature for s in states], states[0].device))

    def __call__(self, scores: Tensor, sequence_idx: Tensor, positions: Tensor, sampler: Sampler) -> Choice:
        return sampler.sample(scores, self.seeds[sequence_idx], positions, self.temperatures[sequence_idx])


@dataclass(frozen=True, slots=True)
class _FilteredDraw:
    """The same with -inf for what filters drop."""

    draw: _Draw
    filters: Filters  # of each sequence

    @staticmethod
    def build(states: Sequence[SamplingState]) -> "_FilteredDraw":
        device, params = states[0].device, [state.params for state in states]
        least = [math.log(p.min_p) if p.min_p > 0 else OFF for p in params]
        top_k = [min(max(state.params.top_k, 0), state.vocab) for state in states]
        top_p = torch.tensor([p.top_p for p in params], dtype=torch.float64, device=device)
        filters = Filters(_floats(least, device), torch.tensor(top_k, device=device), top_p)
        return _FilteredDraw(_Draw.build(states), filters)

    def __call__(self, scores: Tensor, sequence_idx: Tensor, positions: Tensor, sampler: Sampler) -> Choice:
        seeds, temperatures = self.draw.seeds[sequence_idx], self.draw.temperatures[sequence_idx]
        return sampler.sample_filtered(scores, seeds, positions, temperatures, self.filters.of(sequence_idx))


def _padded(rows: Sequence[Sequence[float]], dtype: torch.dtype, device: torch.device) -> Tensor:
    """# [batch, width], 0 padded"""
    return nn.utils.rnn.pad_sequence([torch.tensor(row, dtype=dtype, device=device) for row in rows], batch_first=True)


def _floats(values: Sequence[float], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.float32, device=device)


def _seeds(states: Sequence[SamplingState]) -> Tensor:
    """# [batch] int64"""
    return torch.tensor([signed64(s.params.seed) for s in states], device=states[0].device)
