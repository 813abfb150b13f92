"""The rank head's odds are corrected towards what came true."""

import torch

from drafters.specblock.calibration import Calibration
from drafters.specblock.heads import CLASS_NAMES, CLASS_OF_RANK
from kernels.rank_features import TOP


def test_nothing_is_corrected_before_anything_is_known() -> None:
    conditional = torch.rand(2, 3, 4, TOP) * 0.9
    assert Calibration(4, device="cpu").correct(conditional, 0).equal(conditional)


def test_a_head_that_promises_twice_too_much_is_believed_half() -> None:
    calibration = Calibration(4, device="cpu")
    generator = torch.Generator().manual_seed(0)
    buckets = calibration.buckets(0)[:1, 0][None].expand(1, 50)  # position 1, rank 1
    predicted = torch.full((1, 50), 0.8)
    for _ in range(200):
        true = torch.rand(1, 50, generator=generator) < 0.4
        calibration.observe(buckets, predicted, true, torch.ones_like(true))
    corrected = calibration.correct(torch.full((4, TOP), 0.8), 0)
    assert abs(corrected[0, 0] - 0.4) < 0.02
    assert corrected[1, 0] == 0.8  # another position
    assert corrected[0, 1] == 0.8  # another class
    assert calibration.correct(torch.full((4, TOP), 0.8), 1)[0, 0] == 0.8  # a later block


def test_untried_nodes_teach_nothing() -> None:
    calibration = Calibration(2, device="cpu")
    nodes = torch.zeros(1, 8, dtype=torch.int64)
    never = torch.zeros(1, 8, dtype=torch.bool)
    for _ in range(100):
        calibration.observe(nodes, torch.full((1, 8), 0.9), never, never)
    assert calibration.correct(torch.full((2, TOP), 0.5), 0).eq(0.5).all()


def test_odds_stay_below_certainty() -> None:
    calibration = Calibration(2, device="cpu")
    nodes, always = torch.zeros(1, 8, dtype=torch.int64), torch.ones(1, 8, dtype=torch.bool)
    for _ in range(100):
        calibration.observe(nodes, torch.full((1, 8), 0.3), always, always)
    assert calibration.correct(torch.full((2, TOP), 0.9), 0).max() < 1


def test_outcomes_are_told_by_class_over_all_blocks_and_positions() -> None:
    calibration = Calibration(2, device="cpu")
    ranks = torch.tensor([0, 1, 3, 4, 9])  # of classes 0, 1, 1, 2, 2
    buckets = torch.stack([calibration.buckets(0)[1, ranks], calibration.buckets(1)[0, ranks]])
    true = torch.tensor([[True, False, True, False, False], [False, True, False, False, False]])
    tried = torch.tensor([[True, True, True, True, False], [True, True, True, True, True]])
    calibration.observe(buckets, torch.full((2, 5), 0.25), true, tried)
    outcomes = calibration.outcomes()
    assert outcomes.predicted == {"1": 0.5, "2-4": 1.0, "5-10": 0.75}
    assert outcomes.right == {"1": 1.0, "2-4": 2.0, "5-10": 0.0}


def test_every_class_that_can_be_drafted_has_a_name() -> None:
    assert len(CLASS_NAMES) == len(set(CLASS_OF_RANK))
    spans = [[rank + 1 for rank, one in enumerate(CLASS_OF_RANK) if one == number] for number in range(3)]
    assert tuple(f"{span[0]}-{span[-1]}".replace("1-1", "1") for span in spans) == CLASS_NAMES
