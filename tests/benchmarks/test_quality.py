"""Figures of records made by hand, with answers worked out by hand."""

import pytest

from benchmarks.draft_records import Distribution, StepRecord
from benchmarks.quality import calibration_error, quality_of

TREE = {(1,): 0.6, (2,): 0.3, (1, 5): 0.2, (1, 6): 0.4, (1, 6, 7): 0.1}
STEP = StepRecord(
    truth=(1, 5, 4, 4),
    accepted=2,
    candidates=TREE,
    distributions=[Distribution((), (2, 9, 1), 0.5), Distribution((), (1, 9), 0.7), Distribution((7,), (1,))],
    verified={(1,): 0.9, (2,): 0.1, (1, 5): 0.3},
)
SILENT = StepRecord(truth=(8,))


def test_a_place_is_ranked_by_the_first_distribution_there_or_by_the_tree() -> None:
    assert STEP.ranked(()) == (2, 9, 1)
    assert STEP.ranked((1,)) == (6, 5)
    assert STEP.ranked((1, 5)) == ()


def test_figures_of_two_steps() -> None:
    known = quality_of([STEP, SILENT])
    # Tokens 1, 5 and 4 behind the root and two nodes of the first step, 8 behind the root of the second.
    assert (known["places"], known["named"]) == (4, 0.5)
    assert known["covered"] == {"1": 0.0, "2": 0.5, "4": 1.0, "8": 1.0}
    assert known["right_by_rank"] == [0.0, 0.5, 1.0, None, None, None, None, None]
    assert known["total_variation"] == pytest.approx(0.6)
    assert known["accepted_by_best"] == {"1": 0.5, "2": 0.5, "3": 0.5, "5": 1.0, "8": 1.0}
    table = {(row["depth"], row["rank"]): (row["labels"], row["claimed"], row["accepted"]) for row in known["by_rank"]}
    wanted = {(1, 1): (1, 0.6, 1), (1, 2): (1, 0.3, 0), (2, 1): (1, 0.4 / 0.6, 0), (2, 2): (1, 0.2 / 0.6, 1)}
    assert table == {place: pytest.approx(values) for place, values in wanted.items()}
    # Nodes (1,) and (1, 5) came true: of the claims 0.6, 0.3, 0.2 and of the corrected 0.9, 0.1, 0.3, a bin each.
    assert known["claimed_error"] == pytest.approx((0.4 + 0.3 + 0.8) / 3)
    assert known["corrected_error"] == pytest.approx((0.1 + 0.1 + 0.7) / 3)


def test_calibration_error_of_known_bins() -> None:
    assert calibration_error([]) is None
    assert calibration_error([(0.05, False), (1.0, True)]) == pytest.approx(0.025)
    # one bin: mean estimate 0.55, three of four came true: |0.55 - 0.75|
    same = [(0.51, True), (0.59, True), (0.53, True), (0.57, False)]
    assert calibration_error(same) == pytest.approx(0.2)
    # estimates of one bin may be wrong in both directions and still right on average
    assert calibration_error([(0.5, True), (0.5, False)]) == pytest.approx(0.0)
    assert calibration_error([(0.95, True)] * 19 + [(0.95, False)]) == pytest.approx(0.0)
