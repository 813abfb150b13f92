"""The benchmark of kinds of drafters: what is asked of it, its figures, the command."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.growing import OFF, ON
from benchmarks.kinds import Kind, budgets_of, figures_of, kinds_of
from benchmarks.own_prompts import COUNT, KINDS
from service.bench.driver import Answer, Run, TimedStep
from tests.service.bench.parts import STEP, assembled, save_drafter, save_two_layers


def test_kinds_may_name_their_weights() -> None:
    assert kinds_of("memory, specblock=./mine,memory") == [Kind("memory", None), Kind("specblock", Path("mine"))]
    assert kinds_of("memory+specblock,memory") == [
        Kind("memory+specblock", None),
        Kind("memory", None),
    ]
    assert [kind.title for kind in kinds_of("memory,specblock=some/where")] == ["memory", "specblock=where"]


def test_budgets_are_numbers_or_the_served_one() -> None:
    assert budgets_of("8,64,served,8") == [8, 64, None]


def step(seconds: float, emitted: int, *, nodes: int, prompt: int = 0) -> TimedStep:
    counted = replace(STEP, prompt_tokens=prompt, emitted_tokens=emitted, drafted_nodes=nodes, drafts=int(nodes > 0))
    drafting = 0.25 * (nodes > 0)
    return TimedStep(replace(counted, draft_seconds=drafting, follow_seconds=drafting), seconds)


def run_of(*steps: TimedStep, accepted: tuple[int, ...] = ()) -> Run:
    return Run((Answer((1, 2, 3, 4, 5), "", "length", accepted),), steps, sum(one.seconds for one in steps))


def test_figures_are_in_plain_steps() -> None:
    plain = run_of(step(9.0, 1, nodes=0, prompt=4), *(step(1.0, 1, nodes=0) for _ in range(4)))
    mine = run_of(step(9.0, 1, nodes=0, prompt=4), step(1.5, 3, nodes=6), step(1.0, 1, nodes=0), accepted=(2, 1, 0, 1))
    figures = figures_of([mine], [plain])
    assert (figures["tau"], figures["alpha"]) == (2.0, [0.75, 1 / 3, 0.0])
    assert (figures["step_cost"], figures["drafting_cost"], figures["mean_nodes"]) == (1.5, 0.5, 6)
    assert figures["speedup"] == (4 / 2.5) / 1.0
    assert (figures["step_milliseconds"], figures["plain_milliseconds"]) == (1500, 1000)
    assert (figures["tau_withheld"], figures["mismatched_tokens"]) == (None, 0)
    assert figures_of([mine], [plain], [plain])["tau_withheld"] == 1.0


def test_the_command_compares_kinds(run: Callable[..., tuple[int, str]], tmp_path: Path, prompt_file: Path) -> None:
    folder = save_two_layers(tmp_path / "model")
    drafter = save_drafter(tmp_path / "drafter", assembled(folder))
    out = tmp_path / "kinds.json"
    words = "drafters --queries 2 --max-tokens 12 --temperature 0 --temperature 0.8 --nodes 4,served --device cpu"
    sizes = "--load-dtype float32 --threads 1 --kv-cache 10MiB --max-model-len 256 --budget-policy fixed"
    code, output = run(
        *(*words.split(), *sizes.split(), "--model", folder, "--state-dir", tmp_path),
        *("--kinds", f"memory,specblock={drafter},draft_model={folder}"),
        *("--prompts", prompt_file, "--out", out),
    )
    assert code == 0, output
    report = json.loads(out.read_text())
    assert report["summary"] == {"kinds": 3, "mismatched_tokens": 0}
    assert [(row["kind"], row["temperature"], row["nodes"]) for row in report["rows"]] == [
        (kind, temperature, nodes)
        for kind in ("memory", "specblock=drafter", "draft_model=model")
        for temperature in (0.0, 0.8)
        for nodes in ("4", "served")
    ]
    assert len({tuple(row) for row in report["rows"]}) == 1, "all rows have the same columns"
    for row in report["rows"]:
        assert (row["tokens"], row["plain_milliseconds"] > 0) == (2 * 12, True)
        assert (row["tau_withheld"] is None) == (row["temperature"] == 0)
        assert (row["total_variation"] is None) == (row["kind"] == "memory")
        assert row["kind"] == "memory" or 0 <= row["covered"]["1"] <= row["covered"]["8"] <= 1
    for words in ("top 8", "right by rank", "TVD", "ECE, corrected", "withheld"):
        assert words in output


# A growing server: who is compared.

RunTiny = Callable[..., tuple[dict[str, Any], str]]


def test_a_run_shows_windows_and_the_end(run_tiny: RunTiny) -> None:
    words = ("--requests", 3, "--window", 2, "--last", 1, "--max-tokens", 6, "--temperature", 0, "--kv-cache", "80MiB")
    report, output = run_tiny("growing", *words)
    assert [(row["first"], row["requests"]) for row in report["rows"]] == [(0, 2), (2, 1)]
    (end,) = report["summary"]["end"]
    assert end["ratios"].keys() >= {f"{ON} over {OFF}", "memory off again over memory off", f"{ON} over plain"}
    assert report["summary"]["mismatched_tokens"] == 0
    assert "memory on over memory off" in output


def test_calls_of_tools_are_many_and_always_the_same() -> None:
    prompts = list(KINDS["tools"]())
    assert prompts == list(KINDS["tools"]())
    assert len(set(prompts)) >= COUNT
