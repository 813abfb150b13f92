"""The reference of filtered sampling: filtered, drawn and greedy rows of one batch, each as it is alone."""

import torch

from kernels.sample import sample
from kernels.sample_filtered import OFF, Filters, sample_filtered

torch.set_num_threads(1)

KEYS = (torch.tensor([1, 1, 2, 2, 3, 3]), torch.tensor([5, 5, 5, 6, 7, 7]))
TEMPERATURES = torch.tensor([0.7, 1.0, 0.0, 1.3, 1.0, 0.2])
FILTERS = Filters(
    torch.tensor([OFF, -1.0, -1.0, OFF, OFF, -3.0]),
    torch.tensor([3, 0, 2, 0, 0, 9]),
    torch.tensor([0.9, 0.5, 0.1, 0.3, 1.0, 0.8], dtype=torch.float64),
)


def _logits() -> torch.Tensor:
    return (torch.randn(6, 501, generator=torch.Generator().manual_seed(0)) * 2).bfloat16()


def test_a_row_is_drawn_as_it_is_alone() -> None:
    logits = _logits()
    together = sample_filtered(logits, *KEYS, TEMPERATURES, FILTERS)
    for row in range(6):
        one = torch.tensor([row])
        seeds, positions = (key[one] for key in KEYS)
        alone = sample_filtered(logits[one], seeds, positions, TEMPERATURES[one], FILTERS.of(one))
        assert alone.tokens == together.tokens[row]
    assert not together.bad_rows.any()


def test_what_is_not_filtered_is_drawn_as_without_filters() -> None:
    logits = _logits()
    filtered, drawn = sample_filtered(logits, *KEYS, TEMPERATURES, FILTERS), sample(logits, *KEYS, TEMPERATURES)
    assert filtered.tokens[[2, 4]].tolist() == drawn.tokens[[2, 4]].tolist()
    assert (filtered.tokens != drawn.tokens).any()


def test_logits_are_left_as_they_are() -> None:
    logits = _logits()
    before = logits.clone()
    sample_filtered(logits, *KEYS, TEMPERATURES, FILTERS)
    assert torch.equal(logits, before)
