"""Observed drafters draft the same, and what is written down is what happened."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.draft_records import StepRecord, listen, observed, paths_of, total_variation, without_noise
from drafters.protocol import Noise
from drafters.registry import NoDrafter
from drafters.tree import Candidates
from service.assembly import Assembly
from service.bench.driver import Run, generate
from service.bench.experiment import Measure, requests_from
from service.engine.budget import FixedBudget
from service.engine.engine import Engine
from tests.service.bench.parts import varied_prompts

JOINT = "memory+specblock"
PROMPTS = varied_prompts()[:4]
POLICY = FixedBudget(12)


@pytest.fixture(autouse=True)
def _every_block_is_drafted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether a further block pays is a matter of seconds, which are never the same twice."""
    monkeypatch.setattr("drafters.regret.GainPosterior.may_gain", True)


def answers(engine: Engine, temperature: float, *, concurrency: int = 4) -> list[Run]:
    measure = Measure(temperature, 24, concurrency, seed=5)
    firsts = range(0, len(PROMPTS), concurrency)
    return [generate(engine, requests_from(PROMPTS, first, measure)) for first in firsts]


def watched(
    assembly: Assembly, name: str, temperature: float, *, coupled: bool = True, concurrency: int = 4
) -> tuple[list[StepRecord], list[Run]]:
    drafter, recorder = observed(replace(assembly, drafter_name=name))
    engine = assembly.engine(drafter=drafter if coupled else without_noise(drafter), policy=POLICY)
    runs = answers(engine, temperature, concurrency=concurrency)
    return recorder.take(), runs


def accepted_of(runs: Sequence[Run]) -> list[tuple[int, ...]]:
    return [answer.accepted_per_step for run in runs for answer in run.answers]


@pytest.mark.parametrize("name", ["memory", "specblock"])
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


@pytest.mark.parametrize("name", [JOINT, "specblock", "memory"])
def test_records_tell_the_whole_answer(trained_assembly: Assembly, name: str) -> None:
    steps, runs = watched(trained_assembly, name, 0.0, concurrency=1)
    emitted = [token for step in steps for token in step.emitted]
    assert emitted == [token for run in runs for answer in run.answers for token in answer.token_ids]
    assert sum(step.accepted for step in steps) == sum(map(sum, accepted_of(runs)))
    for step in steps:
        assert set(step.verified) <= set(step.candidates)
        for depth in range(1, step.accepted + 1):
            assert step.truth[:depth] in step.verified
        assert step.truth[: step.accepted + 1] not in step.verified


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("coupled", [True, False])
def test_every_node_of_the_trained_drafter_was_said_by_a_forward(
    trained_assembly: Assembly, temperature: float, coupled: bool
) -> None:
    steps, _ = watched(trained_assembly, JOINT, temperature, coupled=coupled)
    asked = [step for step in steps if step.proposals.get("specblock")]
    assert len(asked) > 20, "one source was passed over"
    late = 0
    for step in asked:
        assert {place.forward for place in step.places} == {0, 1, 2}
        assert {place.source for place in step.places} == {"specblock"}
        first = {(*place.node, token) for place in step.places if place.forward == 0 for token in place.tokens}
        said = {(*place.node, token) for place in step.places for token in place.tokens}
        assert set(step.proposals["specblock"]) <= said
        assert {place.node for place in step.places} <= {(), *said}
        late += len(set(step.proposals["specblock"]) - first)
    assert late, "later forwards added nothing"


def test_distances_are_those_of_a_run_of_target_and_drafter_by_themselves(trained_assembly: Assembly) -> None:
    """The first place of each step of the trained drafter, against whole forwards of the target's modules."""
    steps, runs = watched(trained_assembly, "specblock", 0.0, concurrency=1)
    assembly = replace(trained_assembly, drafter_name="specblock")
    heard: list[torch.Tensor] = []
    drafter = assembly.drafter(observer=lambda lattice, logits, ids: heard.append(logits[0, 0, 0].clone()))
    vars(drafter)["timed"] = lambda times: None
    answers(assembly.engine(drafter=drafter, policy=POLICY), 0.0, concurrency=1)
    drafted = heard[::3]  # of three forwards the first
    model = AutoModelForCausalLM.from_pretrained(assembly.config.model, dtype=torch.float32).eval()
    checked = 0
    for prompt, run in zip(PROMPTS, runs, strict=True):
        answer = run.answers[0]
        with torch.inference_mode():
            logits = model(torch.tensor([[*prompt, *answer.token_ids]])).logits[0]
        place, end = len(prompt) - 1, len(logits) - 1
        while place < end:
            step = steps.pop(0)
            own = [found for found in step.places if found.node == ()]
            assert bool(own) == (place >= len(prompt)), "no draft before the first token"
            if own:
                target, mine = logits[place].softmax(0), torch.zeros(logits.shape[1])
                mine[: len(drafted[0])] = drafted[0].softmax(0)  # draft ids are target ids here
                drafted = drafted[1:]
                assert own[0].distance == pytest.approx(0.5 * float((target - mine).abs().sum()), abs=1e-4)
                assert list(own[0].tokens) == mine.topk(10).indices.tolist()
                checked += 1
            place += len(step.emitted)
    assert checked > 20
    assert (drafted, steps) == ([], [])


def test_total_variation_is_half_of_all_differences() -> None:
    target, drafter = torch.tensor([0.5, 0.3, 0.2, 0.0]).log(), torch.tensor([0.6, 0.4]).log()
    ids = torch.tensor([2, 0])  # the drafter says 0.6 of token 2 and 0.4 of token 0
    assert total_variation(target, drafter, ids) == pytest.approx((0.1 + 0.3 + 0.4) / 2)


def test_total_variation_of_equals_is_not_negative() -> None:
    """Each of 64 probabilities is rounded, and so is each sum: in either direction."""
    for logits in torch.randn(200, 64, generator=torch.Generator().manual_seed(0)):
        assert 0.0 <= total_variation(logits, logits, torch.arange(64)) <= 64 * torch.finfo(torch.float32).eps


def test_paths_follow_parents() -> None:
    assert paths_of([1, 2, 5, 7], [-1, -1, 0, 2]) == [(1,), (2,), (1, 5), (1, 5, 7)]


def test_withholding_noise_changes_what_is_proposed_above_temperature_zero(trained_assembly: Assembly) -> None:
    def proposals(temperature: float, coupled: bool) -> list[object]:
        steps, _ = watched(trained_assembly, "specblock", temperature, coupled=coupled, concurrency=1)
        return [(step.proposals, [(place.node, place.tokens) for place in step.places]) for step in steps]

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
