"""The reference of sampling: rows of one batch, each as it is alone; filters against sorting in plain Python."""

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from kernels.sample import OFF, Filters, gumbel_noise_of, keep_top_k, likeliest, narrow_to_nucleus, sample

torch.set_num_threads(1)

KEYS = (torch.tensor([1, 1, 2, 2, 3, 3]), torch.tensor([5, 5, 5, 6, 7, 7]))
TEMPERATURES = torch.tensor([0.7, 1.0, 0.0, 1.3, 1.0, 0.2])
FILTERS = Filters(
    torch.tensor([OFF, -1.0, -1.0, OFF, OFF, -3.0]),
    torch.tensor([3, 0, 2, 0, 0, 9]),
    torch.tensor([0.9, 0.5, 0.1, 0.3, 1.0, 0.8], dtype=torch.float64),
)
# quarters of a nat: many equal scores, and probabilities that float32 separates
quarters = st.lists(st.integers(-24, 24).map(lambda i: i / 4), min_size=1, max_size=30)


def _logits() -> torch.Tensor:
    return (torch.randn(6, 501, generator=torch.Generator().manual_seed(0)) * 2).bfloat16()


@pytest.mark.parametrize("filters", [None, FILTERS])
def test_a_row_is_drawn_as_it_is_alone(filters: Filters | None) -> None:
    logits = _logits()
    together = sample(logits, *KEYS, TEMPERATURES, filters)
    for row in range(6):
        one = torch.tensor([row])
        seeds, positions = (key[one] for key in KEYS)
        its_filters = None if filters is None else filters.of(one)
        assert sample(logits[one], seeds, positions, TEMPERATURES[one], its_filters).tokens == together.tokens[row]
        scores = logits[one].float()
        if TEMPERATURES[row] > 0:
            scores = (scores - scores.amax()) / TEMPERATURES[row] + gumbel_noise_of(seeds, positions, torch.arange(501))
        if filters is None or row in (2, 4):  # which filter nothing
            assert together.tokens[row] == scores.argmax()
    assert not together.bad_rows.any()


def test_filters_change_tokens() -> None:
    logits = _logits()
    assert (sample(logits, *KEYS, TEMPERATURES, FILTERS).tokens != sample(logits, *KEYS, TEMPERATURES).tokens).any()


@pytest.mark.parametrize("filters", [None, FILTERS])
def test_logits_are_left_as_they_are(filters: Filters | None) -> None:
    logits = _logits()
    sample(logits, *KEYS, TEMPERATURES, filters)
    assert torch.equal(logits, _logits())


def _ranking(scores: list[float]) -> list[int]:
    return sorted(range(len(scores)), key=lambda i: (-scores[i], i))


def _kept(scores: torch.Tensor) -> list[int]:
    return scores.isfinite().nonzero().squeeze(1).tolist()


@given(quarters, st.integers(1, 35))
def test_top_k_keeps_the_first_k_of_the_ranking(scores: list[float], k: int) -> None:
    k = min(k, len(scores))
    row = torch.tensor([scores, scores])
    keep_top_k(row, torch.tensor([k, 1]))
    assert _kept(row[0]) == sorted(_ranking(scores)[:k])
    assert _kept(row[1]) == _ranking(scores)[:1]


@given(quarters, st.integers(1, 35))
def test_likeliest_are_ranked(scores: list[float], k: int) -> None:
    k = min(k, len(scores))
    assert likeliest(torch.tensor([scores]), k)[0].tolist() == _ranking(scores)[:k]


@given(quarters, st.floats(0, 1))
def test_the_best_is_the_best_of_the_sorted_nucleus(scores: list[float], top_p: float) -> None:
    row = torch.tensor([scores])
    row -= row.amax()
    noise = torch.rand(1, len(scores), generator=torch.Generator().manual_seed(len(scores))) * 8
    weights = row[0].double().exp()
    nucleus: list[int] = []
    before, total = 0.0, weights.sum().item()
    for token in _ranking(row[0].tolist()):
        if nucleus and top_p < 1:
            assume(abs(before - top_p * total) > 1e-5 * total)
        if before < top_p * total or not nucleus or top_p >= 1:
            nucleus.append(token)
        before += weights[token].item()
    best = max(nucleus, key=lambda token: (row[0, token] + noise[0, token]).item())
    narrow_to_nucleus(row, noise, torch.tensor([top_p], dtype=torch.float64))
    assert (row + noise).argmax(-1).item() == best
    assert set(nucleus) <= set(_kept(row[0]))


@pytest.mark.parametrize(("top_p", "kept"), [(0.25, 1), (0.26, 2), (0.5, 2), (0.75, 3), (0.76, 4), (1.0, 4)])
def test_a_border_between_equals_falls_by_id(top_p: float, kept: int) -> None:
    # noise pulls to the highest ids, so the best one is the last token of the nucleus
    row = torch.zeros(1, 4)
    noise = torch.tensor([[0.0, 1.0, 2.0, 3.0]])
    narrow_to_nucleus(row, noise, torch.tensor([top_p], dtype=torch.float64))
    assert (row + noise).argmax(-1).item() == kept - 1


def test_rows_of_a_large_vocabulary_do_not_depend_on_company() -> None:
    generator = torch.Generator().manual_seed(1)
    scores = torch.randn(9, 30011, generator=generator) * 2
    scores -= scores.amax(-1, keepdim=True)
    noise = torch.rand(9, 30011, generator=generator) * 9
    top_p = torch.tensor([0.1, 0.5, 1.0, 0.9, 0.99, 0.0, 0.7, 0.3, 0.999], dtype=torch.float64)
    together = scores.clone()
    narrow_to_nucleus(together, noise, top_p)
    for i in range(9):
        alone = scores[i : i + 1].clone()
        narrow_to_nucleus(alone, noise[i : i + 1], top_p[i : i + 1])
        assert torch.equal(alone[0], together[i])
    assert torch.equal(together[2], scores[2])
    assert (together + noise)[5].argmax() == scores[5].argmax()
