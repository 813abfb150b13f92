import torch

from drafters.none import NoDrafter
from drafters.protocol import Noise


def test_it_grows_the_empty_tree() -> None:
    rows = torch.tensor([3, 1])
    candidates = NoDrafter().grow(rows, Noise(torch.zeros(2), torch.zeros(2), torch.zeros(2)))
    assert candidates.tokens.shape == (2, 0)
    assert candidates.num_nodes.tolist() == [0, 0]


def test_nothing_is_accepted_from_a_prediction() -> None:
    assert NoDrafter().finish([3, 1]) == [0, 0]
