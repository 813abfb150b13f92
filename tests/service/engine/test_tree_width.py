"""Rows for more nodes than there are change no text, and a width follows from the trees of the step before."""

import pytest
import torch

from drafters.protocol import DraftingSizes
from drafters.random_tree import RandomTreeDrafter
from service.engine.budget import FixedBudget
from service.engine.engine import EngineLimits
from service.engine.requests import SamplingParams
from service.engine.tree_width import ExactWidth, FixedWidth, widths_up_to
from tests.kernels.tensor_program import kernels, record
from tests.service.engine.harness import generate, greedy, request, sampled, tiny_engine
from tests.tiny_models import VOCAB_SIZE, random_prompts

torch.set_num_threads(1)

SIZES = EngineLimits(max_model_len=120, max_sequences=4, prefill_chunk=16, max_budget=20)


def test_with_the_root_widths_are_powers_of_two_up_to_the_most_nodes() -> None:
    assert widths_up_to(48) == (7, 15, 31, 48)
    assert widths_up_to(7) == (7,)
    assert widths_up_to(0) == ()


def test_exact_widths_are_the_trees() -> None:
    assert ExactWidth().of(torch.tensor([3, 0, 20]), free=100) == [3, 0, 20]


def test_a_fixed_width_holds_the_widest_tree_of_the_step_before() -> None:
    width = FixedWidth(48)
    asked = torch.tensor([1, 2])  # what is wanted now is not looked at
    assert width.of(asked, free=1000) == [48, 48]
    for wanted, given in ((7, 7), (8, 15), (1, 7), (40, 48), (0, 0), (31, 31)):
        width.learn([0, wanted])
        assert width.of(asked, free=1000) == [given, given]


def test_a_fixed_width_fits_into_the_free_slots() -> None:
    width = FixedWidth(48)
    assert width.of(torch.tensor([1, 2]), free=40) == [15, 15]
    assert width.of(torch.tensor([1, 2]), free=13) == [0, 0]


@pytest.mark.parametrize("params", [greedy(24), sampled(3, 24)], ids=["greedy", "sampled"])
@pytest.mark.parametrize(("nodes", "num_slots"), [(5, 600), (20, 600), (20, 230)])
def test_captured_steps_of_fixed_width_give_the_text_of_plain_ones(
    params: SamplingParams, nodes: int, num_slots: int
) -> None:
    """Prompts are read beside trees, texts come and go, and where slots are scarce some are preempted."""
    asked = [request(str(n), prompt, params) for n, prompt in enumerate(random_prompts(9, 40))]
    expected = generate(tiny_engine(drafter="none", policy=FixedBudget(0), limits=SIZES), *asked)
    with kernels():
        sizes = DraftingSizes(
            max_sequences=SIZES.max_sequences,
            max_length=SIZES.max_model_len,
            max_nodes=SIZES.max_budget,
            vocab_size=VOCAB_SIZE,
        )
        drafter = RandomTreeDrafter(sizes, seed=0, hit_rate=0.5)
        engine = tiny_engine(
            drafter=drafter, policy=FixedBudget(nodes), num_slots=num_slots, limits=SIZES, capture=record
        )
        found = generate(engine, *asked)
    assert {key: one.tokens for key, one in found.items()} == {key: one.tokens for key, one in expected.items()}
    assert sum(one.accepted for one in found.values()) > 0
