"""What drafting costs: measured by batch and blocks on a drafter of its own, then followed while serving."""

import numpy as np
import pytest
import torch

from drafters.lookup.drafter import LookupDrafter
from drafters.protocol import Drafter
from service.engine.draft_cost import FREE, DraftCosts, OnlineDraftCosts, measure_drafts

COSTS = DraftCosts(blocks=np.array([1.0]), batches=np.array([1.0, 5.0]), seconds=np.array([[0.1, 0.3]]))


def test_seconds_between_the_measured_batches() -> None:
    assert [COSTS.draft_seconds(batch) for batch in (1, 3, 5, 50)] == [pytest.approx(s) for s in (0.1, 0.2, 0.3, 0.3)]


def test_what_drafting_takes_now_is_followed_by_size_of_batch() -> None:
    online = OnlineDraftCosts(COSTS)
    for _ in range(100):
        online.learn(1, 0.2)
    assert online.draft_seconds(1) == pytest.approx(0.2, rel=0.01)
    assert online.draft_seconds(5) == pytest.approx(0.3)


def test_a_hiccup_is_not_the_price_of_drafting() -> None:
    online = OnlineDraftCosts(COSTS)
    assert online.learn(1, 50.0) == pytest.approx(0.4)
    assert online.draft_seconds(1) < 0.14


def test_a_drafter_that_was_not_measured_costs_what_it_first_took() -> None:
    online = OnlineDraftCosts(FREE)
    assert online.draft_seconds(1) == 0.0
    assert online.learn(1, 0.2) == 0.2
    assert online.draft_seconds(1) == 0.2


def test_measuring_asks_fresh_drafters_for_every_batch() -> None:
    made: list[int] = []

    def make(blocks: int) -> Drafter:
        made.append(blocks)
        return LookupDrafter(max_sequences=4, max_length=128, max_nodes=8, device="cpu")

    costs = measure_drafts(
        make,
        blocks=(1, 2),
        batches=(1, 4),
        vocab_size=100,
        hidden_size=8,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    assert made == [1, 2]
    assert costs.seconds.shape == (2, 2)
    assert (costs.seconds > 0).all()
    assert (np.diff(costs.seconds, axis=0) >= 0).all()
    assert (np.diff(costs.seconds, axis=1) >= 0).all()
