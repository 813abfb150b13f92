"""`python -m benchmarks gpu`: every part of it runs in a rehearsal, aims are judged by their worst figure, floors are
counted in bytes that must be read."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from benchmarks.__main__ import app
from benchmarks.checkpoint import DRAFTER, write_dummy
from benchmarks.gpu import AIMS, ENGINE_TESTS, KERNEL_TESTS, Findings, check_device, judge
from benchmarks.gpu_sections import DRY, FULL, Figure, read_bytes
from service.assembly import assemble, load_target
from service.config import ServiceConfig
from service.errors import StartupError
from tests.architecture.rules import ROOT
from tests.service.bench.parts import save_two_layers, settings_for

CPU = torch.device("cpu")


def test_a_rehearsal_runs_every_part(tmp_path: Path) -> None:
    out = tmp_path / "gpu.json"
    model = write_dummy("tiny", tmp_path / "tiny")
    arguments = ["gpu", "--dry-run", "--out", str(out), "--state-dir", str(tmp_path)]
    arguments += ["--model", str(model), "--drafter-path", str(model / DRAFTER), "--drafter", "specblock"]
    arguments += ["--load-dtype", "float32", "--large", str(model), "--deepened", str(model)]
    arguments += ["--sections", "training,load,speed,steps,exactness"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    report = json.loads(out.read_text())
    sections = {row["section"] for row in report["rows"]}
    assert sections == {"decode", "verify", "graphs", "drafter", "anatomy", "exactness", "speed", "load", "training"}
    assert report["summary"]["dry_run"] is True
    assert report["summary"]["skipped"] == []
    assert report["summary"]["failed"] == {}
    assert [row["value"] >= 1 for row in report["rows"] if row["name"] == "updates"] == [True]
    verdicts = {aim["what"]: aim["verdict"] for aim in report["summary"]["aims"]}
    assert verdicts["no token differs"] == "met"
    assert set(verdicts.values()) <= {"met", "not judged", "not measured"}
    steps = [row["costs_only"] for row in report["rows"] if row["section"] == "verify"]
    assert steps == [False] * (len(steps) // 2) + [True] * (len(steps) // 2)


def test_a_section_that_breaks_costs_no_other() -> None:
    def breaking() -> Iterator[Figure]:
        yield Figure("load", "half of it", 1.0, "")
        raise RuntimeError("nothing came")

    findings = Findings(DRY)
    findings.measure("broken", breaking)
    findings.measure("sound", lambda: iter([Figure("load", "plain", 2.0, "tokens/s")]))
    assert findings.failed == {"broken": "RuntimeError: nothing came"}
    assert [figure.name for figure in findings.figures] == ["plain"]


def test_every_file_with_tests_for_a_gpu_is_run() -> None:
    marked = [path for path in (ROOT / "tests").rglob("*.py") if re.search(r"pytest\.mark\.gpu\b", path.read_text())]
    run = [ROOT / name for name in (*KERNEL_TESTS, *ENGINE_TESTS)]
    assert len(marked) >= len(run)
    assert all(any(path.is_relative_to(place) for place in run) for path in marked)


def test_a_gpu_is_needed_for_more_than_a_rehearsal() -> None:
    config = ServiceConfig()
    with pytest.raises(StartupError, match="--dry-run"):
        check_device(config, FULL, cuda_devices=0)
    with pytest.raises(StartupError, match="--dry-run"):
        check_device(config.model_copy(update={"device": "cpu"}), FULL, cuda_devices=1)
    check_device(config, FULL, cuda_devices=1)
    check_device(config, DRY, cuda_devices=0)


def figures(share: float, mismatched: int, *, costs_only: bool) -> list[Figure]:
    return [
        Figure("decode", "share of floor", share, "", costs_only=costs_only),
        Figure("exactness", "mismatched tokens", mismatched, "tokens"),
    ]


def test_an_aim_is_judged_by_its_worst_figure() -> None:
    found = judge([*figures(0.9, 0, costs_only=True), *figures(0.5, 3, costs_only=True)], for_real=True)
    by_aim = {judged.what: judged for judged in found}
    assert by_aim[AIMS[0].what].verdict == "missed"
    assert by_aim[AIMS[0].what].value == 0.5
    assert by_aim["no token differs"].verdict == "missed"
    assert by_aim[AIMS[3].what].verdict == "not measured"


def test_a_floor_counts_what_must_be_read(tmp_path: Path) -> None:
    assembly = assemble(settings_for(save_two_layers(tmp_path)))
    weights = sum(value.nbytes for value in load_target(assembly.config, CPU).model.parameters())
    embedding = 320 * 32 * 4
    per_token = 2 * 2 * 1 * 16 * 4
    assert assembly.loaded.kv_shape.bytes_per_slot == per_token
    assert read_bytes(assembly, 10) == weights - embedding + 10 * per_token


def test_the_status_table_names_only_tests_there_are() -> None:
    there = set(re.findall(r"^def (test_\w+)", (ROOT / "tests/e2e/test_cuda.py").read_text(), flags=re.MULTILINE))
    text = (ROOT / "docs/gpu.md").read_text()
    named = set(re.findall(r"`(test_\w+)`", text))
    assert named <= there
    files = re.findall(r"`(tests/[\w/]+(?:\.py)?)`", text)
    assert files
    assert [name for name in files if not (ROOT / name).exists()] == []
