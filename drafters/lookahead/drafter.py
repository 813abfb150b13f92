"""The lookahead drafter (Fu et al. 2024, "Break the Sequential Dependency of LLM Inference Using Lookahead Decoding")
in the form of a tree: the target's choice behind every node it verified, rejected or not, is an n-gram for the pool and
a guess for a position. Legend: rows = sequences of the engine's table, batch = some of them; nodes as in
drafters/tree.py; context as in pool.py."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from drafters.calibration import MIN_SURVIVAL
from drafters.lookahead.calibration import ABSENT, LEVELS, LookaheadCalibration, is_repeated
from drafters.lookahead.guesses import Guesses
from drafters.lookahead.pool import CONTEXT, NOTHING, REMEMBERED, NgramPool, contexts_of
from drafters.proposals import Field, ProposalLog
from drafters.protocol import Committed, DraftContext, Drafter, DraftingSizes, Noise
from drafters.tree import MAX_DEPTH, ROOT, Candidates, DraftTree
from kernels import ops
from kernels.graph_runner import by_batch

_BEAM = 8
"""Nodes of a level, all of which are continued."""
_HYPOTHETICAL = 0.25
"""What an n-gram behind a rejected node weighs beside one of the text."""


class _Level(NamedTuple):
    """Nodes of one depth, the likeliest first; all [batch, beam], survival 0 = absent."""

    tokens: Tensor
    parents: Tensor  # int64, among the level above
    survival: Tensor
    buckets: Tensor
    contexts: Tensor  # [batch, beam, context], behind each


class LookaheadDrafter(Drafter):
    """Drafts from a pool of n-grams of each sequence, and from guesses for the positions ahead."""

    name = "lookahead"

    def __init__(self, sizes: DraftingSizes) -> None:
        device, most, capture = sizes.device, sizes.max_sequences, sizes.capture
        self._max_nodes = min(sizes.max_nodes, LEVELS * _BEAM)
        self._pool = NgramPool(most, device)
        self._guesses = Guesses(most, LEVELS, device)
        self._calibration = LookaheadCalibration(device)
        self._tails = torch.full((most + 1, CONTEXT), NOTHING, device=device)  # the last tokens of each text
        nodes = (self._max_nodes,)
        fields = {
            "tokens": Field(nodes, 0),
            "parents": Field(nodes, ROOT),
            "depths": Field(nodes, 0, forgotten=True),
            "buckets": Field(nodes, ABSENT),
        }
        self._proposals = ProposalLog(sizes, fields)
        self._ops = ops.on(self._tails.device)
        self._has_proposed = False  # since the last commit: without, there is nothing to learn from the next one
        nobody = torch.full((most,), most, device=device)
        self._propose = by_batch(self._run_propose, capture, most, (nobody, torch.zeros(most, device=device)))
        shapes = ((*_nothing(nobody, width), width > 0) for width in (sizes.max_nodes, 0))
        self._take_in = by_batch(self._run_take_in, capture, most, *shapes)

    def start(self, contexts: Sequence[DraftContext]) -> None:
        self._forget([context.row for context in contexts])
        device = self._tails.device
        for context in contexts:
            text = torch.tensor(context.tokens[-REMEMBERED:], dtype=torch.int64).to(device)
            row, behind = torch.tensor([context.row], device=device), contexts_of(text)
            self._tails[context.row] = behind[-1].flip(0)
            times = torch.arange(len(text) - 1, device=device) + (len(context.tokens) - len(text))
            self._pool.add(row, behind[None, :-1], text[None, 1:], torch.ones_like(times[None]).float(), times[None])

    def grow(self, rows: Tensor, noise: Noise) -> Candidates:
        self._has_proposed = True
        return self._propose((rows, noise.temperatures)).first(rows.shape[0])

    def commit(self, committed: Committed) -> None:
        text = committed.tokens, committed.counts, committed.positions
        verified = committed.tree, committed.result.path, committed.result.target_tokens
        self._take_in((committed.rows, text, verified, self._has_proposed))
        self._has_proposed = False

    def finish(self, rows: Sequence[int]) -> list[int]:
        self._forget(list(rows))
        return [0] * len(rows)

    def _forget(self, rows: list[int]) -> None:
        self._pool.forget(rows)
        self._guesses.forget(rows)
        self._proposals.forget(rows)

    def _run_propose(self, rows: Tensor, temperatures: Tensor) -> DraftTree:
        guesses, stable = self._guesses.of(rows)
        tokens = self._tails[rows].flip(1)[:, None]  # [batch, 1, context]
        root = tokens[:, :, 0]
        level = _Level(root, root, torch.ones_like(root, dtype=torch.float32), root, tokens)
        levels = []
        for depth in range(LEVELS):
            ahead = guesses[:, depth : depth + 1], stable[:, depth : depth + 1]
            level = self._continued(rows, level, *ahead, temperatures, depth)
            levels.append(level)
        raw, buckets = _joined(levels)
        tree, chosen = self._ops.likeliest_nodes(raw, self._max_nodes)
        kept = {"tokens": tree.tokens, "parents": tree.parents, "depths": tree.depths}
        self._proposals.keep(rows, buckets=buckets.gather(1, chosen), **kept)
        return tree

    def _continued(
        self, rows: Tensor, level: _Level, guess: Tensor, stable: Tensor, temperatures: Tensor, depth: int
    ) -> _Level:
        """The likeliest children of all nodes of a level; the guess for their position is one of the likeliest node.
        # guess, stable [batch, 1]"""
        found = self._pool.find(rows, level.contexts)
        others = level.tokens.shape[1] - 1
        guesses, stable = pad(guess, (0, others), value=NOTHING), pad(stable, (0, others))
        tokens = torch.cat([found.tokens.flatten(2), guesses[:, :, None]], dim=2)  # [batch, beam, children]
        buckets = self._calibration.buckets(found, guesses, stable, temperatures, depth)
        survival = self._calibration.rates[buckets] * level.survival[:, :, None]
        survival = survival.masked_fill_(is_repeated(tokens) | (survival < MIN_SURVIVAL), 0.0)
        best = survival.flatten(1).topk(_BEAM)
        parents = best.indices // tokens.shape[2]
        token, bucket = (values.flatten(1).gather(1, best.indices) for values in (tokens, buckets))
        above = level.contexts.gather(1, parents[:, :, None].expand(-1, -1, CONTEXT))
        contexts = torch.cat([token[:, :, None], above[:, :, :-1]], dim=2)
        return _Level(token, parents, best.values, bucket, contexts)

    def _run_take_in(
        self,
        rows: Tensor,
        text: tuple[Tensor, Tensor, Tensor],
        verified: tuple[DraftTree, Tensor, Tensor],
        learns: bool,
    ) -> tuple[()]:
        (tokens, counts, positions), (tree, path, choices) = text, verified
        if learns:
            self._learn(rows, tokens, counts)
        self._guesses.move(rows, counts, tree, choices)
        tails = self._tails[rows]
        is_text = torch.zeros_like(choices, dtype=torch.bool).scatter_(1, pad(path + 1, (1, 0)), True)
        weights = torch.where(is_text, 1.0, _HYPOTHETICAL)
        times = (positions + counts)[:, None].expand_as(choices)
        self._pool.add(rows, _contexts(tails, tree), choices, weights, times)
        longer = torch.cat([tails, tokens], dim=1)
        newest = counts[:, None] + torch.arange(CONTEXT, device=rows.device)
        self._tails.index_copy_(0, rows, longer.gather(1, newest))
        return ()

    def _learn(self, rows: Tensor, committed: Tensor, counts: Tensor) -> None:
        *proposed, buckets = self._proposals.of(rows, "tokens", "parents", "depths", "buckets")
        tried, came_true = self._ops.fates(*proposed, committed, counts)
        self._calibration.observe(buckets, came_true, tried)
        self._proposals.forget(rows)


def _joined(levels: Sequence[_Level]) -> tuple[DraftTree, Tensor]:
    """A raw tree of all levels, and the bucket of each node. # -> tree, [batch, levels * beam]"""
    values = zip(*(level[:4] for level in levels), strict=True)
    tokens, parents, survival, buckets = (torch.cat(of_levels, dim=1) for of_levels in values)
    places = torch.arange(LEVELS * _BEAM, device=tokens.device)
    depths = (places // _BEAM + 1).expand_as(tokens)
    above = (places // _BEAM - 1) * _BEAM
    parents = torch.where(depths == 1, ROOT, parents + above)
    return DraftTree(tokens, parents, depths, survival, depths[:, 0]), buckets


def _contexts(tails: Tensor, tree: DraftTree) -> Tensor:
    """The context behind root and nodes. # tails [batch, context], the newest last -> [batch, nodes + 1, context]"""
    batch, device = tails.shape[0], tails.device
    tokens = torch.cat([tails, tree.tokens], dim=1)
    before = torch.arange(-1, CONTEXT - 1, device=device).clamp(min=0).expand(batch, -1)
    before = torch.cat([before, tree.parents + CONTEXT], dim=1)  # below the root: behind the tail's last token
    place = torch.arange(CONTEXT - 1, CONTEXT + tree.width, device=device).expand(batch, -1)
    path = []
    for _ in range(CONTEXT):
        path.append(tokens.gather(1, place))
        place = before.gather(1, place)
    return torch.stack(path, dim=2)


def _nothing(nobody: Tensor, width: int) -> tuple[Tensor, tuple[Tensor, ...], tuple[DraftTree, Tensor, Tensor]]:
    """What is committed of nobody's texts, with trees of this width. # nobody [batch]"""
    none = torch.zeros_like(nobody)
    nodes = nobody.new_zeros(len(nobody), width)
    tree = DraftTree(nodes, nodes + ROOT, nodes, nodes.float(), none)
    path, choices = nodes[:, :MAX_DEPTH] + ROOT, nobody.new_full((len(nobody), width + 1), NOTHING)
    longest = min(width, MAX_DEPTH) + 1
    return nobody, (nobody.new_full((len(nobody), longest), NOTHING), none, none), (tree, path, choices)
