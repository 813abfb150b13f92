"""The emit stage: how many of a step's tokens each sequence keeps, the text they make, and whether it ends there.

Tokens behind a stop were accepted by the target but are not part of the answer; they are dropped here.
"""

import time
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import replace
from itertools import accumulate
from typing import NamedTuple

from torch import Tensor

from drafters.protocol import Committed, Drafter
from drafters.tree import DraftTree
from kernels.settle import Verified
from service.engine.budget import Budget
from service.engine.prompt_scores import shown
from service.engine.requests import SequenceOutput, StepTree, TokenLogprob
from service.engine.sequence import Finish, Sequence

_NO_SCORE = Finish("error", error="the model produced no finite score for the next token")


class StepResult(NamedTuple):
    """What drafting, forward and verification gave. Lines are the step's completing sequences, drafting ones first."""

    tree: DraftTree
    budget: Budget
    verified: Verified
    committed: Committed
    logits: Tensor  # [logits, vocab]
    tokens: list[list[int]]  # by line, the accepted ones and the bonus token
    failed: list[bool]  # by line, whether there was no finite score to choose a token by


def read_result(verified: Verified) -> tuple[list[list[int]], list[bool], list[list[int]]]:
    """Asks the device, once: this is what the host waits for in every step.
    # -> by completing sequence: tokens, whether it failed (both as in `StepResult`), sizes of trees"""
    lines: list[list[int]] = verified.emitted.tolist()  # planned transfer
    first = verified.emitted.shape[1] - verified.tokens.shape[1]
    tokens = [[token for token in line[first:] if token >= 0] for line in lines]
    return tokens, [bool(line[0]) for line in lines], [line[1:first] for line in lines]


class EmitStage:
    """Turns committed tokens into outputs."""

    def __init__(self, drafter: Drafter, eos_ids: frozenset[int]) -> None:
        self._drafter = drafter
        self._eos_ids = eos_ids

    def emit(
        self, sequence: Sequence, line: int, result: StepResult, remove: Callable[[Sequence], None]
    ) -> list[SequenceOutput]:
        """Append a line's tokens to its sequence, up to the end of the text; `remove` is called if that is reached.
        # -> what is sent, at least one output"""
        sent, finish, request = list[SequenceOutput](), None, sequence.request
        has_failed, nodes = result.failed[line], result.budget.nodes[line]
        for part in [[]] if has_failed else _parts(sequence, result.tokens[line]):
            kept, finish = ([], _NO_SCORE) if has_failed else absorb(sequence, part, self._eos_ids)
            text = sequence.text.take() if finish is None else sequence.text.finish()
            sent.append(SequenceOutput(request.request_id, sequence.index, tuple(kept), text))
            if finish is not None:
                break
            sequence.sampling.extend(kept)
        tokens = tokens_of(sent)
        if line < result.budget.load.num_drafting:  # the others' first tokens come from reading their prompts
            sequence.mark_verified(max(0, len(tokens) - 1), nodes)
        if finish is not None:
            remove(sequence)
            sent[-1] = self.last(sequence, finish, sent[-1])
        sent = _with_logprobs(sent, _shown_logprobs(sequence, tokens, result.logits, result.verified, line))
        if sequence.prompt_scores:
            sent[0] = replace(sent[0], prompt_logprobs=sequence.take_prompt_scores())
        if request.speculation.trace:
            sent[-1] = replace(sent[-1], tree=_step_tree(result.tree, result.verified, line, nodes))
        return sent

    def last(self, sequence: Sequence, finish: Finish, output: SequenceOutput | None = None) -> SequenceOutput:
        """A sequence's last output, by default one of no tokens: why it ends, and its totals."""
        return replace(
            output or SequenceOutput(sequence.request.request_id, sequence.index, (), ""),
            finish_reason=finish.reason,
            stop_reason=finish.stop,
            error=finish.error,
            speculation=sequence.speculation(self._drafter.name, self._drafter.version),
            timings=sequence.timings(time.monotonic()),
            cached_tokens=sequence.num_cached,
        )


def _parts(sequence: Sequence, tokens: list[int]) -> list[list[int]]:
    """What a step chose, in as many outputs as the request asks for."""
    singles = max(0, min(len(tokens), sequence.request.singly - sequence.num_generated))
    return [[token] for token in tokens[:singles]] + ([tokens[singles:]] if singles < len(tokens) else [])


def tokens_of(outputs: Items[SequenceOutput]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


def _with_logprobs(outputs: list[SequenceOutput], shown: tuple[TokenLogprob, ...] | None) -> list[SequenceOutput]:
    """Outputs, each with those of its tokens."""
    if shown is None:
        return outputs
    ends = accumulate(len(output.token_ids) for output in outputs)
    return [
        replace(output, logprobs=shown[end - len(output.token_ids) : end])
        for output, end in zip(outputs, ends, strict=True)
    ]


def absorb(sequence: Sequence, tokens: Items[int], eos_ids: frozenset[int]) -> tuple[list[int], Finish | None]:
    """Append tokens to the text up to the first that ends it; returns those kept, and the end if there was one."""
    for count, token in enumerate(tokens, start=1):
        sequence.tokens.append(token)
        finish = _finish(sequence, token, eos_ids)
        if finish is not None:
            return list(tokens[:count]), finish
    return list(tokens), None


def _finish(sequence: Sequence, token: int, eos_ids: frozenset[int]) -> Finish | None:
    """Feed the newest token to the text and say whether it ends the answer. A token that stops is not shown unless
    the request asks for its stops."""
    params = sequence.request.sampling
    is_end = token in eos_ids and not params.ignore_eos
    is_asked_for = token in params.stop_token_ids and not is_end  # a text that ends by itself was not cut
    if (is_end or is_asked_for) and sequence.num_generated > params.min_tokens:
        if params.include_stop_str_in_output:
            sequence.text.push(token)
        return Finish("stop", token if is_asked_for else None)
    matched = sequence.text.push(token)
    if matched is not None:
        return Finish("stop", matched)
    return Finish("length") if sequence.num_remaining <= 0 else None


def _step_tree(tree: DraftTree, verified: Verified, line: int, nodes: int) -> StepTree:
    """The tree of one sequence, for requests that ask."""
    path: list[int] = verified.path[line].tolist()  # planned transfer
    return StepTree(
        tuple(tree.tokens[line, :nodes].tolist()),  # planned transfer: only for requests that ask
        tuple(tree.parents[line, :nodes].tolist()),  # planned transfer
        tuple(tree.survival[line, :nodes].tolist()),  # planned transfer
        tuple(place for place in path if place >= 0),
    )


def _shown_logprobs(
    sequence: Sequence, kept: list[int], logits: Tensor, verified: Verified, line: int
) -> tuple[TokenLogprob, ...] | None:
    """Log-probabilities of the kept tokens, for requests that ask. # logits [logits, vocab]"""
    count = sequence.request.sampling.num_logprobs
    if count is None:
        return None
    return tuple(shown(logits[verified.path_logits[line, : len(kept)]], kept, count))
