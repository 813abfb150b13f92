"""Captured forwards give the bits of forwards run as they are, whatever was in the buffers before."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.checkpoint import DRAFTER, write_dummy
from drafters.asking import AskGate
from drafters.memory.drafter import MemoryDrafter
from drafters.protocol import Drafter, DraftingSizes
from drafters.random_tree import RandomTreeDrafter
from drafters.readback import Readback
from drafters.regret import RegretLedger
from drafters.tree import ROOT, DraftTree
from kernels.rows import ExtendRows, ForwardRows
from kernels.sample import Filters
from kernels.tree_attention import NULL_SLOT
from service.assembly import Assembly, assemble
from service.config import ServiceConfig
from service.engine.budget import CostBudget, FixedBudget
from service.engine.captured import CapturedForward, Shape, shapes_for
from service.engine.costs import FREE, CostTable
from service.engine.engine import Engine
from service.engine.kv_pool import SlotPool, SlotTable
from service.engine.requests import SamplingParams
from service.engine.rows import RowLayout
from service.engine.sampling import EAGER_SAMPLER
from service.engine.target import Target, TargetOutput
from tests.kernels.tensor_program import kernels, record
from tests.service.engine.harness import LIMITS, greedy, request, sampled, tiny_engine, tiny_target
from tests.service.engine.host_reads import HostReads
from tests.service.engine.launches import Launches
from tests.tiny_models import VOCAB_SIZE, loaded_tiny, random_prompts

FAMILIES = ("llama", "qwen3", "gemma2")
CONTEXT = 70
NODES = 20
SHAPES = [Shape(batch, rows, NODES) for batch, rows in product((1, 4), (8, 24, 64))]


@pytest.fixture(autouse=True)
def _kernels() -> Iterator[None]:
    with kernels():
        yield


class Both:
    """The same text on two targets, one of which is captured; both have the same slots."""

    def __init__(self, family: str) -> None:
        self.plain, self.captured_target = (tiny_target(loaded_tiny(family), 600, tap_layers=(0, 2)) for _ in range(2))
        self.table = SlotTable(4, CONTEXT + 30, self.plain.device)
        self.slots = SlotPool(600, self.plain.device)
        self.layout = RowLayout(self.slots, self.table)
        for line, prompt in enumerate(random_prompts(4, CONTEXT)):
            rows = self.layout([ExtendRows(line, 0, prompt, completes=False)], DraftTree.empty(1))
            self._forward(self.plain, rows)
            self._forward(self.captured_target, rows)
        forward = CapturedForward(self.captured_target, record, SHAPES, max_length=CONTEXT + 30)
        self.captured_target.run_by(forward, record)

    def step(self, lines: list[int], nodes: int, seed: int) -> tuple[TargetOutput, TargetOutput]:
        """A root and a random tree for some lines, on both."""
        roots = [ExtendRows(line, CONTEXT, [line + seed], completes=True) for line in lines]
        rows = self.layout(roots, random_trees(len(lines), nodes, seed))
        results = self._forward(self.plain, rows), self._forward(self.captured_target, rows)
        self.slots.free(rows.slots)
        return results

    def _forward(self, target: Target, rows: ForwardRows) -> TargetOutput:
        return target.forward(rows, self.table)


def random_trees(batch: int, nodes: int, seed: int) -> DraftTree:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(VOCAB_SIZE, (batch, nodes), generator=generator)
    earlier = torch.arange(nodes).clamp(max=6) + 1
    return DraftTree.of(tokens, (torch.rand(batch, nodes, generator=generator) * earlier).long() + ROOT)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_step_has_the_bits_of_one_that_is_not_captured(family: str) -> None:
    both = Both(family)
    steps = [([0], 0), ([1, 2, 3], 5), ([3], 20), ([0, 2], 0), ([0, 1, 2, 3], 14), ([1], 1), ([2, 0], 11)]
    for seed, (lines, nodes) in enumerate(steps):
        plain, captured = both.step(lines, nodes, seed)
        assert captured.sampler is not EAGER_SAMPLER
        assert torch.equal(plain.logits, captured.logits)
        assert plain.features is not None
        assert captured.features is not None
        assert torch.equal(plain.features, captured.features)
        slots = slice(both.plain.pool.num_slots)
        assert torch.equal(both.plain.pool.storage[:, :, slots], both.captured_target.pool.storage[:, :, slots])


def test_padding_rows_leave_the_null_slot_alone() -> None:
    both = Both("llama")
    both.step([1, 2], 3, seed=0)
    assert not both.captured_target.pool.storage[:, :, NULL_SLOT].any()
    assert both.captured_target.pool.storage[:, :, both.captured_target.pool.unread_slot].any()


def test_a_broken_row_breaks_nobody_else() -> None:
    both = Both("llama")
    broken = both.table.slots[0, :CONTEXT]
    for target in (both.plain, both.captured_target):
        target.pool.storage[:, :, broken] = float("nan")
    plain, captured = both.step([0, 1], 3, seed=1)
    assert captured.logits[0].isnan().all()
    of_line_1 = torch.tensor([1, 5, 6, 7])
    assert captured.logits[of_line_1].isfinite().all()
    assert torch.equal(plain.logits[of_line_1], captured.logits[of_line_1])


def test_what_fits_no_shape_runs_as_it_is() -> None:
    both = Both("llama")
    plain, captured = both.step([0, 1, 2, 3], 18, seed=2)
    assert captured.sampler is EAGER_SAMPLER
    assert torch.equal(plain.logits, captured.logits)
    both.table.slots = torch.cat([both.table.slots, both.table.slots[:, :1] * 0], 1)  # longer than what was captured
    plain, captured = both.step([0], 1, seed=3)
    assert torch.equal(plain.logits, captured.logits)


def test_shapes_hold_all_sequences_with_all_of_their_nodes() -> None:
    shapes = shapes_for(6, 3)
    assert {shape.sequences for shape in shapes} == {1, 2, 4, 6}
    assert [shape.rows for shape in shapes if shape.sequences == 1] == [1, 2, 4]
    assert [shape.rows for shape in shapes if shape.sequences == 6] == [8, 16, 24]
    assert {shape.nodes for shape in shapes} == {3}


@pytest.mark.parametrize("lines", [[0], [1, 3, 2]])
def test_captured_choices_are_those_that_are_asked_for(lines: list[int]) -> None:
    both = Both("llama")
    for seed in range(3):
        plain, captured = both.step(lines, 5, seed)
        rows = captured.logits.shape[0]
        seeds, positions = torch.arange(rows) + seed, torch.arange(rows) % 4
        temperatures = torch.tensor([0.0, 0.7, 1.3])[torch.arange(rows) % 3]
        shares = torch.tensor([0.9, 0.5], dtype=torch.float64)[torch.arange(rows) % 2]
        filters = Filters(torch.full((rows,), -2.0), torch.arange(rows) % 4, shares)
        for chosen, expected in (
            (captured.sampler.likeliest(captured.logits), EAGER_SAMPLER.likeliest(plain.logits)),
            (
                captured.sampler.sample(captured.logits, seeds, positions, temperatures),
                EAGER_SAMPLER.sample(plain.logits, seeds, positions, temperatures),
            ),
            (
                captured.sampler.sample(captured.logits, seeds, positions, temperatures, filters),
                EAGER_SAMPLER.sample(plain.logits, seeds, positions, temperatures, filters),
            ),
        ):
            assert torch.equal(chosen.tokens, expected.tokens)
            assert torch.equal(chosen.bad_rows, expected.bad_rows)


def test_a_broken_row_is_told_by_a_captured_choice() -> None:
    both = Both("llama")
    both.captured_target.pool.storage[:, :, both.table.slots[0, :CONTEXT]] = float("nan")
    _, captured = both.step([0, 1], 0, seed=1)
    assert captured.sampler.likeliest(captured.logits).bad_rows.tolist() == [True, False]


# How often a captured step of the engine asks a device for something, and waits for it: the figures of docs/gpu.md.


LAUNCHES = {
    "none": (5, 3),
    "memory": (13, 8),
    "switch(memory,random)": (27, 8),
    "specblock": (18, 10),
    "memory+specblock": (25, 13),
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
    engine.add(request("0", [5, 6, 7, 8] * 10, greedy(210)))
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


def always(gate: AskGate, expected: float, *, can_answer: bool = True) -> bool:
    """Asks, whatever that has gained."""
    gate._step.situation = 0, False
    gate._step.asked.append((gate._gains.of(1, gate._step.situation), expected))
    return True


@pytest.mark.parametrize("drafter", LAUNCHES)
def test_what_a_step_asks_for(drafter: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one text, with all that a drafter may be asked for."""
    launches = Launches()
    launches.stand_for_a_device(monkeypatch)
    monkeypatch.setattr(AskGate, "ask", always)
    engine = captured(tmp_path, drafter).engine(policy=FixedBudget(0) if drafter == "none" else None)
    assert step_in_the_middle(engine, launches) == ([TOKENS], 0)
    assert (launches.count, launches.replays) == LAUNCHES[drafter]


# How often a step waits for the device: once for its tokens, and once more for the size of its trees.


TOKENS = "service.engine.emit:read_result tolist"
TREE_SIZES = "service.engine.tree_pruning:node_rows tolist"
ON_THE_HOST = (
    "kernels.cpu.",
    "kernels.tree_attention:",
    "kernels.joint_tree:",
    "kernels.memory:",
    "kernels.sample:",
    "drafters.readback:",
    "kernels.staging:",
)
"""Kernels of a CPU and references read there, as those of a device do not; what has come a step late; what is sent from
pinned memory."""


def waits_of_a_step(engine: Engine, params: SamplingParams) -> tuple[list[str], list[str]]:
    """Reads and uploads of a step in the middle of three answers."""
    for number, prompt in enumerate(random_prompts(3, 30)):
        engine.add(request(str(number), prompt, params))
    for _ in range(5):
        engine.step()
    with HostReads() as reads:
        stats = engine.step().stats
    assert stats is not None
    assert stats.emitted_tokens >= 3
    return tuple(  # type: ignore[return-value]
        [wait for wait in waits if not wait.startswith(ON_THE_HOST)] for waits in (reads.seen, reads.uploads)
    )


def reads_of_a_step(engine: Engine, params: SamplingParams) -> list[str]:
    return waits_of_a_step(engine, params)[0]


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
    monkeypatch.setattr(budget, "refusal", lambda load: None)
    drafter = two_drafters() if num_drafters == 2 else "random"
    assert reads_of_a_step(tiny_engine(drafter=drafter, policy=budget), greedy()) == [TREE_SIZES, TOKENS]


@pytest.mark.parametrize("drafter", ["none", "random", "memory", "switch(memory,random)"])
def test_a_step_uploads_nothing(drafter: str) -> None:
    engine = tiny_engine(drafter=drafter, policy=FixedBudget(0 if drafter == "none" else 5))
    assert waits_of_a_step(engine, greedy())[1] == []


def test_reads_are_seen() -> None:
    values = torch.arange(3)
    with HostReads() as reads:
        _ = values[values > 1], int(values[0]), values.tolist(), values.nonzero(), bool(values[1])
        _ = values.masked_select(values > 1), torch.equal(values, values), values[:1] if values[1] else values
    kinds = ["mask", "int", "tolist", "nonzero", "bool", "mask", "equal", "bool"]
    assert [read.split()[-1] for read in reads.seen] == kinds
    assert not reads.uploads
