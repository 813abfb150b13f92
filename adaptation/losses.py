"""Distance to the anchor drafter on texts. Legend: rows = positions, vocab = the drafter's."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import linear

from drafters.network.heads import rank_features
from drafters.network.model import Embed, SpecBlock
from drafters.training.corpus import Batch
from drafters.training.forward import forward_of
from drafters.training.output_layers import anchor_divergence

Rows = Callable[[Tensor], Tensor]
"""Untrained output rows of a draft vocabulary. # d2t [draft_vocab] int64 -> [draft_vocab, hidden]"""


def untrained_rows(anchor: SpecBlock, target_head: Tensor | None) -> Rows:
    """Return a function that gives the anchor's output rows for tokens it knows, and the target's own for others.

    A drafter predicts the target's hidden state, so the target's rows fit it. Weights that an operator or another
    replica brings may have another vocabulary than the anchor.
    target_head [target_vocab, hidden]; None: the vocabulary is always the anchor's
    """

    def rows(vocabulary: Tensor) -> Tensor:
        if torch.equal(vocabulary, anchor.d2t):
            return anchor.lm_head.weight.detach()
        assert target_head is not None, "there are no rows for other tokens"
        known = anchor.t2d[vocabulary]
        found = target_head[vocabulary.to(target_head.device)].to(anchor.lm_head.weight)
        return torch.where((known >= 0)[:, None], anchor.lm_head.weight.detach()[known.clamp(min=0)], found)

    return rows


class TextDivergence:
    """KL(drafter || anchor) on texts: at the first entry of every labelled position, if these are run, and along whole
    blocks as far as the anchor could have drafted the text (valid prefix). Both use the drafter's vocabulary, the
    anchor with its output rows from `rows`."""

    def __init__(self, anchor: SpecBlock, embed: Embed, rows: Rows, *, anchors: int) -> None:
        self._anchor = anchor
        self._embed = embed
        self._rows = rows
        self._num_anchors = anchors

    def __call__(self, model: SpecBlock, batch: Batch) -> Tensor:
        starts = self._starts(batch)
        head = self._rows(model.d2t)
        with torch.no_grad():
            known, blocks = forward_of(self._anchor, self._embed).first(batch, starts)
            valid = self._valid(model, head, batch, starts, blocks.states)
            labelled = batch.label_index[:, 2 : 2 + known.shape[1]] >= 0
            anchor_logits = linear(torch.cat([known[labelled], blocks.states[valid]]), head)
        own, blocks = forward_of(model, self._embed).first(batch, starts)
        return anchor_divergence(model.lm_head(torch.cat([own[labelled], blocks.states[valid]])), anchor_logits)

    def _starts(self, batch: Batch) -> Tensor:
        """Positions spread evenly over each text's labelled ones. # -> [batch, anchors] int64"""
        labelled = batch.label_index[:, 2 : batch.tokens.shape[1] + 1] >= 0
        share = torch.linspace(0, 1, self._num_anchors + 1, device=labelled.device)[:-1]
        first = labelled.long().argmax(1)[:, None]
        return first + (share * labelled.sum(1)[:, None]).long()

    def _valid(self, model: SpecBlock, head: Tensor, batch: Batch, starts: Tensor, states: Tensor) -> Tensor:
        """Block entries that the anchor could have reached. # -> [batch, anchors, block] bool"""
        size = states.shape[2]
        predicted = starts[:, :, None] + 2 + torch.arange(size, device=starts.device)
        tokens = batch.tokens.gather(1, predicted.flatten(1).clamp(max=batch.tokens.shape[1] - 1)).view_as(predicted)
        drafted = model.t2d[tokens]
        _, ids = rank_features(linear(states, head))
        reached = (ids == drafted[..., None]).any(-1).cumprod(2).bool()
        labels = batch.label_index.gather(1, predicted.flatten(1)).view_as(predicted)
        valid = labels >= 0
        if not model.config.injected:
            valid[..., 0] = False  # counted at its position
        valid[..., 1:] &= reached[..., :-1]
        return valid
