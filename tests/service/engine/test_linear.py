"""Linear layers of modules as products of their device."""

import torch
from torch import nn

from kernels import ops
from service.engine.modules import PlannedLinear, replace_linears

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
