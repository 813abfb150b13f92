"""States of recurrent layers in the engine: whatever chunks, trees, company, preemptions, failures and cached prefixes
a text meets, its states equal those of a plain loop over its tokens, and none is lost."""

import copy
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from torch import Tensor

from kernels import ops
from kernels.recurrence import Convolution, Recurrence, StateRows, advance_states
from kernels.rows import ExtendRows
from service.drafter import draft_model_of, make_drafter
from service.engine.budget import FixedBudget
from service.engine.engine import Engine, EngineLimits
from service.engine.kv_pool import KVPool, KVShape, LayerKV
from service.engine.measuring import check
from service.engine.memory_planner import room_for
from service.engine.prefix_cache import PrefixCache
from service.engine.requests import GenerationRequest
from service.engine.rows import Scheduled
from service.engine.states import StateRoom, StateShape
from service.errors import StartupError
from tests.conformance.checkpoints import CHECKPOINTS, Checkpoint, made, save
from tests.service.engine.harness import (
    LIMITS,
    ask,
    bytes_of,
    greedy,
    request,
    sampled,
    tiny_engine,
    vocabulary_of,
)
from tests.tiny_models import load, loaded_tiny, random_prompts

VOCAB, HEADS, DIM = 256, 2, 4
SHAPE = StateShape(kernel=3, columns=3 * HEADS * DIM, heads=HEADS, key_dim=DIM, value_dim=DIM, input_columns=28)
CACHED = replace(LIMITS, prefix_cache=True, max_sequences=16, max_model_len=1024)


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


CONVOLUTION = Convolution(drawn(SHAPE.columns, SHAPE.kernel), None, activated=True)
DELTA = Recurrence(HEADS, HEADS, DIM, DIM, -drawn(HEADS).exp(), drawn(HEADS), corrects=True)
INPUTS, HEAD = drawn(1024, SHAPE.input_columns), 3 * drawn(1024, HEADS * DIM)


class OneLayer:
    """A model of one recurrent layer between a table of inputs and a head."""

    def __init__(self, vocab: int) -> None:
        self.num_read = 0  # rows of forwards that are no nodes
        self.fails: Callable[[], bool] = lambda: False
        self._head = HEAD[:vocab]

    def __call__(
        self, tokens: Tensor, positions: Tensor, groups: object, logit_rows: Any, pool: KVPool, *rest: Any
    ) -> tuple[Tensor, None]:
        states = rest[1]
        assert isinstance(states, StateRows)
        y = advance_states(INPUTS[tokens], CONVOLUTION, DELTA, pool.layer(0), states)
        self.num_read += int(states.extend_start[-1])
        nodes = states.node_start[-1] > states.node_start[0]
        if (nodes or len(states.source) > 1) and self.fails():  # a sequence that fails alone ends
            raise RuntimeError("planted")
        logits = [(self._head * row).sum(1) for row in y[logit_rows]]
        return torch.stack(logits) if logits else y.new_empty(0, len(self._head)), None


@cache
def states_after(text: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Tail and matrix after these tokens, one by one."""
    states = StateRoom(sequences=1).layer(SHAPE, torch.float32, torch.device("cpu"))
    assert states.matrix is not None
    if text:
        states.tail[1], states.matrix[1] = states_after(text[:-1])
        none, starts = torch.zeros(1, 0, dtype=torch.int64), (torch.tensor([0, 1]), torch.tensor([1, 1]))
        zero = torch.tensor([0])
        rows = StateRows(torch.tensor([1]), torch.tensor([2]), none, zero, zero, *starts, none)
        advance_states(INPUTS[[text[-1]]], CONVOLUTION, DELTA, states, rows)
    index = 2 if text else 0
    return states.tail[index].clone(), states.matrix[index].clone()


def engine_of(
    snapshots: int = 6,
    limits: EngineLimits = CACHED,
    *,
    num_slots: int = 2048,
    drafter: str = "memory+random",
    window: int | None = None,
) -> tuple[Engine, OneLayer]:
    """`window`: of a layer that nothing reads, whose slots have places."""
    loaded = loaded_tiny("llama")
    plain = tiny_engine(loaded)  # its target is given the other layers
    target, layer = plain.target, OneLayer(plain.target.vocab_size)
    states = StateRoom(limits.max_sequences, 3 * limits.max_budget, snapshots)
    layers = (SHAPE,) if window is None else (SHAPE, LayerKV(1, 8, window))
    places = None if window is None else min(num_slots, 150)
    target.pool = KVPool(KVShape(layers, torch.float32), num_slots, target.device, num_places=places, states=states)
    target._layers = layer
    drafts = make_drafter(drafter, target, limits)
    return Engine(target, limits, vocabulary_of(loaded), drafts, FixedBudget(limits.max_budget)), layer


def check_states(engine: Engine) -> None:
    """States of all running sequences `==` the plain loop's, and all states have one owner."""
    engine.assert_conserved()
    states, layer = engine.table.states, engine.target.pool.layer(0)
    assert states is not None
    for sequence in engine.scheduler.running:
        row = sequence.table_row
        tail, matrix = states_after(tuple(sequence.tokens[: states.position(row)]))
        (index,) = states.rows([Scheduled.of(sequence, 1)], [0], torch.zeros(1, 0)).source.tolist()
        assert torch.equal(layer.tail[index], tail)
        assert torch.equal(layer.matrix[index], matrix)


def run(engine: Engine, *requests: GenerationRequest, checked: bool = False) -> dict[str, list[int]]:
    """Run all requests together; if `checked`, their states are compared after each step."""
    tokens: dict[str, list[int]] = {}
    for one in requests:
        ask(engine, one)
    while not engine.idle:
        for output in engine.step().outputs:
            tokens.setdefault(f"{output.request_id}.{output.index}", []).extend(output.token_ids)
        if checked:
            check_states(engine)
    return tokens


def alone(requests: Sequence[GenerationRequest]) -> dict[str, list[int]]:
    """The texts of plain decoding, one request after the other."""
    texts: dict[str, list[int]] = {}
    for one in requests:
        texts |= run(engine_of(0, replace(LIMITS, max_budget=0), drafter="none")[0], one)
    return texts


def of_shared_prompts(choose: random.Random, count: int) -> list[GenerationRequest]:
    """Requests with prompts that share random parts."""
    parts = [[*next(random_prompts(1, length, seed=length))] for length in (40, 23, 70, 17)]
    found = list[GenerationRequest]()
    for number in range(count):
        prompt = [
            token for part in choose.sample(parts, choose.randint(1, 3)) for token in part[: choose.choice([20, 99])]
        ]
        params = greedy(choose.randint(1, 12)) if choose.random() < 0.5 else sampled(number, choose.randint(1, 12))
        one = request(str(number), prompt, params, n=choose.choice([1, 1, 2]))
        found.append(replace(one, messages_end=choose.choice([None, len(prompt), len(prompt) - 4])))
    return found


@pytest.mark.parametrize("window", [None, 16])
@pytest.mark.parametrize("seed", [*range(3), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(3, 6))])
def test_states_equal_those_of_a_plain_loop(seed: int, window: int | None) -> None:
    choose = random.Random(seed)
    requests = of_shared_prompts(choose, 8)
    expected = alone(requests)
    limits = replace(CACHED, prefill_chunk=choose.choice([1, 7, 64]), max_sequences=choose.choice([3, 16]))
    engine, layer = engine_of(choose.choice([0, 2, 6]), limits, num_slots=choose.choice([200, 2048]), window=window)
    layer.fails = lambda: choose.random() < 0.05
    with_answers = [replace(one, prediction=tuple(expected[f"{one.request_id}.0"])) for one in requests]
    assert run(engine, *with_answers, checked=True) == expected
    layer.fails = lambda: False
    assert run(engine, *with_answers, checked=True) == expected  # now with cached prefixes
    engine.assert_conserved()


@pytest.mark.parametrize("snapshots", [1, 6])
def test_aborted_and_preempted_texts_lose_no_state(snapshots: int) -> None:
    choose, texts, aborted = random.Random(snapshots), dict[str, list[int]](), set[str]()
    requests = of_shared_prompts(choose, 10)
    engine, _ = engine_of(snapshots, num_slots=400)
    for one in requests:
        ask(engine, one)
    while not engine.idle:
        for output in engine.step().outputs:
            texts.setdefault(f"{output.request_id}.{output.index}", []).extend(output.token_ids)
        if engine.scheduler.running and choose.random() < 0.2:
            engine.scheduler.preempt(choose.choice(engine.scheduler.running))
        if choose.random() < 0.05:
            aborted.add(choose.choice(requests).request_id)
            engine.abort(*aborted)
        check_states(engine)
    kept = {name: text for name, text in texts.items() if name.partition(".")[0] not in aborted}
    assert kept == {name: text for name, text in alone(requests).items() if name in kept}
    engine.scheduler.forget_prefixes()
    assert engine.load.snapshots == 0


def no_score(tokens: Tensor, *_: object) -> tuple[Tensor, None]:
    return torch.full((len(tokens), VOCAB), torch.nan), None


def planted(*_: object) -> NoReturn:
    raise RuntimeError("planted")


@pytest.mark.parametrize(("place", "failing"), [("target._layers", no_score), ("_emit_stage.emit", planted)])
def test_failed_texts_lose_no_state(place: str, failing: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    engine, _ = engine_of()
    ask(engine, request("fails", [*next(random_prompts(1, 50, seed=1))], greedy(40)))
    for _ in range(3):
        engine.step()
    stage, name = place.split(".")
    monkeypatch.setattr(getattr(engine, stage), name, failing)
    (output,) = engine.step().outputs
    assert output.finish_reason == "error"
    assert engine.load.snapshots == 0
    engine.assert_conserved()


RECURRENT = [one for one in CHECKPOINTS if one.family in ("Qwen3-Next", "Qwen3.5", "LFM2", "Granite 4")]


@pytest.mark.parametrize("checkpoint", RECURRENT, ids=str)
def test_texts_of_recurrent_models_are_those_of_plain_decoding(checkpoint: Checkpoint, tmp_path: Path) -> None:
    loaded, choose = load(save(made(checkpoint), tmp_path)), random.Random(str(checkpoint))
    requests, expected = of_shared_prompts(choose, 6), dict[str, list[int]]()
    plain, shared = (copy.deepcopy(loaded.model) for _ in range(2))
    one_by_one = tiny_engine(replace(loaded, model=plain), limits=replace(LIMITS, max_budget=0), drafter="none")
    for one in requests:
        expected |= run(one_by_one, one)
    limits = replace(CACHED, prefill_chunk=choose.choice([5, 64]), max_model_len=512)
    engine = tiny_engine(replace(loaded, model=shared), limits=limits, drafter="memory+random", num_slots=400)
    assert check(engine.target) == "exact"
    with_answers = [replace(one, prediction=tuple(expected[f"{one.request_id}.0"])) for one in requests]
    for _ in range(2):
        assert run(engine, *with_answers) == expected
        engine.assert_conserved()


def conversation(choose: random.Random, turns: int) -> list[tuple[list[int], int]]:
    """Prompts of a conversation whose template drops thoughts, and what is new in each."""

    def words(count: int) -> list[int]:
        return [choose.randrange(20, 250) for _ in range(count)]

    history, found, opening = [7, *words(40)], list[tuple[list[int], int]](), [5, 6]
    new = len(history)
    for _ in range(turns):
        message = words(30)
        history, new = history + message, new + len(message)
        found.append((history + opening, new + len(opening)))
        history, new = [*history, *opening, *words(25)], 2 + 25  # what the client sends of the answer
    return found


def test_nodes_of_a_step_have_room_for_their_inputs() -> None:
    engine, _ = engine_of()
    ask(engine, request("one", [3, 4, 5], greedy(4)))
    budget = engine._next_batch(ahead=False).budget
    assert budget is not None
    assert budget.load.free_slots == 3 * LIMITS.max_budget


def test_a_convolution_that_kernels_do_not_support_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refused(*_: object) -> NoReturn:
        raise NotImplementedError("a convolution over 5 inputs, at most 4")

    loaded = load(save(made(RECURRENT[0]), tmp_path))
    monkeypatch.setattr(ops.on(torch.device("cpu")), "advance_states", refused)
    with pytest.raises(StartupError, match="kernels do not support a convolution over 5 inputs, at most 4"):
        tiny_engine(loaded)


def test_a_draft_model_with_states_is_refused(tmp_path: Path) -> None:
    loaded = load(save(made(RECURRENT[0]), tmp_path))
    with pytest.raises(StartupError, match="the draft model small has recurrent layers"):
        draft_model_of(loaded, loaded, name="small", max_model_len=64)


def prompt_tokens_read(engine: Engine, requests: Sequence[GenerationRequest]) -> int:
    """Run requests together. Returns the number of their prompt tokens that were not found in the cache."""
    read = 0
    for one in requests:
        ask(engine, one)
    while not engine.idle:
        read += sum(one.prompt_tokens - one.cached_tokens for one in engine.step().finished)
    engine.assert_conserved()
    return read


def test_conversations_read_what_is_new_with_drafts_or_without() -> None:
    reads, total = list[int](), 0
    for drafter in ("none", "memory+random"):
        choose, (engine, _) = random.Random(0), engine_of(snapshots=20, num_slots=8192, drafter=drafter)
        turns = [*zip(*(conversation(choose, 10) for _ in range(4)), strict=True)]
        total = sum(new for turn in turns for _, new in turn)
        reads.append(0)
        for turn in turns:
            requests = [
                replace(request(str(number), prompt, greedy(20)), messages_end=len(prompt) - 2)
                for number, (prompt, _) in enumerate(turn)
            ]
            reads[-1] += prompt_tokens_read(engine, requests)
    assert reads[0] == reads[1] <= 1.02 * total


def test_questions_behind_one_system_prompt_read_it_twice_at_most() -> None:
    choose, (engine, layer) = random.Random(1), engine_of(snapshots=12)
    system, count = [choose.randrange(20, 250) for _ in range(150)], 20
    prompts = [[*system, *(choose.randrange(20, 250) for _ in range(30)), 5, 6] for _ in range(count)]
    requests = [
        replace(request(str(number), prompt, greedy(5)), messages_end=len(prompt) - 2)
        for number, prompt in enumerate(prompts)
    ]
    first = run(engine, *requests[:10], checked=True)  # together: the others wait, and the first leaves a snapshot
    assert layer.num_read - sum(map(len, first.values())) <= len(system) + 10 * 32
    layer.num_read = 0
    for one in requests[10:]:  # one by one
        run(engine, one, checked=True)
    assert layer.num_read <= 10 * (32 + 5)


def test_what_a_second_text_shares_is_read_twice() -> None:
    engine, layer = engine_of(snapshots=4)
    shared, reads = [*next(random_prompts(1, 100, seed=1))], list[int]()
    for number in range(4):
        layer.num_read = 0
        run(engine, request(str(number), [*shared, 30 + number, 9, 9], greedy(1)), checked=True)
        reads.append(layer.num_read)
    assert reads == [103, 103, 4, 4]


def test_a_text_goes_on_from_its_end() -> None:
    engine, layer = engine_of(snapshots=4)
    prompt = [*next(random_prompts(1, 50, seed=1))]
    answer = run(engine, request("first", prompt, greedy(40)))["first.0"]
    layer.num_read = 0
    assert engine.load.snapshots == 1
    run(engine, request("next", [*prompt, *answer, 3, 4], greedy(1)), checked=True)
    assert layer.num_read <= 3 + LIMITS.max_budget


def test_messages_end_before_the_generation_prompt() -> None:
    tokenizer = vocabulary_of(loaded_tiny("llama")).tokenizer
    turns = [{"role": role, "content": role} for role in ("user", "assistant", "user")]
    ids = tokenizer.render_chat(turns)
    assert tokenizer.messages_end(ids) == len(tokenizer.render_chat(turns, add_generation_prompt=False)) < len(ids)
    assert tokenizer.messages_end([3, 4]) is None


def test_pools_have_room_for_states() -> None:
    layers = (LayerKV(2, 8), SHAPE, replace(SHAPE, heads=0))
    shape = KVShape(layers, torch.bfloat16)
    assert shape.bytes_per_state == 4 * (2 * (2 * 24) + 2 * 4 * 4)
    assert shape.bytes_per_slot == 2 * 2 * 2 * 8
    limits = EngineLimits(max_model_len=512, max_sequences=4, prefill_chunk=64, max_budget=40, prefix_cache=True)
    pool_bytes = 1 << 20
    room = room_for(shape, pool_bytes, limits)
    assert room.states[:2] == (4, 4 * 40)
    pool = KVPool(shape, room.num_slots, torch.device("cpu"), states=room.states)
    states = [value for layer in pool.layers[1:] for value in layer if value is not None]
    assert sum(value.nbytes for value in states) == shape.state_bytes(room.states)
    assert room_for(shape, 1 << 22, replace(limits, max_sequences=32)).states.nodes == 256
    assert bytes_of(pool) <= pool_bytes + 2 * shape.bytes_per_slot
    assert bytes_of(pool) >= pool_bytes - shape.bytes_per_state - 2048 * shape.bytes_per_slot
    assert room.states.snapshots > 0
    assert f"states of 4 sequences and {room.states.snapshots} prefixes" in room.described
    assert room_for(shape, pool_bytes, replace(limits, prefix_cache=False)).states.snapshots == 0
    with pytest.raises(StartupError, match=r"states of 4 sequences and 0 prefixes: set kv_cache .* or max_sequences"):
        room_for(shape, 1 << 16, limits)


def test_a_snapshot_is_not_wanted_twice() -> None:
    engine, _ = engine_of()
    states = engine.table.states
    assert states is not None
    cache, tokens = PrefixCache(engine.target.device, states=states), list(range(100))
    lease = cache.acquire("", tokens)
    for end in (40, 80):  # other texts wait for these; the sequence has passed the first already
        cache.want_state(lease, end)
    states.begin(0, position=80)
    for _ in range(2):
        cache.want_state(lease, 80)
        if 80 in lease.ends:
            cache.keep_state(lease, row=0)
    assert len(states.free) == len(states.snapshots) - 1
    assert cache.held_states([lease]) == [states.snapshots[0]]


def test_a_state_refuses_a_gap() -> None:
    engine, _ = engine_of()
    states = engine.table.states
    assert states is not None
    states.begin(0, position=5)
    with pytest.raises(AssertionError, match="has read 5 tokens cannot go on at 7"):
        states.rows([ExtendRows(0, 7, [1], completes=True)], [0], torch.zeros(1, 0))


@pytest.mark.parametrize(("snapshots", "num_slots", "most"), [(14, 8192, 1.1), (30, 3800, 1.1)])
def test_conversations_in_turn_keep_their_last_snapshot(snapshots: int, num_slots: int, most: float) -> None:
    choose, (engine, _) = random.Random(0), engine_of(snapshots, num_slots=num_slots, drafter="none")
    turns, read = [*zip(*(conversation(choose, 10) for _ in range(6)), strict=True)], 0
    for prompt, _ in chain.from_iterable(turns):
        one = replace(request("turn", prompt, greedy(20)), messages_end=len(prompt) - 2)
        read += prompt_tokens_read(engine, [one])
    assert read <= most * sum(new for _, new in chain.from_iterable(turns))


def test_a_prompt_that_many_wait_for_holds_no_snapshots_back() -> None:
    engine, layer = engine_of(snapshots=2)
    long, ends = [*next(random_prompts(1, 400, seed=1))], range(80, 400, 80)
    requests = [request("long", long, greedy(1)), *(request(str(end), [*long[:end], 7], greedy(1)) for end in ends)]
    for one in requests:
        ask(engine, one)
    while not engine.idle:
        engine.step()
        check_states(engine)
        leases = [one.lease for one in engine.scheduler.running if one.lease is not None]
        assert all(len(lease.states) <= 1 for lease in leases)
    assert layer.num_read == len(long) + 2 * len(ends)  # the last common token is read again


def test_inputs_are_kept_for_the_next_step_with_nodes() -> None:
    states, none = engine_of()[0].table.states, torch.zeros(2, 0)
    assert states is not None
    pair = [ExtendRows(row, 0, [1], completes=True) for row in range(2)]
    states.advance(pair, [2, 1], torch.tensor([[0, 2, 4], [1, 6, 1]]))
    one, other = (ExtendRows(row, 3 - row, [1, 1], completes=True) for row in range(2))
    for _ in range(2):  # a step without nodes, and the same again
        rows = states.rows([one], [0], none[:1])
        assert rows.replayed[0, :2].tolist() == [0, 2]
    with pytest.raises(AssertionError, match=r"inputs of 1 nodes, while rows \{1\} wait"):
        states.rows([one], [1], none[:1])
    with pytest.raises(AssertionError, match="no room for the inputs of 37 nodes"):
        states.rows([one, other], [30, 7], none)
    rows = states.rows([other, one], [3, 5], none)
    assert rows.replayed[0, 0].item() == 4
    assert rows.kept.tolist() == [states.most_nodes, states.most_nodes + 3]
