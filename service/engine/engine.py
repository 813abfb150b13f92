"""The engine: one step at a time, all running sequences together.

    admit -> grow trees -> choose budget -> verify -> accept -> commit -> emit

Each stage lives in a module of its own; this one composes them. One thread drives it.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from drafters.protocol import Committed, Drafter
from service.engine.accounting import (
    Learning,
    NoLearning,
    PlainSeconds,
    RequestAccounting,
    StepClock,
    finish_stats,
    seconds_as_they_are,
    step_stats,
)
from service.engine.commit import commit, lay_out, reads
from service.engine.drafting import DraftStage
from service.engine.emit import Emission, EmitStage, HostTokens
from service.engine.kv_pool import SlotPool, SlotTable
from service.engine.requests import GenerationRequest, SequenceOutput
from service.engine.rows import ForwardRows
from service.engine.sampling import SamplingState, signed64
from service.engine.scheduler import Batch, Scheduler
from service.engine.sequence import Finish, Sequence, TextStream
from service.engine.stats import FinishStats, LoadStats, StepStats
from service.engine.target import Target
from service.engine.verify import VerifyStage


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What the engine must know of the model's tokens."""

    size: int
    eos_ids: frozenset[int]
    text_stream: Callable[[GenerationRequest], TextStream]


@dataclass(frozen=True, slots=True)
class StepReport:
    """What one step produced."""

    outputs: list[SequenceOutput]
    finished: list[FinishStats]
    stats: StepStats | None  # None when there was nothing to do


class Engine:
    """Owner of target, slots, scheduler and drafter. Not thread-safe."""

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        *,
        slots: SlotPool,
        table: SlotTable,
        scheduler: Scheduler,
        draft_stage: DraftStage,
        vocabulary: Vocabulary,
        learning: Learning | None = None,
        plain_seconds: PlainSeconds = seconds_as_they_are,
    ) -> None:
        """`plain_seconds` is what costs of queries are counted in."""
        self.target = target
        self.drafter = drafter
        self.slots = slots
        self.table = table
        self.scheduler = scheduler
        self._draft_stage = draft_stage
        self._verify_stage = VerifyStage()
        self._emit_stage = EmitStage(drafter, vocabulary.eos_ids)
        self._vocabulary = vocabulary
        self._learning: Learning = learning or NoLearning()
        self._accounting = RequestAccounting(plain_seconds)
        self._credited: dict[str, int] = dict(drafter.credits())

    @property
    def idle(self) -> bool:
        return not self.scheduler.running and not self.scheduler.waiting

    @property
    def load(self) -> LoadStats:
        """How busy it is now."""
        return LoadStats(
            num_running=len(self.scheduler.running),
            num_waiting=len(self.scheduler.waiting),
            slots_used=self.slots.capacity - self.scheduler.num_available,
            slots_total=self.slots.capacity,
        )

    def add(self, request: GenerationRequest) -> None:
        """Take a request in: n sequences at the end of the waiting line."""
        for index in range(request.n):
            self.scheduler.add(self._new_sequence(request, index))

    def abort(self, request_id: str) -> tuple[list[SequenceOutput], list[FinishStats]]:
        """End a request's sequences now and free their slots."""
        mine = [s for s in self._sequences() if s.request.request_id == request_id]
        for sequence in mine:
            self.scheduler.remove(sequence)
            self._accounting.forget(sequence)
        end = Finish("abort")
        return [self._emit_stage.output(s, [], None, end) for s in mine], [finish_stats(s, end) for s in mine]

    def step(self) -> StepReport:
        """Advance every scheduled sequence: by a piece of its prompt, or by one token and what its tree had right."""
        version = self._learning.between_steps()
        clock = StepClock()
        if self.target.pool.use(self, self.slots.mine):
            assert not self.scheduler.running, "another engine has used the slots of running texts"
            self.scheduler.forget_texts()
        batch = self.scheduler.schedule()
        if not batch.items:
            return StepReport([], [], None)
        self._draft_stage.start(batch.started)
        tree, budget = self._draft_stage.build(batch, self.slots.num_free)
        clock.lap("draft")
        rows = lay_out(batch.extends, tree, self.slots, self.table, budget.nodes)
        output = self.target.forward(rows, self.table)
        clock.lap("verify")
        completing = batch.completing
        verified = self._verify_stage.verify(completing, rows, tree, output.logits, output.sampler)
        followed, scored = self._draft_stage.follows, self.drafter.wants_scores
        committed, freed = commit(
            rows, verified, output, self.table, wants_scores=scored, host=batch.host, follow=followed
        )
        clock.lap("other")
        self._teach(batch, rows, output.features, committed)
        clock.lap("follow")
        on_host = HostTokens.of(committed, verified, batch.of_completing(budget.nodes))
        drafted, accepted = budget.nodes, on_host.accepted
        self.slots.free(freed[: sum(drafted) - sum(accepted)])
        _advance(batch, accepted)
        self._accounting.enter(batch, version, drafted, accepted, clock.seconds["draft"], clock.seconds["verify"])
        emission = self._emit_stage.emit(completing, on_host, verified, output.logits, self.scheduler.remove)
        finished = self._close(emission)
        clock.lap("other")
        stats = step_stats(
            batch,
            drafted,
            budget,
            accepted,
            emission,
            clock,
            credited=self._newly_credited,
            preemptions=self.scheduler.take_preemptions(),
        )
        return StepReport(emission.outputs, finished, self._draft_stage.learn(verified.tree, verified.result, stats))

    def _close(self, emission: Emission) -> list[FinishStats]:
        """Tell whoever learns of the sequences that have come to an end of their own."""
        for sequence, finish in emission.ended:
            query = self._accounting.close(sequence, finish)
            if query is not None:
                self._learning.ended(query)
        return [finish_stats(sequence, finish) for sequence, finish in emission.ended]

    def _teach(self, batch: Batch, rows: ForwardRows, features: Tensor | None, committed: Committed) -> None:
        """Hand the drafter what became permanent."""
        if features is not None and self.drafter.tap_layers:
            for read in reads(batch.items, rows, features, follow=committed.follow):
                self.drafter.read(read)
        self.drafter.commit(committed)

    def assert_conserved(self) -> None:
        """Every slot is free, or holds one committed position of a running sequence or of a kept text (for tests)."""
        owned = torch.cat([self.slots.free_slots(), self.scheduler.held_slots()])
        assert owned.shape[0] == self.slots.capacity, f"{self.slots.capacity - owned.shape[0]} slots are lost"
        assert owned.unique().shape[0] == self.slots.capacity, "a slot has two owners"

    def _sequences(self) -> list[Sequence]:
        return [*self.scheduler.running, *self.scheduler.waiting]

    def _new_sequence(self, request: GenerationRequest, index: int) -> Sequence:
        params = replace(request.sampling, seed=signed64(request.sampling.seed + index))
        sampling = SamplingState(
            params,
            request.prompt,
            eos_ids=self._vocabulary.eos_ids,
            vocab=self._vocabulary.size,
            device=self.target.device,
        )
        return Sequence(
            request=request,
            index=index,
            tokens=list(request.prompt),
            sampling=sampling,
            text=self._vocabulary.text_stream(request),
            num_prompt=len(request.prompt),
        )

    def _newly_credited(self, accepted: int) -> dict[str, int]:
        """Tokens accepted in this step by who proposed them."""
        credits = self.drafter.credits()
        if not credits:
            return {self.drafter.name: accepted}
        new = {name: count - self._credited.get(name, 0) for name, count in credits.items()}
        self._credited = dict(credits)
        return new


def _advance(batch: Batch, accepted: list[int]) -> None:
    """Note which positions now have keys and values: the extends, and the accepted nodes of completing sequences."""
    lengths = iter(accepted)
    for item in batch.items:
        item.sequence.num_computed += item.num_rows + (next(lengths) if item.completes else 0)
