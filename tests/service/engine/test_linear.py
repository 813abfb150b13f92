"""Linear layers of modules as products of their device, and how other weights reach them."""

import copy
import threading

import pytest
import torch
from torch import Tensor, nn

from kernels import ops
from service.engine.linear import PlannedLinear, replace_linears, replanning

torch.set_num_threads(1)
CPU_OPS = ops.on(torch.device("cpu"))


def test_a_tied_embedding_keeps_its_weight() -> None:
    model = nn.ModuleDict({"embedding": nn.Embedding(16, 8), "head": nn.Linear(8, 16, bias=False)})
    table = model["head"].weight = model["embedding"].weight
    x = torch.randn(3, 8)
    before = model["head"](x)
    assert replace_linears(model, CPU_OPS) == 1
    assert model["embedding"].weight is table
    assert isinstance(model["head"], PlannedLinear)
    torch.testing.assert_close(model["head"](x), before)


def test_a_subclass_of_linear_is_left_alone() -> None:
    class Special(nn.Linear):
        pass

    assert replace_linears(nn.Sequential(Special(8, 8)), CPU_OPS) == 0


HIDDEN = 96


class Layers(nn.Module):
    """Every kind of layer that is replaced, or not, with and without bias."""

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


def weights_by_name(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.named_parameters()}


def replanned(model: Layers) -> Layers:
    loaded = copy.deepcopy(model)
    assert replace_linears(loaded, CPU_OPS) == 5
    return loaded


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [1, 4, 33])
def test_products_are_those_of_a_fresh_load(bias: bool, rows: int) -> None:
    served, new = replanned(layers(1, bias)), layers(2, bias)
    x = torch.randn(rows, HIDDEN).to(torch.bfloat16)
    before = served(x)
    write = replanning(served)(weights_by_name(new))
    assert torch.equal(served(x), before)
    write()
    assert torch.equal(served(x), replanned(new)(x))
    assert not torch.equal(served(x), before)


def test_weights_made_ready_by_a_thread_with_other_threads_are_the_same() -> None:
    served, new = replanned(layers(1)), layers(2)
    x = torch.randn(5, HIDDEN).to(torch.bfloat16)
    usual = torch.get_num_threads()

    def exchange() -> None:
        torch.set_num_threads(2)
        replanning(served)(weights_by_name(new))()
        torch.set_num_threads(usual)

    thread = threading.Thread(target=exchange)
    thread.start()
    thread.join()
    assert torch.equal(served(x), replanned(new)(x))


def test_what_was_brought_may_change_afterwards() -> None:
    served, new = replanned(layers(1)), layers(2)
    brought = weights_by_name(new)
    replanning(served)(brought)()
    x = torch.randn(3, HIDDEN).to(torch.bfloat16)
    for value in brought.values():
        value.zero_()
    assert torch.equal(served(x), replanned(new)(x))
