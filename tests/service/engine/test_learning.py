"""What the engine tells the learner: one call between steps, and each query that came to its own end."""

import threading
from dataclasses import dataclass, field, replace

import pytest
import torch

from drafters.feedback import Query
from drafters.protocol import Drafter
from kernels.sample import gumbel_noise_of
from service.drafter import make_drafter
from service.engine.budget import Budget, DraftBudget, FixedBudget
from service.engine.engine import Engine
from service.engine.requests import Scope
from service.engine.stats import StepStats
from service.engine.thread import EngineThread
from service.observability.guard import Guard
from tests.service.engine.harness import (
    LIMITS,
    ask,
    generate,
    greedy,
    request,
    sampled,
    tiny_target,
    vocabulary_of,
    with_answers,
)
from tests.tiny_models import loaded_tiny, stock_tiny

PROMPT = [5, 6, 7, 8]


@dataclass
class Heard:
    """A `Learning` that publishes with every step and keeps what it hears."""

    guard: Guard = field(default_factory=Guard)
    version: int = 0
    trains: bool = False
    idle: bool = False
    steps: list[StepStats] = field(default_factory=list)
    queries: list[Query] = field(default_factory=list)
    calls: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))

    def stepped(self, stats: StepStats) -> bool:
        self.steps.append(stats)
        return not self.trains

    def between_steps(self, *, idle: bool) -> int:
        self.idle = idle
        self.version += 1
        self.calls.release()
        return self.version

    def ended(self, query: Query) -> None:
        self.queries.append(query)

    def forgot(self, scope: str | None) -> None:
        self.queries = [query for query in self.queries if scope not in (None, query.scope)]


def engine_for(
    heard: Heard, drafter: str = "random", num_slots: int | None = None, policy: Budget | None = None
) -> Engine:
    loaded = loaded_tiny("llama")
    target = tiny_target(loaded)
    limits = replace(LIMITS, num_slots=num_slots)
    drafts: Drafter = make_drafter(drafter, target, limits)
    return Engine(target, limits, vocabulary_of(loaded), drafts, policy or FixedBudget(4), learning=heard)


class Timed(FixedBudget):
    """Counts the steps whose times it gets."""

    num_learnt = 0

    def learn(self, budget: DraftBudget, stats: StepStats) -> None:
        self.num_learnt += 1


def test_steps_beside_training_say_nothing_of_what_steps_take() -> None:
    heard, policy = Heard(), Timed(4)
    engine = engine_for(heard, policy=policy)
    generate(engine, request("a", PROMPT, greedy(8)))
    assert policy.num_learnt == len(heard.steps) > 0
    heard.trains = True
    generate(engine, request("b", PROMPT, greedy(8)))
    assert len(heard.steps) > policy.num_learnt
    assert all(stats.seconds > 0.0 for stats in heard.steps)


@pytest.mark.parametrize("scope", [Scope("somebody", "of many"), Scope(address="somebody")])
def test_a_query_is_reported_with_what_it_took(scope: Scope) -> None:
    heard = Heard()
    asked = replace(with_answers([request("a", PROMPT, greedy(24))])[0], scope=scope, store=False)
    result = generate(engine_for(heard), asked)["a", 0]
    (query,) = heard.queries
    assert list(query.tokens) == PROMPT + result.tokens
    assert (query.client, query.store, query.temperature) == ("somebody", False, 0.0)
    assert query.scope == scope.cache_namespace
    assert result.end.speculation is not None
    steps = list(zip(result.end.speculation.accepted_per_step, result.end.speculation.drafted_per_step, strict=True))
    assert query.accepted == tuple(accepted for accepted, drafted in steps if drafted)
    assert query.plain_steps == sum(drafted == 0 for _, drafted in steps)
    assert query.drafted_nodes == sum(drafted for _, drafted in steps)
    assert sum(query.accepted) > 0
    assert query.first_version == 1
    assert query.version == heard.version
    assert query.seconds > 0


def test_a_query_counts_whole_where_prompts_are_read_in_all_its_steps() -> None:
    heard, beside = Heard(), list[int]()
    engine = engine_for(heard)
    ask(engine, with_answers([request("a", PROMPT, greedy(24))])[0])
    while not (done := [query for query in heard.queries if len(query.answer) == 24]):
        ask(engine, request(f"b{len(beside)}", [9] * 12, greedy(1)))
        stats = engine.step().stats
        assert stats is not None
        beside.append(stats.prompt_tokens)
    (query,) = done
    assert min(beside) > 0
    assert query.num_steps == len(beside) - 1, "its first token comes from reading"
    assert sum(query.accepted) == 24 - len(beside)
    assert 0.0 < query.seconds < sum(stats.seconds for stats in heard.steps)


def test_every_sequence_is_reported_once_under_its_own_row() -> None:
    heard = Heard()
    generate(engine_for(heard), *(request(str(i), [i + 3] * 5, greedy(8 + i)) for i in range(5)))
    assert sorted(len(query.tokens) for query in heard.queries) == [13, 14, 15, 16, 17]
    assert len({query.row for query in heard.queries}) == 5


def test_a_query_has_the_seed_and_the_positions_of_its_noise() -> None:
    """So that a learner can draw the noise again: the model's own scores with it give the answer."""
    heard = Heard()
    asked = request("a", PROMPT, sampled(seed=2**64 - 1, max_tokens=16), n=2)
    generate(engine_for(heard), asked)
    model = stock_tiny("llama")
    for query in heard.queries:
        tokens = torch.tensor(query.tokens)
        with torch.no_grad():
            logits = model(tokens[None]).logits[0, len(PROMPT) - 1 : -1]
        positions = query.offset + torch.arange(len(PROMPT), len(tokens))
        seeds = torch.full_like(positions, query.seed)
        noise = gumbel_noise_of(seeds, positions, torch.arange(logits.shape[1]))
        assert (logits / query.temperature + noise).argmax(-1).tolist() == list(query.answer)
    assert sorted(query.seed for query in heard.queries) == [-1, 0]


def test_what_was_aborted_is_not_reported() -> None:
    heard = Heard()
    engine = engine_for(heard)
    ask(engine, request("a", PROMPT, greedy(30)))
    ask(engine, request("b", [9, 8, 7], greedy(6)))
    for _ in range(3):
        engine.step()
    engine.abort("a")
    while not engine.idle:
        engine.step()
    assert [list(query.tokens[:3]) for query in heard.queries] == [[9, 8, 7]]


def test_the_moment_between_steps_comes_without_work_too() -> None:
    heard = Heard()
    engine = engine_for(heard)
    assert engine.step().stats is None
    assert (heard.version, heard.idle) == (1, True)


def test_an_idle_engine_can_be_woken_for_it() -> None:
    heard = Heard()
    thread = EngineThread(engine_for(heard))
    thread.start(lambda outputs: None)
    before = heard.version
    for _ in range(3):
        thread.wake()
        assert heard.calls.acquire(timeout=10)
    thread.stop()
    assert thread.failure is None
    assert heard.version > before
