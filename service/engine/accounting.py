"""What steps take and bring: their record for metrics, the ledger's time, and each query's costs for learning."""

from collections.abc import Mapping
from collections.abc import Sequence as Items
from itertools import pairwise
from typing import Protocol

from drafters.feedback import Query
from drafters.protocol import Drafter
from drafters.readback import Clock, Timestamp
from drafters.regret import RegretLedger
from service.engine.budget import DraftBudget
from service.engine.requests import SequenceOutput
from service.engine.scheduler import StepBatch
from service.engine.sequence import Sequence
from service.engine.stats import FinishStats, StepStats


class StepClock:
    """Seconds of a step's phases, by when the device reaches their ends."""

    def __init__(self, now: Clock, version: int = 0) -> None:
        """`version`: of the drafter that serves the step."""
        self.version = version
        self._now = now
        self._laps: list[tuple[str, Timestamp]] = [("", now())]
        self._seconds = {"draft": 0.0, "verify": 0.0, "follow": 0.0, "other": 0.0}

    def lap(self, phase: str) -> None:
        """End a phase here; the next one begins."""
        self._laps.append((phase, self._now()))

    def seconds(self) -> Mapping[str, float]:
        """Seconds by phase up to the last lap; waits until the device is there."""
        for (_, before), (phase, after) in pairwise(self._laps):
            self._seconds[phase] += after - before
        del self._laps[:-1]
        return self._seconds


class LearningHooks(Protocol):
    """What the engine calls for learning while serving. All calls come from the engine thread and must return fast."""

    def between_steps(self) -> int:
        """Weights may change during this call, and at no other time. # -> version of the drafter from now on"""
        ...

    def stepped(self, stats: StepStats) -> bool:
        """Take in a step's record. # -> whether its times are those of serving alone, with no training beside it"""
        ...

    def ended(self, query: Query) -> None:
        """Take in a finished query; what was recorded in its row stays there until the next step."""
        ...


class StepAccounting:
    """Keeps the books of an engine's steps: queries' costs, accepted tokens by source, the ledger, learning."""

    def __init__(
        self, drafter: Drafter, now: Clock, ledger: RegretLedger | None = None, learning: LearningHooks | None = None
    ) -> None:
        """`ledger` gets the time that steps take."""
        self._drafter, self._now, self._ledger, self._learning = drafter, now, ledger, learning
        self._credited: dict[str, int] = dict(drafter.credits())

    def start_step(self) -> StepClock:
        """Let weights change, then start the step's clock."""
        return StepClock(self._now, self._learning.between_steps() if self._learning is not None else 0)

    def end_step(
        self,
        batch: StepBatch,
        budget: DraftBudget,
        accepted: Items[int],
        outputs: Items[SequenceOutput],
        clock: StepClock,
        *,
        gaps: tuple[float, ...],
        preemptions: int,
    ) -> tuple[StepStats, bool]:
        """Record a step: `accepted` lengths by completing sequence, `gaps` in seconds between emissions.
        # -> its record, and whether its times are those of serving alone"""
        per_draft = tuple(count for count, nodes in zip(accepted, budget.num_nodes, strict=False) if nodes)
        seconds = clock.seconds()
        stats = StepStats(
            prompt_tokens=sum(item.num_rows for item in batch.items if not item.decodes),
            emitted_tokens=sum(len(output.token_ids) for output in outputs),
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
            preemptions=preemptions,
            itl_seconds=gaps,
            verify_rows=budget.num_rows,
        )
        if self._ledger is not None:
            self._ledger.accrue(stats.seconds)
        return stats, self._learning is None or self._learning.stepped(stats)

    def end_queries(
        self, sequences: Items[Sequence], rows: Items[int], outputs: Items[SequenceOutput]
    ) -> list[FinishStats]:
        """Hand finished queries to learning; `rows` of the slot table and last outputs by sequence.
        # -> the records of those that finished"""
        finished = []
        for sequence, row, output in zip(sequences, rows, outputs, strict=True):
            if output.finish_reason is not None:
                if self._learning is not None and output.finish_reason in ("stop", "length"):
                    self._learning.ended(query_of(sequence, row))
                finished.append(finish_stats(sequence, output))
        return finished

    def _newly_credited(self, accepted: int) -> Mapping[str, int]:
        """Tokens accepted in this step by who proposed them."""
        credits = self._drafter.credits()
        if not credits:
            return {self._drafter.name: accepted}
        new = {name: count - self._credited.get(name, 0) for name, count in credits.items()}
        self._credited = dict(credits)
        return new


def charge(
    batch: StepBatch, version: int, num_nodes: Items[int], accepted: Items[int], seconds: Mapping[str, float]
) -> None:
    """Charge a step to the queries that took part: `num_nodes` by sequence of the batch, `accepted` lengths by
    completing sequence, `seconds` by phase.

    Decoding sequences share all seconds but those of the step's prompts. These have their share, by rows, of everything
    after drafting: all rows go through the same layers, and one reading of the weights serves them all. It is charged
    to no query, as no drafter makes a prompt shorter.
    """
    for sequence in batch.completing:
        costs = sequence.costs
        costs.version = version
        if costs.first_version < 0:
            costs.first_version = version
    decoding = batch.decoding
    rows = len(decoding) + sum(num_nodes)
    after_drafting = sum(seconds.values()) - seconds["draft"]
    shared = seconds["draft"] + after_drafting * rows / (batch.num_extend_rows + sum(num_nodes))
    for sequence, nodes, length in zip(decoding, num_nodes, accepted, strict=False):
        costs = sequence.costs
        costs.seconds += shared / len(decoding)
        if nodes:
            costs.accepted.append(length)
        else:
            costs.plain_steps += 1


def query_of(sequence: Sequence, row: int) -> Query:
    """The query of a finished sequence, which had this row of the slot table."""
    costs = sequence.costs
    return Query(
        row=row,
        tokens=sequence.tokens,
        num_prompt=sequence.num_prompt,
        client=sequence.client,
        store=sequence.request.store,
        temperature=sequence.sampling.params.temperature,
        seed=sequence.sampling.params.seed,
        first_version=costs.first_version,
        version=costs.version,
        accepted=tuple(costs.accepted),
        plain_steps=costs.plain_steps,
        seconds=costs.seconds,
    )


def finish_stats(sequence: Sequence, output: SequenceOutput) -> FinishStats:
    """The record of a sequence that ends with this output."""
    assert output.finish_reason is not None, "the sequence has not ended"
    assert output.timings is not None, "the last output has the totals"
    return FinishStats(
        finish_reason=output.finish_reason,
        timings=output.timings,
        prompt_tokens=sequence.num_prompt,
        cached_tokens=min(sequence.num_cached, sequence.num_prompt),
        output_tokens=sequence.num_generated,
    )
