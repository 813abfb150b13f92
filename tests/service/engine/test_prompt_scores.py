"""Log-probabilities of prompts are those of the plain model, however a prompt is read and whoever runs beside it."""

from dataclasses import replace

import pytest
import torch

from service.engine.engine import Engine
from service.engine.requests import GenerationRequest, TokenLogprob
from tests.service.engine.harness import LIMITS, greedy, request, sampled, tiny_engine
from tests.tiny_models import random_prompts, stock_tiny

FAMILY = "llama"


def scores_of(engine: Engine, *asked: GenerationRequest) -> dict[tuple[str, int], tuple[TokenLogprob, ...]]:
    for one in asked:
        engine.add(one)
    found: dict[tuple[str, int], tuple[TokenLogprob, ...]] = {}
    while not engine.idle:
        for output in engine.step().outputs:
            assert output.error is None
            if output.prompt_logprobs:
                assert (output.request_id, output.index) not in found
                found[output.request_id, output.index] = output.prompt_logprobs
    engine.assert_conserved()
    return found


def scored(name: str, prompt: list[int], count: int = 2, *, n: int = 1) -> GenerationRequest:
    params = replace(greedy(3), num_logprobs=count)
    return replace(request(name, prompt, params), scores_prompt=True, n=n)


@pytest.mark.parametrize("chunk", [4, 7, 256])
def test_they_are_those_of_the_plain_model(chunk: int) -> None:
    prompts = list(random_prompts(3, 23))
    engine = tiny_engine(FAMILY, limits=replace(LIMITS, prefill_chunk=chunk))
    beside = request("beside", prompts[2], sampled(5, 40))
    found = scores_of(engine, beside, *(scored(str(number), prompt, n=2) for number, prompt in enumerate(prompts[:2])))
    assert found.keys() == {(str(number), index) for number in range(2) for index in range(2)}
    for (name, _), scores in found.items():
        prompt = torch.tensor([prompts[int(name)]])
        with torch.no_grad():
            expected = stock_tiny(FAMILY)(prompt).logits[0].float().log_softmax(-1)
        assert [score.token_id for score in scores] == prompt[0, 1:].tolist()
        for place, score in enumerate(scores):
            assert score.logprob == pytest.approx(float(expected[place, score.token_id]), abs=1e-3)
            top = expected[place].topk(2)
            assert [token for token, _ in score.top] == top.indices.tolist()


def test_a_known_prompt_is_read_again() -> None:
    (prompt,) = random_prompts(1, 30)
    engine = tiny_engine(FAMILY, limits=replace(LIMITS, prefill_chunk=8))
    scores_of(engine, request("first", prompt, greedy(3)))
    (again,) = scores_of(engine, scored("again", prompt)).values()
    (once_more,) = scores_of(engine, scored("again", prompt)).values()
    assert again == once_more
    assert len(again) == 29


def test_a_prompt_of_one_token_has_none() -> None:
    assert scores_of(tiny_engine(FAMILY), scored("one", [5])) == {}
