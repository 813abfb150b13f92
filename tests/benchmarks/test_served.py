"""Served speed over in-process speed, with tiny servers."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from service.config import ServiceConfig
from tests.processes import Process, begin, write_settings


def test_servers_and_engines_answer_alike(
    run_tiny: Callable[..., tuple[dict[str, Any], str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = count()

    @contextmanager
    def forked(config: ServiceConfig, **changes: object) -> Iterator[Process]:
        file = tmp_path / f"server-{next(numbers)}.yaml"
        settings = {**config.model_dump(mode="json", exclude_unset=True), "port": 0, **changes}
        server = begin(["serve"], file, file.with_suffix(".log"), numbers=write_settings(file, settings))
        yield server
        server.end()

    monkeypatch.setattr("service.bench.serve.one_server", forked)
    words = ("--max-tokens", 10, "--concurrency", "1,2", "--temperature", 0.7, "--budget-policy", "fixed")
    report, output = run_tiny("served", *words)
    assert [(row["concurrency"], row["turns"], row["tokens"]) for row in report["rows"]] == [(1, 3, 30), (2, 2, 30)]
    assert report["summary"] == {"mismatched_tokens": 0}
    pairs = {"served plain over plain", "served adaptive over adaptive", "served adaptive over served plain"}
    for row in report["rows"]:
        assert row["ratios"].keys() == {*pairs, "plain again over plain"} == row["decode_ratios"].keys()
    assert "served plain / plain" in output
