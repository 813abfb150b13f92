"""Scores drafters on texts: tokens per verify by replay, and the divergence from the anchor.

A text's score is tau, the mean number of tokens per verify that a drafter would have reached on the text. Scores are
cached until the weights of the scored drafter change.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import linear

from adaptation.samples import ValidationText, without
from adaptation.timing import Pieces
from adaptation.weights import ANCHOR, DrafterWeights
from drafters.network.heads import rank_features
from drafters.network.model import Embed, SpecBlock
from drafters.training.corpus import Batch, Example
from drafters.training.forward import forward_of
from drafters.training.output_layers import anchor_divergence
from drafters.training.replay import replay_served

Replay = Callable[[SpecBlock, Example], float | Pieces[float]]  # -> tau, or pieces if the training process computes it


def replay_of(embed: Embed, *, alone: bool = False) -> Callable[[SpecBlock, Example], float]:
    """Return a function that replays a text as it is served, by the network's first blocks and the recorded memory, and
    returns its tau. `alone`: by the memory alone, the baseline of a drafter that is solved from traffic. Attention over
    whole texts is fp32, whatever type the weights have."""

    def replay(model: SpecBlock, text: Example) -> float:
        with torch.autocast(model.d2t.device.type, dtype=torch.bfloat16, enabled=model.dtype == torch.bfloat16):
            return replay_served(None if alone else model, embed, text).tau

    return replay


@dataclass
class _CachedScores:
    """Cached scores of one drafter, by text number."""

    version: int
    scores: dict[int, float] = field(default_factory=dict)


Rows = Callable[[Tensor], Tensor]
"""Returns the untrained output rows of a draft vocabulary. # d2t [draft_vocab] int64 -> [draft_vocab, hidden]"""


def untrained_rows(anchor: SpecBlock, target_head: Tensor | None) -> Rows:
    """Return a `Rows` function: the anchor's output rows for tokens of its vocabulary, the target's rows for others.

    A drafter predicts the target's hidden state, so the target's rows fit it. Weights from an operator or another
    replica may have another vocabulary than the anchor.

    target_head [target_vocab, hidden]; None if the vocabulary is always the anchor's
    """

    def rows(vocabulary: Tensor) -> Tensor:
        if torch.equal(vocabulary, anchor.d2t):
            return anchor.lm_head.weight.detach()
        assert target_head is not None, "there is no target head for other tokens than the anchor's"
        known = anchor.t2d[vocabulary]
        found = target_head[vocabulary.to(target_head.device)].to(anchor.lm_head.weight)
        return torch.where((known >= 0)[:, None], anchor.lm_head.weight.detach()[known.clamp(min=0)], found)

    return rows


class TextDivergence:
    """Computes KL(drafter || anchor) on texts, in nats: at the first entry of every labelled position, where the
    forward computes these, and along whole blocks as far as the anchor could have drafted the text (valid prefix). Both
    are compared over the drafter's vocabulary, with the anchor's output rows from `rows`."""

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
        """Choose block positions spread evenly over the labelled positions of each text. # -> [batch, anchors] int64"""
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
        if not model.traits.injected:
            valid[..., 0] = False  # the position itself counts this entry
        valid[..., 1:] &= reached[..., :-1]
        return valid


class AnchorDistance:
    """Measures KL(serving || anchor) on the first validation texts, once per version. It is only reported and decides
    nothing, since a drafter that fits the traffic may be far from the anchor."""

    def __init__(self, weights: DrafterWeights, divergence: TextDivergence, *, num_texts: int) -> None:
        """`num_texts`: number of texts, always the same ones, so that distances can be compared."""
        self._weights = weights
        self._divergence = divergence
        self._num_texts = num_texts
        self._texts = deque[ValidationText]()
        self._measured: tuple[int, float] | None = None  # version, distance

    def add(self, text: ValidationText) -> None:
        """Add a text to measure on, unless there are enough."""
        if len(self._texts) < self._num_texts:
            self._texts.append(text)

    def forget(self, scope: str | None) -> None:
        """Drop the texts of a scope, or all texts if it is None."""
        self._texts = without(scope, self._texts)

    def anchor_changed(self) -> None:
        """Discard the measured distance."""
        self._measured = None

    @property
    def is_due(self) -> bool:
        """Whether the next call of `value` has to compute."""
        is_known = self._measured is not None and self._measured[0] == self._weights.newest
        return len(self._texts) >= self._num_texts and not is_known

    def value(self) -> float | None:
        """Return the mean distance over the texts, in nats. Returns None if there are not enough texts yet."""
        if self.is_due:
            self._measured = self._weights.newest, self._measure(self._weights.served_in_full())
        return None if self._measured is None else self._measured[1]

    @torch.no_grad()
    def _measure(self, model: SpecBlock) -> float:
        reach, device = model.config.reach, model.d2t.device
        batches = (Batch.of([text.example], reach, device) for text in self._texts)
        return float(torch.stack([self._divergence(model, batch) for batch in batches]).mean())


@dataclass(frozen=True, slots=True)
class TextScores:
    """Scores of one text, in tokens per verify."""

    serving: float
    anchor: float
    before: float | None  # score of the replaced weights; None: they are no longer compared


class OfflineEvaluator:
    """Scores the training copy, the serving drafter and the anchor, text by text. Each replay is one piece."""

    def __init__(
        self, weights: DrafterWeights, replay: Replay, *, max_scores: int, baseline: Replay | None = None
    ) -> None:
        """`max_scores`: cached scores per drafter; `baseline`: replay that scores what serves before the first version,
        if that is not a network."""
        self._weights = weights
        self._replay, self._baseline = replay, baseline
        self._max_scores = max_scores
        self._anchor, self._baseline_scores = _CachedScores(0), _CachedScores(0)
        self._serving = _CachedScores(weights.newest)
        self._candidate = _CachedScores(weights.newest)
        self._model, self._loaded = weights.replica, _CachedScores(0)  # the replica, and whose weights it holds

    def training_changed(self) -> None:
        """Discard the scores of the training copy, because its weights changed."""
        self._candidate = _CachedScores(self._weights.newest)

    def candidate(self, texts: Sequence[ValidationText]) -> Pieces[list[float]]:
        """Score the training copy as it would be served, one score per text."""
        return self._lookup(self._candidate, self._weights.candidate, texts, self._replay)

    def published(self) -> None:
        """Move the candidate's cached scores to the serving drafter."""
        self._serving = _CachedScores(self._weights.newest, self._candidate.scores)

    def scored(self, text: ValidationText, *, with_previous: bool) -> Pieces[TextScores]:
        """Score the serving drafter and the anchor on one text; `with_previous`: also the weights that the last publish
        replaced."""
        before = None
        if with_previous and self._weights.latest.replaced is not None:
            (before,) = yield from self._lookup(_CachedScores(0), self._weights.previous, [text], self._replay)
        (serving,) = yield from self.serving([text])
        (anchor,) = yield from self.anchor([text])
        return TextScores(serving, anchor, before)

    def anchor_changed(self) -> None:
        """Discard the scores of the anchor, because its weights changed."""
        self._anchor = _CachedScores(0)

    def serving(self, texts: Sequence[ValidationText]) -> Pieces[list[float]]:
        """Score the served or staged drafter, one score per text."""
        if self._weights.latest.origin == ANCHOR:
            return (yield from self.anchor(texts))
        if self._serving.version != self._weights.newest:
            self._serving = _CachedScores(self._weights.newest)
        return (yield from self._lookup(self._serving, self._weights.served, texts, self._replay))

    def anchor(self, texts: Sequence[ValidationText]) -> Pieces[list[float]]:
        """Score the anchor, or the baseline while no version has replaced the baseline; one score per text."""
        if self._baseline is not None and self._weights.latest.origin == ANCHOR:
            return (yield from self._lookup(self._baseline_scores, self._weights.unchanged, texts, self._baseline))
        return (yield from self._lookup(self._anchor, self._weights.unchanged, texts, self._replay))

    def _lookup(
        self, cached: _CachedScores, load: Callable[[], SpecBlock], texts: Sequence[ValidationText], replay: Replay
    ) -> Pieces[list[float]]:
        """Return the scores of one drafter, replaying texts that are not cached. All drafters share one replica, and
        another one may be loaded into it between two pieces."""
        scores = []
        for text in texts:
            if text.number not in cached.scores:
                yield
                if self._loaded is not cached:
                    self._model, self._loaded = load(), cached
                with torch.no_grad():
                    score = replay(self._model, text.example)
                cached.scores[text.number] = score if isinstance(score, float) else (yield from score)
            scores.append(cached.scores[text.number])
        for number in sorted(cached.scores)[: -self._max_scores]:
            del cached.scores[number]
        return scores
