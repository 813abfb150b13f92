"""The draft vocabulary: expected frequency, from what was said and what might have been."""

import pytest
import torch

from drafters.training.corpus import TOP, Example
from drafters.training.errors import TrainingError
from drafters.training.vocabulary import frequent_tokens


def example(prompt: list[int], response: list[int], likely: list[int]) -> Example:
    """Labels put half of the odds on each of two tokens."""
    labels = len(response) + 1
    logprobs = torch.full((labels, TOP), -30.0)
    logprobs[:, :2] = torch.tensor(0.5).log()
    ids = torch.arange(TOP).expand(labels, -1).clone()
    ids[:, :2] = torch.tensor(likely)
    return Example(torch.tensor(prompt + response), torch.zeros(1), len(prompt), ids, logprobs)


def test_said_and_likely_tokens_count_and_prompts_do_not() -> None:
    text = example([90] * 20, [70, 70, 71, 72], [80, 81])
    assert frequent_tokens([text], vocab_size=100, size=3).tolist() == [70, 80, 81]
    assert frequent_tokens([text], vocab_size=100, size=5).tolist() == [70, 71, 72, 80, 81]


def test_no_more_tokens_than_there_are() -> None:
    text = example([1], [2, 3, 4], [5, 6])
    assert frequent_tokens([text], vocab_size=70, size=8192).tolist() == list(range(70))


def test_tokens_of_another_target_are_refused() -> None:
    with pytest.raises(TrainingError, match="token 99, but the target has 80"):
        frequent_tokens([example([1], [99, 3], [5, 6])], vocab_size=80, size=10)
