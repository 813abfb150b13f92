"""`adaptree train` from the outside: one command end to end, the stages one by one, and what is refused."""

import json
from collections.abc import Iterator
from itertools import cycle, islice
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from drafters.network import checkpoint
from drafters.training.corpus import Example
from drafters.training.fit import FitLoop, FitReport, Length
from service.assembly import assemble
from service.cli import app
from service.engine.weights import describe, load_model
from service.errors import StartupError
from tests.service.learning.parts import TAPS, save_target, settings, write_prompts, write_responses

WIDE = {"COLUMNS": "200", "TERM": "dumb", "NO_COLOR": "1"}
QUICK = ["--threads", "1", "--draft-vocab", "96", "--batch-tokens", "150", "--warm-up", "2"]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(autouse=True)
def _quiet_and_exact(monkeypatch: pytest.MonkeyPatch, target: Path) -> None:
    torch.set_num_threads(1)
    monkeypatch.setenv("ADAPTREE_STATE_DIR", str(target / "state"))
    monkeypatch.setenv("ADAPTREE_LOAD_DTYPE", "float32")
    monkeypatch.setenv("ADAPTREE_KV_CACHE", "10MiB")
    monkeypatch.setenv("ADAPTREE_BUDGET_POLICY", "fixed")
    monkeypatch.setattr("service.logging.configure_logging", lambda level, *, as_json: None)


def run(*arguments: object) -> None:
    result = CliRunner(env=WIDE).invoke(app, ["train", *map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == 0, result.output


def refused(*arguments: object) -> str:
    result = CliRunner(env=WIDE).invoke(app, ["train", *map(str, arguments)])
    assert isinstance(result.exception, StartupError), result.output
    return str(result.exception)


@pytest.fixture(scope="module")
def features(tmp_path_factory: pytest.TempPathFactory, target: Path) -> Path:
    folder = tmp_path_factory.mktemp("features")
    responses = write_responses(folder / "r.jsonl", 20)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ADAPTREE_STATE_DIR", str(target / "state"))
        patch.setenv("ADAPTREE_LOAD_DTYPE", "float32")
        patch.setattr("service.logging.configure_logging", lambda level, *, as_json: None)
        run("features", "--responses", responses, "--out", folder / "f", "--target", target, "--threads", 1)
    return folder / "f"


def test_one_command_from_prompts_to_a_drafter_that_serves(target: Path, tmp_path: Path) -> None:
    prompts, out = write_prompts(tmp_path / "p.jsonl", 20), tmp_path / "drafter"
    run(
        *("drafter", "--target", target, "--prompts", prompts, "--out", out, "--minutes", 0.1),
        *("--max-new-tokens", 16, "--concurrency", 4, *QUICK),
    )
    names = {path.name for path in out.iterdir()}
    assert names == {"README.md", "config.json", "curve.jsonl", "fit.pt", "model.safetensors", "work"}
    facts = json.loads((out / "config.json").read_text())["facts"]
    assert 4 <= sum(facts["data"]["responses_by_source"].values()) <= 20  # as many as there was time for
    assert facts["data"]["responses_by_source"].keys() == {"songs-of-0", "songs-of-1", "songs-of-2"}
    assert facts["data"]["files"].keys() == {"responses.jsonl"}
    assert facts["training"]["tokens_seen"] > 0
    assert facts["training"]["initialisation"]["exact"]
    points = [json.loads(line) for line in (out / "curve.jsonl").read_text().splitlines()]
    assert [point["step"] for point in points] == [0, facts["training"]["steps"]]
    assert facts["scores"] == points[-1]["scores"]
    assert "songs-of-1" in (out / "README.md").read_text()
    assert str(tmp_path) not in (out / "config.json").read_text()
    assert "| cost | 0." in (out / "README.md").read_text()

    before = load_file(out / "model.safetensors")
    run("drafter", "--target", target, "--prompts", prompts, "--out", out, "--minutes", 9, *QUICK)
    again = load_file(out / "model.safetensors")
    assert all(torch.equal(value, again[name]) for name, value in before.items()), "it was finished"

    served = settings(target).model_copy(update={"drafter": "specblock", "drafter_path": out})
    assert assemble(served).drafter().tap_layers == TAPS


def test_a_tied_head_is_not_stored_and_an_own_one_is(target: Path, features: Path, tmp_path: Path) -> None:
    fit = ("--steps", 2, *QUICK)
    run("fit", "--features", features, "--out", tmp_path / "tied", "--target", target, *fit)
    assert "lm_head.weight" not in load_file(tmp_path / "tied" / "model.safetensors")
    free = save_target(tmp_path / "free", tied=False)
    responses = write_responses(tmp_path / "r.jsonl", 20)
    run("features", "--responses", responses, "--out", tmp_path / "f", "--target", free, "--threads", 1)
    run("fit", "--features", tmp_path / "f", "--out", tmp_path / "own", "--target", free, *fit)
    assert load_file(tmp_path / "own" / "model.safetensors")["lm_head.weight"].shape == (96, 32)


class Killed(Exception):
    """What a kill is to a run."""


def test_fit_goes_on_where_it_was_killed(
    target: Path, features: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four steps in one go, and two steps, a kill and the rest: weights are equal bit for bit."""
    common = ("fit", "--features", features, "--target", target, "--steps", 4, *QUICK)
    run(*common, "--out", tmp_path / "whole")
    true_run = FitLoop.run

    def killed_run(self: FitLoop, examples: list[Example], length: Length) -> Iterator[FitReport]:
        for report in true_run(self, examples, length):
            if report.position.step == 3:
                raise Killed
            yield report

    monkeypatch.setattr(FitLoop, "run", killed_run)
    with pytest.raises(Killed):
        run(*common, "--out", tmp_path / "torn", "--evaluate-minutes", 0)
    monkeypatch.setattr(FitLoop, "run", true_run)
    assert torch.load(tmp_path / "torn" / "fit.pt")["position"]["step"] == 2
    run(*common, "--out", tmp_path / "torn")
    whole = load_file(tmp_path / "whole" / "model.safetensors")
    torn = load_file(tmp_path / "torn" / "model.safetensors")
    assert all(torch.equal(value, torn[name]) for name, value in whole.items())
    steps = [json.loads(line)["step"] for line in (tmp_path / "torn" / "curve.jsonl").read_text().splitlines()]
    assert steps == [0, 1, 2, 4]


def test_a_run_that_is_taken_up_ends_where_it_was_to_end(
    target: Path, features: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths, true_run = list[Length](), FitLoop.run

    def killed_run(self: FitLoop, examples: list[Example], length: Length) -> Iterator[FitReport]:
        lengths.append(length)
        yield from islice(true_run(self, examples, length), 2)
        raise Killed

    monkeypatch.setattr(FitLoop, "run", killed_run)
    measured = cycle([True, False])  # two times that are nearly the same
    monkeypatch.setattr("service.learning.fit.bf16_is_faster", lambda device: next(measured))
    common = ("--target", target, "--out", tmp_path, "--evaluate-minutes", 0, *QUICK)
    fit, responses = ("fit", "--features", features, *common), features.parent / "r.jsonl"
    for arguments in (
        ("drafter", "--responses", responses, "--minutes", 5, *common),
        ("drafter", "--minutes", 9, *common),
        fit,
        (*fit, "--steps", 7),
        fit,
    ):
        with pytest.raises(Killed):
            run(*arguments)
    whole = lengths[0].seconds
    assert whole is not None
    assert 200 < whole < 300
    assert lengths == [Length(seconds=whole)] * 3 + [Length(steps=7)] * 2


@pytest.mark.parametrize("ablation", ["shift,rank", "broadcast", "valid_prefix", "coupling"])
def test_ablations_train_and_load(target: Path, features: Path, tmp_path: Path, ablation: str) -> None:
    without = ("--steps", 2, "--ablate", ablation)
    run("fit", "--features", features, "--out", tmp_path, "--target", target, *without, *QUICK)
    cpu = torch.device("cpu")
    loaded = load_model(describe(str(target), revision=None, unverified=False), dtype=torch.float32, device=cpu)
    model = checkpoint.load(tmp_path, loaded.parts, dtype=torch.float32, device="cpu")
    assert bool(model.shift_proj) is ("shift" not in ablation)
    assert model.config.described["broadcast"] is (ablation != "broadcast")
    assert model.config.coupled is (ablation != "coupling")
    facts = json.loads((tmp_path / "config.json").read_text())["facts"]
    assert facts["training"]["without"] == sorted(ablation.split(","))


def test_training_goes_on_from_another_drafter(target: Path, features: Path, tmp_path: Path) -> None:
    """No step at all writes the weights it started from; a run of the same name goes on from them."""
    common = ("fit", "--features", features, "--target", target, *QUICK)
    run(*common, "--steps", 2, "--out", tmp_path / "first")
    more = (*common, "--start-from", tmp_path / "first", "--out", tmp_path / "second")
    run(*more, "--minutes", 0)
    first, second = (load_file(tmp_path / name / "model.safetensors") for name in ("first", "second"))
    assert first.keys() == second.keys()
    assert all(torch.equal(value, second[name]) for name, value in first.items())
    described = json.loads((tmp_path / "second" / "config.json").read_text())
    assert described["facts"]["training"]["started_from"]
    other = (*common, "--ablate", "shift", "--start-from", tmp_path / "first", "--out", tmp_path / "other")
    run(*other, "--minutes", 0)
    of_other_shape = load_file(tmp_path / "other" / "model.safetensors")
    assert first.keys() > of_other_shape.keys()
    assert all(torch.equal(first[name][: len(value)], value) for name, value in of_other_shape.items())
    unlike = (*common, "--steps", 1, "--layers", 1, "--start-from", tmp_path / "first", "--out", tmp_path / "no")
    assert "layers or sizes of that drafter differ" in refused(*unlike)
    assert "cannot be read" in refused(*common, "--steps", 1, "--start-from", tmp_path, "--out", tmp_path / "no")


def test_what_does_not_fit_is_refused(target: Path, features: Path, tmp_path: Path) -> None:
    fit = ("fit", "--out", tmp_path / "out", "--target", target, "--threads", 1)
    assert "--kind mtp: choose one of specblock" in refused(*fit, "--features", features, "--steps", 1, "--kind", "mtp")
    whole = ("drafter", "--out", tmp_path / "out", "--target", target, "--minutes", 1)
    assert "give --prompts to be answered, or --responses" in refused(*whole)
    assert "choose among shift" in refused(*fit, "--features", features, "--steps", 1, "--ablate", "shft")
    assert "give --minutes or --steps" in refused(*fit, "--features", features)
    assert "adaptree train features" in refused(*fit, "--features", tmp_path, "--steps", 1)
    assert "lower --batch-tokens" in refused(*fit, "--features", features, "--steps", 1)
    other = save_target(tmp_path / "other", seed=3)
    wrong = refused("fit", "--out", tmp_path / "out", "--target", other, "--features", features, "--steps", 1)
    assert "holds features of target" in wrong


def test_a_run_is_not_gone_on_with_for_another_target(target: Path, features: Path, tmp_path: Path) -> None:
    out, other = tmp_path / "out", save_target(tmp_path / "other", seed=3)
    fit = ("fit", "--out", out, "--steps", 2, *QUICK)
    run(*fit, "--features", features, "--target", target)
    run("features", "--responses", features.parent / "r.jsonl", "--out", tmp_path / "f", "--target", other)
    assert "target_identity was '" in refused(*fit, "--features", tmp_path / "f", "--target", other)
