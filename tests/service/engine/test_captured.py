"""Captured forwards give the bits of forwards run as they are, whatever was in the buffers before."""

from collections.abc import Iterator
from itertools import product

import pytest
import torch

from drafters.tree import ROOT, DraftTree
from kernels.rows import ExtendRows, ForwardRows
from kernels.sample import Filters
from kernels.tree_attention import NULL_SLOT
from service.engine.captured import CapturedForward, Shape, shapes_for
from service.engine.kv_pool import SlotTable
from service.engine.rows import RowLayout
from service.engine.sampling import EAGER_SAMPLER
from service.engine.target import Target, TargetOutput
from tests.kernels.tensor_program import kernels, record
from tests.service.engine.harness import keys_and_values, tiny_target
from tests.tiny_models import VOCAB_SIZE, WINDOW, loaded_tiny, random_prompts

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

    def __init__(self, family: str, num_places: int | None = None) -> None:
        self.plain, self.captured_target = (
            tiny_target(loaded_tiny(family), 600, tap_layers=(0, 2), num_places=num_places) for _ in range(2)
        )
        self.captured_target.pool.window_of = self.plain.pool.window_of
        self.table = SlotTable(4, CONTEXT + 30, self.plain.device)
        self.slots = self.plain.pool.allocator()
        self.layout = RowLayout(self.slots, self.table)
        for line, prompt in enumerate(random_prompts(4, CONTEXT)):
            rows = self.layout([ExtendRows(line, 0, prompt, completes=False)], DraftTree.empty(1))
            self._forward(self.plain, rows)
            self._forward(self.captured_target, rows)
            if self.slots.windows is not None:
                self.slots.windows.take(self.table.slots[line, : CONTEXT - WINDOW + 1])
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


@pytest.mark.parametrize(("family", "num_places"), [*((family, None) for family in FAMILIES), ("gemma3", 300)])
def test_every_step_has_the_bits_of_one_that_is_not_captured(family: str, num_places: int | None) -> None:
    both = Both(family, num_places)
    steps = [([0], 0), ([1, 2, 3], 5), ([3], 20), ([0, 2], 0), ([0, 1, 2, 3], 14), ([1], 1), ([2, 0], 11)]
    for seed, (lines, nodes) in enumerate(steps):
        plain, captured = both.step(lines, nodes, seed)
        assert captured.sampler is not EAGER_SAMPLER
        assert torch.equal(plain.logits, captured.logits)
        assert plain.features is not None
        assert captured.features is not None
        assert torch.equal(plain.features, captured.features)
        pools = both.plain.pool, both.captured_target.pool
        for one, other in zip(*map(keys_and_values, pools), strict=True):
            assert torch.equal(one[:, :-1], other[:, :-1])


def test_padding_rows_leave_the_null_slot_alone() -> None:
    both = Both("llama")
    both.step([1, 2], 3, seed=0)
    pool = both.captured_target.pool
    assert not any(layer[:, NULL_SLOT].any() for layer in keys_and_values(pool))
    assert all(layer[:, pool.unread_slot].any() for layer in keys_and_values(pool))


def test_a_broken_row_breaks_no_other() -> None:
    both = Both("llama")
    broken = both.table.slots[0, :CONTEXT]
    for target in (both.plain, both.captured_target):
        for layer in keys_and_values(target.pool):
            layer[:, broken] = float("nan")
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
        drawn = seeds, positions, temperatures
        for given in ((), drawn, (*drawn, filters)):
            chosen, expected = (
                by.sample(logits, *given) if given else by.likeliest(logits)
                for by, logits in ((captured.sampler, captured.logits), (EAGER_SAMPLER, plain.logits))
            )
            assert torch.equal(chosen.tokens, expected.tokens)
            assert torch.equal(chosen.bad_rows, expected.bad_rows)


def test_a_broken_row_is_reported_by_a_captured_choice() -> None:
    both = Both("llama")
    for layer in keys_and_values(both.captured_target.pool):
        layer[:, both.table.slots[0, :CONTEXT]] = float("nan")
    _, captured = both.step([0, 1], 0, seed=1)
    assert captured.sampler.likeliest(captured.logits).bad_rows.tolist() == [True, False]
