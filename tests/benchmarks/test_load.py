"""The load benchmark: arithmetic on records made by hand, and the whole command on a tiny model."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.load import engines_of, policies_of, row_of
from service.assembly import Assembly, assemble
from service.bench.driver import Answer, Run, Span, TimedStep
from service.bench.experiment import PLAIN, Row
from service.engine.states import StateShape
from service.errors import StartupError
from tests.service.bench.parts import STEP

TIMED = TimedStep(STEP, 1.0)


def served(tokens: list[int], first: float = 1.0, gaps: tuple[float, ...] = (0.1, 0.3)) -> Answer:
    return Answer(tuple(tokens), accepted_per_step=(3, 0), first_token_seconds=first, gaps_seconds=gaps)


def row(policy: str, run: Run, reference: Run | None = None) -> Row:
    return row_of(policy, run, reference or run, 1, {PLAIN: [Span(2.0, 4)], policy: [run.steady]})


def test_a_row_adds_up_what_its_run_did() -> None:
    run = Run(
        (served([1, 2, 3]), served([4, 5, 6], first=3.0)),
        (TIMED, TimedStep(replace(STEP, drafted_nodes=0), 1.0)),
        2.0,
        Span(1.5, 6),
    )
    found = row("adaptive", run)
    assert (found["completed"], found["total_output_tokens"], found["duration"]) == (2, 6, 2.0)
    assert (found["tokens_per_second"], found["median_ttft_ms"], found["median_itl_ms"]) == (4.0, 2000.0, 200.0)
    assert (found["tau"], found["mean_budget"], found["undrafted_share"]) == (2.5, 6 / 4, 0.5)
    assert found["cost_error"] == pytest.approx(0.2)
    assert (found["survival_error"], found["mismatched_tokens"], found["over_first"]) == (0.02, 0, (2.0, 2.0, 2.0))


def test_policies_go_by_name() -> None:
    found = policies_of("plain, fixed:8,plain,adaptive")
    assert list(found) == ["plain", "fixed:8", "adaptive"]
    assert [name for name, policy in found.items() if policy is None] == ["adaptive"]


@pytest.mark.parametrize("names", ["", "fast", "fixed:", "fixed:257", "fast:8"])
def test_unknown_policies_are_refused(names: str) -> None:
    with pytest.raises(StartupError, match="--policies"):
        policies_of(names)


def test_the_adaptive_policy_needs_measured_costs(assembly: Assembly) -> None:
    with pytest.raises(StartupError, match="budget_policy"):
        engines_of(replace(assembly, costs=None), {"adaptive": None}, 100, 1)


@pytest.fixture
def _loaded(monkeypatch: pytest.MonkeyPatch, trained_assembly: Assembly, quiet: None) -> None:
    costly = assemble(trained_assembly.config.model_copy(update={"budget_policy": "cost"}))
    monkeypatch.setattr("service.bench.experiment.assemble", lambda config: costly)


@pytest.mark.usefixtures("_loaded")
def test_the_command_compares_policies(run: Callable[..., tuple[int, str]], prompt_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    code, output = run(
        *("load --concurrency 1,3 --requests 10 --max-tokens 8 --temperature 0.7 --prompts", prompt_file),
        *("--policies plain,fixed:8,adaptive,again --out", out),
    )
    assert code == 0, output
    report = json.loads(out.read_text())
    assert [(line["concurrency"], line["policy"]) for line in report["rows"]] == [
        (concurrency, policy) for concurrency in (1, 3) for policy in ("plain", "fixed:8", "adaptive", "again")
    ]
    tokens = {(line["concurrency"], line["total_output_tokens"]) for line in report["rows"]}
    assert len(tokens) == 2, "every policy answers the same requests"
    assert all(
        4 * requests <= count <= 12 * requests for (_, count), requests in zip(sorted(tokens), (10, 24), strict=True)
    )
    assert report["summary"]["mismatched_tokens"] == 0
    assert report["rows"][1]["mean_budget"] > 0 == report["rows"][0]["mean_budget"]


@pytest.mark.usefixtures("_loaded")
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--concurrency 1,x", "positive numbers"),
        ("--concurrency 0", "positive numbers"),
        ("--policies best", "--policies"),
        ("--out nowhere/at/all.json", "give a file in a folder"),
    ],
)
def test_the_command_says_what_to_change(
    run: Callable[..., tuple[int, str]], prompt_file: Path, arguments: str, words: str
) -> None:
    with pytest.raises(StartupError, match=words):
        run("load --prompts", prompt_file, arguments)


@pytest.mark.usefixtures("_loaded")
def test_a_different_text_fails_the_command(
    run: Callable[..., tuple[int, str]], prompt_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmarks.load.mismatches", lambda reference, runs: 1)
    assert run("load --prompts", prompt_file, "--requests 1 --max-tokens 2 --concurrency 1")[0] == 1


def test_engines_that_take_turns_share_no_states(assembly: Assembly) -> None:
    loaded = replace(
        assembly.loaded, kv_shape=replace(assembly.loaded.kv_shape, layers=(StateShape(3, 8, 0, 0, 0, 8),))
    )
    with pytest.raises(StartupError, match="measure one policy in each run"):
        engines_of(replace(assembly, loaded=loaded), policies_of("plain,fixed:8"), 100, 1)
