"""`adaptree drafter`: what was learnt on one server serves on another, and what cannot serve is refused by name."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig

from adaptation.checkpoint import SNAPSHOTS, WEIGHTS, folder_name, stored_versions
from drafters.network import checkpoint
from drafters.network.checkpoint import CARD_FILE, CONFIG_FILE, VOCABULARY, WEIGHTS_FILE, weights_of
from drafters.network.config import SpecBlockConfig, config_from
from drafters.network.model import SpecBlock
from drafters.published import folders
from drafters.trained_kinds import TRAINED_KINDS
from service.assembly import Assembly, assemble
from service.config import ServiceConfig
from service.drafter_choice import choose_drafter
from service.engine import drafter_weights
from service.engine.drafter_weights import import_place
from service.errors import StartupError
from service.learning.adaptive import Adaptive, learning_folder
from service.learning.moving import DRAFTER_FILE, Origin
from tests.service.bench.parts import DRAFT_VOCAB, run_command
from tests.service.learning_parts import assembled, built
from tests.tiny_models import VOCAB_SIZE


@pytest.fixture(scope="module")
def assembly(tmp_path_factory: pytest.TempPathFactory) -> Assembly:
    """Its state_dir stays empty: what is learnt lies in folders of the tests."""
    return assembled(tmp_path_factory.mktemp("tiny"), drafter="specblock", dtype="bfloat16")


@pytest.fixture(scope="module")
def learnt_once(
    assembly: Assembly, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[int, dict[str, Tensor]]]:
    """A state folder in which versions 1 to 3 were published and 3 was taken back, and what 1 and 2 were."""
    state = tmp_path_factory.mktemp("learnt")
    adaptive = learner_in(assembly, state)
    published: dict[int, dict[str, Tensor]] = {}
    for version in (1, 2, 3):
        weights = moved(adaptive, version)
        assert adaptive.learner.adopt(weights) == version
        adaptive.learner.weights.between_steps()
        published[version] = weights
    adaptive.learner.rollback()
    return state, published


@pytest.fixture
def state(learnt_once: tuple[Path, dict[int, dict[str, Tensor]]], tmp_path: Path) -> Path:
    """The same, to be changed."""
    return copytree(learnt_once[0], tmp_path / "state")


@pytest.fixture
def published(learnt_once: tuple[Path, dict[int, dict[str, Tensor]]]) -> dict[int, dict[str, Tensor]]:
    return learnt_once[1]


def learner_in(assembly: Assembly, state: Path) -> Adaptive:
    assert assembly.drafter_folder is not None
    folder = learning_folder(state, assembly.loaded, assembly.drafter_folder)
    return built(assembly, folder)


def moved(adaptive: Adaptive, by: int) -> dict[str, Tensor]:
    """The drafter that serves with other weights and other tokens, in bf16."""
    generator = torch.Generator().manual_seed(by)
    weights = {
        name: value + torch.randn(value.shape, generator=generator).to(value)
        for name, value in adaptive.learner.weights.latest.weights.items()
        if value.is_floating_point()
    }
    return {**weights, VOCABULARY: torch.randperm(VOCAB_SIZE, generator=generator)[:DRAFT_VOCAB]}


def settings_of(assembly: Assembly, state: Path, **changes: object) -> ServiceConfig:
    """A server that has this state, and was told of no drafter."""
    return assembly.config.model_copy(update={"state_dir": state, "drafter_path": None, "drafter": "auto", **changes})


def run(assembly: Assembly, state: Path, *words: object) -> tuple[int, str]:
    return run_command("drafter", *words, "--model", assembly.config.model, "--state-dir", state)


def inspected(assembly: Assembly, state: Path, *words: object) -> dict[str, Any]:
    code, output = run(assembly, state, "inspect", *words, "--json")
    assert code == 0, output
    told: dict[str, Any] = json.loads(output)
    return told


def learning_folder_in(state: Path) -> Path:
    (folder,) = (state / "adaptation").iterdir()
    return folder


def test_what_was_learnt_serves_on_another_server(
    assembly: Assembly, state: Path, published: dict[int, dict[str, Tensor]], tmp_path: Path
) -> None:
    out, other = tmp_path / "out", tmp_path / "other"
    assert run(assembly, state, "export", "--out", out)[0] == 0
    assert {path.name for path in out.iterdir()} == {CONFIG_FILE, WEIGHTS_FILE, CARD_FILE}
    there = settings_of(assembly, other)
    assert choose_drafter(there) == ("memory", None)
    code, output = run(assembly, other, "import", out)
    assert code == 0
    assert str(import_place(there)) in output
    assert [path.name for path in (other / "drafters").iterdir()] == [import_place(there).name]
    assert choose_drafter(there) == ("memory+specblock", import_place(there))
    network = drafter_weights.load_network(import_place(there), assembly.loaded)
    assert_equal(weights_of(network), published[2])
    assert assemble(there.model_copy(update={"budget_policy": "fixed"})).drafter_name == "memory+specblock"


def assert_equal(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    assert [name for name in wanted if not found[name].equal(wanted[name])] == []


def test_any_kept_version_can_be_exported(
    assembly: Assembly, state: Path, published: dict[int, dict[str, Tensor]], tmp_path: Path
) -> None:
    for version in (1, 3):
        out = tmp_path / str(version)
        assert run(assembly, state, "export", "--out", out, "--version", version)[0] == 0
        assert_equal(weights_of(drafter_weights.load_network(out, assembly.loaded)), published[version])
    with pytest.raises(StartupError, match=r"version 9 is not kept .*--version \(1, 2, 3\)"):
        run(assembly, state, "export", "--out", tmp_path / "9", "--version", "9")
    assert not (tmp_path / "9").exists()


def test_an_exported_drafter_says_where_it_comes_from(assembly: Assembly, state: Path, tmp_path: Path) -> None:
    run(assembly, state, "export", "--out", tmp_path / "out")
    deployed = assembly.config.drafter_path
    assert deployed is not None
    kept = {row["version"]: row for row in inspected(assembly, state)["learnt"][0]["versions"]}
    told = inspected(assembly, state, tmp_path / "out")
    assert told["facts"]["lineage"] == {
        "version": 2,
        "parent": 1,
        "date": kept[2]["date"],
        "scores": {},
        "origin_sha256": inspected(assembly, state, deployed)["weights_sha256"],
        "weights_sha256": kept[2]["weights_sha256"],
    }
    card = (tmp_path / "out" / CARD_FILE).read_text()
    assert kept[2]["weights_sha256"] in card
    assert str(Path(assembly.config.model).parent) not in card + json.dumps(told["facts"])


def test_a_drafter_folder_leaves_in_the_forms_of_its_kind(assembly: Assembly, tmp_path: Path) -> None:
    layers = LlamaConfig(hidden_size=48, intermediate_size=96, num_attention_heads=4, vocab_size=VOCAB_SIZE).to_dict()
    shape = TRAINED_KINDS["eagle3"].shape
    model = SpecBlock(SpecBlockConfig(layers, (1, 3, 4), draft_vocab_size=DRAFT_VOCAB, kind="eagle3", **shape))
    folder = tmp_path / "eagle3"
    checkpoint.save(folder, model, target_identity="abc", facts={"target": "ORG/target"}, own_head=True)
    for form in ("eagle3", "speculators"):
        out = tmp_path / f"as-{form}"
        code, output = run(assembly, tmp_path, "export", "--from", folder, "--format", form, "--out", out)
        assert code == 0, output
        written = folders.form_of(out)
        assert written is not None
        assert written.name == form
        assert load_file(out / WEIGHTS_FILE)["fc.weight"].equal(model.input_layer.condition_proj.weight.bfloat16())
        assert f"| form | {form} |" in (out / CARD_FILE).read_text()
    with pytest.raises(StartupError, match="--format dflash: drafters of kind eagle3 can be written as eagle3, specul"):
        run(assembly, tmp_path, "export", "--from", folder, "--format", "dflash", "--out", tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_a_drafter_on_the_hub_is_found_by_its_id(tmp_path: Path) -> None:
    """In the hub's own cache, laid out as its client does, without a network."""
    repository, revision = tmp_path / "hub" / "models--ORG--some-drafter", "0123456789abcdef0123456789abcdef01234567"
    snapshot = repository / "snapshots" / revision
    snapshot.mkdir(parents=True)
    (snapshot / CONFIG_FILE).write_text("{}")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(revision)
    script = """
from pathlib import Path
from service.drafter_choice import local_folder
from service.errors import StartupError
print(local_folder(Path("ORG/some-drafter")), local_folder(Path("a/b/c")), local_folder(Path("/nowhere")))
try:
    local_folder(Path("ORG/other"))
except StartupError as error:
    print(error)
"""
    env = {**os.environ, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    env.pop("HF_HUB_CACHE", None)
    found = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, check=True).stdout
    places, refusal = found.split("\n", 1)
    assert places.split() == [str(snapshot), "a/b/c", "/nowhere"]
    assert refusal.startswith("drafter ORG/other is no folder here and cannot be fetched from the hub: ")


def test_inspect_tells_versions_and_which_one_serves(assembly: Assembly, state: Path) -> None:
    (one,) = inspected(assembly, state)["learnt"]
    assert (one["served"], one["newest"], one["complaints"]) == (2, 4, [])
    rows = [(row["version"], row["parent"], row["served"], row["taken_back"]) for row in one["versions"]]
    assert rows == [(1, 0, False, False), (2, 1, True, False), (3, 2, False, True)]
    assert (one["target_identity"], one["model"]) == (assembly.loaded.parts.identity, assembly.config.model)
    assert one["drafter"]["draft_vocab_size"] == DRAFT_VOCAB
    assert inspected(assembly, state, learning_folder_in(state))["learnt"] == [one]
    code, output = run(assembly, state, "inspect")
    assert code == 0
    assert [word in output for word in ("served", "taken back", one["versions"][1]["weights_sha256"][:16])] == [
        True
    ] * 3


def test_inspecting_changes_nothing(assembly: Assembly, state: Path) -> None:
    """A running server may be writing a snapshot."""
    for parent in (SNAPSHOTS, "training"):
        (learning_folder_in(state) / parent / ".unfinished-0000000009").mkdir(parents=True)
    before = sorted(state.rglob("*"))
    inspected(assembly, state)
    assert sorted(state.rglob("*")) == before


def test_inspect_tells_what_a_folder_holds(assembly: Assembly, tmp_path: Path) -> None:
    folder = assembly.config.drafter_path
    assert folder is not None
    told = inspected(assembly, tmp_path, folder)
    network = drafter_weights.load_network(folder, assembly.loaded)
    assert told["parameters"] == sum(value.numel() for value in network.parameters())
    assert told["tensors"] == {name: list(value.shape) for name, value in weights_of(network).items()}
    assert (told["architecture"], told["dtype"], told["stores_head"]) == ("SpecBlock", "bfloat16", True)
    assert config_from(told["drafter"]) == network.config
    assert told["bytes"] == (folder / WEIGHTS_FILE).stat().st_size
    code, output = run(assembly, tmp_path, "inspect", folder)
    assert code == 0
    assert told["weights_sha256"] in output


def test_where_nothing_was_learnt_it_is_said(assembly: Assembly, tmp_path: Path) -> None:
    assert inspected(assembly, tmp_path)["learnt"] == []
    assert "nothing was learnt" in run(assembly, tmp_path, "inspect")[1]
    with pytest.raises(StartupError, match=r"nothing was learnt .*adaptation.enabled true"):
        run(assembly, tmp_path, "export", "--out", tmp_path / "out")


def test_the_deployed_drafter_is_not_exported_as_something_learnt(
    assembly: Assembly, state: Path, tmp_path: Path
) -> None:
    for name in ("learner.json", "learner.previous.json"):
        (learning_folder_in(state) / name).unlink()
    with pytest.raises(StartupError, match=r"as it was deployed.*--version \(kept: 1, 2, 3\)"):
        run(assembly, state, "export", "--out", tmp_path / "out")


def test_one_of_several_drafters_has_to_be_chosen(assembly: Assembly, state: Path, tmp_path: Path) -> None:
    first = learning_folder_in(state)
    copytree(first, first.with_name("second"))
    with pytest.raises(StartupError, match=r"(?s)choose one with --from\n.*3 versions.*\n  second: 3 versions"):
        run(assembly, state, "export", "--out", tmp_path / "out")
    for number, name in enumerate(("second", first)):
        assert run(assembly, state, "export", "--out", tmp_path / str(number), "--from", name)[0] == 0
    with pytest.raises(StartupError, match="--from third: no such folder"):
        run(assembly, state, "export", "--out", tmp_path / "third", "--from", "third")


def test_what_another_model_has_learnt_is_not_mixed_in(assembly: Assembly, state: Path) -> None:
    first = learning_folder_in(state)
    origin = Origin.read(copytree(first, first.with_name("second")))
    assert origin is not None
    Origin(origin.target_identity, origin.config, "another/model").write(first.with_name("second"))
    assert [one["folder"] for one in inspected(assembly, state)["learnt"]] == [str(first)]


def test_a_drafter_made_from_traffic_is_exported_without_an_origin(
    assembly: Assembly, state: Path, tmp_path: Path
) -> None:
    folder = learning_folder_in(state)
    told = json.loads((folder / DRAFTER_FILE).read_text())
    (folder / DRAFTER_FILE).write_text(json.dumps({name: told[name] for name in ("target_identity", "drafter")}))
    assert run(assembly, state, "export", "--out", tmp_path / "out")[0] == 0
    assert inspected(assembly, state, tmp_path / "out")["facts"]["lineage"]["origin_sha256"] is None


def test_a_folder_that_does_not_name_its_drafter_is_refused_with_what_to_do(
    assembly: Assembly, state: Path, tmp_path: Path
) -> None:
    file = learning_folder_in(state) / DRAFTER_FILE
    for content in (None, "{}", "no json"):
        file.unlink() if content is None else file.write_text(content)
        with pytest.raises(StartupError, match=r"does not say what its drafter is like.*start its server once"):
            run(assembly, state, "export", "--out", tmp_path / "out")
        file.touch()
    assert [row["version"] for row in inspected(assembly, state)["learnt"][0]["versions"]] == [1, 2, 3]


def test_a_damaged_snapshot_is_refused_and_others_are_named(assembly: Assembly, state: Path, tmp_path: Path) -> None:
    file = learning_folder_in(state) / SNAPSHOTS / folder_name(2) / WEIGHTS
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(StartupError, match=r"version 2 .*cannot be trusted: .*hash.*--version \(1, 3\)"):
        run(assembly, state, "export", "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_what_is_there_is_not_overwritten(assembly: Assembly, state: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    assert run(assembly, state, "export", "--out", out)[0] == 0
    with pytest.raises(StartupError, match="is there already, and not empty"):
        run(assembly, state, "export", "--out", out)
    assert run(assembly, state, "import", out)[0] == 0
    with pytest.raises(StartupError, match=r"holds a drafter .* already: replace it with --force"):
        run(assembly, state, "import", out)
    run(assembly, state, "export", "--out", tmp_path / "first", "--version", "1")
    assert run(assembly, state, "import", tmp_path / "first", "--force")[0] == 0
    place = import_place(settings_of(assembly, state))
    assert checkpoint.describe(place).facts["lineage"]["version"] == 1
    assert [path.name for path in place.parent.iterdir()] == [place.name]


def test_an_import_that_breaks_leaves_what_was_there(
    assembly: Assembly, state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(assembly, state, "export", "--out", tmp_path / "out")
    run(assembly, state, "import", tmp_path / "out")
    place = import_place(settings_of(assembly, state))
    before = {path.name: path.read_bytes() for path in place.iterdir()}

    def full(source: Path, path: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("shutil.copyfile", full)
    with pytest.raises(StartupError, match=r"cannot be written: .*No space left"):
        run(assembly, state, "import", tmp_path / "out", "--force")
    assert {path.name: path.read_bytes() for path in place.iterdir()} == before
    assert [path.name for path in place.parent.iterdir()] == [place.name]


def torn(folder: Path) -> None:
    file = folder / WEIGHTS_FILE
    file.write_bytes(file.read_bytes()[:-7])


def flipped(folder: Path) -> None:
    file = folder / WEIGHTS_FILE
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def rewritten(folder: Path, **tensors: Tensor) -> None:
    """As somebody would who means it: the config no longer says what the weights were."""
    file, config = folder / WEIGHTS_FILE, folder / CONFIG_FILE
    save_file({**load_file(file), **tensors}, file)
    told = json.loads(config.read_text())
    del told["weights_sha256"]
    config.write_text(json.dumps(told))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (torn, "cannot be read"),
        (flipped, "is not the file that config.json was written with: copy both again"),
        (lambda folder: (folder / WEIGHTS_FILE).unlink(), "model.safetensors cannot be read"),
        (lambda folder: (folder / CONFIG_FILE).write_text("{"), "config.json cannot be read"),
        (lambda folder: (folder / CONFIG_FILE).write_text("[]"), "this version reads 1"),
        (lambda folder: rewritten(folder, **{"norm.weight": torch.full((32,), torch.nan)}), "not finite"),
        (lambda folder: rewritten(folder, **{"norm.weight": torch.ones(7)}), "norm.weight has shape"),
    ],
    ids=["torn", "flipped", "no weights", "torn config", "another config", "not finite", "wrong shape"],
)
def test_a_folder_that_cannot_serve_is_refused(
    assembly: Assembly, tmp_path: Path, damage: Callable[[Path], object], message: str
) -> None:
    assert assembly.config.drafter_path is not None
    folder = copytree(assembly.config.drafter_path, tmp_path / "drafter")
    damage(folder)
    with pytest.raises(StartupError, match=message):
        run(assembly, tmp_path, "import", folder)
    assert choose_drafter(settings_of(assembly, tmp_path)) == ("memory", None)


def test_another_target_s_drafter_is_refused_by_the_embedded_model(assembly: Assembly, tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"trained for target \w+, but smollm2-135m is \w+: set model"):
        run_command("drafter", "import", assembly.config.drafter_path, "--state-dir", tmp_path)


def test_another_target_s_drafter_stops_the_start_with_what_to_do(assembly: Assembly, tmp_path: Path) -> None:
    assert assembly.config.drafter_path is not None
    folder = copytree(assembly.config.drafter_path, tmp_path / "drafter")
    told = json.loads((folder / CONFIG_FILE).read_text())
    (folder / CONFIG_FILE).write_text(json.dumps({**told, "target_identity": "another"}))
    run(assembly, tmp_path, "import", folder)
    config = settings_of(assembly, tmp_path, budget_policy="fixed")
    with pytest.raises(StartupError, match=f"it was imported: delete {import_place(config)}"):
        assemble(config)


def test_what_the_settings_name_goes_before_what_was_imported(assembly: Assembly, tmp_path: Path) -> None:
    deployed = assembly.config.drafter_path
    code, output = run(assembly, tmp_path, "import", deployed, "--drafter-path", deployed)
    assert code == 0
    assert "as configured the next start does not: drafter_path is" in output
    assert choose_drafter(settings_of(assembly, tmp_path, drafter_path=deployed))[1] == deployed
    assert choose_drafter(settings_of(assembly, tmp_path, drafter="memory")) == ("memory", None)


def test_a_model_has_one_place_however_its_folder_is_named(
    assembly: Assembly, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Path(assembly.config.model)
    monkeypatch.chdir(model.parent)
    places = {import_place(settings_of(assembly, tmp_path, model=name)) for name in (str(model), f"./{model.name}")}
    assert len(places) == 1
    assert import_place(settings_of(assembly, tmp_path, model="smollm2-135m")) not in places


def test_what_cannot_be_named_is_learnt_all_the_same(
    assembly: Assembly, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(path: Path, data: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("service.learning.moving.replace_file", full)
    adaptive = learner_in(assembly, tmp_path)
    assert "what is learnt cannot be exported" in caplog.text
    adaptive.learner.adopt(moved(adaptive, 1))
    assert stored_versions(learning_folder_in(tmp_path) / SNAPSHOTS) == [1]
