"""Memory that two processes compute on."""

import torch
from torch import nn

from adaptation.arena import Arena


def test_what_is_put_in_is_found_again_by_whoever_maps_it() -> None:
    named = {
        "weights": torch.randn(3, 5),
        "halves": torch.randn(7, dtype=torch.bfloat16),
        "ids": torch.arange(9),
        "step": torch.tensor(4.0),
        "flags": torch.tensor([True, False, True]),
    }
    arena = Arena.holding(named)
    again = Arena(arena.handle, arena.places)
    assert all(torch.equal(again[name], value) for name, value in named.items())
    again["weights"].fill_(2.0)
    assert bool((arena["weights"] == 2.0).all())
    assert not bool((named["weights"] == 2.0).any())


def test_lent_memory_leaves_parameters_the_same_objects() -> None:
    layer = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    before = layer.weight.detach().clone()
    named = dict(layer.named_parameters())
    arena = Arena.holding(named)
    arena.lend(named)
    assert torch.equal(layer.weight, before)
    layer(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    assert torch.equal(arena["weight"], before - 1.0)
    assert torch.equal(layer.weight, before - 1.0)


def test_tensors_outlive_the_one_who_handed_them_out() -> None:
    weights = Arena.holding({"weights": torch.ones(1000)})["weights"]
    assert weights.sum() == 1000
