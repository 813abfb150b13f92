"""Applies tokens that are known before verification to draft trees: tokens that a grammar forbids or forces, and
tokens that a resumed stream replays."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from drafters.tree import MAX_DEPTH, ROOT, Candidates, DraftTree
from kernels import ops
from service.text.grammars import GrammarState

_WORD_BITS = 32
_MOST_FORCED = 16
"""Maximum number of forced tokens below one node; a tree of the default budget has room for three such runs."""


def forbidden_tokens(states: Sequence[GrammarState], paths: Sequence[Sequence[int]], vocab: int) -> Tensor:
    """Compute the mask of tokens that grammars forbid after these paths, with one grammar state per path.
    # -> [paths, vocab] bool"""
    masks = np.zeros((len(paths), -(-vocab // _WORD_BITS) * _WORD_BITS // 8), dtype=np.uint8)
    for mask, state, path in zip(masks, states, paths, strict=True):
        state.fill(mask, path)
    return torch.from_numpy(np.unpackbits(~masks, axis=1, count=vocab, bitorder="little")).view(torch.bool)


def constrained(candidates: Candidates, states: Sequence[GrammarState | None], max_nodes: int) -> Candidates:
    """Remove the nodes that grammars forbid, and add forced tokens as nodes with the survival of their parent.
    `states`: one per tree, None for a sequence without grammar. # -> [batch, nodes]"""
    tokens = candidates.tokens.tolist()  # planned transfer: for constrained sequences only
    parents = candidates.parents.tolist()  # planned transfer
    counts = candidates.num_nodes.tolist()  # planned transfer
    possible = torch.ones(candidates.tokens.shape, dtype=torch.bool)
    runs: list[list[tuple[int, list[int]]]] = []  # (parent node, tokens) per tree
    for tree, state in enumerate(states):
        runs.append([])
        if state is None:
            continue
        paths = paths_of(tokens[tree], parents[tree], counts[tree])
        for node, path in [(ROOT, []), *enumerate(paths)]:
            forced = state.forced(path)
            if forced is None:
                possible[tree, node] = False
            elif run := forced[: min(_MOST_FORCED, MAX_DEPTH - len(path))]:
                runs[tree].append((node, run))
    device = candidates.survival.device
    left = candidates._replace(survival=candidates.survival * possible.to(device))
    whole = _with_runs(left, runs) if any(runs) else left
    return ops.on(device).merge_trees(whole, max_nodes)[0]


def with_runs_of(candidates: Candidates, tokens: Sequence[Sequence[int]], max_nodes: int) -> Candidates:
    """Add a chain of known tokens below the root of each tree. `tokens`: one run per tree. # -> [batch, nodes]"""
    most = min(max_nodes, MAX_DEPTH)
    runs = [[(ROOT, list(run[:most]))] if run else [] for run in tokens]
    return ops.on(candidates.tokens.device).merge_trees(_with_runs(candidates, runs), max_nodes)[0]


def paths_of(tokens: Sequence[int], parents: Sequence[int], count: int) -> list[list[int]]:
    """Tokens on the path from the root to each of the first `count` nodes, the node included."""
    paths: list[list[int]] = []
    for token, parent in zip(tokens[:count], parents[:count], strict=True):
        paths.append([*(paths[parent] if parent != ROOT else ()), token])
    return paths


def _with_runs(candidates: Candidates, runs: Sequence[Sequence[tuple[int, list[int]]]]) -> Candidates:
    """Append runs of tokens below their parent nodes, without merging duplicates."""
    most = max(sum(len(forced) for _, forced in mine) for mine in runs)
    shape, device = (candidates.batch, most), candidates.tokens.device
    tokens, parents, depths = (torch.zeros(shape, dtype=torch.int64) for _ in range(3))
    survival, counts = torch.zeros(shape), torch.zeros(candidates.batch, dtype=torch.int64)
    above = [values.tolist() for values in (candidates.depths, candidates.survival)]  # planned transfer
    for tree, mine in enumerate(runs):
        place = 0
        for node, forced in mine:
            parent, depth, sure = (ROOT, 0, 1.0) if node == ROOT else (node, *(values[tree][node] for values in above))
            for offset, token in enumerate(forced):
                tokens[tree, place], parents[tree, place] = token, parent
                depths[tree, place], survival[tree, place] = int(depth) + 1 + offset, sure
                parent, place = candidates.width + place, place + 1
        counts[tree] = place
    added = [values.to(device) for values in (tokens, parents, depths, survival)]
    tokens, parents, depths, survival = (torch.cat(both, dim=1) for both in zip(candidates[:4], added, strict=True))
    return DraftTree(tokens, parents, depths, survival, candidates.num_nodes + counts.to(device))
