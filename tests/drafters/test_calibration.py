"""Estimates are corrected towards what came true, trees stay trees, and the calibration error falls."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from drafters.calibration import Claims, HitTable, SurvivalCalibration, tried_and_accepted
from drafters.tree import ROOT, DraftTree, select_nodes
from tests.drafters.trees import draft_trees

torch.set_num_threads(1)


def chains(batch: int, claims: list[float]) -> DraftTree:
    """One chain per sequence whose nodes claim these conditionals."""
    nodes = len(claims)
    survival = torch.tensor(claims).cumprod(0).repeat(batch, 1)
    places = torch.arange(nodes).repeat(batch, 1)
    return DraftTree(places, places - 1, places + 1, survival, torch.full((batch,), nodes))


def path_of(accepted: torch.Tensor, nodes: int) -> torch.Tensor:
    """That of chains of which so many nodes were accepted. # accepted [batch] -> [batch, nodes]"""
    places = torch.arange(nodes)
    return torch.where(places < accepted[:, None], places, -1)


def play(
    calibration: SurvivalCalibration, steps: int, claims: list[float], truth: list[float], generator: torch.Generator
) -> DraftTree:
    """So many steps of 8 chains whose nodes really survive with these conditionals; the last corrected tree."""
    tree = chains(8, claims)
    for _ in range(steps):
        tree, claimed = calibration.correct(chains(8, claims))
        draws = torch.rand(8, len(truth), generator=generator) < torch.tensor(truth)
        calibration.learn(claimed, tree, path_of(draws.cumprod(1).sum(1), len(truth)))
    return tree


def conditionals(tree: DraftTree) -> list[float]:
    above = torch.cat([torch.ones(1), tree.survival[0, :-1]])
    found: list[float] = (tree.survival[0] / above).tolist()
    return found


def test_nothing_is_corrected_before_anything_is_known() -> None:
    tree = chains(2, [0.9, 0.5, 0.3])
    corrected, _ = SurvivalCalibration().correct(tree)
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
            calibration.renew()
        return float(play(calibration, 15, [0.8], [0.8], generator).survival[0, 0])

    assert after(renewed=True) > after(renewed=False) + 0.1


@given(draft_trees())
def test_corrected_survival_still_falls_along_every_path(tree: DraftTree) -> None:
    calibration = SurvivalCalibration()
    play(calibration, 5, [0.3] * 4, [1.0] * 4, torch.Generator().manual_seed(3))  # factors above 1
    corrected, claims = calibration.correct(tree)
    for line in range(tree.batch):
        for node in range(int(tree.num_nodes[line])):
            parent = int(tree.parents[line, node])
            above = 1.0 if parent < 0 else float(corrected.survival[line, parent])
            assert 0.0 <= float(corrected.survival[line, node]) <= above
    assert claims.conditional.shape == tree.survival.shape
    assert ((corrected.survival > 0) == (tree.survival > 0)).all()


def test_claims_follow_the_nodes_that_are_kept() -> None:
    corrected, claims = SurvivalCalibration().correct(chains(1, [0.9, 0.2, 0.8]))
    tree, kept = select_nodes(corrected, torch.tensor([2]), 2)
    assert torch.allclose(claims.take(kept).conditional, torch.tensor([[0.9, 0.2]]))
    assert tree.num_nodes.tolist() == [2]
    assert isinstance(claims.take(kept), Claims)


@given(draft_trees(), st.data())
def test_a_node_is_tried_when_its_parent_was_accepted(tree: DraftTree, data: st.DataObject) -> None:
    batch, nodes = tree.tokens.shape
    paths = [_draw_path(tree, b, data) for b in range(batch)]
    depth = max(map(len, paths))
    path = torch.tensor([p + [-1] * (depth - len(p)) for p in paths], dtype=torch.int64).reshape(batch, depth)
    tried, accepted = tried_and_accepted(tree, path)
    for b in range(batch):
        for i in range(nodes):
            exists = i < tree.num_nodes[b]
            assert accepted[b, i] == (exists and i in paths[b])
            assert tried[b, i] == (exists and int(tree.parents[b, i]) in [ROOT, *paths[b]])


def _draw_path(tree: DraftTree, b: int, data: st.DataObject) -> list[int]:
    path: list[int] = []
    parent = ROOT
    while children := [i for i in range(int(tree.num_nodes[b])) if tree.parents[b, i] == parent]:
        parent = data.draw(st.sampled_from([ROOT, *children]))
        if parent == ROOT:
            break
        path.append(parent)
    return path


def table(decay: float) -> HitTable:
    return HitTable(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([4.0, 4.0, 4.0]), decay=decay)


def test_the_prior_speaks_first() -> None:
    assert table(0.9).ratios.tolist() == [0.25, 0.5, 0.75]


def test_rates_are_counts() -> None:
    rates = table(1.0)
    rates.observe(torch.tensor([0, 0, 0, 1]), torch.tensor([1, 1, 0, 0]), torch.tensor([1, 1, 1, 0]))
    assert torch.equal(rates.ratios, torch.tensor([3.0, 2.0, 3.0]) / torch.tensor([7.0, 4.0, 4.0]))


def test_rates_converge_to_each_buckets_own_acceptance() -> None:
    rates, generator = table(0.999), torch.Generator().manual_seed(1)
    truth = torch.tensor([0.1, 0.9, 0.5])
    for _ in range(2000):
        buckets = torch.randint(3, (8,), generator=generator)
        accepted = torch.rand(8, generator=generator) < truth[buckets]
        rates.observe(buckets, accepted, torch.ones(8, dtype=torch.bool))
    assert (rates.ratios - truth).abs().max() < 0.04


def test_a_bucket_no_longer_tried_returns_to_its_prior() -> None:
    rates, yes = table(0.9), torch.ones(4, dtype=torch.bool)
    for _ in range(50):
        rates.observe(torch.zeros(4, dtype=torch.int64), yes, yes)
    assert rates.ratios[0] > 0.9
    for _ in range(100):
        rates.observe(torch.ones(4, dtype=torch.int64), yes, yes)
    assert abs(float(rates.ratios[0]) - 0.25) < 0.01
