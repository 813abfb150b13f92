"""The engine: one step at a time, all running sequences together.

    admit -> grow trees -> choose budget -> verify -> accept -> commit -> emit

Each stage lives in a module of its own; this one composes them. One thread drives it.
"""

import logging
import time
from collections.abc import Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass, field, replace
from itertools import chain

import torch
from torch import Tensor

from drafters.protocol import Committed, Drafter, MemorySizes
from drafters.readback import clock_of
from drafters.regret import RegretLedger
from kernels.graph_runner import Capture
from kernels.tree_attention import NULL_SLOT
from service.engine.accounting import Learning, StepClock, charge, finish_stats, query_of, step_stats
from service.engine.budget import BudgetPolicy
from service.engine.commit import committed_of, lay_out, reads
from service.engine.drafting import DraftStage
from service.engine.emit import EmitStage, StepResult, read_result, tokens_of
from service.engine.gains import TextGain, kind_of
from service.engine.kv_pool import SlotPool, SlotTable
from service.engine.prefix_cache import PrefixCache
from service.engine.prompt_scores import note_scores, rows_of, scored_in
from service.engine.requests import GenerationRequest, SamplingParams, SequenceOutput
from service.engine.rows import ForwardRows, RowLayout
from service.engine.sampling import SamplingState, signed64
from service.engine.scheduler import Batch, Scheduled, Scheduler
from service.engine.sequence import Finish, Sequence, TextStream
from service.engine.stats import FinishStats, LoadStats, StepStats
from service.engine.target import Target
from service.engine.tree_width import widths_up_to
from service.engine.verify import VerifyStage
from service.tokenizer import ChatTokenizer

logger = logging.getLogger(__name__)

_PROBE = GenerationRequest(
    request_id="probe",
    prompt=(0,),
    sampling=SamplingParams(seed=0, max_tokens=1, temperature=0.0),
    store=False,
)
"""What any engine can run that works at all."""


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
    memory: MemorySizes = field(default_factory=MemorySizes)  # of past answers


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
        self.policy = policy
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
        self._refused: list[StepReport] = []  # ends of requests that could not begin, not yet reported
        self._to_repeat: list[list[Scheduled]] = []  # parts of a step that failed, the next one last
        self._is_half_done = False  # whether the last step failed after texts had changed

    @property
    def idle(self) -> bool:
        return not (self.scheduler.running or self.scheduler.waiting or self._refused)

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
        """Append a request's n sequences to the waiting ones; if that raises, the next step reports their end."""
        try:
            sequences = [self._new_sequence(request, index) for index in range(request.n)]
        except Exception as error:
            bare, finish = replace(request, grammar=None, sampling=_PROBE.sampling), _failure(request, error)
            self._refused.append(self._end({self._new_sequence(bare, index): finish for index in range(request.n)}))
            return
        for sequence in sequences:
            self.scheduler.add(sequence)

    def abort(self, request_id: str) -> StepReport:
        """End a request's sequences now and free their slots."""
        every = (*self.scheduler.running, *self.scheduler.waiting)
        return self._end({one: Finish("abort") for one in every if one.request.request_id == request_id})

    def forget(self, scope: str | None = None) -> None:
        """Forget past answers of this scope, or of all."""
        self.drafter.forget(scope)

    def step(self) -> StepReport:
        """Advance every scheduled sequence: by a piece of its prompt, or by one token and its tree's accepted ones.

        A step that raises before any text has changed is repeated by the next calls: first whole and without drafts,
        then in halves, until the sequence that raises is alone and ends with an error. Other texts stay the same, since
        rows do not depend on their company. What raises for every text is raised.
        """
        if self._refused:
            return self._refused.pop()
        version = self._learning.between_steps() if self._learning is not None else 0
        clock = StepClock(self._now)
        if self.target.pool.use(self, self.slots.mine):
            assert not self.scheduler.running, "another engine has used the slots of running texts"
            self.scheduler.forget_texts()
        batch, drafts = self._next_batch()
        if not batch.items:
            return StepReport([], [], None)
        num_free = self.slots.num_free
        try:
            report = self._conclude(batch, self._compute(batch, clock, drafts=drafts), version, clock)
        except Exception as error:
            return self._recover(batch, num_free, error, drafts=drafts)
        self._is_half_done = False
        return report

    def _next_batch(self) -> tuple[Batch, bool]:
        """Part of a step that failed, or else a new step. # -> the batch, and whether it may have drafts"""
        if not self._to_repeat:
            return self._draft_stage.arrange(self.scheduler.schedule()), True
        items = [item for item in self._to_repeat.pop() if item.sequence.row is not None]
        return Batch(items, [item.sequence for item in items]), False

    def _compute(self, batch: Batch, clock: StepClock, *, drafts: bool) -> StepResult:
        """Draft, run the target and verify. Only slots are taken, and the drafter's state changes."""
        self._draft_stage.start(batch.started)
        tree, budget = self._draft_stage.build(batch, self.slots.num_free, drafts=drafts)
        clock.lap("draft")
        rows = lay_out(batch.items, tree, self.slots, self.table, budget.widths, self._layout)
        scored = scored_in(batch.items)
        output = self.target.forward(rows, self.table, rows_of(scored, self.target.device))
        if output.scored is not None:
            note_scores(scored, output.scored)
        clock.lap("verify")
        verified = self._verify_stage.verify(batch.completing, rows, tree, output.logits, output.sampler, budget.sizes)
        wants = self.drafter.wants_scores
        committed = committed_of(verified, tree, output, wants_scores=wants, host=batch.host, follow=budget.followed)
        clock.lap("other")
        self._teach(batch, rows, output.features, committed)
        clock.lap("follow")
        tokens, failed, sizes = read_result(verified)
        budget = self._draft_stage.settle(budget, sizes)
        return StepResult(tree, budget, verified, committed, output.logits, tokens, failed)

    def _conclude(self, batch: Batch, result: StepResult, version: int, clock: StepClock) -> StepReport:
        """Make a step's tokens part of the texts, send them, and take account of them."""
        budget, accepted = result.budget, [len(line) - 1 for line in result.tokens]
        gaps = _advance(batch, accepted)
        self.slots.free(result.verified.freed[: sum(budget.widths) - sum(accepted)])
        sent = [self._emit(sequence, line, result) for line, sequence in enumerate(batch.completing)]
        outputs = list(chain.from_iterable(sent))
        accepted = [max(0, len(tokens_of(of_one)) - 1) for of_one in sent]
        charge(batch, version, budget.nodes, accepted, clock.settle())
        finished = self._close(batch.completing, batch.host.rows, [of_one[-1] for of_one in sent])
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
            self._ledger.accrue(stats.seconds)
        undisturbed = self._learning is None or self._learning.stepped(stats)
        self._draft_stage.learn(budget, result.committed, stats, timed=undisturbed)
        return StepReport(outputs, finished, stats)

    def _emit(self, sequence: Sequence, line: int, result: StepResult) -> list[SequenceOutput]:
        """What a step sends for one sequence; at an exception, that it ends."""
        try:
            return self._emit_stage.emit(sequence, line, result, self.scheduler.remove)
        except Exception as error:
            return self._end({sequence: _failure(sequence.request, error)}).outputs

    def _recover(self, batch: Batch, num_free: int, error: Exception, *, drafts: bool) -> StepReport:
        """Undo a step that raised and note what is to be repeated; end its sequences where that is not possible.

        num_free: slots that were free before the step. Raises `error` if texts have changed in this step and in the one
        before, and what `_probe` raises.
        """
        items, sequences = batch.items, [item.sequence for item in batch.items]
        if any(item.sequence.num_computed != item.start for item in items):
            if self._is_half_done:
                raise error
            self._is_half_done = True
            return self._end({sequence: _failure(sequence.request, error) for sequence in sequences})
        self.slots.num_free = num_free  # nothing has been freed since, so what was taken still lies in the stack
        for sequence in sequences:
            self._draft_stage.stop(sequence)
        if drafts or len(items) > 1:
            logger.warning("a step of %d sequences failed; it runs again without drafts", len(items), exc_info=error)
            half = 0 if drafts else len(items) // 2
            self._to_repeat += [part for part in (items[half:], items[:half]) if part]
            return StepReport([], [], None)
        report = self._end({sequence: _failure(sequence.request, error) for sequence in sequences})
        self._probe()
        return report

    def _probe(self) -> None:
        """Run a step without drafts for a text of the engine's own, and undo it. Raises what that raises."""
        sequence, num_free = self._new_sequence(_PROBE, 0), self.slots.num_free
        sequence.row = self.table.take_row()
        self._compute(Batch([Scheduled.of(sequence, 1)], [sequence]), StepClock(self._now), drafts=False)
        self._draft_stage.stop(sequence)
        self.table.release_row(sequence.row, 1)
        self.slots.num_free = num_free

    def _end(self, ends: Mapping[Sequence, Finish]) -> StepReport:
        """Take sequences out that have not been, and send their last outputs, without text."""
        present = {*self.scheduler.running, *self.scheduler.waiting}
        for sequence in ends:
            if sequence in present:
                self.scheduler.remove(sequence)
        outputs = [self._emit_stage.last(sequence, finish) for sequence, finish in ends.items()]
        return StepReport(outputs, list(map(finish_stats, ends, outputs)), None)

    def _close(
        self, completing: Items[Sequence], rows: Items[int], outputs: Items[SequenceOutput]
    ) -> list[FinishStats]:
        """Hand finished queries to learning; `outputs` is the last one of each sequence."""
        finished = []
        for sequence, row, output in zip(completing, rows, outputs, strict=True):
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
            gain=TextGain(kind_of(params.temperature, has_grammar=request.grammar is not None)),
        )

    def _newly_credited(self, accepted: int) -> Mapping[str, int]:
        """Tokens accepted in this step by who proposed them."""
        credits = self.drafter.credits()
        if not credits:
            return {self.drafter.name: accepted}
        new = {name: count - self._credited.get(name, 0) for name, count in credits.items()}
        self._credited = dict(credits)
        return new


def _advance(batch: Batch, accepted: Items[int]) -> tuple[float, ...]:
    """Note which positions now have keys and values: the extends, and the accepted nodes of completing sequences.
    # -> seconds since each of these emitted last"""
    for item in batch.items:
        item.sequence.num_computed += item.num_rows
    for sequence, length in zip(batch.completing, accepted, strict=True):
        sequence.num_computed += length
    now = time.monotonic()
    gaps = [sequence.mark_emitted(now) for sequence in batch.completing]
    return tuple(gap for gap in gaps if gap is not None)


def _failure(request: GenerationRequest, error: Exception) -> Finish:
    """The end of a request that raised, and its line in the log."""
    logger.error("request %s failed", request.request_id, exc_info=error)
    name = f"Request {request.request_id} failed in the engine"
    return Finish("error", error=f"{name} ({type(error).__name__}); the server's log has the details.")
