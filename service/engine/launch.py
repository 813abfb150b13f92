"""Launches steps: asks the device to draft, to run the target and to accept nodes, without waiting for the result.

A launched step is a `Flight` until the engine has read its tokens. The next step can be launched before that: newest
tokens and positions of its sequences are then filled in on the device (`kernels.rows.Ahead`), and a sequence that turns
out to have ended is computed once more in vain.
"""

import time
from collections.abc import Sequence as Items
from dataclasses import dataclass

import torch
from torch import Tensor

from drafters.readback import Arriving
from drafters.tree import DraftTree
from kernels.graph_runner import send_lines
from kernels.rows import Ahead, ForwardRows
from kernels.settle import Verified
from service.engine.accounting import StepClock
from service.engine.budget import DraftBudget
from service.engine.drafting import DraftStage
from service.engine.emit import PromptScores, mark_emitted
from service.engine.kv_pool import SlotPool, SlotTable
from service.engine.rows import DecodingShape, RowLayout, committed_of, of_sequences, prompt_reads
from service.engine.scheduler import StepBatch
from service.engine.sequence import Sequence
from service.engine.target import Target, TargetOutput
from service.engine.verify import VerifyStage


@dataclass(frozen=True, slots=True)
class Flight:
    """A launched step. The next one may overwrite all tensors but `rejected`."""

    batch: StepBatch
    clock: StepClock
    trees: DraftTree
    budget: DraftBudget
    rows: ForwardRows
    output: TargetOutput
    verified: Verified
    emitted: Arriving  # waits for `Verified.emitted`
    rejected: Tensor  # as `Verified.freed`


class Launcher:
    """Launches steps, and commits their tokens to the drafter."""

    def __init__(
        self,
        target: Target,
        slots: SlotPool,
        table: SlotTable,
        draft_stage: DraftStage,
        shapes: list[DecodingShape],
        *,
        steps_ahead: int = 0,
    ) -> None:
        """`shapes`: captured decoding steps, if the target's forwards are captured; `steps_ahead`: 1 if steps may be
        launched before the tokens of the one before are known. With recurrent layers, and with drafters that need them
        on the host, they are not."""
        self._target, self._table, self._draft_stage = target, table, draft_stage
        self._layout = RowLayout(slots, table, target.capture, shapes)
        self._verify_stage = VerifyStage(table, target.capture, shapes)
        self.runs_ahead = steps_ahead > 0 and table.states is None and not draft_stage.drafter.needs_roots

    def may_pass(self, flight: Flight) -> bool:
        """Whether a step can be launched before this one's tokens are known."""
        return self.runs_ahead and not any(sequence.needs_host for sequence in flight.batch.completing)

    def launch(self, batch: StepBatch, clock: StepClock, before: Flight | None = None, *, drafts: bool) -> Flight:
        """Launch a step: draft trees, run the target on them and accept nodes. Only slots and the drafter's state
        change, so that a step that raises here can be undone. `before`: the last step, if its tokens are unknown."""
        ahead = None if before is None else self._ahead_of(before, batch)
        # A drafter that has not followed the last step reads its tokens from the host.
        drafts = drafts and (before is None or before.budget.followed)
        self._draft_stage.start(batch.started, self._table)
        trees, budget = self._draft_stage.draft(batch, ahead, drafts=drafts)
        clock.lap("draft")
        rows = self._layout(batch.items, trees, budget.node_rows, ahead)
        wants = budget.followed or self._draft_stage.drafter.wants_scores or self._reads(batch)
        output = self._forward(batch, rows, features=wants)
        clock.lap("verify")
        verified = self._verify_stage.verify(
            batch.completing, rows, trees, output.logits, output.sampler, budget.tree_sizes
        )
        emitted = self._target.arriving(verified.emitted, at_once=not self.runs_ahead)
        rejected = verified.freed.clone() if self.runs_ahead else verified.freed
        return Flight(batch, clock, trees, budget, rows, output, verified, emitted, rejected)

    def commit(self, flight: Flight) -> None:
        """Give the drafter the tokens of a step, without those of sequences that ended before it. Must be called before
        another step is launched."""
        batch, budget, output = flight.batch, flight.budget, flight.output
        drafter, follow = self._draft_stage.drafter, budget.followed
        known = flight.verified, flight.trees, output
        committed = committed_of(*known, wants_scores=drafter.wants_scores, host=batch.host, follow=follow)
        self._draft_stage.observe(committed, budget)
        flight.clock.lap("other")
        if self._reads(batch):
            for read in prompt_reads(batch.items, flight.rows, output.features, follow=follow):
                drafter.read(read)
        going_on = [index for index, sequence in enumerate(batch.completing) if not sequence.has_ended]
        drafter.commit(committed if len(going_on) == len(batch.completing) else of_sequences(committed, going_on))
        flight.clock.lap("follow")

    def _reads(self, batch: StepBatch) -> bool:
        """Whether the drafter reads prompt rows of this step."""
        return self._draft_stage.drafter.reads_prompts and batch.num_extend_rows > len(batch.completing)

    def _forward(self, batch: StepBatch, rows: ForwardRows, *, features: bool) -> TargetOutput:
        """Run the target on the step's rows, and keep the log-probabilities of prompt tokens that requests want."""
        scores = PromptScores(batch.items)
        scored = torch.tensor(scores.rows, device=self._target.device) if scores.rows else None
        output = self._target.forward(rows, self._table, scored, features=features)
        if output.scored is not None:
            scores.keep(output.scored)
        return output

    def _ahead_of(self, before: Flight, batch: StepBatch) -> Ahead | None:
        """What the last step chose for the sequences of the next one. Returns None if the host knows all their
        tokens."""
        chosen = {sequence: index for index, sequence in enumerate(before.batch.completing)}
        sequences = [item.sequence for item in batch.items]
        pairs = [(index, chosen[one]) for index, one in enumerate(sequences) if one.awaits_token]
        if not pairs:
            return None
        verified = before.verified
        places, sources = send_lines(self._target.device, *zip(*pairs, strict=True))
        tokens = verified.bonus[sources].clamp(min=0)  # without a finite score a token may be none
        return Ahead(places, tokens, verified.num_accepted[sources], most=verified.path.shape[1])


def landed(batch: StepBatch, accepted: Items[int]) -> tuple[float, ...]:
    """Count the accepted nodes of completing sequences, whose keys and values are computed. Returns the seconds since
    the last output of each that had one."""
    lengths = dict(zip(batch.completing, accepted, strict=True))
    for item in batch.items:
        count_rows(item.sequence, lengths.get(item.sequence, 0), -1)
    now = time.monotonic()
    gaps = [mark_emitted(sequence, now) for sequence in batch.completing if not sequence.has_ended]
    return tuple(gap for gap in gaps if gap is not None)


def count_rows(sequence: Sequence, positions: int, steps: int) -> None:
    """Count positions that are computed, and steps in flight; negative when they no longer are."""
    sequence.num_computed += positions
    sequence.steps_in_flight += steps
