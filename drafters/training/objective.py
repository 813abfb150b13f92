"""The training objective (SpecBlock section 3.3), over the consecutive blocks that the kind is trained for.
The draft loss is one mean over entries, while equations (6) and (7) add a mean for each position of a block
(docs/decisions/0121). The rank head's loss has detached inputs. A valid-prefix mask leaves out entries after a token
that could not have been drafted.
Legend: batch, anchors, block = K entries, flat = entries of a step that have a label, top = corpus.TOP."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy as nll
from torch.nn.functional import pad

from drafters.network.heads import rank_class, rank_features
from drafters.network.layers import Embed
from drafters.network.model import SpecBlock
from drafters.training.corpus import Batch
from drafters.training.forward import at, forward_of
from kernels.lattice import TOP

_COOLEST, _HOTTEST = 0.3, 1.2
_SMALLEST = torch.finfo(torch.float32).tiny


def cross_entropy(p: Tensor, log_q: Tensor) -> Tensor:
    """Return -sum_v p(v) log q(v). # p, log_q [flat, top] -> [flat]"""
    return -(p * log_q).sum(1)


def total_variation(p: Tensor, log_q: Tensor) -> Tensor:
    """Return 1 - sum_v min(p(v), q(v)), which counts all mass beyond the likeliest tokens as distance. # p, log_q
    [flat, top] -> [flat]"""
    return 1.0 - torch.minimum(p, log_q.exp()).sum(1)


@dataclass(frozen=True, slots=True)
class ObjectiveSettings:
    """Settings of the objective: the trained entries of a batch, and the rank head's part."""

    anchored_rows: float = 0.875  # trained entries of blocks, without first entries, per labelled position
    blocks: int | None = None  # maximum number of consecutive blocks; None: the kind's
    valid_prefix: bool = True  # leave out entries after a token that could not have been drafted
    coupled: bool = True  # half of the rank head's entries have sampling noise in their scores
    rank_rows: int = 512  # entries per step that train the rank head


@dataclass(frozen=True, slots=True)
class StepScores:
    """Losses and counts of one step; counts are by index on the path from the anchor, where 0 is the next token."""

    draft_loss: Tensor
    rank_loss: Tensor
    distance: Tensor  # total variation to the target, mean over all entries
    hits: Tensor  # [reach], number of entries that rank the target's likeliest token first
    covered: Tensor  # [reach], the same for ranks 1 to 4
    seen: Tensor  # [reach], number of entries with a label and a valid prefix


class _LabelledEntries(NamedTuple):
    """The entries of a step that have a label, flattened."""

    states: Tensor  # [flat, hidden]
    labels: Tensor  # [flat] int64, row of the batch's labels
    place: Tensor  # [flat] int64, index on the path from the anchor


class Objective:
    """The training objective of a model: losses and progress counts of a batch."""

    def __init__(self, model: SpecBlock, embed: Embed, settings: ObjectiveSettings) -> None:
        self._model = model
        self._forward = forward_of(model, embed)
        self._streams = self._forward.streams
        self._settings = settings
        config, trained = model.config, model.config.trained_blocks
        self._size, self._reach = config.block_size, config.reach
        self._blocks = min(settings.blocks or trained, trained)

    def __call__(self, batch: Batch, generator: torch.Generator) -> StepScores:
        """Compute losses and counts of a batch. `generator` draws anchors, cuts, temperatures and noise on its
        device."""
        entries = self._entries(batch, generator)
        logits = self._model.lm_head(entries.states)  # one product, as the gradient of each is as large as the head
        favourite = self._model.t2d[batch.top_ids[entries.labels, 0]]
        ranks = _ranks(logits.detach(), favourite)
        distributions = _distributions(logits, entries.labels, batch, self._model.t2d)
        return StepScores(
            draft_loss=cross_entropy(*distributions).mean(),
            distance=total_variation(*map(Tensor.detach, distributions)).mean(),
            rank_loss=self._rank_loss(entries, logits.detach(), batch, generator),
            hits=self._count(entries.place, ranks == 0),
            covered=self._count(entries.place, ranks < 4),
            seen=self._count(entries.place, ranks >= 0),
        )

    def _entries(self, batch: Batch, generator: torch.Generator) -> _LabelledEntries:
        anchors = self._draw_anchors(batch, generator)
        stream, grown = self._forward.first(batch, anchors)
        positions = torch.arange(stream.shape[1], device=anchors.device)
        ahead = (positions + 2).expand(stream.shape[:2])
        found = [self._labelled(stream, ahead, batch, place=0)]
        block = torch.arange(self._size, device=anchors.device)
        place = torch.zeros_like(anchors)[:, :, None] + block
        valid = torch.ones_like(place, dtype=torch.bool)  # whether the entry at which a block starts is valid
        for number in range(self._blocks):
            if number:
                cuts = 1 + (_uniform(grown.anchors.shape, generator, anchors.device) * self._size).long()
                valid = valid.gather(2, cuts[:, :, None])
                begun = valid[:, :, 0].long()  # blocks that start at an entry without a loss have none themselves
                kept = begun.argsort(dim=1, descending=True, stable=True)[:, : max(1, int(begun.sum(1).max()))]
                grown = self._forward.next(batch, grown.take(kept), at(cuts, kept))
                place, valid = at(place + cuts[:, :, None], kept), at(valid, kept)
            predicted = grown.anchors[:, :, None] + 2 + block
            valid = self._reached(grown.states, predicted, batch) & valid[:, :, :1]  # [batch, anchors, block + 1]
            taught = predicted.masked_fill(~valid[:, :, :-1], -1)
            own = slice(0 if number else self._streams, None)  # the stream holds first entries
            found.append(self._labelled(grown.states[:, :, own], taught[:, :, own], batch, place=place[:, :, own]))
        return _LabelledEntries(*map(torch.cat, zip(*found, strict=True)))

    def _draw_anchors(self, batch: Batch, generator: torch.Generator) -> Tensor:
        """Draw positions with a labelled next token, the same number for each sequence. # -> [batch, anchors]"""
        labelled = batch.label_index[:, 2 : batch.tokens.shape[1] + 1] >= 0
        share = (self._settings.anchored_rows + 1 - self._streams) / max(1, self._reach - self._streams)
        number = max(1, int(labelled.sum() * share / labelled.shape[0]))
        keys = _uniform(labelled.shape, generator, labelled.device)
        return keys.masked_fill(~labelled, -1.0).topk(min(number, labelled.shape[1]), dim=1).indices

    @torch.no_grad()
    def _reached(self, states: Tensor, predicted: Tensor, batch: Batch) -> Tensor:
        """Return whether each entry can be reached: all tokens before it on the path could have been drafted. # states
        [batch, anchors, block, hidden], predicted [batch, anchors, block] -> [batch, anchors, block + 1] bool"""
        if not self._settings.valid_prefix:
            return torch.ones(*predicted.shape[:2], predicted.shape[2] + 1, dtype=torch.bool, device=states.device)
        length = batch.tokens.shape[1]
        tokens = batch.tokens.gather(1, predicted.flatten(1).clamp(max=length - 1)).view(predicted.shape)
        drafted = self._model.t2d[tokens].flatten()
        ranks = _ranks(self._model.lm_head(states).flatten(0, 2), drafted).view(predicted.shape)
        # A tree holds ten ranks. With the first rank only, as in the paper, a weak drafter would train one position.
        return pad((ranks < TOP).cumprod(2), (1, 0), value=1).bool()

    def _labelled(self, states: Tensor, predicted: Tensor, batch: Batch, place: Tensor | int) -> _LabelledEntries:
        """Return the entries whose predicted position, -1 for none, has a label. # states [..., hidden], predicted
        [...]"""
        width = batch.label_index.shape[1]
        flat = predicted.flatten(1)
        labels = batch.label_index.gather(1, flat.clamp(0, width - 1)).view(predicted.shape)
        known = (labels >= 0) & (predicted >= 0)
        places = torch.as_tensor(place, device=states.device).expand(predicted.shape)
        return _LabelledEntries(states[known], labels[known], places[known])

    def _rank_loss(self, entries: _LabelledEntries, scored: Tensor, batch: Batch, generator: torch.Generator) -> Tensor:
        """Return the rank head's cross-entropy. If `coupled`, half of the entries have a temperature and noise, and
        their label is the rank of the token that the noise selects. # scored [flat, draft_vocab], logits"""
        flat = entries.labels.shape[0]
        chosen = _uniform((flat,), generator, entries.labels.device).argsort()[: self._settings.rank_rows]
        logits = scored[chosen].float()
        labels = entries.labels[chosen]
        warm = torch.zeros(logits.shape[0], dtype=torch.bool, device=logits.device)
        if self._settings.coupled:
            warm[: logits.shape[0] // 2] = True
        noise = _gumbel(logits.shape, generator, logits.device)
        spread = _uniform((logits.shape[0], 1), generator, logits.device)
        temperature = _COOLEST + (_HOTTEST - _COOLEST) * spread
        scores = logits.log_softmax(-1)
        scores = torch.where(warm[:, None], scores / temperature + noise, scores)
        features, ids = rank_features(scores, self._model.traits.rank_head.scores)
        drafted = self._model.t2d[batch.top_ids[labels]]  # [rows, top]
        fresh = _gumbel(drafted.shape, generator, drafted.device)
        shared = torch.where(drafted >= 0, noise.gather(1, drafted.clamp(min=0)), fresh)
        target = batch.top_logprobs[labels]
        target = torch.where(warm[:, None], target / temperature + shared, target)
        wanted = drafted.gather(1, target.argmax(1, keepdim=True))[:, 0]  # -1 for a token that cannot be drafted
        classes = self._model.rank_logits(entries.states.detach()[chosen], features)
        return nll(classes, rank_class(ids, wanted))

    def _count(self, place: Tensor, mask: Tensor) -> Tensor:
        return torch.bincount(place[mask], minlength=self._reach).cpu()


def _distributions(logits: Tensor, labels: Tensor, batch: Batch, t2d: Tensor) -> tuple[Tensor, Tensor]:
    """Return p and log q of the target's likeliest tokens; p is 0 for tokens that cannot be drafted.
    # logits [flat, draft_vocab], labels [flat] -> both [flat, top]"""
    drafted = t2d[batch.top_ids[labels]]  # [flat, top]
    p = batch.top_logprobs[labels].exp() * (drafted >= 0)
    return p, logits.log_softmax(1, dtype=torch.float32).gather(1, drafted.clamp(min=0))


def _ranks(logits: Tensor, drafted: Tensor) -> Tensor:
    """Return the rank of each token from 0, or draft_vocab for one that cannot be drafted. # logits [rows,
    draft_vocab], drafted [rows] draft ids or -1 -> [rows] int64"""
    own = logits.gather(1, drafted.clamp(min=0)[:, None])
    above = torch.gt(logits, own, out=torch.empty_like(logits)).sum(1, dtype=torch.float32)  # booleans add up slowly
    return torch.where(drafted >= 0, above.long(), logits.shape[1])


def _uniform(shape: Sequence[int], generator: torch.Generator, device: torch.device) -> Tensor:
    """Draw uniform numbers on the generator's device. # -> shape [...]"""
    return torch.rand(tuple(shape), generator=generator, device=generator.device).to(device)


def _gumbel(shape: Sequence[int], generator: torch.Generator, device: torch.device) -> Tensor:
    """Draw Gumbel noise as -log(-log u), since torch draws uniform numbers faster than exponential ones. # -> shape
    [...]"""
    return _uniform(shape, generator, device).clamp_(min=_SMALLEST).log_().neg_().log_().neg_()
