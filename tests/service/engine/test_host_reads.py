"""How often a step waits for the device: once for its tokens, and once more for the size of its trees."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.checkpoint import DRAFTER, write_dummy
from drafters.asking import AskGate
from drafters.decision import RegretLedger
from drafters.memory.drafter import MemoryDrafter
from drafters.protocol import Drafter, DraftingSizes
from drafters.readback import Readback
from service.assembly import Assembly, assemble
from service.config import ServiceConfig
from service.engine.budget import CostBudget, FixedBudget
from service.engine.costs import FREE, CostTable
from service.engine.engine import Engine
from service.engine.requests import SamplingParams
from tests.random_tree import RandomTreeDrafter
from tests.service.engine.harness import LIMITS, always_ask, ask, greedy, request, sampled, tiny_engine
from tests.service.engine.host_reads import HostReads
from tests.service.engine.launches import Launches
from tests.tiny_models import VOCAB_SIZE, random_prompts

TOKENS = "service.engine.emit:read_result tolist"
TREE_SIZES = "service.engine.tree_pruning:node_rows tolist"
ON_THE_HOST = (
    "kernels.cpu.",
    "kernels.tree_attention:",
    "kernels.joint_tree:",
    "kernels.memory:",
    "kernels.sample:",
    "drafters.readback:",
    "kernels.graph_runner:_sent",
)
"""Kernels of a CPU and references read there, as those of a device do not; what has come a step late; what is sent from
pinned memory."""


def reads_of_a_step(engine: Engine, params: SamplingParams) -> list[str]:
    """Reads of a step in the middle of three answers."""
    for number, prompt in enumerate(random_prompts(3, 30)):
        ask(engine, request(str(number), prompt, params))
    for _ in range(5):
        engine.step()
    with HostReads() as reads:
        stats = engine.step().stats
    assert stats is not None
    assert stats.emitted_tokens >= 3
    return [read for read in reads.seen if not read.startswith(ON_THE_HOST)]


EVERYTHING = replace(
    sampled(3), top_p=0.8, top_k=20, min_p=0.01, min_tokens=9, frequency_penalty=0.3, logit_bias=((5, -3.0),)
)


@pytest.mark.parametrize("params", [greedy(), sampled(3), EVERYTHING], ids=["greedy", "sampled", "everything"])
def test_a_plain_step_waits_once(params: SamplingParams) -> None:
    engine = tiny_engine(drafter="none", policy=FixedBudget(0))
    assert reads_of_a_step(engine, params) == [TOKENS]


def test_a_step_with_trees_waits_for_their_sizes_too() -> None:
    reads = reads_of_a_step(tiny_engine(drafter="random", policy=FixedBudget(5)), greedy())
    assert reads == [TREE_SIZES, TOKENS]


def two_drafters() -> Drafter:
    sizes = DraftingSizes(
        max_sequences=LIMITS.max_sequences, max_length=LIMITS.max_model_len, max_nodes=8, vocab_size=VOCAB_SIZE
    )
    return MemoryDrafter(sizes, RandomTreeDrafter(sizes, seed=0, hit_rate=0.5))


@pytest.mark.parametrize("num_drafters", [1, 2])
def test_a_budget_by_cost_and_two_drafters_wait_for_nothing_more(
    num_drafters: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("drafters.readback.readback_of", lambda device: Readback(late=True))
    free = CostTable(sequences=np.ones(1), contexts=np.ones(1), rows=np.array([1.0, 99.0]), seconds=np.ones((1, 1, 2)))
    budget = CostBudget(free, FREE, RegretLedger())
    monkeypatch.setattr(budget.gate, "needs_plain_step", lambda *given: False)
    drafter = two_drafters() if num_drafters == 2 else "random"
    assert reads_of_a_step(tiny_engine(drafter=drafter, policy=budget), greedy()) == [TREE_SIZES, TOKENS]


def test_reads_are_seen() -> None:
    values = torch.arange(3)
    with HostReads() as reads:
        _ = values[values > 1], int(values[0]), values.tolist(), values.nonzero(), bool(values[1])
        _ = values.masked_select(values > 1), torch.equal(values, values), values[:1] if values[1] else values
    kinds = ["mask", "int", "tolist", "nonzero", "bool", "mask", "equal", "bool"]
    assert [read.split()[-1] for read in reads.seen] == kinds
    assert not reads.uploads


# How often a captured step of the engine asks a device for something, and waits for it: the figures of docs/gpu.md.

LAUNCHES = {
    "none": (5, 3),
    "memory": (13, 8),
    "specblock": (18, 10),
    "memory+specblock": (22, 13),
}
"""By drafter, outside of graphs, and graphs replayed; the default one is the last. The memory alone is right here to
the last node: otherwise slots are freed by one more."""


def captured(folder: Path, drafter: str) -> Assembly:
    model = write_dummy("tiny", folder / "tiny")
    settings = {"model": str(model), "drafter_path": model / DRAFTER, "load_dtype": "float32", "device": "cpu"}
    sizes = {"max_model_len": 256, "max_sequences": 1, "kv_cache": "10MiB", "max_budget": 16, "draft_blocks": 2}
    more = {"drafter": drafter, "budget_policy": "fixed", "threads": 1, "state_dir": folder}
    return assemble(ServiceConfig.model_validate({**settings, **sizes, **more}), graphs=True)


def step_in_the_middle(engine: Engine, launches: Launches) -> tuple[list[str], int]:
    """One step of a text, counted. # -> its reads, number of uploads"""
    ask(engine, request("0", [5, 6, 7, 8] * 10, greedy(210)))
    for _ in range(9):  # by then shapes are settled: what stands behind a text in one is filled up once
        engine.step()
    launches.count = launches.replays = 0
    with HostReads() as reads, launches:
        stats = engine.step().stats
    assert stats is not None
    assert not stats.prompt_tokens
    seen, uploads = (
        [wait for wait in waits if not wait.startswith(ON_THE_HOST)] for waits in (reads.seen, reads.uploads)
    )
    return seen, len(uploads)


@pytest.mark.parametrize("drafter", LAUNCHES)
def test_what_a_step_asks_for(drafter: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one text, with all that a drafter may be asked for."""
    launches = Launches()
    launches.stand_for_a_device(monkeypatch)
    monkeypatch.setattr(AskGate, "ask", always_ask)
    engine = captured(tmp_path, drafter).engine(policy=FixedBudget(0) if drafter == "none" else None)
    assert step_in_the_middle(engine, launches) == ([TOKENS], 0)
    assert (launches.count, launches.replays) == LAUNCHES[drafter]
