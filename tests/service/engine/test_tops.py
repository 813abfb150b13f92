"""The likeliest tokens are those a plain sort finds, for vocabularies of any width."""

import pytest
import torch

from service.engine.tops import likeliest, target_tops


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


def test_lines_beyond_what_was_emitted_are_not_looked_at() -> None:
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(0))
    tops = target_tops(logits, torch.tensor([[2, 0, 99], [1, 99, 99]]), torch.tensor([2, 1]), 4)
    assert tops is not None
    expected = logits.log_softmax(-1).topk(4)
    assert torch.equal(tops.ids[0, :2], expected.indices[[2, 0]])
    assert torch.equal(tops.logprobs[1, 0], expected.values[1])


def test_nobody_in_the_batch_is_fine() -> None:
    none = torch.zeros(0, 1, dtype=torch.int64)
    tops = target_tops(torch.zeros(0, 50), none, torch.zeros(0, dtype=torch.int64), 4)
    assert tops is not None
    assert tops.ids.shape == (0, 1, 4)
