"""Replays of the policy of budgets: that all see the same texts, and that prices are those of the files."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.decision_worlds import DEAR_ROWS, read_prices
from benchmarks.decisions import Fixed, Oracle, Policy, Replay, measure

RESULTS = Path(__file__).parents[2] / "docs/results"
FREE_ROWS = replace(DEAR_ROWS, verify=replace(DEAR_ROWS.verify, seconds=np.full((1, 1, 3), 5e-3)))


def test_prices_are_those_of_the_files() -> None:
    small, *_ = machines = read_prices(RESULTS / "gpu-h100.json", eager=False)
    assert [one.name for one in machines] == ["h100 smollm2-135m", "h100 llama-3.1-8b", "h100 qwen3-8b"]
    plain = small.verify.verify_seconds(np.array([1.0]), 256, 1)[0] + small.other(1, drafted=False)
    assert plain == pytest.approx(2.5002655e-3)  # decode: step
    eager, *_ = read_prices(RESULTS / "gpu-h100.json", eager=True)
    rows = np.array([32.0, 128.0])
    ratios = eager.verify.verify_seconds(rows, 256, 1) / small.verify.verify_seconds(rows, 256, 1)
    assert ratios == pytest.approx([1.0, 13.7], rel=0.01)
    above = small.verify.verify_seconds(np.array([512.0, 513.0]), 256, 1)
    assert above[1] > 9 * above[0]
    (cpu,) = read_prices(RESULTS / "prices-cpu.json", eager=False)
    assert not cpu.captured


def test_prices_of_a_report_are_taken_as_they_are(tmp_path: Path) -> None:
    forwards = [
        {
            "name": "forward",
            "value": float(sequences + rows),
            "at": {"sequences": sequences, "context": 64, "rows": rows},
        }
        for sequences in (1, 16)
        for rows in (1, 32)
    ]
    others = [
        {"name": name, "value": value, "at": {"sequences": sequences}}
        for name, value in (("drafting", 2.0), ("other plain", 3.0))
        for sequences in (1, 4)
    ]
    file = tmp_path / "gpu.json"
    file.write_text(json.dumps({"rows": [{"section": "prices", **row} for row in (*forwards, *others)]}))
    (prices,) = read_prices(file, eager=False)
    assert prices.verify.verify_seconds(np.array([1.0, 32.0]), 64, 16) == pytest.approx([17e-3, 48e-3])
    assert (prices.drafts.draft_seconds(4), prices.other(1, drafted=True)) == pytest.approx((2e-3, 3e-3))


def test_every_contestant_sees_the_same_texts() -> None:
    place = DEAR_ROWS, 2, 0.0, 0
    contestants = (
        Fixed(DEAR_ROWS, 0),
        Fixed(DEAR_ROWS, 3),
        Oracle(DEAR_ROWS),
        Policy(DEAR_ROWS, 2, np.random.default_rng()),
    )
    replays = [Replay(*place, one).run(tokens=200) for one in contestants]
    assert len({replay._texts[0].length for replay in replays}) <= 2  # its first or its second text
    again = Replay(*place, Fixed(DEAR_ROWS, 3)).run(tokens=200)
    assert again.seconds == replays[1].seconds
    assert len(replays[0].drafted) > len(replays[1].drafted)


def test_drafts_pay_where_rows_are_free_and_not_where_they_are_dear() -> None:
    free = measure(FREE_ROWS, 2, 0.0, steps=50, seeds=range(1))
    assert free["over_plain"] > 1.3
    assert free["oracle_drafted"] > 0.9
    dear = measure(DEAR_ROWS, 2, 0.0, steps=50, seeds=range(1))
    assert dear["oracle_drafted"] < 0.01
    assert 0.7 < dear["over_plain"] <= 1.0
    assert dear["over_fixed"] > 1.0


def test_the_command_reports_each_row(run: Callable[..., tuple[int, str]], tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    words = "decisions --sequences 1 --steps 9 --seeds 1"
    code, output = run(words, RESULTS / "prices-cpu.json", "--out", out)
    assert code == 0, output
    rows = json.loads(out.read_text())["rows"]
    assert [(row["prices"], row["temperature"]) for row in rows] == [
        (name, heat) for name in ("cpu", "dear rows") for heat in (0.0, 1.0)
    ]
