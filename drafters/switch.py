"""Two drafters of which one drafts in each step: the one whose steps gained more lately, for such a size of batch and
with the target as sure of the last token.
Legend: batch, nodes as in drafters/tree.py; rows = sequences of the engine's table."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from drafters import readback
from drafters.asking import FIRST, SwitchPolicy
from drafters.composite import Composite
from drafters.memory.counts import MemoryCounts
from drafters.protocol import Committed, DraftContext, Drafter, DraftingSizes, Noise, Read, StepTimes
from drafters.readback import Observe
from drafters.tree import Candidates

_Event = TypeVar("_Event", Read, Committed)


class SwitchDrafter(Composite, Drafter):
    """Feeds two drafters and asks one of them per step."""

    def __init__(self, first: Drafter, second: Drafter, sizes: DraftingSizes) -> None:
        self.parts = first, second
        self._policy = SwitchPolicy(f"switch to {second.name}", sizes.ledger)
        self._outcomes = readback.readback_of(sizes.device)
        self._asked: int | None = None  # since the last commit
        self._follows = True  # whether the second takes in what is read and committed
        self._names = first.name, second.name  # as long as both are ready
        self._credits = dict.fromkeys(self._names, 0)

    @property
    def name(self) -> str:
        """The names of the drafters that are ready."""
        ready = [one.name for one in self.parts if one.ready]
        return f"switch({','.join(ready)})" if len(ready) == 2 else (ready or [self.parts[FIRST].name])[0]

    @property
    def sources(self) -> tuple[str, ...]:
        return self._names

    @property
    def ready(self) -> bool:
        return any(one.ready for one in self.parts)

    def credits(self) -> Mapping[str, int]:
        return self._credits if all(one.ready for one in self.parts) else {}

    def start(self, contexts: Sequence[DraftContext]) -> None:
        if contexts:  # a drafter knows too little of a sequence that it has not followed from the beginning
            self._follows = self._policy.can_afford_sequence
        for one in self.parts:
            one.start(contexts)

    def read(self, read: Read) -> None:
        for kind, one in enumerate(self.parts):
            if one.reads_prompts:
                one.read(self._for(one, read, follow=kind == FIRST or self._follows))

    def grow(self, rows: Tensor, noise: Noise) -> Candidates:  # rows [batch]
        first, second = self.parts
        if not first.ready:
            return second.grow(rows, noise)
        if not second.ready:
            return first.grow(rows, noise)
        self._asked = self._policy.choose(rows.shape[0], second=self._follows)
        return self.parts[self._asked].grow(rows, noise)

    def commit(self, committed: Committed) -> None:
        if self._asked is not None:
            self._learn(self._asked, committed)
        self._asked = None
        for kind, one in enumerate(self.parts):
            one.commit(self._for(one, committed, follow=kind == FIRST or self._follows))

    def timed(self, times: StepTimes) -> None:
        self._policy.timed(times, followed=self._follows)
        for one in self.parts:
            one.timed(times)

    def finish(self, rows: Sequence[int]) -> list[int]:
        first, second = (one.finish(rows) for one in self.parts)
        return [max(counts) for counts in zip(first, second, strict=True)]

    def forget(self, scope: str | None = None) -> None:
        for one in self.parts:
            one.forget(scope)

    def on_weights_changed(self) -> None:
        self._policy.on_weights_changed()
        self._follows = True
        for one in self.parts:
            one.on_weights_changed()

    def memory_counts(self) -> MemoryCounts | None:
        first, second = (one.memory_counts() for one in self.parts)
        return first or second

    def _for(self, one: Drafter, event: _Event, *, follow: bool) -> _Event:
        """Return what one of the drafters is to be given of an event: the features of its own layers."""
        features = event.features
        if features is not None and one.tap_layers and one.tap_layers != self.tap_layers:
            parts = dict(zip(self.tap_layers, features.chunk(len(self.tap_layers), dim=-1), strict=True))
            features = torch.cat([parts[layer] for layer in one.tap_layers], dim=-1)  # [..., taps * hidden]
        return replace(event, features=features, follow=event.follow and follow)

    def _learn(self, asked: int, committed: Committed) -> None:
        observe = self._policy.end()
        counts = committed.counts.sum(), committed.result.num_accepted.sum()
        totals = torch.stack([*counts, _entropy(committed)])
        self._outcomes.read(totals, partial(self._observe, self._names[asked], observe))

    def _observe(self, name: str, observe: Observe | None, totals: Sequence[float]) -> None:
        emitted, accepted, entropy = totals
        self._credits[name] += int(accepted)
        if observe is not None:
            observe([emitted, entropy])


def _entropy(committed: Committed) -> Tensor:
    """Return the entropy of the target's last distribution in nats, before temperature, as a mean over the batch; 0
    where unknown. # -> scalar"""
    if committed.last_logits is None:
        return torch.zeros((), device=committed.counts.device)
    entropies: Tensor = torch.special.entr(committed.last_logits().float().softmax(-1)).sum(-1)
    return entropies.mean()
