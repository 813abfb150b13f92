"""What is known of texts before they are verified: by grammars, tokens that may not stand behind a row, and others that
must; and by an answer that is generated again, what it has said."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from drafters.tree import MAX_DEPTH, ROOT, Candidates, DraftTree
from kernels import ops
from service.grammars import GrammarState

_WORD_BITS = 32
_MOST_FORCED = 16
"""Tokens that a forced run may add below one node: what a tree of the default budget has room for thrice."""


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
        paths = paths_of(tokens[line], parents[line], counts[line])
        for node, path in [(ROOT, []), *enumerate(paths)]:
            forced = state.forced(path)
            if forced is None:
                possible[line, node] = False
            elif run := forced[: min(_MOST_FORCED, MAX_DEPTH - len(path))]:
                runs[line].append((node, run))
    device = candidates.survival.device
    left = candidates._replace(survival=candidates.survival * possible.to(device))
    whole = _with_runs(left, runs) if any(runs) else left
    return ops.on(device).merge_trees(whole, max_nodes)[0]


def with_known(candidates: Candidates, tokens: Sequence[Sequence[int]], max_nodes: int) -> Candidates:
    """With the tokens that texts are to go on with. # tokens [batch]"""
    most = min(max_nodes, MAX_DEPTH)
    runs = [[(ROOT, list(line[:most]))] if line else [] for line in tokens]
    return ops.on(candidates.tokens.device).merge_trees(_with_runs(candidates, runs), max_nodes)[0]


def paths_of(tokens: Sequence[int], parents: Sequence[int], count: int) -> list[list[int]]:
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
    above = [values.tolist() for values in (candidates.depths, candidates.survival)]  # planned transfer: as above
    for line, mine in enumerate(runs):
        place = 0
        for node, forced in mine:
            parent, depth, sure = (ROOT, 0, 1.0) if node == ROOT else (node, *(values[line][node] for values in above))
            for offset, token in enumerate(forced):
                tokens[line, place], parents[line, place] = token, parent
                depths[line, place], survival[line, place] = int(depth) + 1 + offset, sure
                parent, place = candidates.width + place, place + 1
        counts[line] = place
    added = [values.to(device) for values in (tokens, parents, depths, survival)]
    tokens, parents, depths, survival = (torch.cat(both, dim=1) for both in zip(candidates[:4], added, strict=True))
    return DraftTree(tokens, parents, depths, survival, candidates.num_nodes + counts.to(device))
