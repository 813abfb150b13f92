"""Small engines around tiny models, and what their sequences produced, step by step."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any

import torch

from drafters.asking import AskGate
from drafters.protocol import Drafter
from kernels.graph_runner import Capture
from kernels.sample import ChosenTokens
from service.drafter import make_drafter
from service.engine.budget import Budget, DraftBudget, FixedBudget, StepLoad
from service.engine.draft_gate import SequenceGain
from service.engine.engine import Engine, EngineLimits, Vocabulary
from service.engine.kv_pool import KVPool
from service.engine.requests import (
    GenerationRequest,
    SamplingParams,
    SequenceOutput,
    SpeculationParams,
    Submission,
    TokenLogprob,
)
from service.engine.sampling import EAGER_SAMPLER, SamplingRows, SamplingState
from service.engine.sequence import Sequence as RunningSequence
from service.engine.states import StateRoom
from service.engine.stats import StepStats
from service.engine.target import Target
from service.engine.waiting import WaitingQueue
from service.engine.weights import LoadedModel
from service.text.tokenizer import ChatTokenizer
from tests.tiny_models import loaded_tiny

NUM_SLOTS = 2048
STATES = StateRoom(sequences=16, nodes=256, snapshots=6)
LIMITS = EngineLimits(max_model_len=512, max_sequences=8, prefill_chunk=64, max_budget=12)


def state_after(
    params: SamplingParams, prompt: Sequence[int], generated: Sequence[int], *, eos_ids: frozenset[int], vocab: int
) -> SamplingState:
    """How a sequence samples that has generated these tokens."""
    state = SamplingState(params, prompt, eos_ids=eos_ids, vocab=vocab, device=torch.device("cpu"))
    state.extend(generated)
    return state


def ask(engine: Engine, *requests: GenerationRequest) -> None:
    """Queue the requests of one body."""
    engine.submit(Submission(requests))


def waiting_in(queue: WaitingQueue) -> list[RunningSequence]:
    """The next sequence of each entry, in order of arrival."""
    heads = (entry.head for entry in queue._all() if entry.head is not None)
    return sorted(heads, key=attrgetter("arrival"))


@dataclass
class Generated:
    """One sequence's outputs put together."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    last: SequenceOutput | None = None
    num_outputs: int = 0

    def add(self, output: SequenceOutput) -> None:
        assert self.last is None, "an output came after the last one"
        self.tokens += output.token_ids
        self.text += output.text
        self.logprobs += output.logprobs or ()
        self.num_outputs += 1
        self.last = output if output.finish_reason else None

    @property
    def end(self) -> SequenceOutput:
        assert self.last is not None, "the sequence has not ended"
        return self.last

    @property
    def accepted_per_step(self) -> tuple[int, ...]:
        assert self.end.speculation is not None
        return self.end.speculation.accepted_per_step

    @property
    def accepted(self) -> int:
        return sum(self.accepted_per_step)


def tiny_target(
    loaded: LoadedModel, num_slots: int = NUM_SLOTS, tap_layers: tuple[int, ...] = (), *, num_places: int | None = None
) -> Target:
    pool = KVPool(loaded.kv_shape, num_slots, loaded.model.device, states=STATES)
    target = Target(loaded.model, pool, tap_layers=tap_layers)
    if num_places is not None:
        target.pool = KVPool(loaded.kv_shape, num_slots, loaded.model.device, num_places=num_places)
    return target


def tiny_engine(
    family: str | LoadedModel = "llama",
    *,
    drafter: str | Drafter = "random",
    policy: Budget | None = None,
    num_slots: int = NUM_SLOTS,
    num_places: int | None = None,
    limits: EngineLimits = LIMITS,
    capture: Capture | None = None,
) -> Engine:
    loaded = loaded_tiny(family) if isinstance(family, str) else family
    target = tiny_target(loaded, num_slots, num_places=num_places)
    drafts = make_drafter(drafter, target, limits) if isinstance(drafter, str) else drafter
    target.capture = capture
    return Engine(target, limits, vocabulary_of(loaded), drafts, policy or FixedBudget(limits.max_budget))


def vocabulary_of(loaded: LoadedModel) -> Vocabulary:
    return Vocabulary(ChatTokenizer(loaded.tokenizer), loaded.eos_token_ids)


def request(
    name: str,
    prompt: Sequence[int],
    params: SamplingParams | None = None,
    *,
    n: int = 1,
    prediction: Sequence[int] = (),
    speculation: SpeculationParams | None = None,
) -> GenerationRequest:
    return GenerationRequest(
        request_id=name,
        prompt=tuple(prompt),
        sampling=params or greedy(),
        n=n,
        prediction=tuple(prediction),
        speculation=speculation or SpeculationParams(),
    )


def always_ask(gate: AskGate, expected: float, *, can_answer: bool = True) -> bool:
    """A gate's `ask` that asks, whatever that has gained."""
    gate._step.situation = 0
    gate._step.asked.append((gate._decision.gain(1, gate._step.key), expected))
    return True


def step_stats(nodes: int = 0, accepted: int = 0, **other: object) -> StepStats:
    """The record of a step of one draft."""
    stats = StepStats(
        prompt_tokens=0,
        emitted_tokens=1 + accepted,
        drafts=1,
        drafted_nodes=nodes,
        accepted_tokens=accepted,
        accepted_per_sequence=(accepted,),
        accepted_by_source={},
        budget_reason="fixed",
        draft_seconds=1.0,
        verify_seconds=2.0,
        other_seconds=3.0,
        preemptions=0,
    )
    return replace(stats, **other)  # type: ignore[arg-type]


def load_of(
    num_decoding: int = 1,
    *,
    prompt_rows: int = 0,
    context: float = 1.0,
    free_slots: int = 100,
    decoding: Sequence[SequenceGain] = (),
    num_drafting: int | None = None,
    **other: Any,
) -> StepLoad:
    """Decoding sequences, all of which run the drafter unless `num_drafting` says otherwise, and one prompt chunk."""
    gains = tuple(decoding) or tuple(SequenceGain() for _ in range(num_decoding))
    load = StepLoad(
        num_rows=len(gains) + prompt_rows,
        context=context,
        free_slots=free_slots,
        num_sequences=len(gains) + bool(prompt_rows),
        decoding=gains,
        num_drafting=len(gains) if num_drafting is None else num_drafting,
    )
    return replace(load, **other)


def budget_of(load: StepLoad, nodes: Sequence[int], reason: str = "cost", **other: Any) -> DraftBudget:
    """A decision for so many nodes of each sequence, by a drafter that ran and follows."""
    counts = tuple(nodes)
    budget = DraftBudget(load=load, reason=reason, node_rows=counts, drafted=True, followed=True, num_nodes=counts)
    return replace(budget, **other)


def greedy(max_tokens: int = 32) -> SamplingParams:
    return SamplingParams(seed=0, max_tokens=max_tokens, temperature=0.0, ignore_eos=True)


def sampled(seed: int, max_tokens: int = 32) -> SamplingParams:
    return SamplingParams(seed=seed, max_tokens=max_tokens, temperature=1.0, ignore_eos=True)


def generate(engine: Engine, *requests: GenerationRequest) -> dict[tuple[str, int], Generated]:
    """Run requests to their end together; slots are counted after every step."""
    for one in requests:
        ask(engine, one)
    results = {(one.request_id, index): Generated() for one in requests for index in range(one.n)}
    finish(engine, results)
    assert engine.scheduler.num_available == engine.slots.capacity
    return results


def finish(engine: Engine, results: dict[tuple[str, int], Generated]) -> None:
    """Step until nothing is left to do."""
    steps = 0
    while not engine.idle:
        collect(engine.step().outputs, results)
        engine.assert_conserved()
        steps += 1
        assert steps < 5_000, "the engine makes no progress"


def keys_and_values(pool: KVPool) -> list[torch.Tensor]:
    """Those of the layers that attend."""
    return [kept for kept in pool.layers if isinstance(kept, torch.Tensor)]


def bytes_of(pool: KVPool) -> int:
    """Bytes of all layers' keys and values, and states."""
    own = {id(kept): kept.nbytes for kept in keys_and_values(pool)}
    return sum(own.values()) + pool.shape.state_bytes(pool.states)


def collect(outputs: Sequence[SequenceOutput], results: dict[tuple[str, int], Generated]) -> None:
    for output in outputs:
        results[output.request_id, output.index].add(output)


def alone(params: SamplingParams, prompt: Sequence[int], engine: Engine | None = None) -> Generated:
    """What plain decoding, or the given engine, makes of one prompt with no other around."""
    return generate(engine or tiny_engine(drafter="none"), request("alone", prompt, params))["alone", 0]


def with_answers(requests: Sequence[GenerationRequest]) -> list[GenerationRequest]:
    """The same requests, each with its own plain answer as prediction, so that random trees contain accepted nodes."""
    return [replace(one, prediction=tuple(alone(one.sampling, one.prompt).tokens)) for one in requests]


def choose_tokens(logits: torch.Tensor, rows: SamplingRows) -> ChosenTokens:
    """The target's token for each row of logits."""
    return rows.table.choose(rows.transformed(logits), rows.sequence_idx, rows.positions, EAGER_SAMPLER)
