"""From the target's logits to the target's tokens: penalties, filters and position-keyed noise, row by row.

A row's token is a function of its own logits and its own sequence, bit for bit: rows of one step may stand in any
order and any company. What nobody asked for is not computed; for those who did not ask a transform changes nothing,
so that no step has to find out which rows are whose. Knows nothing of trees beyond the tokens on a row's path, nor of
stop conditions.

Legend: rows = logits of one step that choose a token, batch = sequences in the step, vocab = token ids,
depth = padded length of a row's path, width = padded length of a list of ids.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from kernels.sample import OFF, ChosenTokens, Filters, likeliest
from service.engine.grammar import forbidden_tokens
from service.engine.requests import SamplingParams
from service.engine.sampler import Sampler
from service.grammars import Grammar, GrammarState

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

    __slots__ = ("device", "forbidden_at_first", "grammar", "history", "params", "vocab")

    def __init__(
        self,
        params: SamplingParams,
        prompt: Sequence[int],
        generated: Sequence[int] = (),
        *,
        eos_ids: frozenset[int],
        vocab: int,
        device: torch.device,
        grammar: Grammar | None = None,
    ) -> None:
        self.params = params
        self.grammar = None if grammar is None else grammar.begin()
        self.vocab = vocab
        self.device = device
        self.forbidden_at_first = tuple(sorted(i for i in eos_ids | params.stop_token_ids if i < vocab))
        self.history = TokenHistory(prompt, vocab, device) if params.has_penalties else None
        self.extend(generated)

    def extend(self, tokens: Sequence[int]) -> None:
        """Hear of tokens that were committed."""
        if self.history is not None and tokens:
            self.history.extend(tokens)
        if self.grammar is not None:
            self.grammar.extend(tokens)


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """What the choice of a token must know of each row of logits."""

    table: "SamplingTable"
    sequence_idx: Tensor  # [rows] int64, place of the row's sequence in the table
    positions: Tensor  # [rows] int64, absolute position of the token to be chosen
    num_generated: Tensor  # [rows] int64, tokens generated before that one, drafted ones on the path included
    path_tokens: Tensor  # [rows, depth] int64, drafted tokens from the root's child to this row's node, -1 padded


Transform = Callable[[Tensor, SamplingRows], None]
"""Changes scores [rows, vocab] float32 in place, those of sequences that asked for it."""

Redraw = Callable[[Tensor, Tensor], ChosenTokens]
"""Tokens of other scores [lines, vocab] for some rows [lines]."""


@dataclass(frozen=True, slots=True)
class SamplingTable:
    """The batch's sampling as a list of transforms, none for plain greedy decoding, and how tokens are drawn at their
    end. Built anew only when a sequence joins or leaves; penalties read the states' histories, which
    `SamplingState.extend` keeps current."""

    transforms: tuple[Transform, ...] = ()
    temperatures: Tensor | None = None  # [batch] float32, 0 = the likeliest token; None where nobody draws
    seeds: Tensor | None = None  # [batch] int64
    filters: Filters | None = None  # of each sequence, where somebody filters
    grammars: "tuple[BoundText | None, ...] | None" = None  # of each sequence, where somebody has one

    @staticmethod
    def build(states: Sequence[SamplingState]) -> "SamplingTable":
        """What these sequences need: transforms in the order in which vLLM applies them, the cheapest draw that does
        for all."""
        params = [state.params for state in states]
        plan = [
            (any(p.logit_bias for p in params), _logit_bias),
            (any(p.min_tokens > 0 for p in params), _min_tokens),
            (any(p.has_penalties for p in params), _penalties),
        ]
        transforms = tuple(build(states) for asked, build in plan if asked)
        grammars = tuple(map(_bound, states)) if any(state.grammar for state in states) else None
        if not any(p.temperature > 0 for p in params):
            return SamplingTable(transforms, grammars=grammars)
        device = states[0].device
        return SamplingTable(
            transforms,
            _floats([p.temperature for p in params], device),
            torch.tensor([signed64(p.seed) for p in params], device=device),
            _filters(states) if any(_drops_tokens(p) for p in params) else None,
            grammars,
        )

    def choose(self, scores: Tensor, sequence_idx: Tensor, positions: Tensor, sampler: Sampler) -> ChosenTokens:
        """Of scores [rows, vocab], for each row's sequence and position [rows]."""
        if self.temperatures is None or self.seeds is None:
            return sampler.likeliest(scores)
        seeds, temperatures = self.seeds[sequence_idx], self.temperatures[sequence_idx]
        filters = None if self.filters is None else self.filters.of(sequence_idx)
        return sampler.sample(scores, seeds, positions, temperatures, filters)


def transformed(logits: Tensor, rows: SamplingRows) -> Tensor:
    """Scores that tokens are chosen by: the logits, once every transform has changed them."""
    # logits [rows, vocab], any float dtype, left as they are
    if not rows.table.transforms:
        return logits
    scores = logits.to(torch.float32, copy=True)
    for transform in rows.table.transforms:
        transform(scores, rows)
    return scores


def logprobs(logits: Tensor, token_ids: Tensor, k: int) -> Logprobs:
    """Log-probability and rank of each row's token, and the k likeliest tokens."""
    # logits [rows, vocab]; token_ids [rows] int64
    scores = logits.float()
    normed = scores.log_softmax(-1)
    chosen = token_ids[:, None]
    rank = (scores > scores.gather(1, chosen)).sum(-1) + 1
    top_ids = likeliest(scores, k)
    return Logprobs(normed.gather(1, chosen).squeeze(1), rank, top_ids, normed.gather(1, top_ids))


def _logit_bias(states: Sequence[SamplingState]) -> Transform:
    asked, device = [state.params.logit_bias for state in states], states[0].device
    ids = _padded([[token for token, _ in biases] for biases in asked], torch.int64, device)  # [batch, width]
    values = _padded([[value for _, value in biases] for biases in asked], torch.float32, device)

    def add(scores: Tensor, rows: SamplingRows) -> None:
        scores.scatter_add_(1, ids[rows.sequence_idx], values[rows.sequence_idx])

    return add


def _min_tokens(states: Sequence[SamplingState]) -> Transform:
    device = states[0].device
    ids = _padded([state.forbidden_at_first for state in states], torch.int64, device)  # [batch, width]
    forbidding = _padded([[_NEVER] * len(state.forbidden_at_first) for state in states], torch.float32, device)
    least = torch.tensor([state.params.min_tokens for state in states], device=device)  # [batch]

    def forbid(scores: Tensor, rows: SamplingRows) -> None:
        enough = rows.num_generated >= least[rows.sequence_idx]
        scores.scatter_add_(1, ids[rows.sequence_idx], forbidding[rows.sequence_idx].masked_fill(enough[:, None], 0.0))

    return forbid


def _penalties(states: Sequence[SamplingState]) -> Transform:
    """Repetition penalty (Keskar et al., "CTRL", 2019, section 4.1) over prompt, text and path; OpenAI's frequency and
    presence penalties over text and path. At least one of the batch has a history; penalties of others are neutral."""
    device, params = states[0].device, [state.params for state in states]
    histories = [state.history for state in states if state.history is not None]
    has_history = torch.tensor([state.history is not None for state in states], device=device)
    history_idx = (has_history.cumsum(0) - 1).clamp(min=0)  # [batch], any for sequences without penalties
    repetitions = _floats([p.repetition_penalty for p in params], device)
    frequencies = _floats([p.frequency_penalty for p in params], device)
    presences = _floats([p.presence_penalty for p in params], device)

    def penalise(scores: Tensor, rows: SamplingRows) -> None:
        """Change the scores of tokens that stand before each row's own."""
        sequence_idx, path_tokens = rows.sequence_idx, rows.path_tokens
        own = history_idx[sequence_idx]  # [rows]
        seen = nn.utils.rnn.pad_sequence([history.ids for history in histories], batch_first=True)
        ids = torch.cat((seen[own], path_tokens.clamp(min=0)), 1)  # [rows, width + depth], as all that follows
        counts = torch.stack([history.counts for history in histories])[own[:, None], ids]
        counts += (ids[:, :, None] == path_tokens[:, None, :]).sum(-1)
        in_prompt = torch.stack([history.in_prompt for history in histories])[own[:, None], ids]
        before, written, repetition = scores.gather(1, ids), counts > 0, repetitions[sequence_idx, None]
        repeated = torch.where(before > 0, before / repetition, before * repetition)
        after = torch.where(written | in_prompt, repeated, before)
        after = after - counts * frequencies[sequence_idx, None] - written * presences[sequence_idx, None]
        # an id may stand here twice, with the same new score both times; padding is id 0, which changes only if seen
        scores.scatter_(1, ids, after)

    return penalise


class BoundText(NamedTuple):
    """A text that a grammar binds."""

    grammar: GrammarState
    is_filtered: bool


def _bound(state: SamplingState) -> BoundText | None:
    return None if state.grammar is None else BoundText(state.grammar, _drops_tokens(state.params))


class GrammarRow(NamedTuple):
    """A row whose token a grammar must allow."""

    row: int
    text: BoundText
    path: Sequence[int]  # drafted tokens from the root's child to this row's node

    def may_be(self, token: int) -> bool:
        """Whether the choice stands: one that the grammar allows is the one that a mask would leave, unless tokens are
        filtered by how likely they are among others."""
        return not self.text.is_filtered and self.text.grammar.allows(self.path, token)


def within_grammars(choice: ChosenTokens, rows: Iterable[GrammarRow], scores: Tensor, redraw: Redraw) -> ChosenTokens:
    """Rows whose choice their grammar forbids choose again, of what it allows. # scores [rows, vocab]"""
    chosen = choice.tokens.tolist()  # planned transfer: of such texts
    again = [row for row in rows if not row.may_be(chosen[row.row])]
    if not again:
        return choice
    grammars, paths = [row.text.grammar for row in again], [row.path for row in again]
    forbidden = forbidden_tokens(grammars, paths, scores.shape[1]).to(scores.device)
    lines = torch.tensor([row.row for row in again], device=scores.device)
    other = redraw(scores[lines].to(torch.float32).masked_fill_(forbidden, _NEVER), lines)
    return ChosenTokens(*(first.index_copy(0, lines, second) for first, second in zip(choice, other, strict=True)))


def _drops_tokens(params: SamplingParams) -> bool:
    """Whether tokens are dropped before one is drawn."""
    return params.temperature > 0 and (params.top_p < 1 or params.min_p > 0 or params.top_k > 0)


def _filters(states: Sequence[SamplingState]) -> Filters:
    device, params = states[0].device, [state.params for state in states]
    least = [math.log(p.min_p) if p.min_p > 0 else OFF for p in params]
    top_k = [min(max(state.params.top_k, 0), state.vocab) for state in states]
    top_p = torch.tensor([p.top_p for p in params], dtype=torch.float64, device=device)
    return Filters(_floats(least, device), torch.tensor(top_k, device=device), top_p)


def _padded(rows: Sequence[Sequence[float]], dtype: torch.dtype, device: torch.device) -> Tensor:
    """# [batch, width], 0 padded"""
    return nn.utils.rnn.pad_sequence([torch.tensor(row, dtype=dtype, device=device) for row in rows], batch_first=True)


def _floats(values: Sequence[float], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.float32, device=device)
