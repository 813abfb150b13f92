"""`adaptree drafter`: what was learnt on one server serves on another, and what cannot serve is refused by name."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from adaptation.checkpoint import SNAPSHOTS, WEIGHTS, folder_name, stored_versions
from drafters.network.checkpoint import CARD_FILE, CONFIG_FILE, VOCABULARY, WEIGHTS_FILE, weights_of
from drafters.network.config import config_from
from service.assembly import Assembly, assemble
from service.config import ServiceConfig
from service.drafter import choose_drafter, load_network
from service.errors import StartupError
from service.learning.adaptive import Adaptive, learning_folder
from service.learning.learnt import DRAFTER_FILE, Origin
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
    """A server that has this state, and has no setting for a drafter."""
    return assembly.config.model_copy(update={"state_dir": state, "drafter_path": None, "drafter": "auto", **changes})


def run(assembly: Assembly, state: Path, *words: object) -> tuple[int, str]:
    return run_command("drafter", *words, "--model", assembly.config.model, "--state-dir", state)


def inspected(assembly: Assembly, state: Path, *words: object) -> dict[str, Any]:
    code, output = run(assembly, state, "inspect", *words, "--json")
    assert code == 0, output
    found: dict[str, Any] = json.loads(output)
    return found


def learning_folder_in(state: Path) -> Path:
    (folder,) = (state / "adaptation").iterdir()
    return folder


def test_what_was_learnt_serves_on_another_server(
    assembly: Assembly, state: Path, published: dict[int, dict[str, Tensor]], tmp_path: Path
) -> None:
    out, other = tmp_path / "out", tmp_path / "other"
    assert run(assembly, state, "export", "--out", out)[0] == 0
    assert {path.name for path in out.iterdir()} == {CONFIG_FILE, WEIGHTS_FILE, CARD_FILE}
    assert choose_drafter(settings_of(assembly, other)) == ("memory", None)
    there = settings_of(assembly, other, drafter_path=out)
    assert choose_drafter(there) == ("memory+specblock", out)
    assert_equal(weights_of(load_network(out, assembly.loaded)), published[2])
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
        assert_equal(weights_of(load_network(out, assembly.loaded)), published[version])
    with pytest.raises(StartupError, match=r"version 9 is not kept .*--version \(1, 2, 3\)"):
        run(assembly, state, "export", "--out", tmp_path / "9", "--version", "9")
    assert not (tmp_path / "9").exists()


def test_an_exported_drafter_says_where_it_comes_from(assembly: Assembly, state: Path, tmp_path: Path) -> None:
    run(assembly, state, "export", "--out", tmp_path / "out")
    deployed = assembly.config.drafter_path
    assert deployed is not None
    kept = {row["version"]: row for row in inspected(assembly, state)["learnt"][0]["versions"]}
    found = inspected(assembly, state, tmp_path / "out")
    assert found["facts"]["lineage"] == {
        "version": 2,
        "parent": 1,
        "date": kept[2]["date"],
        "scores": {},
        "origin_sha256": inspected(assembly, state, deployed)["weights_sha256"],
        "weights_sha256": kept[2]["weights_sha256"],
    }
    card = (tmp_path / "out" / CARD_FILE).read_text()
    assert kept[2]["weights_sha256"] in card
    assert str(Path(assembly.config.model).parent) not in card + json.dumps(found["facts"])


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
from service.drafter import local_folder
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
    assert refusal.startswith("drafter ORG/other is not a local folder and cannot be downloaded from the hub: ")


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
    for line in ("served: 2", "versions.3.taken_back: True", one["versions"][1]["weights_sha256"]):
        assert line in output


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
    found = inspected(assembly, tmp_path, folder)
    network = load_network(folder, assembly.loaded)
    assert found["parameters"] == sum(value.numel() for value in network.parameters())
    assert found["tensors"] == {name: list(value.shape) for name, value in weights_of(network).items()}
    assert (found["architecture"], found["dtype"], found["stores_head"]) == ("SpecBlock", "bfloat16", True)
    assert config_from(found["drafter"]) == network.config
    assert found["bytes"] == (folder / WEIGHTS_FILE).stat().st_size
    code, output = run(assembly, tmp_path, "inspect", folder)
    assert code == 0
    assert found["weights_sha256"] in output


def test_where_nothing_was_learnt_it_is_reported(assembly: Assembly, tmp_path: Path) -> None:
    assert inspected(assembly, tmp_path)["learnt"] == []
    assert "nothing was learnt" in run(assembly, tmp_path, "inspect")[1]
    with pytest.raises(StartupError, match=r"nothing was learnt .*adaptation.enabled true"):
        run(assembly, tmp_path, "export", "--out", tmp_path / "out")


def test_the_deployed_drafter_is_not_exported_as_something_learnt(
    assembly: Assembly, state: Path, tmp_path: Path
) -> None:
    for name in ("learner.json", "learner.previous.json"):
        (learning_folder_in(state) / name).unlink()
    with pytest.raises(StartupError, match=r"serves the deployed drafter.*--version \(kept: 1, 2, 3\)"):
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
    found = json.loads((folder / DRAFTER_FILE).read_text())
    (folder / DRAFTER_FILE).write_text(json.dumps({name: found[name] for name in ("target_identity", "drafter")}))
    assert run(assembly, state, "export", "--out", tmp_path / "out")[0] == 0
    assert inspected(assembly, state, tmp_path / "out")["facts"]["lineage"]["origin_sha256"] is None


def test_a_folder_that_does_not_name_its_drafter_is_refused_with_what_to_do(
    assembly: Assembly, state: Path, tmp_path: Path
) -> None:
    file = learning_folder_in(state) / DRAFTER_FILE
    for content in (None, "{}", "no json"):
        file.unlink() if content is None else file.write_text(content)
        with pytest.raises(StartupError, match=r"is not known .*start its server once"):
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
    with pytest.raises(StartupError, match="exists and is not an empty folder"):
        run(assembly, state, "export", "--out", out)


def test_an_export_that_breaks_leaves_nothing(
    assembly: Assembly, state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("service.learning.learnt.exported_card", full)
    with pytest.raises(StartupError, match=r"cannot be written: .*No space left"):
        run(assembly, state, "export", "--out", tmp_path / "new" / "out")
    assert list((tmp_path / "new").iterdir()) == []


def test_a_drafter_that_release_0_3_0_imported_still_serves(
    assembly: Assembly, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In `state_dir/drafters`, under a hash of the model's absolute path, however the setting names it."""
    model, deployed = Path(assembly.config.model), assembly.config.drafter_path
    assert deployed is not None
    place = tmp_path / "drafters" / sha256(str(model.resolve()).encode()).hexdigest()[:16]
    copytree(deployed, place)
    monkeypatch.chdir(model.parent)
    for name in (str(model), f"./{model.name}"):
        assert choose_drafter(settings_of(assembly, tmp_path, model=name)) == ("memory+specblock", place)
    assert choose_drafter(settings_of(assembly, tmp_path, drafter_path=deployed))[1] == deployed
    assert choose_drafter(settings_of(assembly, tmp_path, drafter="memory")) == ("memory", None)
    other = choose_drafter(settings_of(assembly, tmp_path, model="smollm2-135m"))[1]
    assert other is not None
    assert other != place


def torn(folder: Path) -> None:
    file = folder / WEIGHTS_FILE
    file.write_bytes(file.read_bytes()[:-7])


def flipped(folder: Path) -> None:
    file = folder / WEIGHTS_FILE
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def rewritten(folder: Path, **tensors: Tensor) -> None:
    """Change tensors, and remove the hash of the old ones from the config."""
    file, config = folder / WEIGHTS_FILE, folder / CONFIG_FILE
    save_file({**load_file(file), **tensors}, file)
    found = json.loads(config.read_text())
    del found["weights_sha256"]
    config.write_text(json.dumps(found))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (torn, "cannot be read"),
        (flipped, "does not match the hash in config.json: copy both again"),
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
        run(assembly, tmp_path, "inspect", folder)


def test_what_cannot_be_named_is_learnt_all_the_same(
    assembly: Assembly, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(path: Path, data: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("service.learning.learnt.replace_file", full)
    adaptive = learner_in(assembly, tmp_path)
    assert "learnt drafters cannot be exported" in caplog.text
    adaptive.learner.adopt(moved(adaptive, 1))
    assert stored_versions(learning_folder_in(tmp_path) / SNAPSHOTS) == [1]
