"""How far the drafter that serves has moved from the anchor drafter, on a fixed set of texts.

Only a number for people: it decides nothing, because far from the anchor may be exactly where the traffic is.
"""

from collections.abc import Sequence

import torch

from adaptation.losses import TextDivergence
from adaptation.vocabulary import Rows
from drafters.specblock.model import Embed, SpecBlock
from drafters.training.corpus import Batch, Example

_ANCHORS = 8


class Drift:
    """KL(drafter || anchor) on the first texts it was given."""

    def __init__(self, anchor: SpecBlock, embed: Embed, rows: Rows, *, most_texts: int) -> None:
        self._divergence = TextDivergence(anchor, embed, rows, anchors=_ANCHORS)
        self._reach = 2 * anchor.config.block_size
        self._device = anchor.d2t.device
        self._most_texts = most_texts
        self._probe: list[Example] = []

    @property
    def ready(self) -> bool:
        return len(self._probe) == self._most_texts

    def offer(self, texts: Sequence[Example]) -> None:
        """Fill the probe set; when it is full it stays as it is, so that numbers can be compared."""
        self._probe += texts[: self._most_texts - len(self._probe)]

    @torch.no_grad()
    def of(self, model: SpecBlock) -> float:
        """Mean over the texts, each counting the same. # a model with the anchor's dtype"""
        assert self._probe, "nothing to measure on"
        batches = (Batch.of([text], self._reach, self._device) for text in self._probe)
        return float(torch.stack([self._divergence(model, batch) for batch in batches]).mean())
