"""Five bugs put back on purpose, each at the narrowest place: the lossless check must see every one of them.

A check that cannot fail proves nothing, so each bug also shows that the same cases pass without it.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels import ops
from kernels.sample import ChosenTokens
from kernels.settle import Verified
from service.assembly import Assembly
from service.bench.lossless import Case, Extras, LosslessResult, Way, check
from service.engine import emit as emit_module
from service.engine import sampling
from service.engine.kv_pool import SlotPool
from service.engine.sampling import Sampler, SamplingState, SamplingTable, Transform
from service.engine.sequence import Finish
from service.engine.sequence import Sequence as Running
from tests.service.bench.parts import assembled, save_two_layers, varied_prompts

Patch = Callable[[pytest.MonkeyPatch], None]

TREES = Way("random", 16)


@pytest.fixture(scope="module")
def assembly(tmp_path_factory: pytest.TempPathFactory) -> Assembly:
    return assembled(save_two_layers(tmp_path_factory.mktemp("two-layers")))


def compare(assembly: Assembly, extras: Extras, *, seed: int = 0) -> LosslessResult:
    """A few cases with trees that are accepted in part."""
    cases = [Case(temperature, extras, TREES, "among 15", 64) for temperature in (1.0, 0.0)]
    return check(assembly, varied_prompts(), num_tokens=600, seed=seed, answer_tokens=32, cases=cases)


@pytest.mark.parametrize("extras", ["none", "penalties", "stop"])
def test_without_a_bug_the_same_cases_pass(assembly: Assembly, extras: Extras) -> None:
    assert compare(assembly, extras).holds


def keep_a_rejected_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last accepted position of a sequence keeps the slot of a rejected node, and its own is freed instead."""
    on_cpu = ops.on(torch.device("cpu"))
    true_settle = on_cpu.settle

    def settle(table: Tensor, *step: Any) -> Verified:
        verified = true_settle(table, *step)
        accepted, freed = verified.num_accepted, verified.freed
        if freed.any() and accepted.any():
            victim = int(accepted.argmax())
            place = (verified.table_rows[victim], verified.roots[victim] + accepted[victim])
            right, wrong = table[place].clone(), freed[0].clone()
            table[place], freed[0] = wrong, right
        return verified

    monkeypatch.setattr(on_cpu, "settle", settle)


def share_noise_within_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every node of a tree draws with the noise of the position after the root."""
    true_choose = SamplingTable.choose

    def choose(
        self: SamplingTable, scores: Tensor, sequence_idx: Tensor, positions: Tensor, sampler: Sampler
    ) -> ChosenTokens:
        nowhere = positions.new_full((int(sequence_idx.max()) + 1,), torch.iinfo(positions.dtype).max)
        roots = nowhere.scatter_reduce(0, sequence_idx, positions, "amin")
        return true_choose(self, scores, sequence_idx, roots[sequence_idx], sampler)

    monkeypatch.setattr(SamplingTable, "choose", choose)


def skip_penalties_in_the_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafted tokens on the path are not counted."""
    true_build = sampling._penalties

    def build(states: Sequence[SamplingState]) -> Transform:
        penalise = true_build(states)
        return lambda scores, rows: penalise(scores, replace(rows, path_tokens=torch.full_like(rows.path_tokens, -1)))

    monkeypatch.setattr(sampling, "_penalties", build)


def look_for_stops_at_the_end_of_a_step_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a step emits before its last token is taken unseen."""
    true_absorb = emit_module.absorb

    def absorb(sequence: Running, tokens: Sequence[int], eos_ids: frozenset[int]) -> tuple[list[int], Finish | None]:
        sequence.tokens.extend(tokens[:-1])
        kept, finish = true_absorb(sequence, tokens[-1:], eos_ids)
        return [*tokens[:-1], *kept], finish

    monkeypatch.setattr(emit_module, "absorb", absorb)


@pytest.mark.parametrize(
    ("bug", "extras"),
    [
        (keep_a_rejected_slot, "none"),
        (share_noise_within_a_step, "none"),
        (skip_penalties_in_the_tree, "penalties"),
        (look_for_stops_at_the_end_of_a_step_only, "stop"),
    ],
)
def test_a_bug_is_caught(assembly: Assembly, monkeypatch: pytest.MonkeyPatch, bug: Patch, extras: Extras) -> None:
    bug(monkeypatch)
    result = compare(assembly, extras)
    print(f"{bug.__name__}: {result.total.mismatched_tokens} of {result.total.tokens_compared} tokens mismatched")
    assert result.total.mismatched_tokens > 0
    assert not result.holds


def test_a_slot_that_is_never_freed_is_caught(assembly: Assembly, monkeypatch: pytest.MonkeyPatch) -> None:
    true_free = SlotPool.free

    def free_all_but_one(self: SlotPool, slots: Tensor, *, placed: bool = True) -> None:
        true_free(self, slots[1:], placed=placed)

    monkeypatch.setattr(SlotPool, "free", free_all_but_one)
    with pytest.raises(AssertionError, match="slots are lost"):
        compare(assembly, "none")
