"""Request accounting: what each step cost running queries and brought them, until a query ends and is learnt from.

A step's seconds are divided by what the same step would have taken without trees, so that a busier hour is not
mistaken for a worse drafter. Steps that read prompts belong to nobody.
"""

import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from drafters.feedback import Query
from service.engine.budget import Budget
from service.engine.costs.model import CostTable
from service.engine.emit import Emission
from service.engine.scheduler import Batch
from service.engine.sequence import Finish, Sequence
from service.engine.stats import FinishStats, StepStats

PlainSeconds = Callable[[int, float], float]
"""What a step of so many rows without trees takes at a mean context length."""

_CONTEXT_STEP = 32  # tokens; costs hardly change over so few


def seconds_as_they_are(num_rows: int, context: float) -> float:
    """Where nothing was measured, costs are seconds."""
    return 1.0


def plain_seconds(costs: CostTable) -> PlainSeconds:
    """The table's prediction, asked once per number of rows and stretch of context."""
    known: dict[tuple[int, int], float] = {}

    def seconds(num_rows: int, context: float) -> float:
        key = num_rows, int(context) // _CONTEXT_STEP
        if key not in known:
            middle = (key[1] + 0.5) * _CONTEXT_STEP
            known[key] = float(costs.verify_seconds(np.array([float(num_rows)]), middle, num_rows)[0])
        return known[key]

    return seconds


@dataclass(slots=True)
class _Account:
    row: int
    first_version: int
    version: int
    accepted: list[int] = field(default_factory=list)
    plain_steps: int = 0
    draft_cost: float = 0.0
    verify_cost: float = 0.0
    seconds: float = 0.0

    def add(self, draft_cost: float, verify_cost: float, seconds: float) -> None:
        self.draft_cost += draft_cost
        self.verify_cost += verify_cost
        self.seconds += seconds


class RequestAccounting:
    """One account per running sequence."""

    def __init__(self, plain: PlainSeconds) -> None:
        self._plain = plain
        self._accounts: dict[Sequence, _Account] = {}

    def enter(
        self,
        batch: Batch,
        version: int,
        drafted: Items[int],
        accepted: Items[int],
        draft_seconds: float,
        verify_seconds: float,
    ) -> None:
        """Note a step. `drafted` by item of the batch, `accepted` by completing one."""
        completing = batch.completing
        accounts = [self._account(sequence, version) for sequence in completing]
        if len(batch.drafting) != len(batch.items):
            return
        context = sum(len(sequence.tokens) for sequence in completing) / len(completing)
        plain = self._plain(len(completing), context)
        share = (draft_seconds + verify_seconds) / len(completing)
        for account, nodes, length in zip(accounts, drafted, accepted, strict=True):
            account.add(draft_seconds / plain, verify_seconds / plain, share)
            if nodes:
                account.accepted.append(length)
            else:
                account.plain_steps += 1

    def forget(self, sequence: Sequence) -> None:
        """It did not come to its own end."""
        self._accounts.pop(sequence, None)

    def close(self, sequence: Sequence, finish: Finish) -> Query | None:
        """The query of a sequence that has ended, or None if nothing can be said of it."""
        account = self._accounts.pop(sequence, None)
        if account is None or finish.reason not in ("stop", "length"):
            return None
        return Query(
            row=account.row,
            tokens=sequence.tokens,
            num_prompt=sequence.num_prompt,
            client=sequence.request.client,
            store=sequence.request.store,
            temperature=sequence.request.sampling.temperature,
            first_version=account.first_version,
            version=account.version,
            accepted=tuple(account.accepted),
            plain_steps=account.plain_steps,
            draft_cost=account.draft_cost,
            verify_cost=account.verify_cost,
            seconds=account.seconds,
        )

    def _account(self, sequence: Sequence, version: int) -> _Account:
        account = self._accounts.get(sequence)
        if account is None:
            account = self._accounts[sequence] = _Account(sequence.table_row, version, version)
        account.row, account.version = sequence.table_row, version
        return account


class StepClock:
    """Seconds of a step's phases."""

    def __init__(self) -> None:
        self.seconds = {"draft": 0.0, "verify": 0.0, "follow": 0.0, "other": 0.0}
        self._last = time.perf_counter()

    def lap(self, phase: str) -> None:
        now = time.perf_counter()
        self.seconds[phase] += now - self._last
        self._last = now


def step_stats(
    batch: Batch,
    drafted: Items[int],
    budget: Budget,
    accepted: Items[int],
    emission: Emission,
    clock: StepClock,
    *,
    credited: Callable[[int], Mapping[str, int]],
    preemptions: int,
) -> StepStats:
    """The record of a step; `credited` says for so many accepted tokens who proposed them."""
    completing = batch.of_completing(drafted)
    per_draft = tuple(count for count, nodes in zip(accepted, completing, strict=True) if nodes)
    return StepStats(
        prompt_tokens=sum(item.num_rows for item in batch.items if not item.drafts),
        emitted_tokens=sum(len(output.token_ids) for output in emission.outputs),
        drafts=len(per_draft),
        drafted_nodes=sum(drafted),
        accepted_tokens=sum(per_draft),
        accepted_per_sequence=per_draft,
        accepted_by_source=credited(sum(per_draft)),
        budget=sum(drafted),
        budget_reason=budget.reason,
        draft_seconds=clock.seconds["draft"],
        verify_seconds=clock.seconds["verify"],
        other_seconds=clock.seconds["other"] + clock.seconds["follow"],
        follow_seconds=clock.seconds["follow"],
        preemptions=preemptions,
        itl_seconds=emission.gaps,
        verify_rows=sum(item.num_rows for item in batch.items) + sum(drafted),
    )


def finish_stats(sequence: Sequence, finish: Finish) -> FinishStats:
    """The record of a sequence that ends now."""
    timings = sequence.timings(time.monotonic())
    return FinishStats(
        finish_reason=finish.reason,
        queue_seconds=timings.queue_seconds,
        first_token_seconds=timings.first_token_seconds,
        total_seconds=timings.total_seconds,
        prompt_tokens=sequence.num_prompt,
        cached_tokens=min(sequence.num_cached, sequence.num_prompt),
        output_tokens=sequence.num_generated,
    )


class Learning(Protocol):
    """All calls come from the engine thread, and must not hold it up."""

    def between_steps(self) -> int:
        """The moment at which weights may change. # -> version of the drafter that serves the next step"""
        ...

    def ended(self, query: Query) -> None:
        """A sequence has come to its own end; what was recorded in its row is there until the next step."""
        ...


class NoLearning:
    """Nobody learns."""

    def between_steps(self) -> int:
        return 0

    def ended(self, query: Query) -> None:
        """Nothing to tell."""
