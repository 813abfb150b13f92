"""The benchmark of the prefix cache on a tiny model."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks import prefixes
from service.assembly import Assembly


def test_the_prefix_cache_finds_as_much_with_drafts(
    run: Callable[..., tuple[int, str]], trained_assembly: Assembly, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("service.bench.experiment.assemble", lambda config: trained_assembly)
    monkeypatch.setattr(prefixes, "TURNS", 3)
    monkeypatch.setattr(prefixes, "CHARACTERS", 16)
    code, output = run("prefixes --max-tokens 6 --out", tmp_path / "out.json")
    assert code == 0, output
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    plain, drafting = rows[::2], rows[1::2]
    assert [row["found"] for row in plain] == [row["found"] for row in drafting]
    assert all(row["accepted"] == 0 for row in plain)
    assert all(row["accepted"] > 0 for row in drafting)
    assert all(1 <= row["read_over_new"] < 1.15 for row in rows)
    assert all(row["times_shared_is_read"] <= 2 for row in rows if row["traffic"] == "questions")
