"""Observed drafters draft the same, and what is written down is what happened."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from benchmarks.draft_records import StepRecord, listen, observed, without_noise
from drafters.protocol import Noise
from drafters.registry import NoDrafter
from drafters.tree import Candidates
from service.assembly import Assembly
from service.bench.driver import Run, generate
from service.bench.experiment import Measure, requests_from
from service.engine.budget import FixedBudget
from service.engine.engine import Engine
from tests.service.bench.parts import varied_prompts

MERGED = "lookup+specblock"
PROMPTS = varied_prompts()[:4]
POLICY = FixedBudget(12)


@pytest.fixture(autouse=True)
def _every_block_is_drafted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether a further block pays is a matter of seconds, which are never the same twice."""
    monkeypatch.setattr("drafters.regret.GainPosterior.promises", True)


def answers(engine: Engine, temperature: float, *, concurrency: int = 4) -> list[Run]:
    measure = Measure(temperature, 24, concurrency, seed=5)
    firsts = range(0, len(PROMPTS), concurrency)
    return [generate(engine, requests_from(PROMPTS, first, measure)) for first in firsts]


def watched(
    assembly: Assembly, name: str, temperature: float, *, coupled: bool = True, concurrency: int = 4
) -> tuple[list[StepRecord], list[Run]]:
    drafter, recorder = observed(assembly, name, assembly.weights, coupled=coupled)
    engine = assembly.engine(drafter=drafter, policy=POLICY)
    runs = answers(engine, temperature, concurrency=concurrency)
    return recorder.take(), runs


def accepted_of(runs: Sequence[Run]) -> list[tuple[int, ...]]:
    return [answer.accepted_per_step for run in runs for answer in run.answers]


@pytest.mark.parametrize("name", ["lookup", "specblock"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_observed_drafter_drafts_the_same(trained_assembly: Assembly, name: str, temperature: float) -> None:
    drafter = trained_assembly.drafter(name)
    vars(drafter)["timed"] = lambda times: None  # as of the observed one: on a loaded machine it would ask for less
    expected = answers(trained_assembly.engine(drafter=drafter, policy=POLICY), temperature)
    _, runs = watched(trained_assembly, name, temperature)
    assert accepted_of(runs) == accepted_of(expected)
    nodes = [[step.stats.drafted_nodes for step in run.steps] for run in runs]
    assert nodes == [[step.stats.drafted_nodes for step in run.steps] for run in expected]
    assert sum(map(sum, nodes)) > 0


@pytest.mark.parametrize("name", [MERGED, "specblock", "lookup"])
def test_records_tell_the_whole_answer(trained_assembly: Assembly, name: str) -> None:
    steps, runs = watched(trained_assembly, name, 0.0, concurrency=1)
    emitted = [token for step in steps for token in step.emitted]
    assert emitted == [token for run in runs for answer in run.answers for token in answer.token_ids]
    assert sum(step.accepted for step in steps) == sum(map(sum, accepted_of(runs)))
    for step in steps:
        assert step.verified <= set(step.candidates)
        for depth in range(1, step.accepted + 1):
            assert step.truth[:depth] in step.verified
        assert step.truth[: step.accepted + 1] not in step.verified


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("coupled", [True, False])
def test_every_node_of_the_trained_drafter_is_found_in_a_forward(
    trained_assembly: Assembly, temperature: float, coupled: bool
) -> None:
    steps, _ = watched(trained_assembly, MERGED, temperature, coupled=coupled)
    asked = [step for step in steps if "specblock" in step.proposals]
    assert len(asked) == len([step for step in steps if step.proposals]) > 20, "one source was passed over"
    for step in asked:
        assert {block.forward for block in step.blocks} == {0, 1, 2}
        assert set(step.proposals["specblock"]) <= {path for block in step.blocks for path in block.paths()}
        before = {(): -1} | {path: block.forward for block in step.blocks for path in block.paths()}
        assert all(before[block.start] >= block.forward - 1 for block in step.blocks)
    late = [
        path
        for step in asked
        for path in step.proposals["specblock"]
        if not any(path in block.paths() for block in step.blocks if block.forward == 0)
    ]
    assert late, "later forwards added nothing"


def test_withholding_noise_changes_what_is_proposed_above_temperature_zero(trained_assembly: Assembly) -> None:
    def proposals(temperature: float, coupled: bool) -> list[object]:
        steps, _ = watched(trained_assembly, "specblock", temperature, coupled=coupled, concurrency=1)
        return [(step.proposals, step.blocks) for step in steps]

    assert proposals(0.0, False) == proposals(0.0, True)
    assert proposals(1.0, False) != proposals(1.0, True)


def test_withheld_noise_is_that_of_temperature_zero() -> None:
    seen: list[Noise] = []

    def heard(answer: Candidates, rows: torch.Tensor, noise: Noise) -> None:
        seen.append(noise)

    noise = Noise(torch.tensor([3]), torch.tensor([0.7]), torch.tensor([9]))
    drafter = NoDrafter()
    listen(drafter, "grow", heard)
    without_noise(drafter).grow(torch.tensor([0]), noise)
    assert seen == [replace(noise, temperatures=seen[0].temperatures)]
    assert seen[0].temperatures.tolist() == [0.0]
