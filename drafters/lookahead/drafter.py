"""The lookahead drafter (Fu et al. 2024, "Break the Sequential Dependency of LLM Inference Using Lookahead Decoding")
in the form of a tree: the target's choice behind every node it verified, rejected or not, is an n-gram for the pool and
a guess for a position. Legend: rows = sequences of the engine's table, batch = some of them; nodes as in
drafters/tree.py; context as in kernels/ngrams.py."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from drafters.calibration import MIN_SURVIVAL
from drafters.lookahead.calibration import ABSENT, LEVELS, LookaheadCalibration
from drafters.lookahead.guesses import Guesses
from drafters.proposals import Field, ProposalLog
from drafters.protocol import Committed, DraftContext, Drafter, DraftingSizes, Noise
from drafters.tree import MAX_DEPTH, ROOT, Candidates, DraftTree
from kernels import ops
from kernels.graph_runner import by_batch
from kernels.ngrams import BUCKETS, CONTEXT, NOTHING, ORDERS, WAYS, Ahead, Ngrams, Spoken

_BEAM = 8
"""Nodes of a level, all of which are continued."""
_HYPOTHETICAL = 0.25
"""What an n-gram behind a rejected node weighs beside one of the text."""
_REMEMBERED = BUCKETS * WAYS // len(ORDERS)
"""Tokens of a text whose n-grams fit."""


class LookaheadDrafter(Drafter):
    """Drafts from n-grams of each sequence, and from guesses for the positions ahead."""

    name = "lookahead"

    def __init__(self, sizes: DraftingSizes) -> None:
        device, most, capture = sizes.device, sizes.max_sequences, sizes.capture
        self._max_nodes = min(sizes.max_nodes, LEVELS * _BEAM)
        self._ngrams = Ngrams.empty(most + 1, device)
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
        for context in contexts:
            self._read(context.row, context.tokens[-_REMEMBERED:])

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

    def _read(self, row: int, tokens: Sequence[int]) -> None:
        """Take in a text, as a chain below its first token."""
        text = torch.tensor([tokens], dtype=torch.int64).to(self._tails.device)
        first = pad(text[:, :1], (CONTEXT - 1, 0), value=NOTHING)
        below = torch.arange(ROOT, text.shape[1] - 2, device=text.device)[None]
        spoken = Spoken(first, text[:, 1:], below, pad(text[:, 1:], (0, 1), value=NOTHING))
        rows = torch.full((1,), row, device=text.device)
        self._ops.add_ngrams(self._ngrams, rows, spoken, torch.ones_like(text).float(), torch.zeros_like(rows))
        self._tails[row] = torch.cat([first, text[:, 1:]], dim=1)[0, -CONTEXT:]

    def _forget(self, rows: list[int]) -> None:
        for row in rows:
            self._ngrams.forget(row)
        self._guesses.forget(rows)
        self._proposals.forget(rows)

    def _run_propose(self, rows: Tensor, temperatures: Tensor) -> DraftTree:
        ahead = Ahead(self._tails[rows], *self._guesses.of(rows), temperatures)
        evidence = self._calibration.evidence
        raw, buckets = self._ops.grow_ngrams(self._ngrams, rows, ahead, evidence, _BEAM, MIN_SURVIVAL)
        tree, chosen = self._ops.likeliest_nodes(raw, self._max_nodes)
        kept = {"tokens": tree.tokens, "parents": tree.parents, "depths": tree.depths}
        self._proposals.keep(rows, buckets=buckets.gather(1, chosen), **kept)
        return tree

    def _run_take_in(
        self,
        rows: Tensor,
        text: tuple[Tensor, Tensor, Tensor],
        verified: tuple[DraftTree, Tensor, Tensor],
        learns: bool,
    ) -> tuple[()]:
        (tokens, counts, positions), (tree, path, choices) = text, verified
        choices = choices.masked_fill(~pad(tree.valid, (1, 0), value=True), NOTHING)  # rows of padding run as well
        if learns:
            self._learn(rows, tokens, counts)
        self._guesses.move(rows, counts, tree, choices)
        tails = self._tails[rows]
        is_text = torch.zeros_like(choices, dtype=torch.bool).scatter_(1, pad(path + 1, (1, 0)), True)
        weights = torch.where(is_text, 1.0, _HYPOTHETICAL)
        spoken = Spoken(tails, tree.tokens, tree.parents, choices)
        self._ops.add_ngrams(self._ngrams, rows, spoken, weights, positions + counts)
        longer = torch.cat([tails, tokens], dim=1)
        newest = counts[:, None] + torch.arange(CONTEXT, device=rows.device)
        self._tails.index_copy_(0, rows, longer.gather(1, newest))
        return ()

    def _learn(self, rows: Tensor, committed: Tensor, counts: Tensor) -> None:
        tokens, parents, depths, buckets = self._proposals.of(rows, "tokens", "parents", "depths", "buckets")
        tried, came_true = self._ops.fates(tokens, parents, depths, committed, counts)
        self._calibration.observe(buckets, came_true, tried)
        self._proposals.forget(rows)


def _nothing(nobody: Tensor, width: int) -> tuple[Tensor, tuple[Tensor, ...], tuple[DraftTree, Tensor, Tensor]]:
    """What is committed of nobody's texts, with trees of this width. # nobody [batch]"""
    none = torch.zeros_like(nobody)
    nodes = nobody.new_zeros(len(nobody), width)
    tree = DraftTree(nodes, nodes + ROOT, nodes, nodes.float(), none)
    path, choices = nodes[:, :MAX_DEPTH] + ROOT, nobody.new_full((len(nobody), width + 1), NOTHING)
    longest = min(width, MAX_DEPTH) + 1
    return nobody, (nobody.new_full((len(nobody), longest), NOTHING), none, none), (tree, path, choices)
