"""The emit stage: decides how many of a step's tokens each sequence keeps and whether it ends, and makes the outputs
with text and log-probabilities. Accepted tokens after a stop are not part of the answer and are dropped here.
"""

import time
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import replace
from itertools import accumulate
from typing import NamedTuple

from torch import Tensor

from drafters.protocol import Drafter
from drafters.tree import DraftTree
from kernels.settle import Verified
from service.engine.budget import DraftBudget
from service.engine.requests import SequenceOutput, SpeculationRecord, StepTree, Timings, TokenLogprob
from service.engine.rows import Scheduled
from service.engine.sampling import logprobs
from service.engine.sequence import Finish, Sequence

_NO_SCORE = Finish("error", error="the model produced no finite score for the next token")


class StepResult(NamedTuple):
    """Result of a step after verification, before anything is emitted. Completing sequences are in the batch's
    order."""

    trees: DraftTree
    budget: DraftBudget
    verified: Verified
    logits: Tensor  # [logits, vocab]
    tokens: list[list[int]]  # accepted tokens and the bonus token of each completing sequence
    failed: list[bool]  # True for each completing sequence that had no finite logit to choose a token from


def read_result(emitted: Tensor, longest: int) -> tuple[list[list[int]], list[bool], list[list[int]]]:
    """Read `Verified.emitted`, of which the last `longest` columns are tokens. # emitted, on the host -> by completing
    sequence: tokens and failures as in `StepResult`, tree sizes as in `Pruned`"""
    rows: list[list[int]] = emitted.tolist()  # planned transfer: none, it is on the host
    first = emitted.shape[1] - longest
    tokens = [[token for token in row[first:] if token >= 0] for row in rows]
    return tokens, [bool(row[0]) for row in rows], [row[1:first] for row in rows]


class EmitStage:
    """Turns committed tokens into outputs."""

    def __init__(self, drafter: Drafter, eos_ids: frozenset[int]) -> None:
        self._drafter = drafter
        self._eos_ids = eos_ids

    def emit(
        self, sequence: Sequence, index: int, result: StepResult, remove: Callable[[Sequence], None]
    ) -> list[SequenceOutput]:
        """Append the step's tokens to the completing sequence at `index`, up to the end of its text, and call `remove`
        if the sequence ends. # -> its outputs, at least one"""
        sent, finish, request = list[SequenceOutput](), None, sequence.request
        has_failed, num_nodes = result.failed[index], result.budget.num_nodes[index]
        for part in [[]] if has_failed else _parts(sequence, result.tokens[index]):
            kept, finish = ([], _NO_SCORE) if has_failed else absorb(sequence, part, self._eos_ids)
            text = sequence.text.take() if finish is None else sequence.text.finish()
            sent.append(SequenceOutput(request.request_id, sequence.index, tuple(kept), text))
            if finish is not None:
                break
            sequence.sampling.extend(kept)
        tokens = tokens_of(sent)
        if index < result.budget.load.num_decoding:  # the other sequences get their first token from their prompt
            sequence.accepted_per_step.append(max(0, len(tokens) - 1))
            sequence.drafted_per_step.append(num_nodes)
        if finish is not None:
            remove(sequence)
            sent[-1] = self.last(sequence, finish, sent[-1])
        sent = _with_logprobs(sent, _token_logprobs(sequence, tokens, result.logits, result.verified, index))
        if sequence.prompt_scores:
            scores, sequence.prompt_scores = sequence.prompt_scores, {}
            in_order = tuple(scores[position] for position in range(1, sequence.num_prompt))
            sent[0] = replace(sent[0], prompt_logprobs=in_order)
        if request.speculation.trace:
            sent[-1] = replace(sent[-1], tree=_step_tree(result.trees, result.verified, index, num_nodes))
        return sent

    def last(self, sequence: Sequence, finish: Finish, last: SequenceOutput | None = None) -> SequenceOutput:
        """Complete a sequence's last output, by default one without tokens, with the reason of its end and its
        totals."""
        return replace(
            last or SequenceOutput(sequence.request.request_id, sequence.index, (), ""),
            finish_reason=finish.reason,
            stop_reason=finish.stop,
            error=finish.error,
            speculation=_speculation(sequence, self._drafter),
            timings=_timings(sequence),
            cached_tokens=sequence.num_cached,
        )


def _parts(sequence: Sequence, tokens: list[int]) -> list[list[int]]:
    """Split a step's tokens into as many outputs as the request asks for."""
    singles = max(0, min(len(tokens), sequence.request.single_token_outputs - sequence.num_generated))
    return [[token] for token in tokens[:singles]] + ([tokens[singles:]] if singles < len(tokens) else [])


def tokens_of(outputs: Items[SequenceOutput]) -> list[int]:
    """Concatenate the tokens of these outputs."""
    return [token for output in outputs for token in output.token_ids]


def mark_emitted(sequence: Sequence, now: float) -> float | None:
    """Record the time of an output. Returns the seconds since the sequence's previous output, or None for its first."""
    if sequence.first_token_seconds is None or sequence.last_emit_seconds is None:
        sequence.first_token_seconds = sequence.last_emit_seconds = now
        return None
    gap, sequence.last_emit_seconds = now - sequence.last_emit_seconds, now
    return gap


def _timings(sequence: Sequence) -> Timings:
    now, arrival = time.monotonic(), sequence.request.arrival_seconds
    started = sequence.started_seconds if sequence.started_seconds is not None else now
    first = sequence.first_token_seconds if sequence.first_token_seconds is not None else now
    return Timings(started - arrival, first - arrival, now - arrival)


def _speculation(sequence: Sequence, drafter: Drafter) -> SpeculationRecord:
    predicted = min(sequence.predicted_tokens, sequence.num_generated)  # tokens cut off after a stop do not count
    return SpeculationRecord(
        accepted_per_step=tuple(sequence.accepted_per_step),
        drafted_per_step=tuple(sequence.drafted_per_step),
        accepted_prediction_tokens=predicted,
        rejected_prediction_tokens=max(0, len(sequence.request.prediction) - predicted),
        drafter=drafter.name,
        drafter_version=drafter.version,
    )


def _with_logprobs(outputs: list[SequenceOutput], shown: tuple[TokenLogprob, ...] | None) -> list[SequenceOutput]:
    """Give each output the log-probabilities of its tokens."""
    if shown is None:
        return outputs
    ends = accumulate(len(output.token_ids) for output in outputs)
    return [
        replace(output, logprobs=shown[end - len(output.token_ids) : end])
        for output, end in zip(outputs, ends, strict=True)
    ]


def absorb(sequence: Sequence, tokens: Items[int], eos_ids: frozenset[int]) -> tuple[list[int], Finish | None]:
    """Append tokens to the sequence, up to the first that ends it. Returns the appended tokens, and the end or None."""
    for count, token in enumerate(tokens, start=1):
        sequence.tokens.append(token)
        finish = _finish(sequence, token, eos_ids)
        if finish is not None:
            return list(tokens[:count]), finish
    return list(tokens), None


def _finish(sequence: Sequence, token: int, eos_ids: frozenset[int]) -> Finish | None:
    """Append the newest token to the text. Returns the end of the answer, or None if the answer goes on. A token that
    ends the answer is not shown unless the request sets `include_stop_str_in_output`."""
    params = sequence.request.sampling
    is_eos = token in eos_ids and not params.ignore_eos
    is_stop = token in params.stop_token_ids and not is_eos  # an end token of the model is not reported as a stop
    if (is_eos or is_stop) and sequence.num_generated > params.min_tokens:
        if params.include_stop_str_in_output:
            sequence.text.push(token)
        return Finish("stop", token if is_stop else None)
    matched = sequence.text.push(token)
    if matched is not None:
        return Finish("stop", matched)
    return Finish("length") if sequence.num_remaining <= 0 else None


def _step_tree(trees: DraftTree, verified: Verified, index: int, num_nodes: int) -> StepTree:
    """Copy one sequence's tree to the host, for requests with `trace`."""
    path: list[int] = verified.path[index].tolist()  # planned transfer
    return StepTree(
        tuple(trees.tokens[index, :num_nodes].tolist()),  # planned transfer: only for requests with `trace`
        tuple(trees.parents[index, :num_nodes].tolist()),  # planned transfer
        tuple(trees.survival[index, :num_nodes].tolist()),  # planned transfer
        tuple(node for node in path if node >= 0),
    )


def _token_logprobs(
    sequence: Sequence, kept: list[int], logits: Tensor, verified: Verified, index: int
) -> tuple[TokenLogprob, ...] | None:
    """Log-probabilities of the kept tokens. Returns None if the request does not want them. # logits [logits, vocab]"""
    count = sequence.request.sampling.num_logprobs
    if count is None:
        return None
    return tuple(logprobs(logits[verified.path_logits[index, : len(kept)]], kept, count))


class PromptScores:
    """The prompt tokens of a step whose log-probabilities a request wants: all but a prompt's first token, which no row
    predicts. Scoring chunk by chunk keeps the logits of at most one chunk in memory."""

    def __init__(self, items: Items[Scheduled]) -> None:
        self.rows: list[int] = []  # extend rows of the step whose logits predict these tokens
        self._positions: dict[Sequence, range] = {}
        row = 0
        for item in items:
            sequence = item.sequence
            if sequence.request.scores_prompt and not sequence.num_generated:
                last = min(item.start + item.num_rows, sequence.num_prompt - 1)
                if positions := range(item.start + 1, last + 1):
                    self._positions[sequence] = positions
                    self.rows += range(row, row + len(positions))
            row += item.num_rows

    def keep(self, logits: Tensor) -> None:
        """Store the log-probabilities of the tokens in their sequences. # logits [scored, vocab]"""
        parts = logits.split([len(positions) for positions in self._positions.values()])
        for (sequence, positions), rows in zip(self._positions.items(), parts, strict=True):
            tokens = sequence.tokens[positions.start : positions.stop]
            count = sequence.request.sampling.num_logprobs or 0
            sequence.prompt_scores.update(zip(positions, logprobs(rows, tokens, count), strict=True))
