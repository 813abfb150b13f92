"""Survival is corrected towards what came true, trees stay trees, and the calibration error falls."""

import torch
from hypothesis import given

from drafters.recalibration import Claims, Recalibration
from drafters.select import select_nodes
from drafters.tree import DraftTree
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
    recalibration: Recalibration, steps: int, claims: list[float], truth: list[float], generator: torch.Generator
) -> DraftTree:
    """So many steps of 8 chains whose nodes really survive with these conditionals; the last corrected tree."""
    tree = chains(8, claims)
    for _ in range(steps):
        tree, claimed = recalibration.correct(chains(8, claims))
        draws = torch.rand(8, len(truth), generator=generator) < torch.tensor(truth)
        recalibration.learn(claimed, tree, path_of(draws.cumprod(1).sum(1), len(truth)))
    return tree


def conditionals(tree: DraftTree) -> list[float]:
    above = torch.cat([torch.ones(1), tree.survival[0, :-1]])
    found: list[float] = (tree.survival[0] / above).tolist()
    return found


def test_nothing_is_corrected_before_anything_is_known() -> None:
    tree = chains(2, [0.9, 0.5, 0.3])
    corrected, _ = Recalibration().correct(tree)
    assert torch.allclose(corrected.survival, tree.survival)
    assert Recalibration().error() == 0.0


def test_claims_are_corrected_by_depth() -> None:
    tree = play(Recalibration(), 200, [0.9, 0.9, 0.9], [0.9, 0.6, 0.3], torch.Generator().manual_seed(0))
    assert all(abs(found - true) < 0.1 for found, true in zip(conditionals(tree), [0.9, 0.6, 0.3], strict=True))


def test_who_claims_certainty_and_is_never_right_is_hardly_believed_after_ten_steps() -> None:
    tree = play(Recalibration(), 10, [1.0] * 6, [0.0] * 6, torch.Generator().manual_seed(0))
    assert float(tree.survival[0, 0]) < 0.15


def test_the_calibration_error_is_small_before_and_after_a_shift() -> None:
    """5,000 nodes each time."""
    generator, recalibration = torch.Generator().manual_seed(1), Recalibration()
    play(recalibration, 160, [0.8, 0.7, 0.6, 0.5], [0.6, 0.5, 0.7, 0.4], generator)
    before = recalibration.error()
    play(recalibration, 160, [0.8, 0.7, 0.6, 0.5], [0.9, 0.8, 0.3, 0.2], generator)
    assert before <= 0.03
    assert recalibration.error() <= 0.05  # the bins still remember the first steps of the shift
    play(recalibration, 400, [0.8, 0.7, 0.6, 0.5], [0.9, 0.8, 0.3, 0.2], generator)
    assert recalibration.error() <= 0.03


def test_a_new_version_is_soon_believed() -> None:
    def after(renewed: bool) -> float:
        generator, recalibration = torch.Generator().manual_seed(2), Recalibration()
        play(recalibration, 300, [0.8], [0.1], generator)
        if renewed:
            recalibration.renew()
        return float(play(recalibration, 15, [0.8], [0.8], generator).survival[0, 0])

    assert after(renewed=True) > after(renewed=False) + 0.1


@given(draft_trees())
def test_corrected_survival_still_falls_along_every_path(tree: DraftTree) -> None:
    recalibration = Recalibration()
    play(recalibration, 5, [0.3] * 4, [1.0] * 4, torch.Generator().manual_seed(3))  # factors above 1
    corrected, claims = recalibration.correct(tree)
    for line in range(tree.batch):
        for node in range(int(tree.num_nodes[line])):
            parent = int(tree.parents[line, node])
            above = 1.0 if parent < 0 else float(corrected.survival[line, parent])
            assert 0.0 <= float(corrected.survival[line, node]) <= above
    assert claims.conditional.shape == tree.survival.shape
    assert ((corrected.survival > 0) == (tree.survival > 0)).all()


def test_claims_follow_the_nodes_that_are_kept() -> None:
    corrected, claims = Recalibration().correct(chains(1, [0.9, 0.2, 0.8]))
    tree, kept = select_nodes(corrected, torch.tensor([2]), 2)
    assert torch.allclose(claims.take(kept).conditional, torch.tensor([[0.9, 0.2]]))
    assert tree.num_nodes.tolist() == [2]
    assert isinstance(claims.take(kept), Claims)
