"""Estimates are corrected towards what came true, trees stay trees, and the calibration error falls."""

import torch
from hypothesis import given
from torch import Tensor

from drafters.calibration import RankCalibration, SurvivalCalibration
from drafters.protocol import DraftingSizes
from drafters.tree import MAX_DEPTH, DraftTree
from kernels.lattice import TOP
from kernels.survival import HitCounts, correct_survival, count_hits
from tests.drafters.trees import draft_trees


def chains(batch: int, claims: list[float]) -> DraftTree:
    """One chain per sequence whose nodes claim these conditionals."""
    nodes = len(claims)
    survival = torch.tensor(claims).cumprod(0).repeat(batch, 1)
    places = torch.arange(nodes).repeat(batch, 1)
    return DraftTree(places, places - 1, places + 1, survival, torch.full((batch,), nodes))


def corrected_by(calibration: SurvivalCalibration, tree: DraftTree) -> DraftTree:
    return tree._replace(
        survival=correct_survival(tree, torch.full_like(tree.num_nodes, MAX_DEPTH), calibration.rates).survival
    )


def play(
    calibration: SurvivalCalibration, steps: int, claims: list[float], truth: list[float], generator: torch.Generator
) -> DraftTree:
    """So many steps of 8 chains whose nodes really survive with these conditionals; the last corrected tree."""
    tree = claimed = chains(8, claims)
    wrong = len(claims)  # what no node says
    for _ in range(steps):
        survival, conditional, buckets = correct_survival(claimed, torch.full((8,), MAX_DEPTH), calibration.rates)
        tree = claimed._replace(survival=survival)
        accepted = (torch.rand(8, len(truth), generator=generator) < torch.tensor(truth)).cumprod(1).sum(1)
        places = torch.arange(wrong + 1)
        calibration.learn(
            tree, conditional, buckets, torch.where(places < accepted[:, None], places, wrong), accepted + 1
        )
    return tree


def conditionals(tree: DraftTree) -> list[float]:
    above = torch.cat([torch.ones(1), tree.survival[0, :-1]])
    found: list[float] = (tree.survival[0] / above).tolist()
    return found


def test_nothing_is_corrected_before_anything_is_known() -> None:
    tree = chains(2, [0.9, 0.5, 0.3])
    corrected = corrected_by(SurvivalCalibration(), tree)
    assert torch.allclose(corrected.survival, tree.survival)
    assert SurvivalCalibration().error() == 0.0


def test_claims_are_corrected_by_depth() -> None:
    tree = play(SurvivalCalibration(), 200, [0.9, 0.9, 0.9], [0.9, 0.6, 0.3], torch.Generator().manual_seed(0))
    assert all(abs(found - true) < 0.1 for found, true in zip(conditionals(tree), [0.9, 0.6, 0.3], strict=True))


def test_who_claims_certainty_and_is_never_right_is_hardly_believed_after_ten_steps() -> None:
    tree = play(SurvivalCalibration(), 10, [1.0] * 6, [0.0] * 6, torch.Generator().manual_seed(0))
    assert float(tree.survival[0, 0]) < 0.15


def test_the_calibration_error_is_small_before_and_after_a_shift() -> None:
    """5,000 nodes each time."""
    generator, calibration = torch.Generator().manual_seed(1), SurvivalCalibration()
    play(calibration, 160, [0.8, 0.7, 0.6, 0.5], [0.6, 0.5, 0.7, 0.4], generator)
    before = calibration.error()
    play(calibration, 160, [0.8, 0.7, 0.6, 0.5], [0.9, 0.8, 0.3, 0.2], generator)
    assert before <= 0.03
    assert calibration.error() <= 0.05  # the bins still remember the first steps of the shift
    play(calibration, 400, [0.8, 0.7, 0.6, 0.5], [0.9, 0.8, 0.3, 0.2], generator)
    assert calibration.error() <= 0.03


def test_a_new_version_is_soon_believed() -> None:
    def after(renewed: bool) -> float:
        generator, calibration = torch.Generator().manual_seed(2), SurvivalCalibration()
        play(calibration, 300, [0.8], [0.1], generator)
        if renewed:
            calibration.on_weights_changed()
        return float(play(calibration, 15, [0.8], [0.8], generator).survival[0, 0])

    assert after(renewed=True) > after(renewed=False) + 0.1


@given(draft_trees())
def test_corrected_survival_still_falls_along_every_path(tree: DraftTree) -> None:
    calibration = SurvivalCalibration()
    play(calibration, 5, [0.3] * 4, [1.0] * 4, torch.Generator().manual_seed(3))  # factors above 1
    corrected = corrected_by(calibration, tree)
    for line in range(tree.batch):
        for node in range(int(tree.num_nodes[line])):
            parent = int(tree.parents[line, node])
            above = 1.0 if parent < 0 else float(corrected.survival[line, parent])
            assert 0.0 <= float(corrected.survival[line, node]) <= above
    assert ((corrected.survival > 0) == (tree.survival > 0)).all()


def test_nothing_survives_below_what_can_be_emitted() -> None:
    corrected = correct_survival(chains(1, [0.9, 0.8, 0.7]), torch.tensor([2]), SurvivalCalibration().rates)
    assert corrected.survival[0, 1] > 0
    assert corrected.survival[0, 2] == 0


def test_a_bucket_no_longer_tried_returns_to_its_prior() -> None:
    counts, ones = HitCounts.empty(3, prior=4.0, decay=0.9, limits=(0.1, 1.0), device="cpu"), torch.ones(4)
    for _ in range(50):
        count_hits(counts, torch.zeros(4, dtype=torch.int64), torch.zeros(4), ones)
    assert counts.rates[0] == 0.1
    assert counts.rates[1] == 1.0
    for _ in range(100):
        count_hits(counts, torch.ones(4, dtype=torch.int64), torch.zeros(4), ones)
    assert abs(float(counts.rates[0]) - 1.0) < 0.01


# What a tree claimed is judged once, by the text that came; and what is learned of the rank head.

ROWS = torch.tensor([1])
SIZES = DraftingSizes(max_sequences=2, max_length=0, max_nodes=6)


def grown() -> RankCalibration:
    """Row 1 has heard of the chain 5, 6, 7, whose last node is of a later block, and of 9 beside it."""
    calibration = RankCalibration(2, SIZES)
    tree = DraftTree.of(torch.tensor([[5, 6, 7, 9]]), torch.tensor([[-1, 0, 1, -1]]))
    buckets = torch.tensor([0, 0, calibration._first_further, 1])
    calibration.keep(ROWS, tree, torch.arange(4)[None], torch.full((1, 4), 0.5), buckets)
    return calibration


def learnt(calibration: RankCalibration, tokens: list[int]) -> list[int]:
    reported: list[int] = calibration.learn(ROWS, torch.tensor([tokens]), torch.tensor([len(tokens)])).tolist()
    return reported


def observe(calibration: RankCalibration, buckets: Tensor, predicted: Tensor, true: Tensor, tried: Tensor) -> None:
    count_hits(calibration._counts, buckets, true & tried, predicted * tried)


def test_accepted_tokens_of_later_blocks_are_counted() -> None:
    assert learnt(grown(), [5, 6, 7, 8]) == [1, 4]
    assert learnt(grown(), [5, 6, 8]) == [0, 3]


def test_the_bonus_token_is_of_no_tree() -> None:
    assert learnt(grown(), [5, 6, 7]) == [0, 3]


def test_nodes_are_judged_once() -> None:
    calibration = grown()
    learnt(calibration, [5, 2])
    outcomes = calibration.outcomes()
    assert sum(outcomes.predicted.values()) == 1.5  # 5, 9 and, behind the true 5, 6
    assert sum(outcomes.right.values()) == 1.0
    assert learnt(calibration, [5, 6, 7, 8]) == [0, 4]


def test_a_row_that_ends_is_forgotten() -> None:
    calibration = grown()
    calibration.forget([1])
    assert learnt(calibration, [5, 6, 7, 8]) == [0, 4]


def test_no_rank_is_corrected_before_anything_is_known() -> None:
    assert RankCalibration(4, SIZES).trust(0).equal(torch.ones(4, TOP))


def test_a_head_that_promises_twice_too_much_is_believed_half() -> None:
    calibration = RankCalibration(4, SIZES)
    generator = torch.Generator().manual_seed(0)
    buckets = calibration.buckets(0)[:1, 0][None].expand(1, 50)  # position 1, rank 1
    predicted = torch.full((1, 50), 0.8)
    for _ in range(200):
        true = torch.rand(1, 50, generator=generator) < 0.4
        observe(calibration, buckets, predicted, true, torch.ones_like(true))
    trust = calibration.trust(0)
    assert abs(trust[0, 0] - 0.5) < 0.02
    assert trust[1, 0] == 1.0  # another position
    assert trust[0, 1] == 1.0  # another class
    assert calibration.trust(1)[0, 0] == 1.0  # a later block


def test_outcomes_are_reported_by_class_over_all_blocks_and_positions() -> None:
    calibration = RankCalibration(2, SIZES)
    ranks = torch.tensor([0, 1, 3, 4, 9])  # of classes 0, 1, 1, 2, 2
    buckets = torch.stack([calibration.buckets(0)[1, ranks], calibration.buckets(1)[0, ranks]])
    true = torch.tensor([[True, False, True, False, False], [False, True, False, False, False]])
    tried = torch.tensor([[True, True, True, True, False], [True, True, True, True, True]])
    observe(calibration, buckets, torch.full((2, 5), 0.25), true, tried)
    outcomes = calibration.outcomes()
    assert outcomes.predicted == {"1": 0.5, "2-4": 1.0, "5-10": 0.75}
    assert outcomes.right == {"1": 1.0, "2-4": 2.0, "5-10": 0.0}
