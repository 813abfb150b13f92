"""The benchmark of bad and perfect drafters: what they propose, what their steps are compared with, the command."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.drafters import (
    LIAR,
    PERFECT,
    RANDOM,
    WINDOW_STEPS,
    Liar,
    Perfect,
    answer_all,
    engines_of,
    interval_of,
    priced_steps,
    rows_of,
    summary_of,
)
from drafters.protocol import DraftContext, DraftingSizes, Noise
from service.assembly import Assembly, assemble
from service.bench.driver import Answer, Run, TimedStep
from service.bench.experiment import PLAIN, Measure
from service.engine.budget import FixedBudget
from service.errors import StartupError
from tests.service.bench.parts import varied_prompts
from tests.service.bench.test_load import STEP

SIZES = DraftingSizes(max_sequences=4, max_length=30, vocab_size=200, num_slots=1, max_nodes=24)
NO_NOISE = Noise(torch.zeros(0), torch.zeros(0), torch.zeros(0))
PROMPTS = [tuple(prompt) for prompt in varied_prompts()[:4]]


@pytest.fixture(scope="module")
def costly(assembly: Assembly) -> Assembly:
    """The tiny model with measured costs."""
    return assemble(assembly.config.model_copy(update={"budget_policy": "cost"}))


def test_lies_are_full_trees_of_certain_nodes_without_equal_siblings() -> None:
    tree = Liar(replace(SIZES, vocab_size=50)).grow(torch.arange(3), NO_NOISE)
    assert tree.num_nodes.tolist() == [24] * 3
    assert torch.equal(tree.survival, torch.ones(3, 24))
    assert bool((tree.parents < torch.arange(24)).all())
    for tokens, parents in zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True):
        assert len(set(zip(parents, tokens, strict=True))) == 24


def test_a_replay_goes_on_where_the_text_stands() -> None:
    replay = Perfect(replace(SIZES, max_nodes=48))
    answer = list(range(100, 120))
    replay.start([DraftContext(2, [1, 2], answer), DraftContext(0, [1, 2, 100, 101], answer[:5], num_generated=2)])
    tree = replay.grow(torch.tensor([2, 0]), NO_NOISE)
    assert tree.num_nodes.tolist() == [20, 3]
    assert tree.tokens[0, :20].tolist() == answer
    assert tree.tokens[1].tolist() == [102, 103, 104] + [0] * 45
    assert tree.parents[1].tolist() == [-1, 0, 1] + [-1] * 45
    assert tree.depths[1].tolist() == [1, 2, 3] + [0] * 45
    assert tree.survival[1].tolist() == [1.0] * 3 + [0.0] * 45


def test_a_replay_knows_nothing_without_an_answer() -> None:
    replay = Perfect(SIZES)
    replay.start([DraftContext(0, [1, 2])])
    assert replay.grow(torch.tensor([0]), NO_NOISE).num_nodes.tolist() == [0]


def test_a_perfect_drafter_is_right_to_the_end(costly: Assembly) -> None:
    """Behind a budget that lets everything through: sixteen tokens and the bonus in every step."""
    measure = Measure(temperature=0.8, max_tokens=35, concurrency=2, seed=3)
    engines = engines_of(costly, measure)
    generous = costly.engine(drafter=engines[PERFECT].drafter, policy=FixedBudget(16))
    runs = answer_all({PLAIN: engines[PLAIN], PERFECT: generous}, PROMPTS, measure)
    summary = summary_of(runs[PERFECT], runs[PLAIN])
    assert summary["mismatched_tokens"] == 0
    # The prompt's own step gives one token, and two steps of seventeen the other thirty-four.
    assert {answer.accepted_per_step for run in runs[PERFECT] for answer in run.answers} == {(16, 16)}
    assert summary["whole"]["tau"] == 17.0


def test_bad_drafters_are_soon_not_asked_any_more(costly: Assembly) -> None:
    asked = 6 * PROMPTS  # in few steps one trial more, by a hiccup of the clock, would be a large share
    measure = Measure(0.0, 60, 1, 0)
    runs = answer_all(engines_of(costly, measure), asked, measure)
    for name in (RANDOM, LIAR):
        summary = summary_of(runs[name], runs[PLAIN])
        assert summary["mismatched_tokens"] == 0
        assert summary["stopped_after_steps"] is not None
        assert summary["stopped_after_steps"] < WINDOW_STEPS
        assert summary["later"] is not None
        assert summary["later"]["nodes_per_step"] < 0.5  # now and then a trial


def test_without_measured_costs_there_is_nothing_to_compare(assembly: Assembly) -> None:
    with pytest.raises(StartupError, match="budget_policy"):
        engines_of(replace(assembly, costs=None), Measure(0.0, 60, 1, 0))


def step(seconds: float, *, prompt: int = 0, nodes: int = 0, reason: str = "cost", **emitted: int) -> TimedStep:
    stats = replace(STEP, prompt_tokens=prompt, drafted_nodes=nodes, draft_seconds=0.125, budget_reason=reason)
    return TimedStep(stats, seconds, emitted)


def run_of(*steps: TimedStep, tokens: tuple[int, ...] = (1, 2, 3, 4, 5)) -> Run:
    return Run((Answer(tokens, "", "length", ()),), steps, sum(step.seconds for step in steps))


PLAIN_RUN = run_of(step(9.0, prompt=4, a=1), step(1.0, a=1), step(2.0, a=1), step(3.0, a=1), step(4.0, a=1))


def test_a_step_costs_what_plain_decoding_takes_for_its_tokens() -> None:
    mine = run_of(step(8.0, prompt=4, a=1), step(2.0, a=3, nodes=5), step(1.0, a=1))
    steps = priced_steps([mine], [PLAIN_RUN])
    assert [(one.tokens, one.seconds, one.plain_seconds) for one in steps] == [(3, 2.0, 6.0), (1, 1.0, 4.0)]
    summary = summary_of([mine, mine], [PLAIN_RUN, PLAIN_RUN])
    whole = summary["whole"]
    assert (whole["steps"], whole["tokens"], whole["tau"], whole["nodes_per_step"]) == (4, 8, 2.0, 2.5)
    assert (whole["tokens_per_second"], whole["plain_tokens_per_second"]) == (8 / 6, 8 / 20)
    assert whole["over_plain"] == 20 / 6
    assert whole["drafting_share"] == 0.5 / 6
    assert summary["with_prompts_over_plain"] == 19 / 11
    assert (summary["first"], summary["later"], summary["later_over_plain_interval"]) == (whole, None, None)


def test_steps_are_left_out_where_the_plain_run_was_reading() -> None:
    """Two texts at a time: the second prompt is read while the first answer goes on."""
    plain = run_of(step(9.0, prompt=4, a=1), step(9.0, prompt=4, a=1, b=1), step(4.0, a=1, b=1))
    mine = run_of(step(9.0, prompt=8, a=1, b=1), step(3.0, a=1), step(1.0, a=1, b=1))
    (only,) = priced_steps([mine], [plain])
    assert (only.tokens, only.verifies, only.seconds, only.plain_seconds) == (2, 2, 1.0, 4.0)


def test_windows_and_the_step_at_which_drafting_stopped() -> None:
    count = 2 * WINDOW_STEPS + 50
    plain = run_of(step(1.0, prompt=1, a=1), *(step(1.0, a=1) for _ in range(count)))
    asked = [step(2.0, a=1, nodes=4) for _ in range(WINDOW_STEPS)]
    refused = [step(1.0, a=1, reason="suspended") for _ in range(count - WINDOW_STEPS)]
    mine = run_of(step(1.0, prompt=1, a=1), *asked, *refused)
    rows = rows_of("liar", priced_steps([mine], [plain]))
    assert [(row["window"], row["steps"], row["over_plain"]) for row in rows] == [
        *((0, 100, 0.5), (1, 100, 1.0), (2, 50, 1.0))
    ]
    assert (rows[0]["player"], rows[0]["nodes_per_step"]) == ("liar", 4.0)
    summary = summary_of([mine], [plain])
    assert summary["stopped_after_steps"] == WINDOW_STEPS
    assert summary["later"] is not None
    assert (summary["first"]["over_plain"], summary["later"]["over_plain"], summary["later"]["steps"]) == (
        0.5,
        1.0,
        150,
    )
    assert summary["later_over_plain_interval"] == (1.0, 1.0)


def test_the_interval_is_as_wide_as_texts_differ() -> None:
    even = priced_steps([run_of(step(1.0, a=1), step(1.0, a=1))] * 8, [run_of(step(1.0, a=1), step(1.0, a=1))] * 8)
    assert interval_of(even) == (1.0, 1.0)
    slow = [replace(one, seconds=1.0 + one.turn / 8) for one in even]
    low, high = interval_of(slow)
    assert 1 / (1 + 7 / 8) < low < 16 / sum(one.seconds for one in slow) < high < 1.0


@pytest.fixture
def _loaded(monkeypatch: pytest.MonkeyPatch, costly: Assembly, quiet: None) -> None:
    monkeypatch.setattr("service.bench.experiment.assemble", lambda config: costly)


@pytest.mark.usefixtures("_loaded")
def test_the_command_reports_every_drafter(
    run: Callable[..., tuple[int, str]], prompt_file: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out.json"
    code, output = run(
        *("drafters", "--queries", 3, "--max-tokens", 50, "--temperature", 0.7, "--prompts", prompt_file, "--out", out)
    )
    assert code == 0, output
    assert "stopped" in output
    report = json.loads(out.read_text())
    players = report["summary"]["players"]
    assert list(players) == [PLAIN, RANDOM, LIAR, PERFECT]
    assert report["summary"]["mismatched_tokens"] == 0
    assert {player["whole"]["tokens"] for player in players.values()} == {3 * 49}
    assert players[PLAIN]["whole"]["over_plain"] == 1.0
    assert [row["steps"] for row in report["rows"] if row["player"] == PLAIN] == [100, 47]


@pytest.mark.usefixtures("_loaded")
def test_another_text_is_an_error(
    run: Callable[..., tuple[int, str]], prompt_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = run_of(step(1.0, prompt=1, a=1), step(1.0, a=4), tokens=(1, 2, 3, 4, 6))
    monkeypatch.setattr("benchmarks.drafters.answer_all", lambda *asked: {PLAIN: [PLAIN_RUN], LIAR: [wrong]})
    assert run("drafters", "--queries", 1, "--prompts", prompt_file)[0] == 1
