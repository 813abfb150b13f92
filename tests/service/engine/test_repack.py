"""Weights that are exchanged in packed layers: the same bits as if they had been there at load."""

import copy
import threading

import pytest
import torch
from torch import Tensor, nn

from service.engine.linear import can_pack, pack_linears
from service.engine.repack import repacking

pytestmark = pytest.mark.skipif(
    not can_pack(torch.bfloat16, torch.device("cpu")), reason="this CPU has no bf16 arithmetic, so nothing is packed"
)
HIDDEN = 96


class Layers(nn.Module):
    """Every kind of layer that is packed, or not, with and without bias."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(HIDDEN)
        self.q_proj = nn.Linear(HIDDEN, HIDDEN, bias=bias)
        self.k_proj = nn.Linear(HIDDEN, 32, bias=bias)
        self.v_proj = nn.Linear(HIDDEN, 32, bias=bias)
        self.head = nn.Sequential(nn.Linear(HIDDEN, 64), nn.SiLU(), nn.Linear(64, 4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        return torch.cat([self.q_proj(x), self.k_proj(x), self.v_proj(x), self.head(x)], dim=-1)


def layers(seed: int, bias: bool = True) -> Layers:
    torch.manual_seed(seed)
    model = Layers(bias).to(torch.bfloat16).requires_grad_(False)
    for parameter in model.parameters():
        parameter.normal_(std=0.3)
    return model


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.named_parameters()}


def packed(model: Layers) -> Layers:
    loaded = copy.deepcopy(model)
    assert pack_linears(loaded) == 5
    return loaded


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [1, 4, 33])
def test_products_are_those_of_a_fresh_load(bias: bool, rows: int) -> None:
    served, new = packed(layers(1, bias)), layers(2, bias)
    x = torch.randn(rows, HIDDEN).to(torch.bfloat16)
    before = served(x)
    write = repacking(served)(weights(new))
    assert torch.equal(served(x), before)
    write()
    assert torch.equal(served(x), packed(new)(x))
    assert not torch.equal(served(x), before)


def test_weights_made_ready_by_a_thread_with_other_threads_are_the_same() -> None:
    served, new = packed(layers(1)), layers(2)
    x = torch.randn(5, HIDDEN).to(torch.bfloat16)
    usual = torch.get_num_threads()

    def exchange() -> None:
        torch.set_num_threads(2)
        repacking(served)(weights(new))()
        torch.set_num_threads(usual)

    thread = threading.Thread(target=exchange)
    thread.start()
    thread.join()
    assert torch.equal(served(x), packed(new)(x))


def test_what_was_brought_may_change_afterwards() -> None:
    served, new = packed(layers(1)), layers(2)
    brought = weights(new)
    repacking(served)(brought)()
    x = torch.randn(3, HIDDEN).to(torch.bfloat16)
    for value in brought.values():
        value.zero_()
    assert torch.equal(served(x), packed(new)(x))
