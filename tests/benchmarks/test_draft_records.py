"""A recorded drafter drafts the same, and records say what happened."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.draft_records import Recorder, SteeredDrafter, StepRecord, observed, total_variation
from service.assembly import Assembly
from service.bench.driver import Run, generate
from service.bench.experiment import Measure, requests_from
from service.engine.budget import FixedBudget
from tests.service.bench.parts import varied_prompts

JOINT = "memory+specblock"
PROMPTS = varied_prompts()[:4]


@pytest.fixture(autouse=True)
def _every_block_is_drafted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether another block pays depends on seconds, which differ between runs."""
    monkeypatch.setattr("drafters.decision.GainPosterior.may_gain", True)


def answers(assembly: Assembly, drafter: SteeredDrafter, temperature: float, concurrency: int = 4) -> list[Run]:
    engine = assembly.engine(drafter=drafter.as_drafter(), policy=FixedBudget(12))
    measure = Measure(temperature, 24, concurrency, seed=5)
    return [generate(engine, requests_from(PROMPTS, first, measure)) for first in range(0, len(PROMPTS), concurrency)]


def recorded(
    assembly: Assembly, name: str, temperature: float, *, hides_noise: bool = False
) -> tuple[list[StepRecord], list[Run]]:
    recorder = observed(replace(assembly, drafter_name=name))
    recorder.hides_noise = hides_noise
    runs = answers(assembly, recorder, temperature, concurrency=1)
    return recorder.take(), runs


def accepted_of(runs: Sequence[Run]) -> list[tuple[int, ...]]:
    return [answer.accepted_per_step for run in runs for answer in run.answers]


@pytest.mark.parametrize("name", ["memory", "specblock"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_recorded_drafter_drafts_the_same(trained_assembly: Assembly, name: str, temperature: float) -> None:
    steady = SteeredDrafter(trained_assembly.drafter(name))
    steady.hides_times = True  # on a loaded machine it would draft less
    expected = answers(trained_assembly, steady, temperature)
    runs = answers(trained_assembly, observed(replace(trained_assembly, drafter_name=name)), temperature)
    assert accepted_of(runs) == accepted_of(expected)
    nodes = [[step.stats.drafted_nodes for step in run.steps] for run in runs]
    assert nodes == [[step.stats.drafted_nodes for step in run.steps] for run in expected]
    assert sum(map(sum, nodes)) > 0


@pytest.mark.parametrize("name", [JOINT, "specblock", "memory"])
def test_records_hold_the_whole_answer(trained_assembly: Assembly, name: str) -> None:
    steps, runs = recorded(trained_assembly, name, 0.0)
    emitted = [token for step in steps for token in step.truth[: step.accepted + 1]]
    assert emitted == [token for run in runs for answer in run.answers for token in answer.token_ids]
    assert sum(step.accepted for step in steps) == sum(map(sum, accepted_of(runs)))
    for step in steps:
        assert set(step.verified) <= set(step.candidates)
        for depth in range(1, step.accepted + 1):
            assert step.truth[:depth] in step.verified
        assert step.truth[: step.accepted + 1] not in step.verified


def test_distances_are_those_of_separate_forwards(trained_assembly: Assembly) -> None:
    """The distribution at each step's root, against forwards of the target's modules."""
    assembly, heard = replace(trained_assembly, drafter_name="specblock"), list[torch.Tensor]()
    steps, runs = recorded(assembly, "specblock", 0.0)
    drafter = assembly.drafter(observer=lambda lattice, logits, ids: heard.append(logits[0, 0, 0].clone()))
    answers(assembly, Recorder(lambda observer: drafter), 0.0, concurrency=1)
    drafted = heard[::3]  # the first of three forwards
    model = AutoModelForCausalLM.from_pretrained(assembly.config.model, dtype=torch.float32).eval()
    checked = 0
    for prompt, run in zip(PROMPTS, runs, strict=True):
        answer = run.answers[0]
        with torch.inference_mode():
            logits = model(torch.tensor([[*prompt, *answer.token_ids]])).logits[0]
        at, end = len(prompt) - 1, len(logits) - 1
        while at < end:
            step = steps.pop(0)
            own = [found for found in step.distributions if found.node == ()]
            assert bool(own) == (at >= len(prompt)), "nothing is drafted before the first token"
            if own:
                target, mine = logits[at].softmax(0), torch.zeros(logits.shape[1])
                mine[: len(drafted[0])] = drafted[0].softmax(0)  # draft ids are target ids here
                drafted = drafted[1:]
                assert own[0].distance == pytest.approx(0.5 * float((target - mine).abs().sum()), abs=1e-4)
                assert list(own[0].tokens) == mine.topk(10).indices.tolist()
                checked += 1
            at += step.accepted + 1
    assert checked > 20
    assert (drafted, steps) == ([], [])


def test_total_variation_is_half_of_all_differences() -> None:
    target, drafter = torch.tensor([0.5, 0.3, 0.2, 0.0]).log(), torch.tensor([0.6, 0.4]).log()
    ids = torch.tensor([2, 0])  # the drafter gives token 2 a probability of 0.6, and token 0 one of 0.4
    assert total_variation(target, drafter, ids) == pytest.approx((0.1 + 0.3 + 0.4) / 2)


def test_hidden_noise_changes_drafts_above_temperature_zero_only(trained_assembly: Assembly) -> None:
    def proposals(temperature: float, *, hides_noise: bool) -> list[object]:
        steps, _ = recorded(trained_assembly, "specblock", temperature, hides_noise=hides_noise)
        return [(step.candidates, [(one.node, one.tokens) for one in step.distributions]) for step in steps]

    assert proposals(0.0, hides_noise=True) == proposals(0.0, hides_noise=False)
    assert proposals(1.0, hides_noise=True) != proposals(1.0, hides_noise=False)
