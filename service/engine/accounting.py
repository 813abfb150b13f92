"""What steps cost running queries and brought them, until a query ends and is learnt from; and the records of steps."""

from collections.abc import Mapping
from collections.abc import Sequence as Items
from itertools import pairwise
from typing import Protocol

from drafters.feedback import Query
from drafters.readback import Clock, Timestamp
from service.engine.budget import Budget
from service.engine.requests import SequenceOutput
from service.engine.scheduler import Batch
from service.engine.sequence import Sequence
from service.engine.stats import FinishStats, StepStats


class StepClock:
    """Seconds of a step's phases, by when the device gets to their ends."""

    def __init__(self, now: Clock) -> None:
        self._now = now
        self._laps: list[tuple[str, Timestamp]] = [("", now())]
        self._seconds = {"draft": 0.0, "verify": 0.0, "follow": 0.0, "other": 0.0}

    def lap(self, phase: str) -> None:
        """So far went this phase."""
        self._laps.append((phase, self._now()))

    def settle(self) -> Mapping[str, float]:
        """By phase, of all laps; waits for the end of the last one."""
        for (_, before), (phase, after) in pairwise(self._laps):
            self._seconds[phase] += after - before
        del self._laps[:-1]
        return self._seconds


def charge(
    batch: Batch,
    version: int,
    drafted: Items[int],
    accepted: Items[int],
    seconds: Mapping[str, float],
) -> None:
    """Note a step with the sequences that took part: `drafted` nodes by item of the batch, `accepted` lengths by
    completing sequence, `seconds` by phase.

    Decoding sequences share all seconds but those of prompts that were read in the same forward. These have their share
    of everything after drafting, by rows: all rows go through the same layers, and one reading of the weights serves
    them all. It is charged to no query, as no drafter makes a prompt shorter.
    """
    for sequence in batch.completing:
        sequence.account.served_by(version)
    drafting = batch.drafting
    rows = len(drafting) + sum(drafted)
    after_drafting = sum(seconds.values()) - seconds["draft"]
    shared = seconds["draft"] + after_drafting * rows / (batch.num_extend_rows + sum(drafted))
    for sequence, nodes, length in zip(drafting, drafted, accepted, strict=False):
        account = sequence.account
        account.seconds += shared / len(drafting)
        if nodes:
            account.accepted.append(length)
        else:
            account.plain_steps += 1


def query_of(sequence: Sequence, row: int) -> Query:
    """The query of a sequence that has come to its own end, which had this line of the slot table."""
    account = sequence.account
    return Query(
        row=row,
        tokens=sequence.tokens,
        num_prompt=sequence.num_prompt,
        client=sequence.client,
        store=sequence.request.store,
        temperature=sequence.sampling.params.temperature,
        seed=sequence.sampling.params.seed,
        first_version=account.first_version,
        version=account.version,
        accepted=tuple(account.accepted),
        plain_steps=account.plain_steps,
        seconds=account.seconds,
    )


def step_stats(
    batch: Batch,
    budget: Budget,
    accepted: Items[int],
    outputs: Items[SequenceOutput],
    seconds: Mapping[str, float],
    *,
    credited: Mapping[str, int],
    gaps: tuple[float, ...],
    preemptions: int,
) -> StepStats:
    """The record of a step; `credited` says who proposed the accepted tokens."""
    per_draft = tuple(count for count, nodes in zip(accepted, budget.nodes, strict=False) if nodes)
    return StepStats(
        prompt_tokens=sum(item.num_rows for item in batch.items if not item.drafts),
        emitted_tokens=sum(len(output.token_ids) for output in outputs),
        drafts=len(per_draft),
        drafted_nodes=sum(budget.nodes),
        accepted_tokens=sum(per_draft),
        accepted_per_sequence=per_draft,
        accepted_by_source=credited,
        budget_reason=budget.reason,
        draft_seconds=seconds["draft"],
        verify_seconds=seconds["verify"],
        other_seconds=seconds["other"] + seconds["follow"],
        follow_seconds=seconds["follow"],
        preemptions=preemptions,
        itl_seconds=gaps,
        verify_rows=budget.num_rows,
    )


def finish_stats(sequence: Sequence, output: SequenceOutput) -> FinishStats:
    """The record of a sequence that ends with this output."""
    assert output.finish_reason is not None, "the sequence goes on"
    assert output.timings is not None, "the last output has the totals"
    return FinishStats(
        finish_reason=output.finish_reason,
        queue_seconds=output.timings.queue_seconds,
        first_token_seconds=output.timings.first_token_seconds,
        total_seconds=output.timings.total_seconds,
        prompt_tokens=sequence.num_prompt,
        cached_tokens=min(sequence.num_cached, sequence.num_prompt),
        output_tokens=sequence.num_generated,
    )


class Learning(Protocol):
    """All calls come from the engine thread, and must not hold it up."""

    def stepped(self, stats: StepStats) -> bool:
        """A step has ended. # -> whether its times are those of serving alone, with no training beside it"""
        ...

    def between_steps(self) -> int:
        """The moment at which weights may change. # -> version of the drafter that serves the next step"""
        ...

    def ended(self, query: Query) -> None:
        """A sequence has come to its own end; what was recorded in its row is there until the next step."""
        ...
