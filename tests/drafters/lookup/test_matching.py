import torch
from hypothesis import given
from hypothesis import strategies as st

from drafters.lookup.matching import CONTEXT, History, Matcher
from drafters.protocol import DraftContext


def common_suffix(a: list[int], b: list[int]) -> int:
    length = 0
    while length < min(CONTEXT, len(a), len(b)) and a[-1 - length] == b[-1 - length]:
        length += 1
    return length


@given(st.lists(st.integers(0, 3), min_size=1, max_size=40))
def test_all_matches_of_a_short_text_are_found_longest_first_then_latest(text: list[int]) -> None:
    history = History(2, 64, "cpu")
    history.start([DraftContext(1, text)])
    matches = Matcher(history, 40, device="cpu").find(torch.tensor([1]))
    oracle = sorted(
        ((common_suffix(text[: i + 1], text), i) for i in range(len(text) - 1) if text[i] == text[-1]), reverse=True
    )
    found = int((matches.strengths > 0).sum())
    places = (matches.columns - CONTEXT)[0, :found].tolist()
    assert list(zip(matches.strengths[0, :found].tolist(), places, strict=True)) == oracle


def test_matches_do_not_reach_over_the_beginning() -> None:
    history = History(1, 64, "cpu")
    history.start([DraftContext(0, [1, 1, 1])])
    matches = Matcher(history, 4, device="cpu").find(torch.tensor([0]))
    assert matches.strengths.tolist() == [[2, 1, 0, 0]]
