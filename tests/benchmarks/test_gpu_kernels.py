"""The layers by themselves, in a rehearsal: every contestant, row count and layer has its figure."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.mark.parametrize(
    ("name", "section", "contestants"),
    [
        ("gpu-attention", "attention", {"tree attention", "SDPA with a mask", "SDPA with a mask, heads repeated"}),
        ("gpu-linear", "linear", {"one order", "library"}),
    ],
)
def test_a_rehearsal_runs_every_contestant(
    run: Callable[..., tuple[int, str]], tmp_path: Path, name: str, section: str, contestants: set[str]
) -> None:
    out = tmp_path / "gpu.json"
    code, output = run(name, "--dry-run", "--out", out, "--state-dir", tmp_path)
    assert code == 0, output
    rows = json.loads(out.read_text())["rows"]
    assert {row["section"] for row in rows} == {section}
    assert {row["name"] for row in rows} == contestants
    assert {row["at"]["model"] for row in rows} == {"tiny"}
    assert all(row["value"] > 0 for row in rows)
