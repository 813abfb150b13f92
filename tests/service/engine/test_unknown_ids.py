"""Ids of the model's vocabulary that are no tokens are never chosen, drafted or not, and change no other score."""

from dataclasses import replace

import pytest
import torch

from service.engine.requests import SamplingParams
from tests.service.engine.harness import generate, greedy, request, sampled, tiny_engine
from tests.tiny_models import VOCAB_SIZE, random_prompts

HALF = range(0, VOCAB_SIZE, 2)
PROMPTS = list(random_prompts(3, 20))


def answers(params: SamplingParams, drafter: str, banned: range = HALF) -> list[list[int]]:
    engine = tiny_engine(drafter=drafter)
    engine.target.never_choose(banned)
    plain = [request(str(number), prompt, replace(params, seed=number)) for number, prompt in enumerate(PROMPTS)]
    first = [result.tokens for result in generate(engine, *plain).values()]
    again = [replace(one, prediction=tuple(tokens)) for one, tokens in zip(plain, first, strict=True)]
    assert [result.tokens for result in generate(engine, *again).values()] == first
    return first


@pytest.mark.parametrize(
    "params",
    [
        greedy(),
        replace(sampled(1), temperature=5.0),
        replace(sampled(2), temperature=2.0, top_p=0.9, top_k=50),
        replace(sampled(3), logit_bias=((0, 100.0), (1, 1.0)), repetition_penalty=1.3),
    ],
)
def test_they_are_never_chosen_and_drafts_change_nothing(params: SamplingParams) -> None:
    plain = answers(params, "none")
    assert not set(HALF) & {token for tokens in plain for token in tokens}
    assert answers(params, "random") == plain
    assert answers(params, "memory") == plain
    assert set(HALF) & {token for tokens in answers(params, "none", range(0)) for token in tokens}


def test_other_tokens_keep_their_scores() -> None:
    found = []
    for banned in (range(0), HALF):
        engine = tiny_engine(drafter="none")
        engine.target.never_choose(banned)
        asked = replace(greedy(4), num_logprobs=VOCAB_SIZE)
        (result,) = generate(engine, request("one", PROMPTS[0], asked)).values()
        found.append(dict(result.logprobs[0].top))
    free, limited = found
    kept = torch.tensor([token for token in range(VOCAB_SIZE) if token not in HALF])
    expected = torch.tensor([free[int(token)] for token in kept]).log_softmax(0)
    torch.testing.assert_close(torch.tensor([limited[int(token)] for token in kept]), expected, rtol=0, atol=1e-4)
    assert all(limited[token] == -torch.inf for token in HALF)
