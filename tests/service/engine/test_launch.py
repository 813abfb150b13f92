"""Steps that are launched before the tokens of the one before are read: they change no token, and lose no slot."""

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.checkpoint import DRAFTER, write_dummy
from drafters.registry import NoDrafter
from kernels.graph_runner import rerun
from kernels.rows import Ahead, ExtendRows, lay_out_rows
from kernels.trees import DraftTree
from service.assembly import assemble
from service.config import ServiceConfig
from service.engine.budget import FixedBudget
from service.engine.engine import Engine
from service.engine.requests import GenerationRequest
from service.engine.rows import place_rows
from service.text.grammars import GrammarCompiler
from tests.service.engine.harness import (
    LIMITS,
    Generated,
    ask,
    collect,
    generate,
    greedy,
    request,
    sampled,
    tiny_engine,
    vocabulary_of,
    with_answers,
)
from tests.tiny_models import loaded_tiny, random_prompts

AHEAD = replace(LIMITS, steps_ahead=1)
DRAFTERS = ("none", "memory", "memory+random", "random")


def asked_for(count: int, longest: int = 40) -> list[GenerationRequest]:
    """Texts of several lengths, greedy and sampled, some of which end by a stop string."""
    made = []
    for number, prompt in enumerate(random_prompts(count, 30)):
        params = greedy(longest - number) if number % 2 else sampled(number, longest - number)
        made.append(request(str(number), prompt, params))
    return with_answers(made)


@pytest.fixture(scope="module")
def texts() -> list[GenerationRequest]:
    return asked_for(10)


@pytest.fixture(scope="module")
def stopped(texts: list[GenerationRequest]) -> list[GenerationRequest]:
    """The same, ended by a token in the middle of their answers."""
    return [
        replace(one, sampling=replace(one.sampling, stop_token_ids=frozenset({one.prediction[9]}))) for one in texts
    ]


def run(engine: Engine, requests: Sequence[GenerationRequest]) -> tuple[dict[str, list[int]], int, int]:
    """Run to the end. Returns tokens by request, the number of steps launched ahead, and discarded tokens."""
    results, ahead, discarded = {(one.request_id, 0): Generated() for one in requests}, 0, 0
    ask(engine, *requests)
    while not engine.idle:
        output = engine.step()
        collect(output.outputs, results)
        ahead += engine._flight is not None
        discarded += output.stats.discarded_tokens if output.stats else 0
        engine.assert_conserved()
    assert engine.scheduler.num_available == engine.slots.capacity
    assert engine.table.num_free_rows == engine.table.slots.shape[0]
    return {name: one.tokens for (name, _), one in results.items()}, ahead, discarded


@pytest.mark.parametrize("capture", [None, rerun], ids=["eager", "captured"])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_what_ends_in_a_step_is_computed_once_more_and_thrown_away(
    stopped: list[GenerationRequest], drafter: str, capture: object
) -> None:
    expected, *_ = run(tiny_engine(drafter="none", policy=FixedBudget(0)), stopped)
    engine = tiny_engine(drafter=drafter, policy=FixedBudget(7), limits=AHEAD, capture=capture)  # type: ignore[arg-type]
    found, ahead, discarded = run(engine, stopped)
    assert found == expected
    assert all(len(tokens) <= 10 for tokens in found.values())
    assert ahead > 5
    assert discarded >= len(stopped) // 2, "an end by a token is not foreseen"


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("num_slots", [2048, 260])
def test_scarce_slots_and_lengths(texts: list[GenerationRequest], drafter: str, num_slots: int) -> None:
    """An end by length is foreseen where nothing is drafted; what must be preempted is settled first."""
    limits = replace(AHEAD, prefix_cache=True)
    engine = tiny_engine(drafter=drafter, policy=FixedBudget(5), limits=limits, num_slots=num_slots)
    found, ahead, discarded = run(engine, texts)
    assert found == {one.request_id: list(one.prediction) for one in texts}
    assert ahead > 5
    assert not discarded or drafter != "none"


def test_aborts_and_arrivals_at_any_time(texts: list[GenerationRequest]) -> None:
    for seed in range(12):
        rng = random.Random(seed)
        limits = replace(AHEAD, prefix_cache=bool(seed % 2), prefill_chunk=rng.choice([7, 64]))
        engine = tiny_engine(drafter=rng.choice(DRAFTERS), limits=limits, num_slots=rng.choice([260, 2048]))
        left, gone = list(texts), set[str]()
        results = {(one.request_id, 0): Generated() for one in texts}
        while left or not engine.idle:
            if left and rng.random() < 0.5:
                ask(engine, left.pop())
            if rng.random() < 0.1 and engine.scheduler.running:
                gone.add(rng.choice(engine.scheduler.running).request.request_id)
                ended = {output.request_id for output in engine.abort(*gone).outputs}
                assert ended <= gone
            outputs = engine.step().outputs
            assert not gone.intersection(output.request_id for output in outputs)
            collect(outputs, results)
            engine.assert_conserved()
        assert engine.scheduler.num_available == engine.slots.capacity
        assert engine.table.num_free_rows == limits.max_sequences
        for one in texts:
            whole = list(one.prediction)
            assert results[one.request_id, 0].tokens == whole or one.request_id in gone


def test_a_grammar_waits_for_its_tokens_and_so_do_its_companions(texts: list[GenerationRequest]) -> None:
    loaded = loaded_tiny("llama")
    vocabulary = vocabulary_of(loaded)
    compiler = GrammarCompiler(vocabulary.tokenizer, loaded.model.config.vocab_size, vocabulary.eos_ids)
    grammar, params = compiler.compile("regex", "[a-c]{1,12}"), replace(texts[0].sampling, ignore_eos=False)
    strict = replace(texts[0], request_id="strict", prediction=(), grammar=grammar, sampling=params)
    shown = replace(texts[1], request_id="shown", sampling=replace(texts[1].sampling, num_logprobs=2))
    asked = [strict, shown, *texts[2:]]
    expected, *_ = run(tiny_engine(drafter="none", policy=FixedBudget(0)), asked)
    found, ahead, _ = run(tiny_engine(drafter="memory+random", limits=AHEAD), asked)
    assert found == expected
    assert ahead > 5


def test_a_step_that_fails_ahead_is_repeated(texts: list[GenerationRequest], monkeypatch: pytest.MonkeyPatch) -> None:
    for stage in ("start", "grow", "commit", "forward"):
        engine = tiny_engine(drafter="memory+random", limits=AHEAD)
        place, calls = engine.target if stage == "forward" else engine.drafter, iter(range(1_000))
        function = getattr(place, stage)

        def failing(*given: object, **named: object) -> object:
            result = function(*given, **named)  # noqa: B023 - called in this turn
            if next(calls) in (1, 4, 5):  # noqa: B023
                raise RuntimeError("planted")
            return result

        monkeypatch.setattr(place, stage, failing)
        found, ahead, _ = run(engine, texts)
        assert found == {one.request_id: list(one.prediction) for one in texts}, stage
        assert ahead > 5


def test_the_next_step_is_launched_before_the_last_one_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, seen = tiny_engine(drafter="memory", limits=AHEAD), list[str]()
    forward, arriving = engine.target.forward, engine.target.arriving

    def launched(*given: object, **named: object) -> object:
        seen.append("launch")
        return forward(*given, **named)  # type: ignore[arg-type]

    def sent(values: torch.Tensor, *, at_once: bool) -> object:
        read = arriving(values, at_once=at_once)
        return lambda: (seen.append("read"), read())[1]  # type: ignore[func-returns-value]

    monkeypatch.setattr(engine.target, "forward", launched)
    monkeypatch.setattr(engine.target, "arriving", sent)
    generate(engine, request("one", [5, 6, 7], greedy(9)))
    assert seen[:5] == ["launch", "launch", "read", "launch", "read"]


def test_a_trained_drafter_and_the_memory(texts: list[GenerationRequest], tmp_path: Path) -> None:
    model = write_dummy("tiny", tmp_path / "tiny")
    settings = {"model": str(model), "drafter_path": model / DRAFTER, "load_dtype": "float32", "device": "cpu"}
    sizes = {"max_model_len": 256, "max_sequences": 4, "kv_cache": "10MiB", "max_budget": 16, "threads": 1}
    more = {"drafter": "memory+specblock", "budget_policy": "fixed", "state_dir": tmp_path, "async_scheduling": "on"}
    assembly = assemble(ServiceConfig.model_validate({**settings, **sizes, **more}), graphs=True)
    asked = [replace(one, prediction=()) for one in texts[:6]]
    plain = assembly.engine(NoDrafter(), FixedBudget(0), replace(assembly.limits, steps_ahead=0))
    expected, *_ = run(plain, asked)
    engine = assembly.engine()
    found, ahead, _ = run(engine, asked)
    assert found == expected
    assert ahead > 5
    assert engine.drafter.num_blocks > 0


def test_rows_whose_tokens_only_the_device_knows() -> None:
    """As if the host had known them, also where nodes of the step before were accepted."""
    known = [ExtendRows(2, 9, [7], True), ExtendRows(0, 5, [8], True), ExtendRows(1, 0, [1, 2, 3], False)]
    unknown = [ExtendRows(2, 9, [7], True), ExtendRows(0, 3, [0], True), known[2]]
    ahead = Ahead(torch.tensor([1]), torch.tensor([8]), torch.tensor([2]), most=4)
    nodes = torch.tensor([[4, 6], [5, 0], [0, 0]])
    parents, depths = torch.tensor([[-1, 0], [-1, -1], [-1, -1]]), torch.tensor([[1, 2], [1, 0], [0, 0]])
    tree = DraftTree(nodes, parents, depths, nodes.float(), torch.tensor([2, 1, 0]))
    slots, tables = torch.arange(20, 28), [torch.zeros(3, 16, dtype=torch.int64) for _ in range(2)]
    place = lambda rows: place_rows(*rows)  # noqa: E731
    one = lay_out_rows(known, [2, 1, 0], tree, slots, tables[0], place)
    other = lay_out_rows(unknown, [2, 1, 0], tree, slots, tables[1], place, ahead)
    assert torch.equal(*tables)
    for name in ("tokens", "slots", "logit_rows", "completing"):
        assert torch.equal(getattr(one, name), getattr(other, name)), name
    for name in ("positions", "extend_end", "ancestors", "node_slots"):
        assert torch.equal(getattr(one.attention, name), getattr(other.attention, name)), name
