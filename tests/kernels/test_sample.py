"""The reference of sampling: greedy and drawn rows of one batch, each as it is alone."""

import torch

from kernels.gumbel import gumbel_noise
from kernels.sample import sample

torch.set_num_threads(1)


def test_a_row_is_drawn_as_it_is_alone() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = (torch.randn(8, 501, generator=generator) * 2).bfloat16()
    seeds = torch.tensor([1, 1, 2, 2, 3, 3, 4, 4])
    positions = torch.tensor([5, 5, 5, 6, 7, 7, 8, 9])
    temperatures = torch.tensor([0.7, 1.0, 0.0, 1.3, 1.0, 0.0, 0.2, 1.0])
    together = sample(logits, seeds, positions, temperatures)
    for row in range(8):
        one = slice(row, row + 1)
        scores = logits[one].float()
        if temperatures[row] > 0:
            noise = gumbel_noise(seeds[one], positions[one], 501)
            scores = (scores - scores.amax()) / temperatures[row] + noise
        assert together.tokens[row] == scores.argmax()
        assert sample(logits[one], seeds[one], positions[one], temperatures[one]).tokens == together.tokens[row]
    assert not together.bad_rows.any()


def test_logits_are_left_as_they_are() -> None:
    logits = torch.randn(3, 40, generator=torch.Generator().manual_seed(1))
    before, zeros = logits.clone(), torch.zeros(3, dtype=torch.int64)
    sample(logits, zeros, zeros, zeros + 1.0)
    assert torch.equal(logits, before)
