"""What a tree said is judged once, by the text that came; and what is learned of the rank head."""

import torch
from torch import Tensor

from drafters.calibration import RankCalibration
from drafters.protocol import DraftingSizes
from drafters.tree import DraftTree
from kernels.rank_features import TOP

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
    told: list[int] = calibration.learn(ROWS, torch.tensor([tokens]), torch.tensor([len(tokens)])).tolist()
    return told


def observe(calibration: RankCalibration, buckets: Tensor, predicted: Tensor, true: Tensor, tried: Tensor) -> None:
    calibration._table.observe(buckets, true & tried, predicted * tried)


def test_accepted_tokens_of_later_blocks_are_counted() -> None:
    assert learnt(grown(), [5, 6, 7, 8]) == [1, 4]
    assert learnt(grown(), [5, 6, 8]) == [0, 3]


def test_the_bonus_token_is_nobodys() -> None:
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


def test_outcomes_are_told_by_class_over_all_blocks_and_positions() -> None:
    calibration = RankCalibration(2, SIZES)
    ranks = torch.tensor([0, 1, 3, 4, 9])  # of classes 0, 1, 1, 2, 2
    buckets = torch.stack([calibration.buckets(0)[1, ranks], calibration.buckets(1)[0, ranks]])
    true = torch.tensor([[True, False, True, False, False], [False, True, False, False, False]])
    tried = torch.tensor([[True, True, True, True, False], [True, True, True, True, True]])
    observe(calibration, buckets, torch.full((2, 5), 0.25), true, tried)
    outcomes = calibration.outcomes()
    assert outcomes.predicted == {"1": 0.5, "2-4": 1.0, "5-10": 0.75}
    assert outcomes.right == {"1": 1.0, "2-4": 2.0, "5-10": 0.0}
