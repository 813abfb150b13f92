"""What a tree said is judged once, by the text that came."""

import torch

from drafters.calibration import RankCalibration
from drafters.proposals import TreeLog
from drafters.protocol import DraftingSizes
from drafters.tree import DraftTree

ROWS = torch.tensor([1])


def grown() -> tuple[TreeLog, RankCalibration]:
    """Row 1 has heard of the chain 5, 6, 7, whose last node is of a later block, and of 9 beside it."""
    calibration = RankCalibration(2, device="cpu")
    log = TreeLog(calibration, DraftingSizes(max_sequences=2, max_length=0, max_nodes=6))
    tree = DraftTree.of(torch.tensor([[5, 6, 7, 9]]), torch.tensor([[-1, 0, 1, -1]]))
    buckets = torch.tensor([[0, 0, calibration.first_further, 1]])
    log.keep(ROWS, tree, torch.full((1, 4), 0.5), buckets)
    return log, calibration


def learnt(log: TreeLog, tokens: list[int]) -> list[int]:
    told: list[int] = log.learn(ROWS, torch.tensor([tokens]), torch.tensor([len(tokens)])).tolist()
    return told


def test_accepted_tokens_of_later_blocks_are_counted() -> None:
    assert learnt(grown()[0], [5, 6, 7, 8]) == [1, 4]
    assert learnt(grown()[0], [5, 6, 8]) == [0, 3]


def test_the_bonus_token_is_nobodys() -> None:
    assert learnt(grown()[0], [5, 6, 7]) == [0, 3]


def test_nodes_are_judged_once() -> None:
    log, calibration = grown()
    learnt(log, [5, 2])
    outcomes = calibration.outcomes()
    assert sum(outcomes.predicted.values()) == 1.5  # 5, 9 and, behind the true 5, 6
    assert sum(outcomes.right.values()) == 1.0
    assert learnt(log, [5, 6, 7, 8]) == [0, 4]


def test_a_row_that_ends_is_forgotten() -> None:
    log, _ = grown()
    log.forget([1])
    assert learnt(log, [5, 6, 7, 8]) == [0, 4]
