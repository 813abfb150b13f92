"""Samples tokens from the target's logits: penalties, filters and position-keyed noise, row by row.

A row's token is a function of its own logits and its own sequence, bit for bit: it does not depend on the order or the
number of the step's rows. A transform runs only if a sequence of the batch needs it, and does not change the logits of
other sequences. Trees are known here only by the tokens on each row's path; stop conditions are checked in emit.py.

Legend: rows = rows of logits from which a token is chosen, batch = sequences in the step, vocab = vocabulary size,
depth = padded length of a row's path, width = padded length of a list of ids, scores = logits after the transforms.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor, nn

from kernels import ops
from kernels.graph_runner import Capture, GraphRunner, send, send_floats
from kernels.sample import OFF, ChosenTokens, Filters, likeliest
from service.engine.requests import SamplingParams, TokenLogprob
from service.text.grammars import Grammar

_NEVER = float("-inf")


class Sampler:
    """Chooses tokens from scores by the kernels of `kernels.ops`, without further transforms."""

    def __init__(
        self, capture: Capture | None = None, logits: Tensor | None = None, counts: Iterable[int] = ()
    ) -> None:
        """With `capture`, choices from the first rows of the static buffer `logits` [rows, vocab] run as CUDA graphs,
        one for each number of rows in `counts`; the next choice overwrites the last one."""
        buffers = [] if logits is None else [logits[:count] for count in sorted(counts, reverse=True)]
        self._likeliest = GraphRunner(_choose_likeliest, capture, (((), (rows,)) for rows in buffers))
        self._plain, self._filtered = (
            GraphRunner(_sample, capture, [(_padding(rows, filtered=filtered), (rows,)) for rows in buffers])
            for filtered in (False, True)
        )

    def likeliest(self, logits: Tensor) -> ChosenTokens:
        """Choose the likeliest token of each row. # logits [rows, vocab]"""
        return _leading(self._likeliest((), (logits,)), logits.shape[0])

    def sample(
        self, logits: Tensor, seeds: Tensor, positions: Tensor, temperatures: Tensor, filters: Filters | None = None
    ) -> ChosenTokens:
        """Sample each row's token with position-keyed noise from the tokens that pass the filters; see `sample` of
        `kernels.ops`. # logits [rows, vocab]; seeds, positions [rows] int64; temperatures [rows] float32"""
        runner = self._plain if filters is None else self._filtered
        return _leading(runner((seeds, positions, temperatures, filters or ()), (logits,)), logits.shape[0])


def _choose_likeliest(logits: Tensor) -> ChosenTokens:
    return ops.on(logits.device).choose_likeliest(logits)


def _sample(
    seeds: Tensor, positions: Tensor, temperatures: Tensor, filters: tuple[Tensor, ...], logits: Tensor
) -> ChosenTokens:
    kept = Filters(*filters) if filters else None
    return ops.on(logits.device).sample(logits, seeds, positions, temperatures, kept)


def _padding(logits: Tensor, *, filtered: bool) -> tuple[Tensor | tuple[Tensor, ...], ...]:
    """Arguments for greedy rows: seeds, positions, temperatures, and filters that are off."""
    whole = torch.zeros(3, logits.shape[0], dtype=torch.int64, device=logits.device)
    zeros = torch.zeros_like(logits[:, 0], dtype=torch.float32)
    filters = Filters(zeros + OFF, whole[2], zeros.double() + 1) if filtered else ()
    return whole[0], whole[1], zeros, tuple(filters)


def _leading(choice: ChosenTokens, rows: int) -> ChosenTokens:
    """Cut the padding rows of a capture off the choice."""
    return choice if choice.tokens.shape[0] == rows else ChosenTokens(*(result[:rows] for result in choice))


EAGER_SAMPLER = Sampler()


def signed64(seed: int) -> int:
    """Convert a seed to the signed integer of its low 64 bits, which fits into an int64 tensor."""
    return (seed + 2**63) % 2**64 - 2**63


class TokenHistory:
    """Tokens of a sequence's prompt and text, and counts of the generated ones, for its penalties."""

    __slots__ = ("_seen", "counts", "ids", "in_prompt")

    def __init__(self, prompt: Sequence[int], vocab: int, device: torch.device) -> None:
        self._seen = set(prompt)
        self.ids = torch.tensor(sorted(self._seen), dtype=torch.int64, device=device)  # [seen], distinct tokens
        self.in_prompt = torch.zeros(vocab, dtype=torch.bool, device=device)  # [vocab]
        self.in_prompt[self.ids] = True
        self.counts = torch.zeros(vocab, device=device)  # [vocab] float32

    def extend(self, tokens: Sequence[int]) -> None:
        """Count committed tokens."""
        written = torch.tensor(tokens, dtype=torch.int64, device=self.ids.device)
        self.counts.index_add_(0, written, torch.ones(len(tokens), device=self.ids.device))
        new = set(tokens) - self._seen
        self._seen |= new
        self.ids = torch.cat((self.ids, torch.tensor(sorted(new), dtype=torch.int64, device=self.ids.device)))


class SamplingState:
    """Sampling state of one running sequence; `extend` must be called with the tokens of each commit."""

    __slots__ = ("device", "forbidden_at_first", "grammar", "history", "params", "vocab")

    def __init__(
        self,
        params: SamplingParams,
        prompt: Sequence[int],
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
        ends = eos_ids | params.stop_token_ids if params.min_tokens else ()
        self.forbidden_at_first = tuple(sorted(i for i in ends if i < vocab))
        self.history = TokenHistory(prompt, vocab, device) if params.has_penalties else None

    def extend(self, tokens: Sequence[int]) -> None:
        """Advance penalties and grammar by committed tokens."""
        if self.history is not None and tokens:
            self.history.extend(tokens)
        if self.grammar is not None:
            self.grammar.extend(tokens)


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """Inputs of the score transforms, per row of logits."""

    table: "SamplingTable"
    sequence_idx: Tensor  # [rows] int64, index of the row's sequence in the table
    positions: Tensor  # [rows] int64, absolute position of the token to be chosen
    num_generated: Tensor  # [rows] int64, tokens generated before that one, including drafted ones on the path
    path_tokens: Tensor  # [rows, depth] int64, drafted tokens from the root's child to this row's node, padded with -1

    def transformed(self, logits: Tensor) -> Tensor:
        """Apply all transforms to a float32 copy of the logits; without transforms, return the logits themselves.
        # logits [rows, vocab], any float dtype -> scores [rows, vocab]"""
        if not self.table.transforms:
            return logits
        scores = logits.to(torch.float32, copy=True)
        for transform in self.table.transforms:
            transform(scores, self)
        return scores


Transform = Callable[[Tensor, SamplingRows], None]
"""Changes scores [rows, vocab] float32 in place, for the sequences whose parameters require it."""


@dataclass(frozen=True, slots=True)
class SamplingTable:
    """The batch's sampling parameters as tensors: score transforms, then temperatures, seeds and filters.

    It is rebuilt only when a sequence joins or leaves the batch. Penalties read the histories of the states, which
    `SamplingState.extend` updates."""

    transforms: tuple[Transform, ...] = ()
    temperatures: Tensor | None = None  # [batch] float32, 0 for greedy sequences; None if all are greedy
    seeds: Tensor | None = None  # [batch] int64
    filters: Filters | None = None  # one row per sequence; None if no sequence filters
    states: tuple[SamplingState, ...] | None = None  # one per sequence; None if no sequence has a grammar

    @staticmethod
    def build(states: Sequence[SamplingState]) -> "SamplingTable":
        """Build the table for these sequences: only the transforms that they need, in vLLM's order, and no tensors for
        sampling if all are greedy."""
        params = [state.params for state in states]
        plan = [
            (any(p.logit_bias for p in params), _logit_bias),
            (any(p.min_tokens > 0 for p in params), _min_tokens),
            (any(p.has_penalties for p in params), _penalties),
        ]
        transforms = tuple(build(states) for is_needed, build in plan if is_needed)
        constrained = tuple(states) if any(state.grammar for state in states) else None
        if not any(p.temperature > 0 for p in params):
            return SamplingTable(transforms, states=constrained)
        device = states[0].device
        return SamplingTable(
            transforms,
            send_floats(device, [p.temperature for p in params]),
            send(device, [signed64(p.seed) for p in params])[0],
            filters_of(states),
            constrained,
        )

    def choose(self, scores: Tensor, sequence_idx: Tensor, positions: Tensor, sampler: Sampler) -> ChosenTokens:
        """Choose each row's token. # scores [rows, vocab]; sequence_idx, positions [rows] int64"""
        if self.temperatures is None or self.seeds is None:
            return sampler.likeliest(scores)
        seeds, temperatures = self.seeds[sequence_idx], self.temperatures[sequence_idx]
        filters = None if self.filters is None else self.filters.of(sequence_idx)
        return sampler.sample(scores, seeds, positions, temperatures, filters)


def logprobs(logits: Tensor, tokens: Sequence[int], count: int) -> Iterator[TokenLogprob]:
    """Iterate over the log-probabilities of tokens under the target's unprocessed distribution, one for each row, each
    with the `count` likeliest alternatives, lower id first among equals. # logits [tokens, vocab]"""
    scores = logits.float()
    normed = scores.log_softmax(-1)
    chosen = torch.tensor(tokens, device=logits.device)[:, None]
    top_ids = likeliest(scores, count)
    rows = zip(
        tokens,
        normed.gather(1, chosen).squeeze(1).tolist(),  # planned transfer: only for requests with log-probabilities
        ((scores > scores.gather(1, chosen)).sum(-1) + 1).tolist(),  # planned transfer: ranks
        top_ids.tolist(),  # planned transfer
        normed.gather(1, top_ids).tolist(),  # planned transfer
        strict=True,
    )
    for token, logprob, rank, ids, values in rows:
        yield TokenLogprob(token, logprob, rank, tuple(zip(ids, values, strict=True)))


def _logit_bias(states: Sequence[SamplingState]) -> Transform:
    biases, device = [state.params.logit_bias for state in states], states[0].device
    ids = _padded([[token for token, _ in pairs] for pairs in biases], torch.int64, device)  # [batch, width]
    values = _padded([[value for _, value in pairs] for pairs in biases], torch.float32, device)

    def add(scores: Tensor, rows: SamplingRows) -> None:
        scores.scatter_add_(1, ids[rows.sequence_idx], values[rows.sequence_idx])

    return add


def _min_tokens(states: Sequence[SamplingState]) -> Transform:
    device = states[0].device
    ids = _padded([state.forbidden_at_first for state in states], torch.int64, device)  # [batch, width]
    forbidding = _padded([[_NEVER] * len(state.forbidden_at_first) for state in states], torch.float32, device)
    min_tokens = torch.tensor([state.params.min_tokens for state in states], device=device)  # [batch]

    def forbid(scores: Tensor, rows: SamplingRows) -> None:
        enough = rows.num_generated >= min_tokens[rows.sequence_idx]
        scores.scatter_add_(1, ids[rows.sequence_idx], forbidding[rows.sequence_idx].masked_fill(enough[:, None], 0.0))

    return forbid


def _penalties(states: Sequence[SamplingState]) -> Transform:
    """Transform for the repetition penalty (Keskar et al., "CTRL", 2019, section 4.1) over prompt, text and path, and
    OpenAI's frequency and presence penalties over text and path. At least one sequence must have a history; the
    penalties of sequences without one are neutral."""
    device, params = states[0].device, [state.params for state in states]
    histories = [state.history for state in states if state.history is not None]
    has_history = torch.tensor([state.history is not None for state in states], device=device)
    history_idx = (has_history.cumsum(0) - 1).clamp(min=0)  # [batch], arbitrary for sequences without penalties
    repetitions = send_floats(device, [p.repetition_penalty for p in params])
    frequencies = send_floats(device, [p.frequency_penalty for p in params])
    presences = send_floats(device, [p.presence_penalty for p in params])

    def penalise(scores: Tensor, rows: SamplingRows) -> None:
        """Penalise the tokens that occur before each row's position."""
        sequence_idx, path_tokens = rows.sequence_idx, rows.path_tokens
        own = history_idx[sequence_idx]  # [rows]
        seen = nn.utils.rnn.pad_sequence([history.ids for history in histories], batch_first=True)
        ids = torch.cat((seen[own], path_tokens.clamp(min=0)), 1)  # [rows, width + depth], like all tensors below
        counts = torch.stack([history.counts for history in histories])[own[:, None], ids]
        counts += (ids[:, :, None] == path_tokens[:, None, :]).sum(-1)
        in_prompt = torch.stack([history.in_prompt for history in histories])[own[:, None], ids]
        before, written, repetition = scores.gather(1, ids), counts > 0, repetitions[sequence_idx, None]
        repeated = torch.where(before > 0, before / repetition, before * repetition)
        after = torch.where(written | in_prompt, repeated, before)
        after = after - counts * frequencies[sequence_idx, None] - written * presences[sequence_idx, None]
        # An id may occur twice in a row, then with the same new score; the padding id 0 changes only if it was seen.
        scores.scatter_(1, ids, after)

    return penalise


def drops_tokens(params: SamplingParams) -> bool:
    """Whether top-p, top-k or min-p may exclude tokens before one is sampled."""
    return params.temperature > 0 and (params.top_p < 1 or params.min_p > 0 or params.top_k > 0)


def filters_of(states: Sequence[SamplingState]) -> Filters | None:
    """Return the filters of these sequences, which must not be changed: batches with the same ones share them. Returns
    None if no sequence filters."""
    if not any(drops_tokens(state.params) for state in states):
        return None
    kept = ((p.min_p, min(max(p.top_k, 0), state.vocab), p.top_p) for state in states for p in (state.params,))
    return _filters(states[0].device, *kept)


@lru_cache(maxsize=64)
def _filters(device: torch.device, *kept: tuple[float, int, float]) -> Filters:
    min_p, top_k, top_p = zip(*kept, strict=True)
    logs = [math.log(least) if least > 0 else OFF for least in min_p]
    masses = torch.tensor(top_p, dtype=torch.float64, device=device)  # once for these filters
    return Filters(send_floats(device, logs), send(device, top_k)[0], masses)


def _padded(rows: Sequence[Sequence[float]], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Stack lists as a tensor. # [batch, width], padded with 0"""
    return nn.utils.rnn.pad_sequence([torch.tensor(row, dtype=dtype, device=device) for row in rows], batch_first=True)
