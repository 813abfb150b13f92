"""What idle time makes of past traffic is measured beside a memory of the same traffic, and resumed."""

import json
from collections.abc import Callable
from pathlib import Path

from service.config import ServiceConfig
from service.learning.features import make_features
from tests.service.bench.parts import save_two_layers, written_prompts

Command = Callable[..., tuple[int, str]]


def test_a_run_learns_from_past_texts_and_resumes(run: Command, tmp_path: Path) -> None:
    folder = save_two_layers(tmp_path / "model")
    responses = [
        {"id": f"a-{n}", "temperature": 0.0, "prompt": [5, 6, 7], "response": [8 + n, 9, 10, 11] * 4} for n in range(6)
    ]
    past, prompts, out = (tmp_path / name for name in ("past.jsonl", "prompts.jsonl", "out.json"))
    past.write_text("".join(json.dumps(one) + "\n" for one in responses))
    prompts.write_text("\n".join(list(written_prompts()) * 6))
    config = ServiceConfig(model=str(folder), load_dtype="float32", device="cpu", threads=1, state_dir=tmp_path)
    make_features(config, [past], tmp_path / "features", deadline=None)
    words = (
        *("idle", "--prompts", prompts, "--practice", prompts, "--features", tmp_path / "features", "--out", out),
        *("--model", folder, "--load-dtype", "float32", "--threads", 1, "--max-model-len", 256, "--device", "cpu"),
        *("--state-dir", tmp_path, "--answered", 60, "--minutes", 0.1, "--requests", 2, "--max-tokens", 24),
        *("--temperature", 0.7, "--adaptation.enabled", "true"),
    )
    code, output = run(*words)
    assert code == 0, output
    report = json.loads(out.read_text())
    assert report["summary"]["past_texts"] == 6
    assert report["summary"]["past_labels"] == 6 * 16
    assert report["summary"]["mismatched_tokens"] == 0
    assert [(row["set"], row["requests"]) for row in report["rows"]] == [("prompts", 2), ("all", 2)]
    assert all(0 <= event["minutes"] <= 0.2 for event in report["summary"]["events"])
    assert "solved" in [event["kind"] for event in report["summary"]["events"]], output
    assert run(*words)[0] == 0
    kinds = [event["kind"] for event in json.loads(out.read_text())["summary"]["events"]]
    assert "restored" in kinds or "solved" not in kinds
