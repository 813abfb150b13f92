"""The likeliest tokens are those a plain sort finds, for vocabularies of any width."""

import pytest
import torch

from drafters.feedback import likeliest, target_tops


@pytest.mark.parametrize("vocab", [64, 320, 4096, 4100, 9001])
@pytest.mark.parametrize("top", [1, 7, 64])
def test_the_highest_scores_are_found(vocab: int, top: int) -> None:
    scores = torch.randn(5, vocab, generator=torch.Generator().manual_seed(vocab))
    values, places = likeliest(scores, top)
    expected = scores.topk(top, dim=-1)
    assert torch.equal(values, expected.values)
    assert torch.equal(places, expected.indices)


def test_many_in_one_block_are_all_found() -> None:
    scores = torch.zeros(1, 8192)
    scores[0, 640:672] = torch.arange(32) + 1.0
    values, places = likeliest(scores, 32)
    assert values[0].tolist() == [float(value) for value in range(32, 0, -1)]
    assert places[0].tolist() == list(range(671, 639, -1))


def test_logprobs_are_those_of_the_whole_vocabulary() -> None:
    scores = torch.randn(3, 5000, generator=torch.Generator().manual_seed(0)).bfloat16()
    kept = scores.clone()
    ids, logprobs = target_tops(scores, 4)
    expected = kept.float().log_softmax(-1).topk(4)
    assert torch.equal(ids, expected.indices)
    assert torch.allclose(logprobs, expected.values, atol=1e-5)
    assert torch.equal(scores, kept)


def test_no_positions_are_fine() -> None:
    assert target_tops(torch.zeros(0, 50), 4)[0].shape == (0, 4)
