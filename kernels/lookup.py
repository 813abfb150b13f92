"""Where the end of a text occurred in it before, and one tree of what followed there.

The table of texts has a line per sequence, a predicted answer laid out before the text:

    | sentinels | end of the prompt | prediction | separator | prompt and generated text ...
                                                              ^ origin                      ^ end

Legend: batch = lines that are looked up, matches, strongest first, reach = tokens that a match is continued, buckets =
kinds of evidence.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from kernels.trees import ROOT, DraftTree, likeliest_nodes, prefix_hashes

CONTEXT = 16
"""Tokens that a match is followed back, and sentinels before each text, so that looking back needs no bounds check."""

SEPARATOR = -1
"""Stands where no token is; equals none."""

PREDICTED = CONTEXT + 1
"""Added to the strength of a match in the prediction: the shortest one there is stronger than any other."""

SURE = PREDICTED + 3
"""Strength from which on a match in the prediction tells where in it the answer is."""

GUESSES = (0, -1)
"""Places in the prediction, seen from the cursor, from which it may go on though the last token is another: that token
stands for the predicted one, or before it."""


class Texts(NamedTuple):
    """Lines of the table of texts; `ends`, `origins` and `cursors` are columns of it, all [lines] int64.
    A cursor is where the prediction is believed to be at: the column of its token that matches the text's last one."""

    tokens: Tensor  # [lines, columns] int32
    ends: Tensor
    origins: Tensor
    cursors: Tensor


class Matches(NamedTuple):
    """Places whose preceding tokens equal the text's last ones, strongest first. Strength is the number of equal tokens
    (at most CONTEXT, 0 = no match), and PREDICTED more in the prediction, which may predict the bonus token as well and
    is guessed to go on where no token is equal."""

    columns: Tensor  # [batch, matches] int64, where the last equal token stands
    strengths: Tensor  # [batch, matches] int64
    continuations: Tensor  # [batch, reach + 1, matches] int64, SEPARATOR where there is none


def find_matches(texts: Texts, rows: Tensor, columns: int, matches: int, reach: int) -> Matches:
    """The best matches in the first so many columns of some lines, of which at least one behind each text; the latest
    ones, but near the cursor in the prediction. Cursors move to where the prediction surely is at. # rows [batch]"""
    tokens = texts.tokens[:, :columns].index_select(0, rows)
    last, origins, cursors = (values[rows][:, None] for values in (texts.ends - 1, texts.origins, texts.cursors))
    back, ahead = (torch.arange(count, device=rows.device) for count in (CONTEXT, reach + 1))
    suffix = tokens.gather(1, last - back)  # [batch, CONTEXT], last token first
    places = torch.arange(CONTEXT, columns - 1, device=rows.device)  # nothing follows the last column
    near = 3.0 * columns - (places - cursors - 0.25).abs()  # of two equally near the one ahead
    preference = torch.where(places < origins, near, places)
    grades = _grades(tokens, suffix).maximum(_is_guessed(places, origins, cursors).view(torch.uint8))
    keys = torch.add(preference, grades, alpha=4.0 * columns)  # above every preference
    keys.scatter_(1, last - CONTEXT, -1.0)  # the end of the text matches itself
    found = keys.topk(matches, dim=1).indices + CONTEXT
    contexts = tokens.gather(1, (found[:, :, None] - back).flatten(1)).view(*found.shape, CONTEXT)
    lengths = (contexts == suffix[:, None]).cumprod(2).sum(2)
    in_prediction = (found < origins) & ((lengths > 0) | _is_guessed(found, origins, cursors))
    strengths = lengths + PREDICTED * in_prediction
    strengths, order = strengths.sort(dim=1, descending=True, stable=True)
    found = found.gather(1, order)
    # A match close to the end of the text is a period: copying goes on into what it has just copied.
    period = (last - found).clamp_(min=1)[:, None]
    copied = (ahead[:, None] % period).add_(found[:, None] + 1)  # [batch, reach + 1, matches]
    continuations = tokens.gather(1, copied.flatten(1)).view(copied.shape).long()
    is_predicted = (strengths >= PREDICTED)[:, None]
    behind = is_predicted & (found[:, None] + ahead[:, None] + 2 >= origins[:, None])
    continuations.masked_fill_(behind | (strengths == 0)[:, None], SEPARATOR)
    best = torch.where(strengths[:, :1] >= SURE, found[:, :1], cursors)
    texts.cursors.index_copy_(0, rows, best[:, 0])
    return Matches(found, strengths, continuations)


def _is_guessed(places: Tensor, origins: Tensor, cursors: Tensor) -> Tensor:
    """Whether the prediction may go on from there, whatever the text's last token."""
    guessed = torch.zeros_like(places < origins)
    for offset in GUESSES:
        guessed |= places == cursors + offset
    return guessed & (places < origins)


def _grades(tokens: Tensor, suffix: Tensor) -> Tensor:
    """Equal ones of the last three tokens, at each place but the last. # -> [batch, columns - 1 - CONTEXT] uint8"""
    end = tokens.shape[1] - 1
    one, two, three = (
        (tokens[:, CONTEXT - back : end - back] == suffix[:, back : back + 1]).view(torch.uint8) for back in range(3)
    )
    return torch.addcmul(one, one, torch.addcmul(two, two, three))


@dataclass(frozen=True, slots=True)
class Evidence:
    """What says how often a copied token comes true, and the rates by bucket."""

    rates: Tensor  # [buckets] float32
    weights: Tensor  # [strengths] float32, of a match
    rank_weights: Tensor  # [matches] float32, of a match by its place among the others
    of_strength: Tensor  # [strengths] int64, what a match's strength adds to the bucket
    of_depth: Tensor  # [reach] int64
    share_edges: Tensor  # [any] float32, of the part of the parent's weight that goes on through a node
    vote_edges: Tensor  # [any] float32, of how many matches run through it
    sampled: int  # what a temperature above 0 adds
    share: int  # what each share edge that is passed adds
    votes: int  # what each vote edge adds


def merge_copies(
    matches: Matches, temperatures: Tensor, evidence: Evidence, max_nodes: int, least: float
) -> tuple[DraftTree, Tensor]:
    """The likeliest nodes of one tree of all continuations, as far as they survive with probability `least`, and the
    bucket of each (depth, match): beginnings that are equal are one node, named by the first, hence strongest, match
    that has it; what is no node has the last bucket. # temperatures [batch] -> tree, [batch, reach, matches] int64"""
    continuations = matches.continuations[:, :-1]
    beginnings = prefix_hashes(continuations)
    same = beginnings[:, :, :, None] == beginnings[:, :, None]  # [batch, reach, matches, other matches]
    first = same.view(torch.uint8).argmax(3)  # [batch, reach, matches]
    weights = evidence.weights[matches.strengths] * evidence.rank_weights  # [batch, matches]
    both = torch.stack([weights, torch.ones_like(weights)], dim=2)
    through, votes = (same.flatten(1, 2).float() @ both).view(*first.shape, 2).unbind(3)
    total = weights.sum(1)[:, None, None].expand(-1, 1, first.shape[2])
    share = through / torch.cat([total, through[:, :-1]], dim=1)
    buckets = (evidence.of_strength[matches.strengths] + evidence.sampled * (temperatures > 0)[:, None])[:, None]
    buckets = buckets + evidence.of_depth[:, None]
    buckets.add_(torch.bucketize(share, evidence.share_edges), alpha=evidence.share)
    buckets.add_(torch.bucketize(votes.contiguous(), evidence.vote_edges), alpha=evidence.votes)
    order = torch.arange(first.shape[2], device=first.device)
    absent = (first != order) | (continuations == SEPARATOR)
    # The rates along a path are those of its nodes, which may stand in other matches' columns.
    survival = evidence.rates[buckets].gather(2, first).cumprod_(1).masked_fill_(absent, 0.0)
    buckets.masked_fill_(absent, len(evidence.rates) - 1)
    above = torch.arange(first.shape[1] - 1, device=first.device)[:, None] * first.shape[2]
    parents = pad(first[:, :-1] + above, (0, 0, 1, 0), value=ROOT)
    return _likeliest(continuations, parents, survival, max_nodes, least), buckets


def _likeliest(tokens: Tensor, parents: Tensor, survival: Tensor, max_nodes: int, least: float) -> DraftTree:
    """By falling survival: strictly so along a path, hence parents come first. # all [batch, reach, matches]"""
    depths = torch.arange(1, tokens.shape[1] + 1, device=tokens.device)[:, None].expand_as(tokens)
    survival = survival.masked_fill(survival < least, 0.0)
    tokens, parents, depths, survival = (value.flatten(1) for value in (tokens, parents, depths, survival))
    return likeliest_nodes(DraftTree(tokens, parents, depths, survival, depths[:, 0]), max_nodes)[0]
