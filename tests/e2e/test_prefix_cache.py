"""The prefix cache changes when an answer comes, never what it says: the same texts with and without it, token for
token, whatever was kept, shared, evicted or preempted in between."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from drafters.registry import TrainedWeights
from service.drafter import make_drafter
from service.engine.budget import FixedBudget
from service.engine.engine import Engine, EngineLimits
from service.engine.requests import GenerationRequest, Scope, SpeculationParams
from tests.drafters.network.parts import TAPS, serving, tiny_drafter, tiny_embedding
from tests.service.engine.harness import (
    LIMITS,
    Generated,
    alone,
    ask,
    collect,
    generate,
    greedy,
    keys_and_values,
    request,
    sampled,
    tiny_engine,
    tiny_target,
    vocabulary_of,
    with_answers,
)
from tests.tiny_models import loaded_tiny, random_prompts

TOKENS = 16
SHARED = 150
CACHED = replace(LIMITS, prefix_cache=True)


def run(engine: Engine, requests: Sequence[GenerationRequest]) -> list[Generated]:
    """Answer all together."""
    return list(generate(engine, *requests).values())


def tokens_of(results: Sequence[Generated]) -> list[list[int]]:
    return [result.tokens for result in results]


def family(count: int, *, seed: int) -> list[GenerationRequest]:
    """Requests whose prompts begin alike, each with its plain answer as prediction."""
    (shared,) = random_prompts(1, SHARED, seed=seed)
    ends = random_prompts(count, 9, seed=seed + 100)
    kinds = [greedy(TOKENS) if place % 2 else sampled(place, TOKENS) for place in range(count)]
    asked = [request(f"{seed}-{i}", shared + end, kinds[i]) for i, end in enumerate(ends)]
    return with_answers(asked)


@pytest.fixture(scope="module")
def families() -> list[list[GenerationRequest]]:
    return [family(4, seed=seed) for seed in range(3)]


def mixed(families: Sequence[Sequence[GenerationRequest]]) -> list[GenerationRequest]:
    return [one for together in zip(*families, strict=True) for one in together]


@pytest.mark.parametrize("drafter", ["none", "memory", "random"])
@pytest.mark.parametrize("at_once", [1, 4, 12])
def test_text_is_that_without_the_cache(families: list[list[GenerationRequest]], drafter: str, at_once: int) -> None:
    engine, requests = tiny_engine(drafter=drafter, limits=CACHED), mixed(families)
    for first in range(0, len(requests), at_once):
        batch = requests[first : first + at_once]
        results = run(engine, batch)
        assert tokens_of(results) == [list(one.prediction) for one in batch]
        hits = [result.end.cached_tokens for result in results]
        # The first of each family reads the prefix, one that comes with or behind it finds it.
        expected = [0 if number < len(families) else SHARED - 1 for number in range(first, first + len(batch))]
        assert hits == expected


def test_a_conversation_finds_its_own_answers(families: list[list[GenerationRequest]]) -> None:
    engine = tiny_engine(limits=CACHED)
    text, cached = list(families[0][0].prompt), []
    for turn in range(4):
        (result,) = run(engine, [request(str(turn), text, sampled(turn, TOKENS))])
        assert result.tokens == alone(sampled(turn, TOKENS), text).tokens
        cached.append(result.end.cached_tokens)
        text += [*result.tokens, 5, 6, 7]
    # An answer's last token was never run, and the position before it is found only with the token that follows.
    assert cached == [0, *(SHARED + 9 + TOKENS - 1 + (TOKENS + 3) * turn for turn in range(3))]


def prompt_bits(engine: Engine, one: GenerationRequest) -> torch.Tensor:
    """Keys and values of the shared prefix once it is there; the request is then answered to its end."""
    ask(engine, one)
    engine.step()
    (sequence,) = engine.scheduler.running
    while sequence.is_prefilling:
        engine.step()
    shared = engine.table.slots[sequence.table_row, : SHARED - 1]
    bits = torch.stack([layer[:, shared] for layer in keys_and_values(engine.target.pool)])
    while not engine.idle:
        engine.step()
    return bits


def test_kept_keys_and_values_are_the_bits_of_reading_again(families: list[list[GenerationRequest]]) -> None:
    keeping = tiny_engine(limits=CACHED)
    prompt_bits(keeping, families[1][0])
    kept = [prompt_bits(keeping, one) for one in families[0]]
    read = prompt_bits(tiny_engine(drafter="none", limits=replace(LIMITS, prefill_chunk=37)), families[0][3])
    assert all(bits.equal(read) for bits in kept)
    assert not read.equal(prompt_bits(keeping, families[1][1]))


@pytest.mark.parametrize("drafter", ["none", "random"])
def test_eviction_changes_no_token(families: list[list[GenerationRequest]], drafter: str) -> None:
    """Room for two prefixes of three, so that one is always gone when it comes again."""
    limits = replace(CACHED, max_model_len=200)
    engine, requests = tiny_engine(drafter=drafter, num_slots=2 * 200 + 13, limits=limits), mixed(families)
    hits = []
    for one in requests * 2:
        (result,) = run(engine, [one])
        assert result.tokens == list(one.prediction)
        hits.append(result.end.cached_tokens)
    for first in range(0, len(requests), 4):
        results = run(engine, requests[first : first + 4])
        assert tokens_of(results) == [list(one.prediction) for one in requests[first : first + 4]]
        hits += [result.end.cached_tokens for result in results]
    assert 0 in hits[len(families) :]
    assert SHARED - 1 in hits


def test_preempted_texts_find_what_they_had_read(families: list[list[GenerationRequest]]) -> None:
    engine, requests = tiny_engine(limits=replace(CACHED, prefill_chunk=40)), mixed(families)
    results = {(one.request_id, 0): Generated() for one in requests}
    for one in requests:
        ask(engine, one)
    rows = steps = 0
    while not engine.idle:
        if steps % 3 == 2 and len(engine.scheduler.running) > 1:
            engine.scheduler.preempt(engine.scheduler.running[steps % len(engine.scheduler.running)])
        report = engine.step()
        rows += report.stats.prompt_tokens if report.stats else 0
        collect(report.outputs, results)
        engine.assert_conserved()
        steps += 1
    assert tokens_of(list(results.values())) == [list(one.prediction) for one in requests]
    assert rows < 2 * len(families) * (SHARED + 4 * 10)


def test_several_answers_to_one_prompt_read_it_once(families: list[list[GenerationRequest]]) -> None:
    one = replace(families[0][0], n=4, prediction=())
    engine = tiny_engine(limits=replace(CACHED, prefill_chunk=64))
    results = run(engine, [one])
    seeds = [replace(one.sampling, seed=one.sampling.seed + index) for index in range(4)]
    assert tokens_of(results) == [alone(params, one.prompt).tokens for params in seeds]
    assert [result.end.cached_tokens for result in results] == [0, *[SHARED + 8] * 3]


@pytest.mark.parametrize("drafter", ["specblock", "memory+specblock"])
def test_a_trained_drafter_follows_what_is_found(families: list[list[GenerationRequest]], drafter: str) -> None:
    """Every third request drafts nothing, so that some of what is found was left without a drafter's entries."""
    engine, requests = trained_engine(drafter, replace(CACHED, max_sequences=3)), mixed(families)
    requests = [
        replace(one, speculation=SpeculationParams(enabled=number % 3 != 1)) for number, one in enumerate(requests)
    ]
    for first in range(0, len(requests), 4):
        results = run(engine, requests[first : first + 4])
        assert tokens_of(results) == [list(one.prediction) for one in requests[first : first + 4]]
    (result,) = run(engine, [replace(requests[0], request_id="again")])
    assert result.tokens == list(requests[0].prediction)
    assert result.end.cached_tokens == SHARED + 8
    assert result.end.speculation is not None
    assert sum(result.end.speculation.drafted_per_step) > 0


def trained_engine(name: str, limits: EngineLimits) -> Engine:
    """A drafter of random weights."""
    loaded = loaded_tiny("llama")
    target = tiny_target(loaded, tap_layers=TAPS)
    weights = TrainedWeights(serving(tiny_drafter()), tiny_embedding(loaded.model.config.hidden_size))
    drafter = make_drafter(name, target, limits, weights)
    return Engine(target, limits, vocabulary_of(loaded), drafter, FixedBudget(limits.max_budget))


def test_engines_in_turn_on_one_target_do_not_find_each_others_slots(
    families: list[list[GenerationRequest]],
) -> None:
    loaded = loaded_tiny("llama")
    target = tiny_target(loaded)
    engines = [
        Engine(target, CACHED, vocabulary_of(loaded), make_drafter("none", target, CACHED), FixedBudget(0))
        for _ in range(2)
    ]
    for number, one in enumerate(mixed(families)[:8]):
        (result,) = run(engines[number % 2], [one])
        assert result.tokens == list(one.prediction)
        assert result.end.cached_tokens == 0


def test_later_ones_read_a_tenth_of_what_the_first_reads() -> None:
    """Sixty-four prompts that share 450 tokens: what each one's first token costs, in rows."""
    (shared,) = random_prompts(1, 450, seed=9)
    ends = [[number, *end] for number, end in enumerate(random_prompts(64, 11, seed=10))]
    engine = tiny_engine(drafter="none", limits=replace(CACHED, prefill_chunk=512))
    rows = []
    for number, end in enumerate(ends):
        ask(engine, request(str(number), shared + end, greedy(2)))
        report = engine.step()
        assert report.outputs, "one step reads the prompt and chooses the first token"
        assert report.stats is not None
        rows.append(report.stats.prompt_tokens)
        while not engine.idle:
            engine.step()
    assert rows == [462, *[13] * 63]


# Sixty-four streams with a quarter of the slots they need: no error, no wrong token, and everyone gets on.

STREAMS = 64
LONGEST = 110
CLIENTS = ("a", "b", "c")
ALL_AT_ONCE = replace(LIMITS, max_model_len=LONGEST, max_sequences=STREAMS)


def num_tokens(stream: int) -> int:
    """The first answers are short, so that the later ones outgrow what is expected of them."""
    return 2 if stream < 20 else 45


@pytest.fixture(scope="module")
def requests() -> list[GenerationRequest]:
    """Prompts of 1 to 64 tokens from three clients, each with its answer where slots abound as prediction."""
    asked = []
    for stream in range(STREAMS):
        (prompt,) = random_prompts(1, 1 + 37 * stream % 64, seed=stream)
        params = greedy(num_tokens(stream)) if stream % 3 == 0 else sampled(stream, num_tokens(stream))
        asked.append(replace(request(str(stream), prompt, params), scope=Scope(address=CLIENTS[stream % 7 % 3])))
    answers = generate(tiny_engine(drafter="none", num_slots=8_000, limits=ALL_AT_ONCE), *asked)
    return [replace(one, prediction=tuple(answers[one.request_id, 0].tokens)) for one in asked]


@pytest.mark.parametrize(("drafter", "prefix_cache"), [("none", False), ("none", True), ("random", True)])
def test_scarcity_costs_time_and_nothing_else(
    requests: list[GenerationRequest], drafter: str, prefix_cache: bool
) -> None:
    needed = sum(len(one.prompt) + one.sampling.max_tokens for one in requests)
    limits = replace(ALL_AT_ONCE, prefix_cache=prefix_cache)
    engine = tiny_engine(drafter=drafter, num_slots=needed // 4 + 1, limits=limits)
    results = {(one.request_id, 0): Generated() for one in requests}
    for one in requests:
        ask(engine, one)
    preemptions = steps = 0
    while not engine.idle:
        report = engine.step()
        engine.assert_conserved()
        assert report.stats is not None
        assert report.outputs or report.stats.prompt_tokens, "a step that brings no one on"
        preemptions += report.stats.preemptions
        collect(report.outputs, results)
        steps += 1
    assert [result.tokens for result in results.values()] == [list(one.prediction) for one in requests]
    assert {result.end.finish_reason for result in results.values()} == {"length"}
    assert engine.scheduler.num_available == engine.slots.capacity
    print(f"{steps} steps, {preemptions} preemptions")
    assert preemptions > 0
    # One after the other, without any company, they would take as many steps as there are tokens.
    assert steps < sum(one.sampling.max_tokens for one in requests) / 3
