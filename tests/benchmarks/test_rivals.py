"""Another engine beside ours: transformers, served from the environment of the tests."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks import rivals
from service.bench.experiment import Row
from service.errors import StartupError
from tests.service.bench.parts import save_two_layers


@pytest.fixture
def measure(
    run: Callable[..., tuple[int, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str], tuple[list[Row], str]]:
    """Rows and output for these engines and a tiny model."""
    monkeypatch.setattr(rivals, "_environment", lambda engine, folder: Path(sys.executable))
    model, prompts, out = save_two_layers(tmp_path / "model"), tmp_path / "prompts.jsonl", tmp_path / "out"
    chats = ([{"role": "user", "content": text}] for text in ("a b", "c d e", "f"))
    prompts.write_text("\n".join(json.dumps({"messages": chat}) for chat in chats))

    def measure(engines: str) -> tuple[list[Row], str]:
        code, output = run(
            *(
                "rivals --max-tokens 8 --limit 3 --sampling",
                '{"temperature":0}',
                "--engines",
                engines,
                "--prompts",
                prompts,
            ),
            *("--out", out, "--model", model, "--load-dtype", "float32", "--device", "cpu", "--threads", 1),
            *("--max-model-len", 256, "--state-dir", tmp_path),
        )
        assert code == 0, output
        return json.loads((out / "rivals.json").read_text())["rows"], output

    return measure


def test_transformers_answers_as_ours_does(
    measure: Callable[[str], tuple[list[Row], str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, output = measure("adaptree:again,transformers:plain+lookup-3")
    assert [row["mode"] for row in rows] == ["plain", "default", "again", "plain", "default", "plain", "lookup-3"]
    assert all(row["same_as_plain"] == row["same_as_own_plain"] == row["completed"] == 3 for row in rows)
    assert all(row["resident_megabytes"] > 1 for row in rows)
    assert [row["beside"] for row in rows] == [*3 * ["adaptree"], *4 * ["transformers"]]
    assert list(rows[0]["by_set"]) == ["prompts"]
    assert "lookup-3" in output
    monkeypatch.setattr(rivals, "measured", None)
    assert measure("adaptree:again,transformers:plain+lookup-3")[0] == rows  # from its cells


def test_an_engine_that_cannot_serve_the_model_says_so(measure: Callable[[str], tuple[list[Row], str]]) -> None:
    rows, output = measure("openvino:plain")
    assert [row.get("failure") is None for row in rows] == [True, True, False]
    assert "GGUF" in output


@pytest.mark.parametrize("engines", ["vlm", "vllm:plane"])
def test_an_unknown_engine_or_mode_is_refused(engines: str) -> None:
    with pytest.raises(StartupError, match=r"--engines .*(?:vllm|plain)"):
        rivals.chosen_modes(engines)
