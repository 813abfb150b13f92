"""The start-up check of numerics confirms what is exact and notices what is not; its forwards are the engine's."""

from typing import Any

import pytest
import torch
from torch import Tensor

from kernels import ops
from kernels.linear import Product
from kernels.tree_attention import Attention
from service.engine.numerics import check
from tests.service.engine.harness import tiny_target
from tests.tiny_models import FAMILIES, loaded_tiny

torch.set_num_threads(1)


@pytest.mark.parametrize("family", FAMILIES)
def test_tiny_models_are_exact(family: str) -> None:
    target = tiny_target(loaded_tiny(family))
    assert check(target) == "exact"


def test_attention_that_depends_on_company_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Company:
        """Attention whose last bits depend on how many rows are in the forward."""

        def __init__(self, plan: Attention) -> None:
            self._plan = plan

        def attend(self, query: Tensor, pool: Tensor, **how: Any) -> Tensor:
            return self._plan.attend(query, pool, **how) * (1 + 1e-6 * (query.shape[0] % 5))

    table = ops.on(torch.device("cpu"))
    true_plan = table.plan_attention
    monkeypatch.setattr(table, "plan_attention", lambda *args, **sizes: Company(true_plan(*args, **sizes)))
    monkeypatch.setattr(table, "plan_layers", ops.REFERENCE.plan_layers)  # which asks any attention
    assert check(tiny_target(loaded_tiny("llama"))) == "tolerant"


def test_products_that_depend_on_the_number_of_rows_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    table = ops.on(torch.device("cpu"))
    true_plan = table.plan_linear

    def plan(weight: Tensor, bias: Tensor | None) -> Product:
        product = true_plan(weight, bias)
        return lambda x: product(x) * (1.0 if x.shape[0] % 8 else 1 + 1e-6)

    monkeypatch.setattr(table, "plan_linear", plan)
    assert check(tiny_target(loaded_tiny("llama"))) == "tolerant"


def test_references_alone_are_not_called_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing is compiled: libraries sum in other orders for other numbers of rows."""
    monkeypatch.setattr(ops, "_table", lambda device_type: ops.REFERENCE)
    assert check(tiny_target(loaded_tiny("llama"))) == "tolerant"
