"""Building an engine and measuring its costs, also where memory holds one short sequence and no more."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from drafters.regret import RegretLedger
from service.engine import build
from service.engine.budget import CostBudget, FixedBudget
from service.engine.costs import FREE, Costs
from service.engine.measuring import measure_costs
from service.engine.numerics import check
from tests.service.engine.harness import LIMITS, tiny_target
from tests.tiny_models import loaded_tiny

torch.set_num_threads(1)


@pytest.mark.parametrize(("max_model_len", "num_slots"), [(16, 81), (64, 129), (300, 365), (1024, 1089), (1024, 5000)])
def test_costs_are_measured_within_any_pool(max_model_len: int, num_slots: int) -> None:
    target = tiny_target(loaded_tiny("llama"), num_slots)
    assert check(target) == "exact"
    costs = measure_costs(target, replace(LIMITS, max_model_len=max_model_len))
    assert (costs.contexts < max_model_len).all()
    for context in (1, 100, 5000):
        seconds = costs.verify_seconds(np.arange(1.0, 100.0), context)
        assert np.isfinite(seconds).all()
        assert (seconds > 0).all()


def test_without_costs_the_budget_is_fixed() -> None:
    assert isinstance(build.make_policy(None, LIMITS, RegretLedger()), FixedBudget)
    table = measure_costs(tiny_target(loaded_tiny("llama"), 400), LIMITS)
    assert isinstance(build.make_policy(Costs(table, FREE), LIMITS, RegretLedger()), CostBudget)
