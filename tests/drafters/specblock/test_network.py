"""The network that serves: weights that come later, in the place of the first or in places of their own."""

import pytest
import torch

from drafters.specblock.checkpoint import weights_of
from drafters.specblock.network import ServingNetwork
from drafters.trained_kinds import TRAINED_KINDS
from kernels import ops
from kernels.families import FUSED_FAMILIES
from tests.drafters.specblock.parts import computed, serves, tiny_drafter


@pytest.fixture(params=[False, True], ids=["elsewhere", "in place"])
def in_place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """In place with products that read weights where they are, as kernels of a GPU do."""
    if request.param:
        monkeypatch.setattr(ops, "_table", lambda device_type: ops.REFERENCE)
    return bool(request.param)


@pytest.mark.parametrize("family", FUSED_FAMILIES)
@pytest.mark.parametrize("kind", ["specblock", "medusa", "treeflash"])
def test_other_weights_serve_once_they_are_written(family: str, kind: str, in_place: bool) -> None:
    models = [tiny_drafter(family, seed, kind=kind, **TRAINED_KINDS[kind].shape) for seed in (0, 1)]
    first, second = map(weights_of, models)
    network = ServingNetwork(models[0].config, first, in_place=in_place)
    assert serves(network, first)
    write = network.prepare(second)
    assert serves(network, first)
    write()
    assert serves(network, second)
    assert not serves(network, first)
    network.prepare(first)()
    assert serves(network, first)


def test_in_place_ops_read_where_they_read_before() -> None:
    """As a captured graph does, which knows addresses only."""
    network = ServingNetwork(tiny_drafter().config, weights_of(tiny_drafter()), in_place=True)
    planned = network._planned
    network.prepare(weights_of(tiny_drafter(seed=1)))()
    assert network._planned is planned


def test_weights_that_are_brought_are_left_as_they_are(in_place: bool) -> None:
    first, second = (weights_of(tiny_drafter(seed=seed)) for seed in (0, 1))
    before = {name: value.clone() for name, value in first.items()}
    network = ServingNetwork(tiny_drafter().config, first, in_place=in_place)
    network.prepare(second)()
    computed(network)
    assert all(torch.equal(value, before[name]) for name, value in first.items())
