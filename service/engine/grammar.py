"""Grammars: which tokens may stand next, after a text and after each drafted path; and what that makes of draft trees.

llguidance (https://github.com/guidance-ai/llguidance) compiles grammars and walks them; a text's matcher stands behind
its last committed token, and is moved down a path and back again for every node."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from llguidance import LLMatcher
from torch import Tensor

from drafters.tree import ROOT, Candidates, DraftTree
from kernels import ops

_WORD_BITS = 32
_MOST_FORCED = 16
"""Tokens that a forced run may add below one node: what a tree of the default budget has room for thrice."""


class Grammar:
    """A compiled grammar. Requests share it; each of their sequences begins a text of its own."""

    def __init__(self, matcher: LLMatcher) -> None:
        """`matcher`: at the grammar's beginning; it stays there."""
        self._matcher = matcher

    def begin(self) -> "GrammarState":
        return GrammarState(self._matcher.deep_copy())


class GrammarState:
    """Where one text stands in its grammar."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    def extend(self, tokens: Sequence[int]) -> None:
        """These were committed: all of them were allowed when they were chosen."""
        self._matcher.try_consume_tokens(list(tokens))

    def fill(self, mask: np.ndarray, path: Sequence[int]) -> None:
        """Write which tokens may stand behind this path. # mask [vocab bits] uint8"""
        with self._behind(path) as is_possible:
            if self._matcher.is_error():  # it grew beyond a limit: nothing may stand there, and the text ends
                mask[:] = 0
            elif is_possible:
                mask[:] = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)[: mask.shape[0]]
            else:  # nobody gets there: the token above is never chosen
                mask[:] = 0xFF

    def forced(self, path: Sequence[int]) -> list[int] | None:
        """Tokens that must stand behind this path, as far as the grammar leaves no choice of characters; None where the
        path itself is impossible."""
        with self._behind(path) as is_possible:
            return self._matcher.compute_ff_tokens() if is_possible else None

    @contextmanager
    def _behind(self, path: Sequence[int]) -> Iterator[bool]:
        """While it lasts the matcher stands behind as much of a path as is possible; yields whether that is all."""
        consumed = self._matcher.try_consume_tokens(list(path)) if path else 0
        yield consumed == len(path)
        if consumed:
            self._matcher.rollback(consumed)


def forbidden_tokens(states: Sequence[GrammarState], paths: Sequence[Sequence[int]], vocab: int) -> Tensor:
    """Which tokens may not stand behind these paths of these texts. # -> [paths, vocab] bool"""
    masks = np.zeros((len(paths), -(-vocab // _WORD_BITS) * _WORD_BITS // 8), dtype=np.uint8)
    for mask, state, path in zip(masks, states, paths, strict=True):
        state.fill(mask, path)
    return torch.from_numpy(np.unpackbits(~masks, axis=1, count=vocab, bitorder="little")).view(torch.bool)


def constrained(candidates: Candidates, states: Sequence[GrammarState | None], max_nodes: int) -> Candidates:
    """Without the nodes that grammars forbid, and with the tokens that they force, which are as sure as the node that
    they follow. # states [batch]"""
    tokens, parents = candidates.tokens.tolist(), candidates.parents.tolist()  # planned transfer: of constrained texts
    counts = candidates.num_nodes.tolist()  # planned transfer
    possible = torch.ones(candidates.tokens.shape, dtype=torch.bool)
    runs: list[list[tuple[int, list[int]]]] = []  # of each line: below which node, which tokens
    for line, state in enumerate(states):
        runs.append([])
        if state is None:
            continue
        paths = _paths(tokens[line], parents[line], counts[line])
        for node, path in [(ROOT, []), *enumerate(paths)]:
            forced = state.forced(path)
            if forced is None:
                possible[line, node] = False
            elif forced:
                runs[line].append((node, forced[:_MOST_FORCED]))
    device = candidates.survival.device
    left = candidates._replace(survival=candidates.survival * possible.to(device))
    whole = _with_runs(left, runs) if any(runs) else left
    return ops.on(device).merge_trees(whole, max_nodes)[0]


def _paths(tokens: Sequence[int], parents: Sequence[int], count: int) -> list[list[int]]:
    """The tokens from the root's child down to each node."""
    paths: list[list[int]] = []
    for token, parent in zip(tokens[:count], parents[:count], strict=True):
        paths.append([*(paths[parent] if parent != ROOT else ()), token])
    return paths


def _with_runs(candidates: Candidates, runs: Sequence[Sequence[tuple[int, list[int]]]]) -> Candidates:
    """Runs of tokens appended below their nodes, as a raw tree."""
    most = max(sum(len(forced) for _, forced in mine) for mine in runs)
    shape, device = (candidates.batch, most), candidates.tokens.device
    tokens, parents, depths = (torch.zeros(shape, dtype=torch.int64) for _ in range(3))
    survival, counts = torch.zeros(shape), torch.zeros(candidates.batch, dtype=torch.int64)
    above = [values.cpu() for values in (candidates.depths, candidates.survival)]
    for line, mine in enumerate(runs):
        place = 0
        for node, forced in mine:
            parent, depth, sure = (ROOT, 0, 1.0) if node == ROOT else (node, *(float(v[line, node]) for v in above))
            for offset, token in enumerate(forced):
                tokens[line, place], parents[line, place] = token, parent
                depths[line, place], survival[line, place] = int(depth) + 1 + offset, sure
                parent, place = candidates.width + place, place + 1
        counts[line] = place
    added = [values.to(device) for values in (tokens, parents, depths, survival)]
    tokens, parents, depths, survival = (torch.cat(both, dim=1) for both in zip(candidates[:4], added, strict=True))
    return DraftTree(tokens, parents, depths, survival, candidates.num_nodes + counts.to(device))
