"""The benchmark of the budget's numbers: its legs, figures made by hand and from real steps, and the command."""

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path
from statistics import median

import pytest

from benchmarks.calibration import (
    CostError,
    PlayedLeg,
    SurvivalError,
    cost_error,
    first_reading_from,
    legs_of,
    play,
    readings,
    rows_of,
    summary_of,
)
from service.assembly import Assembly, assemble
from service.bench.driver import Answer, Run, Span, TimedStep
from service.bench.experiment import Measure
from service.bench.shift_play import shifted
from service.engine.stats import StepStats
from service.errors import StartupError
from tests.service.bench.parts import written_prompts
from tests.service.bench.shift_parts import prompt_set, stream_of_halves
from tests.service.bench.test_load import STEP

MEASURE = Measure(temperature=0.0, max_tokens=40, concurrency=1, seed=5)


@pytest.fixture(scope="module")
def costly(trained_assembly: Assembly) -> Assembly:
    """The tiny model and its drafter with measured costs."""
    return assemble(trained_assembly.config.model_copy(update={"budget_policy": "cost"}))


def test_legs_cycle_through_concurrencies_and_never_mix_kinds_of_prompt() -> None:
    stream = stream_of_halves(28)
    legs = legs_of(stream, (1, 2, 4), MEASURE)
    assert [(leg.phase, leg.concurrency, len(leg.requests)) for leg in legs] == [
        *((0, 1, 2), (0, 2, 4), (0, 4, 8)),
        *((1, 1, 2), (1, 2, 4), (1, 4, 8)),
    ]
    requests = [request for leg in legs for request in leg.requests]
    assert [request.prompt for request in requests] == [prompt for phase in stream.phases for prompt in phase.prompts]
    assert [request.sampling.seed for request in requests] == list(range(5, 33))
    assert len({request.request_id for request in requests}) == 28
    assert not any(request.sampling.ignore_eos for request in requests)


def test_the_last_leg_takes_what_is_left() -> None:
    legs = legs_of(stream_of_halves(10), (1, 8), MEASURE)
    assert [(leg.phase, leg.concurrency, len(leg.requests)) for leg in legs] == [
        *((0, 1, 2), (0, 8, 3)),
        *((1, 1, 2), (1, 8, 3)),
    ]


def taking(seconds: float, predicted: float | None = 1.0, *, nodes: int = 6, ece: float | None = None) -> StepStats:
    return replace(
        STEP,
        verify_seconds=seconds,
        predicted_verify_seconds=predicted,
        drafted_nodes=nodes,
        survival_error=ece,
    )


def test_errors_are_relative_to_what_was_measured() -> None:
    steps = [taking(1.0), taking(2.0), taking(0.8), taking(0.5, None), taking(0.0)]
    assert cost_error(steps) == CostError(steps=3, median=0.25, p90=0.5)
    assert cost_error([taking(1.0, None)]) is None


def test_survival_is_judged_at_the_first_reading_after_enough_nodes() -> None:
    steps = [taking(1.0), taking(1.0, ece=0.5), taking(1.0), taking(1.0, ece=0.25), taking(1.0, ece=0.125)]
    assert [(one.nodes, one.error) for one in readings(steps)] == [(12, 0.5), (24, 0.25), (30, 0.125)]
    assert first_reading_from(steps, 12) == SurvivalError(nodes=12, error=0.5)
    assert first_reading_from(steps, 13) == SurvivalError(nodes=24, error=0.25)
    assert first_reading_from(steps, 31) is None


def played(phase: int, concurrency: int, *steps: StepStats) -> PlayedLeg:
    served = Answer((1, 2, 3))
    leg = legs_of(stream_of_halves(2), (concurrency,), MEASURE)[phase]
    return PlayedLeg(
        leg, Run((served,), tuple(TimedStep(step, 1.0) for step in steps), 2.0, Span(2.0, len(served.token_ids)))
    )


def test_nodes_are_counted_anew_from_the_change() -> None:
    reading = replace(taking(2.0), prompt_tokens=9)
    legs = [
        played(0, 1, taking(1.0, ece=0.5), taking(4.0)),
        played(0, 2, taking(0.5, ece=0.25)),
        played(1, 1, reading),
        played(1, 2, taking(1.0, ece=0.125)),
    ]
    rows = rows_of(legs, stream_of_halves(2))
    assert [(row.phase, row.concurrency, row.nodes, row.tokens_per_second) for row in rows] == [
        *(("old", 1, 12, 1.5), ("old", 2, 6, 1.5), ("new", 1, 6, 1.5), ("new", 2, 6, 1.5))
    ]
    assert [row.survival and (row.survival.nodes, row.survival.error) for row in rows] == [
        *((6, 0.5), (18, 0.25), None, (12, 0.125))
    ]
    summary = summary_of(legs, nodes=10)
    assert summary.survival_before == SurvivalError(nodes=18, error=0.25)
    assert summary.survival_after == SurvivalError(nodes=12, error=0.125)
    assert summary.cost_error == CostError(steps=5, median=0.5, p90=1.0)
    assert {count: error and error.steps for count, error in summary.cost_error_by_concurrency.items()} == {1: 3, 2: 2}
    assert summary.cost_error_reading == CostError(steps=1, median=0.5, p90=0.5)
    assert summary.cost_error_decoding is not None
    assert summary.cost_error_decoding.steps == 4


def test_what_is_reported_is_what_the_steps_said(costly: Assembly) -> None:
    stream = shifted([prompt_set("old", 12)], [prompt_set("new", 12, first=50)], 12, seed=0)
    legs = play(costly.engine(), legs_of(stream, (1, 2), MEASURE))
    steps: list[StepStats] = [step.stats for leg in legs for step in leg.run.steps]
    errors = []
    for step in steps:
        assert step.predicted_verify_seconds is not None
        errors.append(abs(step.predicted_verify_seconds - step.verify_seconds) / step.verify_seconds)
    summary = summary_of(legs, nodes=0)
    assert summary.cost_error is not None
    assert summary.cost_error.median == pytest.approx(median(errors))
    assert summary.cost_error.steps == len(steps)
    assert sum(row.nodes for row in rows_of(legs, stream)) == sum(step.drafted_nodes for step in steps)
    # The engine reads its calibration every 64 steps.
    places = [place for place, step in zip(count(1), steps, strict=False) if step.survival_error is not None]
    assert places == list(range(64, len(steps) + 1, 64))


@pytest.fixture
def prompt_file(tmp_path: Path) -> Path:
    file = tmp_path / "some.jsonl"
    file.write_text("\n".join(written_prompts()))
    return file


def test_the_command_reports_both_halves(
    run: Callable[..., tuple[int, str]],
    costly: Assembly,
    prompt_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("service.bench.experiment.assemble", lambda config: costly)
    out = tmp_path / "out.json"
    code, output = run(
        *("calibration", "--before", prompt_file, "--after", prompt_file, "--queries", 6, "--concurrency", "1,2"),
        *("--max-tokens", 90, "--nodes", 1, "--out", out),
    )
    assert code == 0, output
    assert "concurrency 2" in output
    report = json.loads(out.read_text())
    assert [(row["phase"], row["concurrency"], row["queries"]) for row in report["rows"]] == [
        *((("some", 1, 2), ("some", 2, 1)) * 2)
    ]
    summary = report["summary"]
    assert set(summary["cost_error_by_concurrency"]) == {"1", "2"}
    assert summary["cost_error"]["p90"] >= summary["cost_error"]["median"] > 0
    assert {"survival_before", "survival_after"} <= set(summary)


def test_the_command_needs_measured_costs(
    run: Callable[..., tuple[int, str]], trained_assembly: Assembly, prompt_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("service.bench.experiment.assemble", lambda config: replace(trained_assembly, costs=None))
    with pytest.raises(StartupError, match="budget_policy"):
        run("calibration", "--before", prompt_file, "--after", prompt_file)
