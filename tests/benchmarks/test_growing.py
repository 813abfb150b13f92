"""A growing server, and what its memory costs: who is compared, and that what is to be held is found again."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.growing import OFF, ON
from benchmarks.memory_costs import drafter_of, remember
from benchmarks.own_prompts import COUNT, KINDS
from drafters.protocol import DraftContext
from service.assembly import Assembly
from service.training.regenerate import Response

RunTiny = Callable[..., tuple[dict[str, Any], str]]


def test_a_run_shows_windows_and_the_end(run_tiny: RunTiny) -> None:
    words = ("--requests", 3, "--window", 2, "--last", 1, "--max-tokens", 6, "--temperature", 0, "--kv-cache", "80MiB")
    report, output = run_tiny("growing", *words)
    assert [(row["first"], row["requests"]) for row in report["rows"]] == [(0, 2), (2, 1)]
    (end,) = report["summary"]["end"]
    assert end["ratios"].keys() >= {f"{ON} over {OFF}", "memory off again over memory off", f"{ON} over plain"}
    assert report["summary"]["mismatched_tokens"] == 0
    assert "memory on over memory off" in output


def test_costs_are_beside_a_plain_step(run_tiny: RunTiny, tmp_path: Path) -> None:
    file = tmp_path / "responses.jsonl"
    file.write_text(Response(id="a", temperature=0, prompt=[1], response=[*range(50)]).model_dump_json())
    words = ("--responses", file, "--held", "20,200", "--concurrency", "1,2", "--max-tokens", 4, "--memory", "1MiB")
    report, _ = run_tiny("memory-costs", *words)
    assert [(row["held"], row["sequences"]) for row in report["rows"]] == [(20, 1), (20, 2), (200, 1), (200, 2)]
    assert all(row["share"] > 0 and 8 < row["bytes_per_token"] <= 32 for row in report["rows"])


def test_what_is_held_is_found_again(assembly: Assembly) -> None:
    drafter = drafter_of(assembly, 1 << 20)
    remember(drafter, torch.arange(10, 20), 90, range(20))
    found = {}
    for last in (12, 22):  # of the first round, and of the second
        drafter.start([DraftContext(0, [last - 1, last])])
        tree = drafter.recall(torch.tensor([0]))
        found[last] = int(tree.tokens[0, 0]) if tree.num_nodes[0] else None
    assert found == {12: 13, 22: 23}


def test_calls_of_tools_are_many_and_always_the_same() -> None:
    prompts = list(KINDS["tools"]())
    assert prompts == list(KINDS["tools"]())
    assert len(set(prompts)) >= COUNT
