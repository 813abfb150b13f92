"""Bookkeeping of the engine's steps: records for metrics, seconds for the ledger, and each query's costs for learning.
It runs after a step's outputs were delivered, and under a guard: an exception in it does not affect generation."""

import math
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Items
from functools import partial
from itertools import pairwise
from typing import NamedTuple, Protocol

from drafters.decision import SHARE, RegretLedger
from drafters.feedback import Query
from drafters.protocol import Drafter
from drafters.readback import Clock, Timestamp
from service.engine.budget import DraftBudget
from service.engine.requests import SequenceOutput
from service.engine.scheduler import StepBatch
from service.engine.sequence import Sequence
from service.engine.stats import FinishStats, StepStats
from service.observability.guard import Guard

_PLAIN_STEPS = round(1 / SHARE)
"""Number of steps without drafts after a step whose loss was not entered in the ledger. Even if that step was lost as a
whole, drafting then loses no more than its share of steps."""


class SentStep(NamedTuple):
    """A step whose outputs were delivered, with the data that its bookkeeping needs."""

    batch: StepBatch
    budget: DraftBudget
    clock: "StepClock"
    sent: list[list[SequenceOutput]]  # outputs by completing sequence; none if it had ended before
    accepted: list[int]  # accepted nodes of each, of which it kept the tokens; all if it had ended before
    gaps: tuple[float, ...]  # seconds between emissions
    preemptions: int
    discarded: int = 0  # tokens of sequences that had ended before
    is_last: bool = True  # whether no later step is launched, so that the clock runs on


class StepClock:
    """Measures the seconds of a step's phases, on a GPU by the times at which the device reaches their ends."""

    def __init__(self, now: Clock, version: int = 0) -> None:
        """`now`: returns a timestamp of the device; `version`: version of the drafter that serves the step."""
        self.version = version
        self._now = now
        self._laps: list[tuple[str, Timestamp]] = [("", now())]
        self._seconds = {"draft": 0.0, "verify": 0.0, "follow": 0.0, "other": 0.0}

    def lap(self, phase: str) -> None:
        """End the current phase under this name, and begin the next one."""
        self._laps.append((phase, self._now()))

    def seconds(self) -> Mapping[str, float]:
        """Return the seconds by phase up to the last lap; waits until the device has reached it."""
        for (_, before), (phase, after) in pairwise(self._laps):
            self._seconds[phase] += after - before
        del self._laps[:-1]
        return self._seconds


class LearningHooks(Protocol):
    """Interface through which the engine calls learning while serving. All calls come from the engine thread and must
    return fast."""

    @property
    def guard(self) -> Guard:
        """Guard under which the engine's bookkeeping runs."""
        ...

    def between_steps(self, *, idle: bool) -> int:
        """Replace the drafter's weights if new ones are due; they change in no other call. `idle`: the step that begins
        has nothing to do. Returns the version of the drafter from now on."""
        ...

    def stepped(self, stats: StepStats) -> bool:
        """Record a step. Returns whether it ran without training at the same time."""
        ...

    def ended(self, query: Query) -> None:
        """Record a finished query; the recorder keeps the data of the query's row until the next step."""
        ...

    def forgot(self, scope: str | None) -> None:
        """Forget what was recorded of a scope, or of all scopes if it is None."""
        ...


class StepAccounting:
    """Bookkeeping of an engine's steps: costs of queries, accepted tokens by source, the ledger's time, learning."""

    def __init__(
        self, drafter: Drafter, now: Clock, ledger: RegretLedger | None = None, learning: LearningHooks | None = None
    ) -> None:
        """`now`: clock of the device; `ledger`: ledger in which the seconds of steps accrue; `learning`: learning
        while serving, if it is on."""
        self.guard = Guard() if learning is None else learning.guard
        self._drafter, self._now, self._ledger, self._learning = drafter, now, ledger, learning
        self._credited: dict[str, int] = dict(drafter.credits())
        self._num_plain = 0  # number of coming steps that must not draft

    @property
    def may_draft(self) -> bool:
        """Whether the next step may have drafts. It may not while losses cannot be entered in the ledger, because a
        part of the bookkeeping is off or has just failed."""
        return not (self._num_plain or self.guard.is_off("end_step") or self.guard.is_off("learn"))

    def forgot(self, scope: str | None) -> None:
        """Let learning forget a scope, or all scopes if it is None."""
        if self._learning is not None:
            self._learning.forgot(scope)

    def start_step(self, *, idle: bool) -> StepClock:
        """Let learning replace the drafter's weights, then start the step's clock. `idle`: the step has nothing to
        do."""
        learning, drafter = self._learning, self._drafter
        if learning is None:
            return StepClock(self._now)
        begin = partial(learning.between_steps, idle=idle)
        return StepClock(self._now, self.guard.run("weights", begin, lambda: drafter.version))

    def keep(self, step: SentStep, learn: Callable[..., None]) -> tuple[list[FinishStats], StepStats | None]:
        """Do the bookkeeping of a step, each part under a guard of its own; `learn`: `DraftStage.learn`. Returns the
        records of finished sequences, and the record of the step, or None if that part failed."""
        batch, clock = step.batch, step.clock
        self.guard.run(
            "charge",
            lambda: charge(batch, clock.version, step.budget.num_nodes, clock.seconds()),
            partial(leave_uncharged, batch),
        )
        sequences = zip(batch.completing, batch.host.rows, step.sent, strict=True)
        going_on = [(sequence, row, outputs[-1]) for sequence, row, outputs in sequences if outputs]
        finished = self.guard.run("end_queries", lambda: self.end_queries(going_on), list[FinishStats])
        recorded = self.guard.run("end_step", lambda: self.end_step(step), lambda: None)
        self._num_plain = max(0, self._num_plain - 1)
        if recorded is None:
            self._leave_unlearnt()
            return finished, None
        stats, undisturbed = recorded
        how = {"timed": undisturbed, "is_passed": not step.is_last}
        self.guard.run("learn", partial(learn, step.budget, stats, **how), self._leave_unlearnt)
        return finished, stats

    def _leave_unlearnt(self) -> None:
        """Forbid drafts in the coming steps, because this step's loss was not entered in the ledger."""
        self._num_plain = _PLAIN_STEPS if self._ledger is not None else 0

    def end_step(self, step: SentStep) -> tuple[StepStats, bool]:
        """Record a step. Returns its record, and whether it ran without training at the same time."""
        budget, clock, accepted = step.budget, step.clock, step.accepted
        if step.is_last:
            clock.lap("other")
        per_draft = tuple(count for count, nodes in zip(accepted, budget.num_nodes, strict=False) if nodes)
        seconds = clock.seconds()
        stats = StepStats(
            prompt_tokens=sum(item.num_rows for item in step.batch.items if not item.decodes),
            emitted_tokens=sum(len(output.token_ids) for of_one in step.sent for output in of_one),
            drafts=len(per_draft),
            drafted_nodes=sum(budget.num_nodes),
            accepted_tokens=sum(per_draft),
            accepted_per_sequence=per_draft,
            accepted_by_source=self._newly_credited(sum(accepted)),
            budget_reason=budget.reason,
            draft_seconds=seconds["draft"],
            verify_seconds=seconds["verify"],
            other_seconds=seconds["other"] + seconds["follow"],
            follow_seconds=seconds["follow"],
            preemptions=step.preemptions,
            itl_seconds=step.gaps,
            verify_rows=budget.num_rows,
            discarded_tokens=step.discarded,
        )
        if self._ledger is not None:
            self._ledger.accrue(stats.seconds)
        return stats, self._learning is None or self._learning.stepped(stats)

    def end_queries(self, sent: Iterable[tuple[Sequence, int, SequenceOutput]]) -> list[FinishStats]:
        """Hand finished queries to learning, and return their records. `sent`: sequences, their rows of the slot table,
        and their last outputs."""
        finished = []
        for sequence, row, output in sent:
            if output.finish_reason is not None:
                is_charged = not math.isnan(sequence.charged_seconds)
                if self._learning is not None and is_charged and output.finish_reason in ("stop", "length"):
                    self._learning.ended(query_of(sequence, row))
                finished.append(finish_stats(sequence, output))
        return finished

    def _newly_credited(self, accepted: int) -> Mapping[str, int]:
        """Number of tokens accepted in this step, by source."""
        credits = self._drafter.credits()
        if not credits:
            return {self._drafter.name: accepted}
        new = {name: count - self._credited.get(name, 0) for name, count in credits.items()}
        self._credited = dict(credits)
        return new


def charge(batch: StepBatch, version: int, num_nodes: Items[int], seconds: Mapping[str, float]) -> None:
    """Charge a step's seconds to its queries. `num_nodes` by sequence of the batch, `seconds` by phase.

    Prompt rows get a share of the seconds after drafting, proportional to their number, because all rows pass through
    the same layers. This share is charged to no query, as no drafter can make a prompt shorter. The decoding sequences
    share all other seconds equally.
    """
    for sequence in batch.completing:
        sequence.version = version
        if sequence.first_version < 0:
            sequence.first_version = version
    decoding = batch.decoding
    rows = len(decoding) + sum(num_nodes)
    after_drafting = sum(seconds.values()) - seconds["draft"]
    shared = seconds["draft"] + after_drafting * rows / (batch.num_extend_rows + sum(num_nodes))
    for sequence in decoding:
        sequence.charged_seconds += shared / len(decoding)


def leave_uncharged(batch: StepBatch) -> None:
    """Mark the costs of this step's queries as unknown (NaN), so that nothing is learnt from them."""
    for sequence in batch.completing:
        sequence.charged_seconds = math.nan


def query_of(sequence: Sequence, row: int) -> Query:
    """Build the record of a finished sequence for learning; `row`: its row of the slot table."""
    steps = zip(sequence.accepted_per_step, sequence.drafted_per_step, strict=True)
    return Query(
        row=row,
        tokens=sequence.tokens,
        num_prompt=sequence.num_prompt,
        client=sequence.client,
        scope=sequence.request.scope.cache_namespace,
        store=sequence.request.store,
        temperature=sequence.sampling.params.temperature,
        seed=sequence.sampling.params.seed,
        first_version=sequence.first_version,
        version=sequence.version,
        accepted=tuple(length for length, nodes in steps if nodes),
        plain_steps=sequence.drafted_per_step.count(0),
        drafted_nodes=sum(sequence.drafted_per_step),
        seconds=sequence.charged_seconds,
    )


def finish_stats(sequence: Sequence, output: SequenceOutput) -> FinishStats:
    """Build the metrics record of a sequence that ends with this output."""
    assert output.finish_reason is not None, "the sequence has not ended"
    assert output.timings is not None, "the last output has the totals"
    return FinishStats(
        finish_reason=output.finish_reason,
        timings=output.timings,
        prompt_tokens=sequence.num_prompt,
        cached_tokens=min(sequence.num_cached, sequence.num_prompt),
        output_tokens=sequence.num_generated,
    )
