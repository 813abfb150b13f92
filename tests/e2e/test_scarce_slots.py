"""Sixty-four streams with a quarter of the slots they need: no error, no wrong token, and everyone gets on."""

from dataclasses import replace

import pytest
import torch

from service.engine.requests import GenerationRequest, Scope
from tests.service.engine.harness import LIMITS, Generated, collect, generate, greedy, request, sampled, tiny_engine
from tests.tiny_models import random_prompts

torch.set_num_threads(1)

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
        asked.append(replace(request(str(stream), prompt, params), scope=Scope(name=CLIENTS[stream % 7 % 3])))
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
        engine.add(one)
    preemptions = steps = 0
    while not engine.idle:
        report = engine.step()
        engine.assert_conserved()
        assert report.stats is not None
        assert report.outputs or report.stats.prompt_tokens, "a step that brings nobody on"
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
