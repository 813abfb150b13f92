"""Every other kind of trained drafter: taught what a target says, it is found by its folder, serves beside the
memory and alone, never changes a token, and goes on learning."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from drafters.network import checkpoint
from drafters.trained_kinds import TRAINED_KINDS, trained_kind
from service.assembly import Assembly, assemble
from service.cli import app
from service.errors import StartupError
from tests.service.bench.parts import settings_for
from tests.service.learning_parts import assert_learns, requests, texts
from tests.taught import speech, taught_model
from tests.tiny_models import VOCAB_SIZE, load

OTHERS = tuple(kind for kind in TRAINED_KINDS if kind not in ("specblock", "mtp"))  # that one comes with targets
STEPS, PROMPT, TOKENS = 30, 12, 32
LONGER = {"eagle3": 150, "dflash": 150, "jetspec": 150}
"""Steps of kinds that do not start from the target's layers."""
FIT = ["--threads=1", "--draft-vocab=256", "--batch-tokens=400", "--warm-up=4", "--learning-rate=0.003", "--seed=1"]


def train(*arguments: object) -> None:
    result = CliRunner(env={"TERM": "dumb"}).invoke(app, ["train", *map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == 0, result.output


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return taught_model("llama", tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def quiet(target: Path) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ADAPTREE_STATE_DIR", str(target / "state"))
        patch.setenv("ADAPTREE_LOAD_DTYPE", "float32")
        patch.setattr("service.logging.configure_logging", lambda level, *, as_json: None)
        yield


@pytest.fixture(scope="module")
def features(target: Path, quiet: None) -> Path:
    """Of texts in the language that the target was taught."""
    folder = target / "features"
    lines = [
        {"id": f"said-{number}", "task": "t", "temperature": 0.0, "prompt": text[:PROMPT], "response": text[PROMPT:]}
        for number, text in enumerate(speech(64, 48, torch.Generator().manual_seed(2)).tolist())
    ]
    (target / "r.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    train("features", "--responses", target / "r.jsonl", "--out", folder, "--target", target, "--threads", 1)
    return folder


@pytest.fixture(scope="module")
def trained(target: Path, features: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The folder of a trained drafter of a kind."""

    @cache
    def of_kind(kind: str) -> Path:
        out = tmp_path_factory.mktemp(kind)
        steps = LONGER.get(kind, STEPS)
        train("fit", "--kind", kind, "--features", features, "--out", out, "--target", target, "--steps", steps, *FIT)
        return out

    return of_kind


def assembled(target: Path, folder: Path, drafter: str = "auto", **changes: object) -> Assembly:
    chosen = {"drafter": drafter, "drafter_path": folder, "budget_policy": "fixed", **changes}
    return assemble(settings_for(target).model_copy(update=chosen))


@pytest.mark.parametrize("kind", OTHERS)
def test_training_teaches_it_to_foretell_the_target(trained: Any, kind: str) -> None:
    described = json.loads((trained(kind) / "config.json").read_text())
    assert described["drafter"]["kind"] == kind
    before, after = described["facts"]["scores_at_start"], described["facts"]["scores"]
    assert after["loss"] < before["loss"]
    goes_on = trained_kind(kind).config.trained_blocks > 1  # behind its own states
    assert after["tree_tau"] > (2.0 if goes_on else 1.4)
    assert len(after["alpha"]) == trained_kind(kind).config.trained_blocks * trained_kind(kind).shape["block_size"]


@pytest.mark.parametrize("kind", OTHERS)
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_it_serves_and_changes_no_token(target: Path, trained: Any, kind: str, temperature: float) -> None:
    assembly = assembled(target, trained(kind))
    assert assembly.drafter_name == f"memory+{kind}"
    prompts = speech(6, PROMPT, torch.Generator().manual_seed(3)).tolist()
    asked = requests(prompts, temperature=temperature, tokens=TOKENS)
    plain = texts(assembly.engine(assembly.drafter("none")), asked)
    for name in (f"memory+{kind}", kind):
        engine = assembly.engine(assembly.drafter(name))
        assert texts(engine, asked) == plain
        assert engine.drafter.name == name
        assert engine.drafter.num_blocks > 0
    assert assembly.weights is not None
    assert assembly.weights.blocks == assembly.weights.network.config.blocks(1)


@pytest.mark.parametrize("kind", OTHERS)
def test_it_learns_while_it_serves(target: Path, trained: Any, kind: str, tmp_path: Path) -> None:
    assembly = assembled(target, trained(kind))
    prompts = speech(16, PROMPT, torch.Generator().manual_seed(4)).tolist()
    asked = requests(prompts, temperature=0.9, tokens=TOKENS)
    assert_learns(assembly, tmp_path, asked)


def test_dflash_begins_with_layers_of_qwen3_and_a_rare_mask_token(target: Path, trained: Any) -> None:
    """Although the target is a Llama; no text holds the mask token."""
    parts = load(target).parts
    model = checkpoint.load(trained("dflash"), parts, dtype=torch.float32, device="cpu")
    assert model.config.target["model_type"] == "qwen3"
    assert model.config.described["mask_token"] == VOCAB_SIZE - 1
    mask = model.get_parameter("input_layer.mask_embedding")
    assert torch.equal(mask, parts.embedding[VOCAB_SIZE - 1].bfloat16().float())


def test_a_folder_says_its_kind_and_a_setting_that_says_another_is_refused(target: Path, trained: Any) -> None:
    assert checkpoint.describe(trained("treeflash")).config.kind == "treeflash"
    with pytest.raises(StartupError, match=r"holds a drafter of kind treeflash: set drafter to auto, treeflash or"):
        assembled(target, trained("treeflash"), "memory+specblock")


def test_a_kind_that_is_not_trained_here_is_refused(features: Path, target: Path, tmp_path: Path) -> None:
    inputs = ["--features", str(features), "--out", str(tmp_path), "--target", str(target), "--steps", "1"]
    for kind in ("medusa", "mtp"):
        result = CliRunner().invoke(app, ["train", "fit", *inputs, *FIT, "--kind", kind])
        assert isinstance(result.exception, StartupError)
        assert f"--kind {kind}: choose one of specblock" in str(result.exception)


def test_a_kind_of_another_version_is_refused(trained: Any, tmp_path: Path) -> None:
    described = json.loads((trained("treeflash") / "config.json").read_text())
    for kind, message in (
        ("later", "is none of specblock, eagle3"),
        ("medusa", "is a plug-in of benchmarks/baselines"),
    ):
        described["drafter"]["kind"] = kind
        (tmp_path / "config.json").write_text(json.dumps(described))
        with pytest.raises(checkpoint.DrafterError, match=f"kind '{kind}' {message}"):
            checkpoint.describe(tmp_path)
