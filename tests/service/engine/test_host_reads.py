"""How often a step waits for the device: once for its tokens, and once more for the size of its trees."""

import pytest
import torch

from service.engine.budget import FixedBudget
from service.engine.engine import Engine
from service.engine.sequence import SamplingParams
from tests.service.engine.harness import greedy, request, sampled, tiny_engine
from tests.service.engine.host_reads import HostReads
from tests.tiny_models import random_prompts

torch.set_num_threads(1)

TOKENS = "service.engine.emit:of tolist"
TREE_SIZES = "service.engine.drafting:build tolist"
ON_THE_HOST = ("kernels.tree_attention:", "kernels.sample:", "drafters.late:")
"""References that read there, as the kernels that stand for them on a device do not; what has come a step late."""


def reads_of_a_step(engine: Engine, params: SamplingParams) -> list[str]:
    """Reads of a step in the middle of three answers."""
    for number, prompt in enumerate(random_prompts(3, 30)):
        engine.add(request(str(number), prompt, params))
    for _ in range(5):
        engine.step()
    with HostReads() as reads:
        stats = engine.step().stats
    assert stats is not None
    assert stats.emitted_tokens >= 3
    return [read for read in reads.seen if not read.startswith(ON_THE_HOST)]


@pytest.mark.parametrize("params", [greedy(), sampled(3)], ids=["greedy", "sampled"])
def test_a_plain_step_waits_once(params: SamplingParams) -> None:
    engine = tiny_engine(drafter="none", policy=FixedBudget(0))
    assert reads_of_a_step(engine, params) == [TOKENS]


def test_a_step_with_trees_waits_for_their_sizes_too() -> None:
    reads = reads_of_a_step(tiny_engine(drafter="random", policy=FixedBudget(5)), greedy())
    assert reads == [TREE_SIZES, TOKENS]


def test_reads_are_seen() -> None:
    values = torch.arange(3)
    with HostReads() as reads:
        _ = values[values > 1], int(values[0]), values.tolist(), values.nonzero(), bool(values[1])
    assert [read.split()[-1] for read in reads.seen] == ["mask", "int", "tolist", "nonzero", "bool"]
