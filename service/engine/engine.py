"""The engine: advances all running sequences together, one step at a time.

    admit -> choose budget -> grow trees -> prune -> verify -> accept -> commit -> emit

Each stage has a module of its own; this one composes them. The engine is driven by a single thread. On a GPU a step is
launched before the tokens of the one before are read (`launch.py`), so that the device does not wait for the host.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain

import torch

from drafters.decision import RegretLedger
from drafters.protocol import MIN_SURVIVAL, Drafter, MemorySizes
from drafters.readback import clock_of
from kernels.tree_attention import NULL_SLOT
from service.engine.accounting import LearningHooks, SentStep, StepAccounting, StepClock, finish_stats
from service.engine.budget import Budget
from service.engine.drafting import DraftStage
from service.engine.emit import EmitStage, StepResult, read_result, tokens_of
from service.engine.launch import Flight, Launcher, count_rows, landed
from service.engine.requests import GenerationRequest, SamplingParams, SequenceOutput, Submission
from service.engine.rows import Scheduled, decoding_shapes
from service.engine.sampling import SamplingState, signed64
from service.engine.scheduler import Scheduler, StepBatch
from service.engine.sequence import Finish, Sequence, TextStream, new_sequence
from service.engine.stats import FinishStats, LoadStats, StepStats
from service.engine.target import Target
from service.engine.tree_pruning import tree_widths_up_to
from service.engine.waiting import PromptPace
from service.observability.guard import Guard
from service.text.tokenizer import ChatTokenizer

logger = logging.getLogger(__name__)

Deliver = Callable[[list[SequenceOutput]], None]

_PROBE = GenerationRequest(
    request_id="probe",
    prompt=(0,),
    sampling=SamplingParams(seed=0, max_tokens=1, temperature=0.0),
    store=False,
)
"""A request that every working engine can run; used to find out whether the engine itself fails."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLimits:
    """Sizes of an engine's tables and steps, and its promised pace."""

    max_model_len: int
    max_sequences: int
    prefill_chunk: int
    max_budget: int
    prefix_cache: bool = False
    num_slots: int | None = None  # number of KV slots that the engine uses; None for all of the target's pool
    first_slot: int = NULL_SLOT + 1  # first slot that the engine uses; engines with disjoint slots can share a pool
    memory: MemorySizes = field(default_factory=MemorySizes)  # sizes of the memory of past answers
    least_survival: float = MIN_SURVIVAL  # survival below which no node is drafted, see `least_that_pays`
    pace_seconds: float | None = None  # promised seconds per token, see `pace_weights`; None without a promise
    steps_ahead: int = 0  # steps that are launched before the tokens of earlier ones are read: 0 or 1


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The model's tokenizer and end tokens."""

    tokenizer: ChatTokenizer
    eos_ids: frozenset[int]


@dataclass(frozen=True, slots=True)
class EngineOutput:
    """Outputs and statistics of one step."""

    outputs: list[SequenceOutput]
    finished: list[FinishStats]
    stats: StepStats | None  # None if there was nothing to do, or if recording the step failed


_NOTHING = EngineOutput([], [], None)


@dataclass(slots=True)
class _Recovery:
    """State of failures that the next calls of `Engine.step` deal with."""

    rejected: dict[Sequence, Finish] = field(default_factory=dict)  # sequences that could not start
    ended: EngineOutput = _NOTHING  # outputs of a sequence that failed alone
    parts: list[list[Scheduled]] = field(default_factory=list)  # parts of a failed step, to be repeated last one first


class Engine:
    """Generates tokens for submitted requests; owns target, KV slots, scheduler and drafter. Not thread-safe."""

    def __init__(
        self,
        target: Target,
        limits: EngineLimits,
        vocabulary: Vocabulary,
        drafter: Drafter,
        policy: Budget,
        *,
        ledger: RegretLedger | None = None,
        learning: LearningHooks | None = None,
    ) -> None:
        """`policy`: chooses how many nodes are drafted; `ledger`: ledger in which the seconds of steps accrue;
        `learning`: learning while serving. If the target's forwards are captured, so are the other stages of a step,
        with trees of fixed widths."""
        capture, max_sequences = target.capture, limits.max_sequences
        shapes = decoding_shapes(max_sequences, tree_widths_up_to(limits.max_budget))
        self.target = target
        self.drafter = drafter
        self.slots = target.pool.allocator(limits.num_slots, limits.first_slot)
        self.table = target.pool.table(max_sequences, limits.max_model_len)
        self._draft_stage = DraftStage(
            drafter,
            policy,
            max_budget=limits.max_budget,
            device=target.device,
            pace_seconds=limits.pace_seconds,
            capture=capture,
            max_sequences=max_sequences,
        )
        self.scheduler = Scheduler(
            self.slots,
            self.table,
            pace=PromptPace(limits.prefill_chunk),
            on_start=self._begin,
            on_stop=self._draft_stage.stop,
            keeps_prefixes=limits.prefix_cache,
            tree_nodes=limits.max_budget,
        )
        self._launcher = Launcher(
            target, self.slots, self.table, self._draft_stage, shapes, steps_ahead=limits.steps_ahead
        )
        self._flight: Flight | None = None  # the launched step whose tokens have not been read
        self._emit_stage = EmitStage(drafter, vocabulary.eos_ids)
        self._accounting = StepAccounting(drafter, clock_of(target.device), ledger, learning)
        self._vocabulary = vocabulary
        self._recovery = _Recovery()

    @property
    def idle(self) -> bool:
        """Whether the next step would have nothing to do."""
        scheduler = self.scheduler
        return not (scheduler.running or scheduler.queue.num_sequences or self._recovery.rejected or self._flight)

    @property
    def policy(self) -> Budget:
        """Policy that chooses how many nodes are drafted."""
        return self._draft_stage.policy

    @property
    def load(self) -> LoadStats:
        """Numbers of running and waiting sequences and of used slots, for metrics."""
        states = self.table.states
        return LoadStats(
            num_running=len(self.scheduler.running),
            num_waiting=self.scheduler.queue.num_sequences,
            slots_used=self.slots.capacity - self.scheduler.num_available,
            slots_total=self.slots.capacity,
            places_used=self.scheduler.num_seen,
            places_total=0 if self.slots.windows is None else self.slots.windows.places.capacity,
            snapshots=0 if states is None else len(states.snapshots) - len(states.free),
        )

    def submit(self, body: Submission) -> None:
        """Queue the requests of an HTTP request body."""
        self.scheduler.add(body)

    def abort(self, *request_ids: str) -> EngineOutput:
        """End all sequences of these requests now, free their slots, and return their last outputs."""
        return self._end(dict.fromkeys(self.scheduler.withdraw(frozenset(request_ids)), Finish("abort")))

    @property
    def guard(self) -> Guard:
        """Guard under which the bookkeeping of steps runs."""
        return self._accounting.guard

    def step(self, deliver: Deliver = lambda outputs: None) -> EngineOutput:
        """Advance every scheduled sequence: by a prompt chunk, or by the accepted tokens of its tree and one more.

        A step that raises before any sequence has changed is repeated by the next calls: first whole and without
        drafts, then in halves, until the failing sequence is alone and ends with an error. The texts of the others stay
        the same, since a row's result does not depend on the other rows. An exception that even the engine's own probe
        request causes is raised. `deliver` is called with the outputs, if there are any, before the bookkeeping.
        """
        output, sent = self._advance_all()
        if output.outputs:
            deliver(output.outputs)
        if sent is None:
            return output
        finished, stats = self._accounting.keep(sent, self._draft_stage.learn)
        return EngineOutput(output.outputs, finished, stats)

    def _advance_all(self) -> tuple[EngineOutput, SentStep | None]:
        """Launch a step, and settle it or, if steps run ahead, the one before. Returns the outputs, and the data for
        the bookkeeping or None."""
        if self._recovery.rejected:
            rejected, self._recovery.rejected = self._recovery.rejected, {}
            return self._end(rejected), None
        before, self._flight = self._flight, None
        launched = self._launch(before) if before is None or self._may_pass(before) else None
        settled = None if before is None else self._settle(before, is_last=launched is None)
        if launched is not None and self._commit(launched):
            if not self._launcher.runs_ahead:
                return self._settle(launched)
            self._flight = launched
        if settled is not None:
            return settled
        ended, self._recovery.ended = self._recovery.ended, _NOTHING
        return ended, None

    def _may_pass(self, flight: Flight) -> bool:
        """Whether a step can be launched before this one's tokens are known."""
        return not self._recovery.parts and self._launcher.may_pass(flight) and self.scheduler.fits_ahead

    def _launch(self, before: Flight | None) -> Flight | None:
        """Launch the next step. Returns None if there is nothing to do, or if that raised; then it is repeated."""
        clock = self._accounting.start_step(idle=self.idle)
        if self.target.pool.use(self, self.slots.owned):
            self._forget_slots(before)
        batch = self._next_batch(ahead=before is not None)
        if not batch.items:
            return None
        mark = self.slots.mark()
        try:
            flight = self._launcher.launch(batch, clock, before, drafts=self._accounting.may_draft)
        except Exception as error:
            self.slots.rewind(mark)  # nothing was freed since
            self._recover(batch, error)
            return None
        for item in batch.items:
            count_rows(item.sequence, item.num_rows, 1)
        return flight

    def _commit(self, flight: Flight) -> bool:
        """Give the drafter the tokens of a launched step. If that raises, undo the step, and return False."""
        try:
            self._launcher.commit(flight)
        except Exception as error:
            for item in flight.batch.items:
                count_rows(item.sequence, -item.num_rows, -1)
                self.scheduler.release(item.sequence)
            self.slots.free(flight.rows.slots)
            self._recover(flight.batch, error)
            return False
        return True

    def forget(self, scope: str | None) -> None:
        """Forget the past answers of this scope, or of all scopes, in the drafter and in what is learnt from."""
        self.drafter.forget(scope)
        self._accounting.forgot(scope)

    def _forget_slots(self, before: Flight | None) -> None:
        """Forget cached prefixes, because another engine has written to these slots since the last step."""
        assert not self.scheduler.running, "another engine has used the slots of running sequences"
        assert before is None, "another engine has used slots while a step was in flight: step until idle"
        self.scheduler.forget_prefixes()
        if self.slots.windows is not None:
            self.slots.windows.places.reset()  # the other engine has changed which slots have them

    def _next_batch(self, *, ahead: bool) -> StepBatch:
        """Return the next part of a failed step, which has no drafts, or else a new batch. `ahead`: whether the tokens
        of the last step are unknown."""
        if not self._recovery.parts:
            batch = self.scheduler.schedule(ahead=ahead)
            most = batch.num_extend_rows + self.table.most_nodes
            return self._draft_stage.arrange(batch, min(self.slots.room, most))
        part = [item for item in self._recovery.parts.pop() if item.sequence in self.scheduler.running]
        items = [Scheduled.of(item.sequence, item.num_rows) for item in part]  # with tokens that were unknown
        return StepBatch(items, [item.sequence for item in items])

    def _settle(self, flight: Flight, *, is_last: bool = True) -> tuple[EngineOutput, SentStep]:
        """Read a step's tokens, append them to their sequences, free the slots of rejected nodes, and make the outputs.
        `is_last`: whether no later step is launched."""
        batch, budget = flight.batch, flight.budget
        tokens, failed, tree_sizes = read_result(flight.emitted(), flight.verified.tokens.shape[1])
        self._draft_stage.count_nodes(budget, tree_sizes)
        lengths = [len(chosen) - 1 for chosen in tokens]
        gaps = landed(batch, lengths)
        self.table.advance(batch.items, lengths, flight.verified.path_rows)
        if rejected := sum(budget.node_rows) - sum(lengths):
            self.slots.free(flight.rejected[:rejected])
        result = StepResult(flight.trees, budget, flight.verified, flight.output.logits, tokens, failed)
        discarded = sum(len(of) for of, one in zip(tokens, batch.completing, strict=True) if one.has_ended)
        sent = list[list[SequenceOutput]]()
        for index, sequence in enumerate(batch.completing):
            if not sequence.has_ended:
                sent.append(self._emit(sequence, index, result))
                lengths[index] = max(0, len(tokens_of(sent[-1])) - 1)
            else:
                sent.append([])
        for item in batch.items:
            self.scheduler.release(item.sequence)
        preemptions = self.scheduler.take_preemptions()
        books = SentStep(batch, budget, flight.clock, sent, lengths, gaps, preemptions, discarded, is_last)
        return EngineOutput(list(chain.from_iterable(sent)), [], None), books

    def _emit(self, sequence: Sequence, index: int, result: StepResult) -> list[SequenceOutput]:
        """Make the outputs of one completing sequence; if that raises, the sequence ends with an error."""
        try:
            return self._emit_stage.emit(sequence, index, result, self.scheduler.remove)
        except Exception as error:
            return self._end({sequence: _failure(sequence.request, error)}).outputs

    def _recover(self, batch: StepBatch, error: Exception) -> None:
        """Queue the parts of a step that raised and was undone, to be repeated; a sequence that raises alone ends with
        an error. Raises the exceptions of `_probe`."""
        items, sequences = batch.items, [item.sequence for item in batch.items]
        for sequence in sequences:
            if not sequence.has_ended:
                self._draft_stage.stop(sequence)
        drafts = batch.budget is not None
        if drafts or len(items) > 1:
            logger.warning("a step of %d sequences failed; repeating it without drafts", len(items), exc_info=error)
            half = 0 if drafts else len(items) // 2
            self._recovery.parts += [part for part in (items[half:], items[:half]) if part]
            return
        self._recovery.ended = self._end({sequence: _failure(sequence.request, error) for sequence in sequences})
        self._probe()

    def _probe(self) -> None:
        """Run and undo a step without drafts for the engine's own probe request. Raises if the engine itself fails."""
        sequence, mark = new_sequence(_PROBE, 0), self.slots.mark()
        if not self._begin(sequence):
            raise RuntimeError("no sequence can begin")
        sequence.row = self.table.take_row()
        batch = StepBatch([Scheduled.of(sequence, 1)], [sequence])
        flight = self._launcher.launch(batch, StepClock(clock_of(self.target.device)), drafts=False)
        self._launcher.commit(flight)
        flight.emitted()
        self._draft_stage.stop(sequence)
        self.table.release_row(sequence.row, 1)
        self.slots.rewind(mark)

    def _end(self, ends: Mapping[Sequence, Finish]) -> EngineOutput:
        """Stop these sequences, and make their last outputs, without text."""
        for sequence in ends:
            self.scheduler.remove(sequence)
        outputs = [self._emit_stage.last(sequence, finish) for sequence, finish in ends.items()]
        return EngineOutput(outputs, list(map(finish_stats, ends, outputs)), None)

    def assert_conserved(self) -> None:
        """Assert, for tests, that every slot is either free or holds one position of a running sequence or a cached
        prefix; not while a step is in flight, which holds some for its nodes."""
        if self._flight is not None:
            return
        owned = torch.cat([self.slots.free_slots(), self.scheduler.held_slots()])
        assert owned.shape[0] == self.slots.capacity, f"{self.slots.capacity - owned.shape[0]} slots are lost"
        assert owned.unique().shape[0] == self.slots.capacity, "a slot has two owners"
        if (windows := self.slots.windows) is not None:
            held = self.scheduler.held_slots(placed=True)
            owned = torch.cat([windows.places.free_slots(), windows.of(held)])
            assert owned.shape[0] == owned.unique().shape[0] == windows.places.capacity, "a place is lost or shared"
            assert windows.of(self.scheduler.held_slots()).count_nonzero() == len(held), "a slot lost its place"
        if (states := self.table.states) is not None:
            owners = sorted(states.free + self.scheduler.held_states())
            assert owners == [*states.snapshots], "a state is lost or shared"

    def _begin(self, sequence: Sequence) -> bool:
        """Create a sequence's sampling state and text stream from its tokens so far. Returns whether it can start; if
        this raises, the sequence ends with an error."""
        request, num_prompt = sequence.request, sequence.num_prompt
        try:
            sequence.sampling = SamplingState(
                replace(request.sampling, seed=signed64(request.sampling.seed + sequence.index)),
                request.prompt,
                eos_ids=self._vocabulary.eos_ids,
                vocab=self.target.vocab_size,
                device=self.target.device,
                grammar=request.grammar,
            )
            sequence.sampling.extend(sequence.tokens[num_prompt:])
            if not sequence.preemptions:
                skips = request.sampling.skip_special_tokens
                detokenizer = self._vocabulary.tokenizer.detokenizer(skips, request.prompt)
                sequence.text = TextStream(detokenizer, request.sampling)
        except Exception as error:
            self._recovery.rejected[sequence] = _failure(request, error)
            return False
        return True


def _failure(request: GenerationRequest, error: Exception) -> Finish:
    """Log the exception of a request, and return its end."""
    logger.error("request %s failed", request.request_id, exc_info=error)
    name = f"Request {request.request_id} failed in the engine"
    return Finish("error", error=f"{name} ({type(error).__name__}); the server's log has the details.")
