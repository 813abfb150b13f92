"""One of two drafters, chosen anew in every step by what steps like it have gained: with so many sequences, and where
the target was as sure of the last token.
Legend: batch, nodes as in drafters/tree.py; rows = sequences of the engine's table."""

from bisect import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from drafters import readback
from drafters.memory.counts import MemoryCounts
from drafters.protocol import Committed, DraftContext, Drafter, DraftingSizes, Noise, RankOutcomes, Read, StepTimes
from drafters.regret import TRIAL_STEPS, GainPosterior, PosteriorsBySize, RegretLedger, StepAccount
from drafters.taps import SharedTaps
from drafters.tree import Candidates

FIRST, SECOND = 0, 1

_MEMORY = 128.0  # steps, of the pace
_EDGES = (0.3, 1.5)  # nats, of the entropy of the target's last distribution: sure, one of few, one of many


@dataclass(slots=True)
class _Step:
    """One step: who drafted, what it took, and what came of it, in whichever order that becomes known."""

    batch: int
    kind: int | None = None  # None: nobody was asked
    doubt: int = 0  # the range of the entropy it began with
    seconds: float | None = None
    emitted: float | None = None  # tokens per sequence


@dataclass(slots=True)
class _Pace:
    """Means over recent steps of one size of batch."""

    seconds: float  # of a step
    emitted: float  # tokens per sequence

    def observe(self, seconds: float, emitted: float) -> None:
        self.seconds += (seconds - self.seconds) / _MEMORY
        self.emitted += (emitted - self.emitted) / _MEMORY

    def gain(self, seconds: float, emitted: float) -> float:
        """Steps that such a one gains: what its tokens would have taken at this pace, less what it took."""
        return emitted / self.emitted - seconds / self.seconds


class Choice:
    """Who drafts. Of two kinds of steps the one that makes more tokens per second is the one with the larger mean of
    n * p - s, n its tokens, s its seconds and p the seconds per token of what is done at present. Each kind has a
    posterior of it for every range of the entropy that the target's last distribution can have (of a batch, their
    mean): the one that may be better is asked, and what is not asked becomes uncertain again (drafters/regret.py). What
    asking the second may lose against the first is the ledger's to say."""

    def __init__(self, account: str, ledger: RegretLedger) -> None:
        self._account = StepAccount(account, ledger)
        self._gains = PosteriorsBySize()  # in steps, by kind and range of entropy
        self._paces: dict[int, _Pace] = {}  # by size of batch
        self._step = _Step(1)
        self._doubt = 0

    @property
    def affords_text(self) -> bool:
        """Whether enough may be lost for the second to follow a text from its beginning."""
        return self._account.covers(TRIAL_STEPS, self._seconds_of(self._step.batch))

    def choose(self, batch: int, *, second: bool) -> int:
        """FIRST or SECOND, for so many sequences; `second`: whether that can answer."""
        gains = self._posteriors(batch, self._doubt)
        acts = second and gains[SECOND].best_case > gains[FIRST].best_case
        acts = acts and self._account.covers(1.0, self._seconds_of(self._step.batch))
        kind = SECOND if acts else FIRST
        gains[1 - kind].elapse()
        self._step = _Step(batch, kind, self._doubt)
        return kind

    def end(self) -> partial[None] | None:
        """Of the step's trees it is known what was accepted. What is returned is to be told, sooner or later, how many
        tokens were emitted, and in which doubt the target is now; None where nobody was asked."""
        return partial(self._observe, self._step) if self._step.kind is not None else None

    def took(self, times: StepTimes, *, followed: bool) -> None:
        """What the step took; `followed`: with taking in of prompts for the second."""
        step, self._step = self._step, _Step(self._step.batch)
        if times.reads_prompts:
            if followed:
                self._account.settle(-times.follow_seconds, self._seconds_of(step.batch))
        elif step.kind is not None:
            step.seconds = times.seconds
            self._conclude(step)

    def renew(self) -> None:
        """Other weights answer from now on."""
        self._gains.widen()

    def _posteriors(self, batch: int, doubt: int) -> tuple[GainPosterior, GainPosterior]:
        return self._gains.of(batch, (FIRST, doubt)), self._gains.of(batch, (SECOND, doubt))

    def _observe(self, step: _Step, emitted: Sequence[float]) -> None:
        step.emitted, entropy = emitted[0] / step.batch, emitted[1]
        self._doubt = bisect(_EDGES, entropy)
        self._conclude(step)

    def _conclude(self, step: _Step) -> None:
        if step.seconds is None or step.emitted is None or step.kind is None:
            return
        pace = self._paces.setdefault(step.batch.bit_length(), _Pace(step.seconds, step.emitted))
        gains, gain = self._posteriors(step.batch, step.doubt), pace.gain(step.seconds, step.emitted)
        if step.kind == SECOND:
            self._account.settle((gain - gains[FIRST].mean) * pace.seconds, pace.seconds)
        gains[step.kind].observe(gain)
        pace.observe(step.seconds, step.emitted)

    def _seconds_of(self, batch: int) -> float:
        """What a step of so many takes, 0 where nothing is known."""
        pace = self._paces.get(batch.bit_length())
        return 0.0 if pace is None else pace.seconds


class SwitchDrafter(Drafter):
    """Two drafters that both follow the text, of which one is asked in a step."""

    tap_layers: tuple[int, ...] = ()
    reads_prompts = False

    def __init__(self, first: Drafter, second: Drafter, sizes: DraftingSizes) -> None:
        self.parts = first, second
        self._taps = SharedTaps(first, second)
        self.tap_layers = self._taps.layers
        self.reads_prompts = first.reads_prompts or second.reads_prompts
        self._choice = Choice(f"switch to {second.name}", sizes.ledger)
        self._outcomes = readback.readback_of(sizes.device)
        self._asked: int | None = None  # since the last commit
        self._follows = True  # texts, for the second
        self._names = first.name, second.name  # which change where one is yet to be made
        self._credits = dict.fromkeys(self._names, 0)

    @property
    def name(self) -> str:
        """Of those who draft: one that is yet to be made leaves the other alone."""
        ready = [one.name for one in self.parts if one.ready]
        return f"switch({','.join(ready)})" if len(ready) == 2 else (ready or [self.parts[FIRST].name])[0]

    @property
    def sources(self) -> tuple[str, ...]:
        return self._names

    @property
    def version(self) -> int:
        return sum(one.version for one in self.parts)

    @property
    def ready(self) -> bool:
        return any(one.ready for one in self.parts)

    @property
    def wants_scores(self) -> bool:
        return any(one.wants_scores for one in self.parts)

    @property
    def num_blocks(self) -> int:
        return sum(one.num_blocks for one in self.parts)

    def credits(self) -> Mapping[str, int]:
        return self._credits if all(one.ready for one in self.parts) else {}

    def start(self, contexts: Sequence[DraftContext]) -> None:
        if contexts:  # of a text that it has not followed from its beginning it knows too little
            self._follows = self._choice.affords_text
        for one in self.parts:
            one.start(contexts)

    def read(self, read: Read) -> None:
        for kind, one in enumerate(self.parts):
            if one.reads_prompts:
                one.read(self._taps.told(one, read, follow=kind == FIRST or self._follows))

    def grow(self, rows: Tensor, noise: Noise) -> Candidates:
        first, second = self.parts
        if not first.ready:
            return second.grow(rows, noise)
        if not second.ready:
            return first.grow(rows, noise)
        self._asked = self._choice.choose(rows.shape[0], second=self._follows)
        return self.parts[self._asked].grow(rows, noise)

    def commit(self, committed: Committed) -> None:
        if self._asked is not None:
            self._learn(self._asked, committed)
        self._asked = None
        for kind, one in enumerate(self.parts):
            one.commit(self._taps.told(one, committed, follow=kind == FIRST or self._follows))

    def timed(self, times: StepTimes) -> None:
        self._choice.took(times, followed=self._follows)
        for one in self.parts:
            one.timed(times)

    def finish(self, rows: Sequence[int]) -> list[int]:
        first, second = (one.finish(rows) for one in self.parts)
        return [max(counts) for counts in zip(first, second, strict=True)]

    def forget(self, scope: str | None = None) -> None:
        for one in self.parts:
            one.forget(scope)

    def renew(self) -> None:
        self._choice.renew()
        self._follows = True
        for one in self.parts:
            one.renew()

    def rank_outcomes(self) -> RankOutcomes:
        first, second = (one.rank_outcomes() for one in self.parts)
        return RankOutcomes({**first.predicted, **second.predicted}, {**first.right, **second.right})

    def memory_counts(self) -> MemoryCounts | None:
        first, second = (one.memory_counts() for one in self.parts)
        return first or second

    def _learn(self, asked: int, committed: Committed) -> None:
        observe = self._choice.end()
        counts = committed.counts.sum(), committed.result.num_accepted.sum()
        totals = torch.stack([*counts, _entropy(committed)])
        self._outcomes.read(totals, partial(self._observe, self._names[asked], observe))

    def _observe(self, name: str, observe: readback.Observe | None, totals: Sequence[float]) -> None:
        emitted, accepted, entropy = totals
        self._credits[name] += int(accepted)
        if observe is not None:
            observe([emitted, entropy])


def _entropy(committed: Committed) -> Tensor:
    """Of what the target said last, in nats, before anybody's sampling, a mean over the batch; 0: nobody knows."""
    if committed.last_logits is None:
        return torch.zeros((), device=committed.counts.device)
    entropies: Tensor = torch.special.entr(committed.last_logits().float().softmax(-1)).sum(-1)
    return entropies.mean()
