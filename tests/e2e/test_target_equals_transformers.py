"""The target is right: greedy text equals transformers' own `generate`, token for token, whatever the engine does."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from service.engine.requests import SamplingParams
from service.engine.weights import EMBEDDED_NAME, LoadedModel, describe, gguf_file, load_model
from tests.service.engine.harness import LIMITS, alone, generate, request, tiny_engine
from tests.tiny_models import FAMILIES, random_prompts, stock, stock_tiny

NUM_PROMPTS = 8
NUM_TOKENS = 40


def until_eos(max_tokens: int) -> SamplingParams:
    return SamplingParams(seed=0, max_tokens=max_tokens, temperature=0.0)


@cache
def tiny_answers(family: str) -> list[tuple[list[int], list[int]]]:
    """Prompts of different lengths, some of them longer than one prompt chunk, and transformers' greedy answers."""
    lengths = [1, 5, 30, 64, 65, 100, 150, 290]
    prompts = [next(random_prompts(1, length, seed=length)) for length in lengths]
    return [(prompt, stock_generate(stock_tiny(family), prompt, NUM_TOKENS)) for prompt in prompts]


@torch.inference_mode()
def stock_generate(model: PreTrainedModel, prompt: Sequence[int], count: int) -> list[int]:
    generate_text: Any = model.generate  # its types are those of no model
    ids = torch.tensor([prompt])
    answer = generate_text(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, pad_token_id=0
    )
    tokens: list[int] = answer[0, len(prompt) :].tolist()
    return tokens


@pytest.mark.parametrize(("drafter", "chunk"), [("none", 256), ("random", 7), ("random", 256)])
@pytest.mark.parametrize("family", FAMILIES)
def test_tiny_greedy_text_in_a_batch(family: str, drafter: str, chunk: int) -> None:
    answers = tiny_answers(family)
    engine = tiny_engine(family, drafter=drafter, limits=replace(LIMITS, prefill_chunk=chunk))
    requests = [request(str(i), p, until_eos(NUM_TOKENS), prediction=a) for i, (p, a) in enumerate(answers)]
    results = generate(engine, *requests)
    assert [results[str(i), 0].tokens for i in range(NUM_PROMPTS)] == [expected for _, expected in answers]
    assert all((results[str(i), 0].accepted > 0) is (drafter == "random") for i in range(NUM_PROMPTS))


REAL_TOKENS = 128
REAL_PROMPTS = (
    "Name the planets of the solar system in order.",
    "Write a haiku about the sea in winter.",
    "What is the difference between a list and a tuple in Python?",
    "A train leaves at 9:40 and arrives at 13:05. How long is the journey?",
    "Explain to a child why the sky is blue.",
    "Translate into French: The library opens at eight o'clock.",
    "def fibonacci(n):\n    # complete this function",
    "Give me three ideas for a birthday party at home.",
    "Repeat these words three times: apple, river, stone, candle.",
    "List five uses of baking soda, as a numbered list.",
    "Who wrote Don Quixote, and when was it published?",
    "Write a SQL query that counts the orders of each customer.",
    "Summarise in one sentence: The committee met on Monday. It discussed the budget, heard two reports on the new "
    "bridge, postponed the vote on parking fees, and agreed to meet again in two weeks.",
    "What are the first ten prime numbers?",
    "Write a polite email asking for a deadline to be moved by a week.",
    "Count from 1 to 30.",
    "Why do leaves change colour in autumn?",
    "Turn this into a JSON object: name Ada, age 36, city London.",
    "Tell a short story about a lighthouse keeper and a storm.",
    "Compare tea and coffee in a short paragraph. " * 12,
)


@pytest.fixture(scope="module")
def real() -> LoadedModel:
    return load_model(
        describe(EMBEDDED_NAME, revision=None, unverified=False), dtype=torch.float32, device=torch.device("cpu")
    )


@pytest.fixture(scope="module")
def real_answers(real: LoadedModel) -> list[tuple[list[int], list[int]]]:
    file = gguf_file(EMBEDDED_NAME)
    assert file is not None
    model = stock(file.parent, gguf_file=file.name)
    prompts = [chat(real.tokenizer, text) for text in REAL_PROMPTS]
    return [(prompt, stock_generate(model, prompt, REAL_TOKENS)) for prompt in prompts]


def chat(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    rendered = tokenizer.apply_chat_template(
        [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
    )
    assert isinstance(rendered, str)
    ids: list[int] = tokenizer(rendered, add_special_tokens=False)["input_ids"]
    return ids


@pytest.mark.slow
@pytest.mark.parametrize(("drafter", "chunk"), [("none", 256), ("memory", 16)])
def test_real_greedy_text_alone(
    real: LoadedModel, real_answers: list[tuple[list[int], list[int]]], drafter: str, chunk: int
) -> None:
    engine = tiny_engine(real, drafter=drafter, limits=replace(LIMITS, prefill_chunk=chunk))
    for prompt, expected in real_answers:
        assert alone(until_eos(REAL_TOKENS), prompt, engine).tokens == expected


@pytest.mark.slow
@pytest.mark.parametrize(("drafter", "chunk"), [("none", 256), ("random", 40)])
def test_real_greedy_text_in_a_batch(
    real: LoadedModel, real_answers: list[tuple[list[int], list[int]]], drafter: str, chunk: int
) -> None:
    engine = tiny_engine(real, drafter=drafter, num_slots=4096, limits=replace(LIMITS, prefill_chunk=chunk))
    requests = [request(str(i), p, until_eos(REAL_TOKENS), prediction=a) for i, (p, a) in enumerate(real_answers)]
    results = generate(engine, *requests)
    assert [results[str(i), 0].tokens for i in range(len(requests))] == [expected for _, expected in real_answers]
