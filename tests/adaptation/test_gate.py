import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adaptation.gate import Gate, GateDecision
from tests.adaptation.streams import Texts

GATE = Gate(least_texts=16, standard_errors=1.25)


def replay(seed: int, candidate: float, serving: float = 1.0, count: int = 64) -> GateDecision:
    """Drafters of these qualities over the same texts, beside an anchor of quality 1."""
    texts = Texts(seed)
    chances = texts.difficulties(count)
    return GATE.decide(texts.scores(chances, candidate), texts.scores(chances, serving), texts.scores(chances))


def test_a_bad_candidate_is_refused_20_of_20_times() -> None:
    decisions = [replay(seed, 0.8) for seed in range(20)]
    assert [decision.publish for decision in decisions] == [False] * 20
    assert {decision.reason for decision in decisions} == {"worse_than_serving"}


def test_a_good_candidate_is_published() -> None:
    decisions = [replay(seed, 1.2) for seed in range(20)]
    assert [decision.reason for decision in decisions] == ["better"] * 20
    assert all(decision.publish and decision.gain > 0 for decision in decisions)


def test_a_candidate_without_any_gain_passes_seldom() -> None:
    assert sum(replay(seed, 1.0).publish for seed in range(400)) / 400 < 0.15


def test_the_numbers_are_told() -> None:
    decision = GATE.decide([2.0, 3.0] * 8, [1.0, 2.5] * 8, [1.0, 1.0] * 8)
    assert decision == GateDecision("better", 16, 2.5, 1.75, 1.0, decision.standard_error, decision.needed)
    assert decision.standard_error == pytest.approx(0.25 * math.sqrt(16 / 15) / 4)
    assert (decision.gain, decision.needed) == (0.75, 1.25 * decision.standard_error)


@pytest.mark.parametrize(
    ("candidate", "serving", "anchor", "reason"),
    [
        ([2.0] * 15, [1.0] * 15, [1.0] * 15, "too_little_evidence"),
        ([], [], [], "too_little_evidence"),
        ([2.0] * 15 + [math.nan], [1.0] * 16, [1.0] * 16, "not_finite"),
        ([2.0] * 15 + [math.inf], [1.0] * 16, [1.0] * 16, "not_finite"),
        ([2.0] * 16, [1.0] * 15 + [math.nan], [1.0] * 16, "not_finite"),
        ([2.0] * 16, [1.0] * 16, [1.0] * 15 + [math.nan], "not_finite"),
        ([1.5] * 16, [2.0] * 16, [1.0] * 16, "worse_than_serving"),
        ([2.0] * 16, [1.5] * 16, [2.5] * 16, "worse_than_anchor"),
        ([2.0] * 16, [2.0] * 16, [1.0] * 16, "within_noise"),
        ([2.2, 1.9] * 8, [2.0, 2.0] * 8, [1.0] * 16, "better"),
        ([2.2, 1.85] * 8, [2.0, 2.0] * 8, [1.0] * 16, "within_noise"),
    ],
)
def test_each_reason(candidate: list[float], serving: list[float], anchor: list[float], reason: str) -> None:
    decision = GATE.decide(candidate, serving, anchor)
    assert decision.reason == reason
    assert decision.publish == (reason == "better")


def test_little_evidence_that_is_no_number_is_refused_too() -> None:
    decision = GATE.decide([math.nan], [1.0], [1.0])
    assert decision.reason == "too_little_evidence"
    assert math.isnan(decision.candidate_mean)
    assert decision.serving_mean == 1.0


@given(st.floats(0, 100), st.lists(st.floats(0, 3), min_size=15, max_size=40), st.integers(0, 14))
def test_no_single_sequence_carries_a_candidate(gain: float, losses: list[float], place: int) -> None:
    differences = [-loss for loss in losses]
    differences.insert(place, gain)
    serving = [5.0] * len(differences)
    candidate = [5.0 + difference for difference in differences]
    assert not GATE.decide(candidate, serving, [0.0] * len(differences)).publish


@given(st.permutations(range(16)))
def test_the_order_of_the_sequences_does_not_matter(order: list[int]) -> None:
    candidate = [1.5 + 0.125 * (i % 5) for i in range(16)]
    serving = [1.5 + 0.125 * (i % 3) for i in range(16)]
    shuffled = GATE.decide([candidate[i] for i in order], [serving[i] for i in order], [1.0] * 16)
    assert shuffled == GATE.decide(candidate, serving, [1.0] * 16)
