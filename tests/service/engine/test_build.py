"""Building an engine and measuring its costs, also where memory holds one short sequence and no more."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from drafters.registry import NoDrafter
from drafters.regret import RegretLedger
from service.engine import build
from service.engine.budget import CostBudget, FixedBudget
from service.engine.costs import FREE, Costs
from service.engine.engine import Engine, EngineLimits
from service.engine.measuring import measure_costs
from service.engine.numerics import check
from tests.service.engine.harness import LIMITS, alone, greedy, tiny_target, vocabulary_of
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


@pytest.mark.parametrize("name", ["memory", "switch(memory,random)", "none", "random"])
def test_drafters_go_by_name(name: str) -> None:
    assert build.make_drafter(name, tiny_target(loaded_tiny("llama"), 10), LIMITS).name == name


def test_scarce_slots_can_be_asked_for() -> None:
    loaded = loaded_tiny("llama")
    target = tiny_target(loaded)
    limits = EngineLimits(max_model_len=60, max_sequences=2, prefill_chunk=64, max_budget=8, num_slots=130)
    engine = Engine(target, limits, vocabulary_of(loaded), NoDrafter(), FixedBudget(8))
    assert engine.slots.capacity == 129
    assert len(alone(greedy(5), [1, 2, 3], engine).tokens) == 5
