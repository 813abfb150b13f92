"""Layers with a window keep fewer keys and values than there are positions: the texts stay those of layers that keep
all, no place is lost, and conversations find what they said before."""

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from drafters.registry import TrainedWeights
from service.drafter import make_drafter
from service.engine.budget import FixedBudget
from service.engine.engine import Engine, EngineLimits
from service.engine.kv_pool import KVPool
from service.engine.memory_planner import room_for
from service.engine.requests import GenerationRequest
from service.engine.weights import LoadedModel
from tests.drafters.network.parts import TAPS, serving, tiny_drafter, tiny_embedding
from tests.service.engine.harness import (
    LIMITS,
    Generated,
    ask,
    bytes_of,
    collect,
    finish,
    greedy,
    request,
    sampled,
    tiny_engine,
    tiny_target,
    vocabulary_of,
)
from tests.tiny_models import SMALL, load, random_prompts, tiny_model

MORE = pytest.mark.slow("the same in other orders", covers="service/engine/kv_pool.py service/engine/scheduler.py")
FAMILIES = ("mistral", "gemma3")
WINDOWS = (16, 64)
TOKENS = 40
SHORT = replace(LIMITS, max_model_len=400, max_sequences=4, prefill_chunk=24, prefix_cache=True)


def tiny(family: str, window: int, **changes: Any) -> LoadedModel:
    """A model whose layers, or two of three of them, see `window` positions."""
    with TemporaryDirectory() as folder:
        return load(tiny_model(family, Path(folder), sliding_window=window, **changes))


def tight(window: int, limits: EngineLimits = SHORT) -> int:
    """Places for all sequences at once, but hardly for anything else."""
    return limits.max_sequences * (window + 1 + limits.max_budget) + limits.prefill_chunk + 1


def run(engine: Engine, requests: Sequence[GenerationRequest]) -> list[Generated]:
    """Answer all together; slots and places are counted after every step."""
    results = {(one.request_id, 0): Generated() for one in requests}
    for one in requests:
        ask(engine, one)
    finish(engine, results)
    return list(results.values())


@cache
def asked(family: str, window: int) -> list[GenerationRequest]:
    """Twelve requests with three beginnings, each with the answer of layers that keep all as prediction."""
    beginnings, requests = list(random_prompts(3, 90, seed=3)), []
    for number, (end,) in enumerate(random_prompts(1, 9 + number, seed=50 + number // 3) for number in range(12)):
        params = greedy(TOKENS) if number % 2 else sampled(number, TOKENS)
        requests.append(request(str(number), beginnings[number % 3] + end, params))
    plain = tiny_engine(tiny(family, window), drafter="none", limits=replace(SHORT, prefix_cache=False))
    answers = [tuple(result.tokens) for result in run(plain, requests)]
    assert plain.slots.windows is None
    return [replace(one, prediction=answer) for one, answer in zip(requests, answers, strict=True)]


def check(results: Sequence[Generated], requests: Sequence[GenerationRequest]) -> None:
    assert [result.tokens for result in results] == [list(one.prediction) for one in requests]


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("at_once", [1, pytest.param(4, marks=MORE), 12])
@pytest.mark.parametrize("spare", [0, 150])
def test_texts_are_those_of_layers_that_keep_all(family: str, window: int, at_once: int, spare: int) -> None:
    """Windows end inside trees, prompt chunks and cached prefixes, and the middle of texts has lost its places."""
    requests, places = asked(family, window), tight(window) + spare
    engine = tiny_engine(tiny(family, window), limits=SHORT, num_slots=1500, num_places=places)
    hits = []
    for first in (*range(0, len(requests), at_once), 0):
        results = run(engine, requests[first : first + at_once])
        check(results, requests[first : first + at_once])
        hits += [result.end.cached_tokens for result in results]
    assert any(hits)
    assert sum(result.accepted for result in results) > 0
    assert engine.load.places_total == places - 1


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("slots", "places"), [(1500, 16 + 40), (420, 16 + 60), (420, 400)])
@pytest.mark.parametrize("drafter", ["none", "random"])
def test_scarcity_costs_time_and_nothing_else(family: str, slots: int, places: int, drafter: str) -> None:
    """Room for the window of one sequence, for the slots of one, or for both."""
    requests = asked(family, 16)
    engine = tiny_engine(tiny(family, 16), drafter=drafter, limits=SHORT, num_slots=slots, num_places=places)
    check(run(engine, requests), requests)
    check(run(engine, requests[::-1]), requests[::-1])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_trained_drafter_follows_what_is_found(family: str) -> None:
    loaded, requests = tiny(family, 16), asked(family, 16)
    target = tiny_target(loaded, 1500, TAPS, num_places=tight(16))
    weights = TrainedWeights(serving(tiny_drafter()), tiny_embedding(loaded.model.config.hidden_size))
    drafter = make_drafter("memory+specblock", target, SHORT, weights)
    engine = Engine(target, SHORT, vocabulary_of(loaded), drafter, FixedBudget(SHORT.max_budget))
    for first in (0, 4, 8, 0, 4):
        check(run(engine, requests[first : first + 4]), requests[first : first + 4])


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=MORE) for seed in (2, 3))])
def test_any_order_of_events_loses_no_place(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests come, are aborted, preempted and fail in the middle of steps; who ends says what it says alone."""
    drawn, family = random.Random(seed), FAMILIES[seed % 2]
    requests = asked(family, 16)
    limits = replace(SHORT, prefix_cache=seed < 3)
    places = drawn.choice([16 + 45, tight(16), 300])
    engine = tiny_engine(tiny(family, 16), limits=limits, num_slots=drawn.choice([500, 1500]), num_places=places)
    forward, failing = engine.target.forward, [False]

    def perhaps(*args: object, **options: object) -> object:
        output = forward(*args, **options)  # type: ignore[arg-type]
        if failing[0]:
            failing[0] = False
            raise RuntimeError("a device that failed once")
        return output

    monkeypatch.setattr(engine.target, "forward", perhaps)
    results: dict[tuple[str, int], Generated] = {}
    expected: dict[tuple[str, int], GenerationRequest] = {}
    for number in range(200):
        event = drawn.random()
        if event < 0.15:
            one = replace(drawn.choice(requests), request_id=f"event {number}")
            results[one.request_id, 0], expected[one.request_id, 0] = Generated(), one
            ask(engine, one)
        elif event < 0.17 and engine.scheduler.running:
            gone = drawn.choice(engine.scheduler.running).request.request_id
            collect(engine.abort(gone).outputs, results)
        elif event < 0.22 and len(engine.scheduler.running) > 1:
            engine.scheduler.preempt(drawn.choice(engine.scheduler.running))
        elif event < 0.24:
            failing[0] = True
        engine.assert_conserved()
        collect(engine.step().outputs, results)
        engine.assert_conserved()
    finish(engine, results)
    ended = [(results[key], one) for key, one in expected.items() if results[key].end.finish_reason == "length"]
    check([result for result, _ in ended], [one for _, one in ended])
    assert len(ended) > len(expected) / 2
    assert engine.load.places_used == 0


def test_engines_in_turn_on_one_target() -> None:
    loaded, requests = tiny("gemma3", 16), asked("gemma3", 16)
    target = tiny_target(loaded, 1500, num_places=tight(16))
    engines = [
        Engine(target, SHORT, vocabulary_of(loaded), make_drafter("none", target, SHORT), FixedBudget(0))
        for _ in range(2)
    ]
    for number, one in enumerate(requests[:6]):
        results = run(engines[number // 2 % 2], [one])
        check(results, [one])
        assert results[0].end.cached_tokens == 0


# What is found again: as much as by layers that keep all.


def conversations(engine: Engine, count: int, turns: int, first: int, answer: int) -> list[list[int]]:
    """Hold conversations by turns, and return the cached tokens of each turn of each."""
    texts, hits = list(random_prompts(count, first, seed=7)), [list[int]() for _ in range(count)]
    for turn in range(turns):
        for number, text in enumerate(texts):
            (result,) = run(engine, [request(f"{number} {turn}", text, greedy(answer))])
            hits[number].append(result.end.cached_tokens)
            text += [*result.tokens, 5 + number % 7, 6, 7]
    return hits


SHAPES: dict[str, dict[str, Any]] = {
    "mistral": SMALL,
    "gemma3": {**SMALL, "num_hidden_layers": 6, "layer_types": [*["sliding_attention"] * 5, "full_attention"]},
}


@pytest.mark.parametrize("family", [pytest.param("mistral", marks=MORE), "gemma3"])
def test_twenty_long_conversations_where_layers_that_keep_all_hold_five(family: str) -> None:
    limits = replace(LIMITS, max_sequences=4, prefix_cache=True, max_budget=4)
    loaded = tiny(family, 8, **SHAPES[family])
    pool_bytes = 5 * limits.max_model_len * loaded.kv_shape.bytes_per_slot
    room = room_for(loaded.kv_shape, pool_bytes, limits)
    hits = []
    for pool in (KVPool(loaded.kv_shape, 5 * limits.max_model_len, loaded.model.device), None):
        target = tiny_target(loaded, room.num_slots, num_places=room.num_places)
        target.pool = pool or target.pool
        assert bytes_of(target.pool) <= pool_bytes * 1.02
        drafter = make_drafter("none", target, limits)
        engine = Engine(target, limits, vocabulary_of(loaded), drafter, FixedBudget(0))
        hits.append(conversations(engine, 20, 3, 360, 30))
        loaded = tiny(family, 8, **SHAPES[family])
    every, found = [[0, 360 + 30 - 1, 360 + 2 * 30 + 3 - 1]] * 20, hits[1]
    assert hits[0] != every, "the five are pushed out before their next turn"
    assert found == every


@pytest.mark.parametrize("family", FAMILIES)
def test_the_third_text_with_a_shared_beginning_finds_it(family: str) -> None:
    """The first leaves no window there, the second computes it again and leaves it."""
    (shared,) = random_prompts(1, 200, seed=1)
    engine = tiny_engine(tiny(family, 16), drafter="none", limits=SHORT, num_slots=1500, num_places=tight(16))
    hits, others = [], list(random_prompts(8, 150, seed=2))
    for number, (own, other) in enumerate(zip(random_prompts(8, 30, seed=3), others, strict=True)):
        (result,) = run(engine, [request(str(number), [*shared, number, *own], greedy(10))])
        hits.append(result.end.cached_tokens)
        run(engine, [request(f"other {number}", other, greedy(10))])  # takes places
    assert hits == [0, 0, *[199] * 6]
