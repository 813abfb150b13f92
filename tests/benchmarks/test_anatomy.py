"""Statistics on records made by hand, with answers worked out by hand."""

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest

from benchmarks.anatomy import (
    Place,
    Share,
    SourceCredit,
    alpha,
    anatomy_of,
    calibration_error,
    class_scores,
    conditional_pairs,
    credits_of,
    places_of,
    position_shares,
    spine,
    survival_pairs,
)
from benchmarks.draft_records import BlockRecord, StepRecord, paths_of
from service.assembly import Assembly
from tests.service.bench.parts import written_prompts


def share(hits: int, of: int) -> Share:
    return Share.count([True] * hits + [False] * (of - hits))


TREE = {(1,): 0.6, (2,): 0.3, (1, 5): 0.2, (1, 6): 0.4, (1, 6, 7): 0.1, (2, 9): 0.25}


def test_paths_follow_parents() -> None:
    assert paths_of([1, 2, 5, 7], [-1, -1, 0, 2]) == [(1,), (2,), (1, 5), (1, 5, 7)]


def test_the_spine_goes_on_with_the_likeliest_child() -> None:
    assert spine(TREE) == {(1,): 0.6, (1, 6): 0.4, (1, 6, 7): 0.1}
    assert spine({}) == {}


def test_alpha_counts_trees_that_held_all_before() -> None:
    trees = [(TREE, (1, 5, 8)), (TREE, (3, 5, 8)), (TREE, (2, 9)), (TREE, (1, 4, 7))]
    assert alpha(trees, 1) == share(3, 4)
    assert alpha(trees, 2) == share(2, 3)
    assert alpha(trees, 3) == share(0, 1)  # the truth of (2, 9) is not known at depth 3
    assert alpha(trees, 4) == share(0, 0)
    assert alpha(trees, 4).rate is None


BLOCK = BlockRecord(forward=0, start=(), tokens=((1, 2), (5, 6), (7, 8)), classes=(0, 1, 3))
LATER = BlockRecord(forward=1, start=(1, 6), tokens=((3, 4), (2, 1), (0, 9)), classes=(0, 0, 2))


def test_a_block_is_judged_up_to_its_first_wrong_spine_token() -> None:
    assert list(places_of(BLOCK, (1, 6, 7, 7))) == [Place(True, 1, 0, 0), Place(True, 2, 1, 1)]
    assert list(places_of(BLOCK, (1, 5))) == [Place(True, 1, 0, 0), Place(True, 2, 0, 1)]
    assert list(places_of(BLOCK, (4,))) == [Place(True, 1, None, 0)]


def test_a_block_that_starts_off_the_text_is_not_judged() -> None:
    assert list(places_of(LATER, (1, 5, 3))) == []
    assert list(places_of(LATER, (1, 6))) == []
    assert list(places_of(LATER, (1, 6, 3, 8))) == [Place(False, 1, 0, 0), Place(False, 2, None, 0)]


def test_a_block_proposes_its_spine_and_what_hangs_beside_it() -> None:
    assert BLOCK.paths() == [(1,), (2,), (1, 5), (1, 6), (1, 5, 7), (1, 5, 8)]
    assert LATER.paths()[:4] == [(1, 6, 3), (1, 6, 4), (1, 6, 3, 2), (1, 6, 3, 1)]


PLACES = [
    Place(True, 1, 0, 0),
    Place(True, 1, 0, 0),
    Place(True, 1, 3, 0),
    Place(True, 1, None, 3),
    Place(True, 2, 5, 1),
    Place(False, 1, 1, 1),
]


def test_shares_by_forward_and_position() -> None:
    rows = [(row.forward, row.position, row.first_rank, row.any_rank) for row in position_shares(PLACES)]
    assert rows == [
        ("first", 1, share(2, 4), share(3, 4)),
        ("first", 2, share(0, 1), share(1, 1)),
        ("later", 1, share(0, 1), share(1, 1)),
    ]


def test_precision_and_recall_by_class() -> None:
    scores = [(score.precision, score.recall) for score in class_scores(PLACES)]
    assert scores == [
        (share(2, 3), share(2, 2)),
        (share(1, 2), share(1, 2)),
        (share(0, 0), share(0, 1)),
        (share(1, 1), share(1, 1)),
    ]


def test_calibration_error_of_known_bins() -> None:
    assert calibration_error([]) is None
    assert calibration_error([(0.05, False), (1.0, True)]) == pytest.approx(0.025)
    # one bin: mean estimate 0.55, three of four came true: |0.55 - 0.75|
    same = [(0.51, True), (0.59, True), (0.53, True), (0.57, False)]
    assert calibration_error(same) == pytest.approx(0.2)
    # estimates of one bin may be wrong in both directions and still right on average
    assert calibration_error([(0.5, True), (0.5, False)]) == pytest.approx(0.0)
    assert calibration_error([(0.95, True)] * 19 + [(0.95, False)]) == pytest.approx(0.0)


STEP = StepRecord(root=0, truth=(1, 6), accepted=1, candidates=TREE, proposals={"a": TREE})


def test_every_candidate_with_a_known_fate_is_judged() -> None:
    assert sorted(survival_pairs(STEP)) == [
        *[(0.2, False), (0.25, False), (0.3, False), (0.4, True), (0.6, True)]  # (1, 6, 7) is not known
    ]


def test_tried_candidates_are_those_whose_parent_came_true() -> None:
    pairs = sorted(conditional_pairs(STEP))
    assert [outcome for _, outcome in pairs] == [False, False, True, True]
    assert [estimate for estimate, _ in pairs] == pytest.approx([0.3, 0.2 / 0.6, 0.6, 0.4 / 0.6])


def test_credit_goes_to_everybody_who_was_right() -> None:
    steps = [
        StepRecord(root=0, truth=(1, 6, 7, 4), accepted=3, proposals={"a": {(1,): 1.0}, "b": TREE}),
        StepRecord(root=0, truth=(2, 9), accepted=1, proposals={"a": {(2,): 1.0}, "b": {}, "c": {}}),
        StepRecord(root=0, truth=(2, 9), accepted=0, proposals={"a": {(2,): 1.0}}),
    ]
    assert credits_of(steps) == {"a": SourceCredit(2, 1), "b": SourceCredit(3, 2), "c": SourceCredit(0, 0)}


def test_an_anatomy_tells_sources_apart() -> None:
    both = StepRecord(
        root=0,
        truth=(1, 6, 7),
        accepted=2,
        candidates=TREE,
        proposals={"lookup": {(2,): 0.3}, "specblock": {(1,): 0.6}},
        blocks=[BLOCK],
    )
    silent = StepRecord(root=0, truth=(1, 6, 7), accepted=0)
    not_asked = StepRecord(root=0, truth=(2,), accepted=1, candidates={(2,): 0.9}, proposals={"lookup": {(2,): 0.9}})
    whole = anatomy_of([both, silent, not_asked], depth=2, source=None)
    one = anatomy_of([both, silent, not_asked], depth=2, source="specblock")
    assert (whole.observed_steps, whole.drafted_steps) == (3, 2)
    assert whole.alpha == (share(2, 2), share(1, 1))
    assert one.alpha == (share(1, 1), share(0, 1))
    assert one.spine_alpha == (share(1, 1), share(0, 1))
    assert [score.recall.of for score in one.rank_head] == [1, 1, 0, 0]
    written = json.loads(json.dumps(asdict(one)))
    assert written["alpha"] == [{"rate": 1.0, "of": 1}, {"rate": 0.0, "of": 1}]
    assert written["observed_by_source"] == {
        "lookup": {"accepted": 1, "alone": 1},
        "specblock": {"accepted": 1, "alone": 1},
    }
    assert written["rank_head"][0] == {
        "rank_class": 0,
        "precision": {"rate": 1.0, "of": 1},
        "recall": {"rate": 1.0, "of": 1},
    }


def test_nothing_observed_is_no_number() -> None:
    empty = anatomy_of([], depth=2, source=None)
    assert (empty.survival_ece, empty.conditional_ece, empty.rank_head, empty.block_positions) == (None, None, (), ())
    assert [share.rate for share in empty.alpha] == [None, None]


def test_the_command_looks_into_the_drafts_at_every_temperature(
    run: Callable[..., tuple[int, str]], trained_assembly: Assembly, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("service.bench.experiment.assemble", lambda config: trained_assembly)
    prompts, out = tmp_path / "some.jsonl", tmp_path / "out.json"
    prompts.write_text("\n".join(written_prompts()))
    code, output = run(
        *("anatomy", "--prompts", prompts, "--max-tokens", 16, "--out", out),
        *("--temperature", 0, "--temperature", 0.8, "--temperature", 0),
    )
    assert code == 0, output
    for words in ("alpha 12", "ranks 2-4", "position 1", "specblock", "T = 0.8"):
        assert words in output
    rows = json.loads(out.read_text())["rows"]
    assert [row["temperature"] for row in rows] == [0.0, 0.8]
    for row in rows:
        assert (row["alpha_of"], len(row["alpha"]), len(row["spine_alpha"])) == ("specblock", 12, 12)
        assert [score["rank_class"] for score in row["rank_head"]] == [0, 1, 2, 3]
        assert row["block_positions"][0]["forward"] == "first"
        assert set(row["observed_by_source"]) == {"lookup", "specblock"}
        assert row["observed_by_source"]["lookup"]["accepted"] >= row["observed_by_source"]["lookup"]["alone"]
        assert 0 <= row["conditional_ece"] <= 1
        assert row["observed_steps"] > 0
