"""The made-up device: work is done in order, launching takes no time, and reading waits."""

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from benchmarks.overlap import SimulatedDevice

RESULTS = Path(__file__).parents[2] / "docs/results"


def test_what_is_sent_is_there_when_all_work_before_is_done() -> None:
    device, start = SimulatedDevice(0.02), time.perf_counter()
    for _ in range(2):
        device.launch()
    first = device.arriving(torch.tensor([7]))
    device.launch()
    second = device.arriving(torch.tensor([8]))
    assert time.perf_counter() - start < 0.02, "launching takes no time"
    assert (first().tolist(), device.waits) == ([7], 1)
    assert 0.04 <= time.perf_counter() - start < 0.06
    assert second().tolist() == [8]
    assert time.perf_counter() - start >= 0.06
    assert first().tolist() == [7], "what has come is there at once"


def test_the_host_is_hidden(run: Callable[..., tuple[int, str]], tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    words = f"overlap {RESULTS / 'gpu-steps-h200.json'} --sequences 1 --short-ms 3 --steps 20 --turns 3 --out {out}"
    code, _ = run(*words.split())
    assert code == 0
    rows = json.loads(out.read_text())["rows"]
    assert [row["waits"] for row in rows] == [pytest.approx(1.0, abs=0.1)] * 4
    assert all(row["ahead_ms"] < row["step_ms"] for row in rows)
