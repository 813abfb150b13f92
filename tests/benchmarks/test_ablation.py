"""Ablations: what is refused, what is compared, and that nobody's text differs."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.ablation import ABLATIONS, config_for, measure_variants, refuse_impossible, variants_of
from drafters.specblock.growth import POLICIES
from service.assembly import Assembly
from service.bench.experiment import Measure
from service.config import ServiceConfig
from service.errors import StartupError
from service.prompts import PromptSet
from tests.service.bench.parts import save_drafter, varied_prompts, written_prompts

PARTS = (("a", 0), ("b", 4))
SETS = [PromptSet(name, tuple(map(tuple, varied_prompts()[at : at + 2]))) for name, at in PARTS]
CHANGES: dict[str, dict[str, Any]] = {
    "full": {},
    "shift": {"shift": False},
    "broadcast": {"broadcast": False},
    "valid_prefix": {},
    "prefix": {"prefix_entries": "all"},
}


@pytest.fixture(scope="module")
def folders(assembly: Assembly, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ablation")
    for seed, (name, changes) in enumerate(CHANGES.items()):
        save_drafter(folder / name, assembly, seed=seed, **changes)
    return folder


def test_every_ablation_has_its_variants(trained_assembly: Assembly, folders: Path) -> None:
    variants = variants_of(trained_assembly, ABLATIONS, folders)
    by_ablation = {ablation: [v for v in variants if v.ablation == ablation] for ablation in ("", *ABLATIONS)}
    assert {ablation: len(mine) for ablation, mine in by_ablation.items()} == {
        **{"": 1, "shift": 1, "broadcast": 1, "rank": len(POLICIES) - 1, "valid_prefix": 1, "coupling": 1, "prefix": 1}
    }
    assert not by_ablation["shift"][0].weights.network.config.shift
    assert not by_ablation["broadcast"][0].weights.network.config.broadcast
    assert by_ablation["prefix"][0].weights.network.config.prefix_entries == "all"
    assert {v.weights.policy for v in by_ablation["rank"]} == set(POLICIES) - {"best_first"}
    assert [v.ablation for v in variants if not v.coupled] == ["coupling"]
    assert all(v.weights.blocks == 3 for v in variants)


def test_variants_verify_equal_nodes_and_change_no_token(trained_assembly: Assembly, folders: Path) -> None:
    variants = variants_of(trained_assembly, ["shift", "prefix", "coupling"], folders)
    done: list[int] = []
    measure = Measure(1.0, 8, 1, seed=2)
    rows = measure_variants(trained_assembly, SETS, variants, measure, nodes=6, observe=1, advance=done.append)
    assert [row.ablation for row in rows] == ["", "shift", "prefix", "coupling"]
    assert sum(done) == 4
    for row in rows:
        assert (row.mismatched_tokens, row.prompts, row.tokens, row.temperature) == (0, 4, 32, 1.0)
        assert 0 < row.nodes_per_step <= 6
        assert row.tau >= 1
        assert len(row.alpha) == 4
        assert row.alpha[0].of > 0


def test_withheld_noise_is_not_compared_at_temperature_zero(trained_assembly: Assembly) -> None:
    variants = variants_of(trained_assembly, ["coupling"], None)
    rows = measure_variants(trained_assembly, SETS[:1], variants, Measure(0.0, 6, 1, seed=2), nodes=4, observe=0)
    assert [row.variant for row in rows] == ["full"]
    assert rows[0].alpha[0].rate is None


@pytest.mark.parametrize(
    ("ablations", "temperatures", "words"),
    [
        (["shift", "wings"], [0.0], "--ablate wings: choose from shift"),
        (["rank", "shift", "prefix"], [0.0], "--ablate shift,prefix needs weights .* full, shift, prefix"),
        (["coupling"], [0.0], "add --temperature 1"),
    ],
)
def test_what_cannot_be_compared_is_refused(ablations: list[str], temperatures: list[float], words: str) -> None:
    with pytest.raises(StartupError, match=words):
        refuse_impossible(ablations, None, temperatures)


def test_missing_or_foreign_weights_are_named(trained_assembly: Assembly, tmp_path: Path, folders: Path) -> None:
    with pytest.raises(StartupError, match=r"shift: config\.json cannot be read"):
        variants_of(trained_assembly, ["shift"], tmp_path)
    described = json.loads((folders / "shift" / "config.json").read_text())
    described["drafter"]["tap_layers"] = [0]
    (tmp_path / "shift").mkdir()
    (tmp_path / "shift" / "config.json").write_text(json.dumps(described))
    with pytest.raises(StartupError, match=r"reads target layers \(0,\), the full drafter reads \(0, 1\)"):
        variants_of(trained_assembly, ["shift"], tmp_path)


def test_the_full_drafter_comes_from_the_folder_of_weights(tmp_path: Path) -> None:
    config = ServiceConfig(drafter="lookup", drafter_path=tmp_path)
    assert config_for(config, None).drafter_path == tmp_path
    found = config_for(config, tmp_path / "all")
    assert (found.drafter, found.drafter_path) == ("specblock", tmp_path / "all" / "full")
    with pytest.raises(StartupError, match="leave drafter unset"):
        config_for(ServiceConfig(drafter="none"), None)


def test_the_command_writes_a_row_per_variant(
    run: Callable[..., tuple[int, str]], trained_assembly: Assembly, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "service.bench.experiment.assemble", lambda config: replace(trained_assembly, drafter_name="specblock")
    )
    prompts, out = tmp_path / "some.jsonl", tmp_path / "out.json"
    prompts.write_text(next(written_prompts()))
    arguments = ["ablation", "--prompts", prompts, "--max-tokens", 6, "--ablate", "rank, coupling", "--out", out]
    arguments += ["--temperature", 0, "--temperature", 1, "--ablation-nodes", 5, "--observe", 1]
    code, output = run(*arguments)
    assert code == 0, output
    assert "growth uniform" in output
    report = json.loads(out.read_text())
    assert len(report["rows"]) == 2 * len(POLICIES) + 1
    assert report["summary"] == {"variants": len(POLICIES) + 1, "nodes": 5, "mismatched_tokens": 0}
    assert set(report["rows"][0]) == {
        *("ablation", "variant", "temperature", "prompts", "tokens", "nodes_per_step", "tokens_per_second"),
        *("speedup", "tau", "alpha", "mismatched_tokens"),
    }
