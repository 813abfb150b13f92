"""Estimates are corrected towards what came true, trees stay trees, and the calibration error falls."""

import torch
from hypothesis import given

from drafters.calibration import HitTable, SurvivalCalibration
from drafters.tree import MAX_DEPTH, DraftTree
from kernels.survival import correct_survival
from tests.drafters.trees import draft_trees

torch.set_num_threads(1)


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


def table(decay: float) -> HitTable:
    return HitTable(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([4.0, 4.0, 4.0]), decay=decay)


def test_the_prior_speaks_first() -> None:
    assert table(0.9).rates.tolist() == [0.25, 0.5, 0.75]


def test_rates_are_counts() -> None:
    rates = table(1.0)
    rates.observe(torch.tensor([0, 0, 0, 1]), torch.tensor([1, 1, 0, 0]), torch.tensor([1, 1, 1, 0]))
    assert torch.equal(rates.rates, torch.tensor([3.0, 2.0, 3.0]) / torch.tensor([7.0, 4.0, 4.0]))


def test_a_bucket_no_longer_tried_returns_to_its_prior() -> None:
    rates, yes = table(0.9), torch.ones(4, dtype=torch.bool)
    for _ in range(50):
        rates.observe(torch.zeros(4, dtype=torch.int64), yes, yes)
    assert rates.rates[0] > 0.9
    for _ in range(100):
        rates.observe(torch.ones(4, dtype=torch.int64), yes, yes)
    assert abs(float(rates.rates[0]) - 0.25) < 0.01
