"""The engine: one step at a time, all running sequences together.

    admit -> grow trees -> choose budget -> verify -> accept -> commit -> emit

Each stage lives in a module of its own; this one composes them. One thread drives it.
"""

import time
from collections.abc import Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from drafters.protocol import Committed, Drafter
from drafters.readback import clock_of
from drafters.regret import RegretLedger
from kernels.graph_runner import Capture
from kernels.tree_attention import NULL_SLOT
from service.engine.accounting import Learning, StepClock, charge, finish_stats, query_of, step_stats
from service.engine.budget import BudgetPolicy
from service.engine.commit import committed_of, lay_out, reads
from service.engine.drafting import DraftStage
from service.engine.emit import EmitStage, read_result
from service.engine.kv_pool import SlotPool, SlotTable
from service.engine.prefix_cache import PrefixCache
from service.engine.requests import GenerationRequest, SequenceOutput
from service.engine.rows import ForwardRows, RowLayout
from service.engine.sampling import SamplingState, signed64
from service.engine.scheduler import Batch, Scheduler
from service.engine.sequence import Finish, Sequence, TextStream
from service.engine.stats import FinishStats, LoadStats, StepStats
from service.engine.target import Target
from service.engine.tree_width import widths_up_to
from service.engine.verify import VerifyStage
from service.tokenizer import ChatTokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLimits:
    """Sizes of an engine's tables."""

    max_model_len: int
    max_sequences: int
    prefill_chunk: int
    max_budget: int
    prefix_cache: bool = False
    num_slots: int | None = None  # fewer than the target's pool has, to make slots scarce; None = all of them
    first_slot: int = NULL_SLOT + 1  # where they begin: engines of disjoint slots may run in turn


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What the engine must know of the model's tokens."""

    tokenizer: ChatTokenizer
    eos_ids: frozenset[int]


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
        limits: EngineLimits,
        vocabulary: Vocabulary,
        drafter: Drafter,
        policy: BudgetPolicy,
        *,
        ledger: RegretLedger | None = None,
        learning: Learning | None = None,
        pace_seconds: float | None = None,
        capture: Capture | None = None,
    ) -> None:
        """`ledger`: what is told how long steps take, if anything is to be; with `capture` trees are pruned by CUDA
        graphs."""
        self.target = target
        self.drafter = drafter
        self.slots = SlotPool(limits.num_slots or target.pool.num_slots, target.device, first=limits.first_slot)
        self.table = SlotTable(limits.max_sequences, limits.max_model_len, target.device)
        widths = widths_up_to(limits.max_budget)
        self._draft_stage = DraftStage(
            drafter,
            policy,
            max_budget=limits.max_budget,
            device=target.device,
            pace_seconds=pace_seconds,
            capture=capture,
            max_sequences=limits.max_sequences,
        )
        self.scheduler = Scheduler(
            self.slots,
            self.table,
            prefill_chunk=limits.prefill_chunk,
            released=self._draft_stage.stop,
            cache=PrefixCache(target.device, keep=limits.prefix_cache),
            tree_nodes=limits.max_budget,
        )
        self._layout = RowLayout(capture, widths, max_sequences=limits.max_sequences, device=target.device)
        self._verify_stage = VerifyStage(self.table, capture, widths, max_sequences=limits.max_sequences)
        self._emit_stage = EmitStage(drafter, vocabulary.eos_ids)
        self._vocabulary = vocabulary
        self._now = clock_of(target.device)
        self._ledger = ledger
        self._learning = learning
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
        every = [*self.scheduler.running, *self.scheduler.waiting]
        mine = [sequence for sequence in every if sequence.request.request_id == request_id]
        for sequence in mine:
            self.scheduler.remove(sequence)
        outputs = [self._emit_stage.output(sequence, [], Finish("abort")) for sequence in mine]
        return outputs, list(map(finish_stats, mine, outputs))

    def step(self) -> StepReport:
        """Advance every scheduled sequence: by a piece of its prompt, or by one token and what its tree had right."""
        version = self._learning.between_steps() if self._learning is not None else 0
        clock = StepClock(self._now)
        if self.target.pool.use(self, self.slots.mine):
            assert not self.scheduler.running, "another engine has used the slots of running texts"
            self.scheduler.forget_texts()
        batch = self.scheduler.schedule()
        if not batch.items:
            return StepReport([], [], None)
        self._draft_stage.start(batch.started)
        tree, budget = self._draft_stage.build(batch, self.slots.num_free)
        clock.lap("draft")
        rows = lay_out(batch.items, tree, self.slots, self.table, budget.widths, self._layout)
        output = self.target.forward(rows, self.table)
        clock.lap("verify")
        completing, host = batch.completing, batch.host
        verified = self._verify_stage.verify(completing, rows, tree, output.logits, output.sampler)
        scored = self.drafter.wants_scores
        committed = committed_of(verified, tree, output, wants_scores=scored, host=host, follow=budget.followed)
        clock.lap("other")
        self._teach(batch, rows, output.features, committed)
        clock.lap("follow")
        tokens, failed, sizes = read_result(verified, budget.sizes)
        budget = self._draft_stage.settle(budget, sizes)
        drafted, accepted = budget.nodes, [len(line) - 1 for line in tokens]
        self.slots.free(verified.freed[: sum(budget.widths) - sum(accepted)])
        gaps = _advance(batch, drafted, accepted)
        charge(batch, version, drafted, accepted, clock.settle())
        emit, remove = self._emit_stage.emit, self.scheduler.remove
        outputs = emit(completing, tokens, failed, tree, drafted, verified, output.logits, remove)
        finished = self._close(completing, host.rows, outputs)
        clock.lap("other")
        stats = step_stats(
            batch,
            budget,
            accepted,
            outputs,
            clock.settle(),
            credited=self._newly_credited(sum(accepted)),
            gaps=gaps,
            preemptions=self.scheduler.take_preemptions(),
        )
        if self._ledger is not None:
            self._ledger.elapse(stats.seconds)
        undisturbed = self._learning is None or self._learning.stepped(stats)
        return StepReport(outputs, finished, self._draft_stage.learn(budget, committed, stats, timed=undisturbed))

    def _close(
        self, completing: Items[Sequence], rows: Items[int], outputs: Items[SequenceOutput]
    ) -> list[FinishStats]:
        """Tell whoever learns of the sequences that have come to an end of their own."""
        finished, last = [], {(output.request_id, output.index): output for output in outputs}
        for sequence, row in zip(completing, rows, strict=True):
            output = last[sequence.request.request_id, sequence.index]
            if output.finish_reason is None:
                continue
            if self._learning is not None and output.finish_reason in ("stop", "length"):
                self._learning.ended(query_of(sequence, row))
            finished.append(finish_stats(sequence, output))
        return finished

    def _teach(self, batch: Batch, rows: ForwardRows, features: Tensor | None, committed: Committed) -> None:
        """Hand the drafter what became permanent."""
        if self.drafter.reads_prompts:
            for read in reads(batch.items, rows, features, follow=committed.follow):
                self.drafter.read(read)
        self.drafter.commit(committed)

    def assert_conserved(self) -> None:
        """Every slot is free, or holds one committed position of a running sequence or of a kept text (for tests)."""
        owned = torch.cat([self.slots.free_slots(), self.scheduler.held_slots()])
        assert owned.shape[0] == self.slots.capacity, f"{self.slots.capacity - owned.shape[0]} slots are lost"
        assert owned.unique().shape[0] == self.slots.capacity, "a slot has two owners"

    def _new_sequence(self, request: GenerationRequest, index: int) -> Sequence:
        params = replace(request.sampling, seed=signed64(request.sampling.seed + index))
        sampling = SamplingState(
            params,
            request.prompt,
            eos_ids=self._vocabulary.eos_ids,
            vocab=self.target.vocab_size,
            device=self.target.device,
            grammar=request.grammar,
        )
        return Sequence(
            request=request,
            index=index,
            tokens=list(request.prompt),
            sampling=sampling,
            text=TextStream(self._vocabulary.tokenizer.detokenizer(params.skip_special_tokens), params),
            num_prompt=len(request.prompt),
        )

    def _newly_credited(self, accepted: int) -> Mapping[str, int]:
        """Tokens accepted in this step by who proposed them."""
        credits = self.drafter.credits()
        if not credits:
            return {self.drafter.name: accepted}
        new = {name: count - self._credited.get(name, 0) for name, count in credits.items()}
        self._credited = dict(credits)
        return new


def _advance(batch: Batch, drafted: Items[int], accepted: list[int]) -> tuple[float, ...]:
    """Note which positions now have keys and values: the extends, and the accepted nodes of completing sequences.
    # -> seconds since each of these emitted last"""
    for item in batch.items:
        item.sequence.num_computed += item.num_rows
    # Those that read are not verified: their first token comes from reading.
    for sequence, nodes, length in zip(batch.drafting, drafted, accepted, strict=False):
        sequence.num_computed += length
        sequence.mark_verified(length, nodes)
    now = time.monotonic()
    gaps = [sequence.mark_emitted(now) for sequence in batch.completing]
    return tuple(gap for gap in gaps if gap is not None)
