"""Drafters in their authors' form serve from where they lie, change no token, and go on learning."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from gguf import GGMLQuantizationType as Kind

from service.assembly import Assembly, assemble
from service.errors import StartupError
from service.learning.learnt import described
from tests.published_forms import deep_target, dflash, dflash_target, eagle3, file_with_module, mimo, with_module
from tests.published_specblock import specblock
from tests.service.bench.parts import settings_for
from tests.service.learning_parts import assert_learns, requests, texts
from tests.tiny_models import random_prompts, tiny_model

TOKENS = 16

Folders = Mapping[str, tuple[Path, Path | None]]
"""Target and drafter by kind; none: it lies with the target."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    place = tmp_path_factory.mktemp("forms")
    llama, qwen = deep_target(place / "llama"), dflash_target(place / "qwen")
    return {
        "mtp": (mimo(place / "mimo"), None),
        "mtp of experts": (with_module(place / "glm", "glm4_moe"), None),
        "mtp with gates": (with_module(place / "gates", "qwen3_5_text"), None),
        "mtp in a file": (file(place / "file", "glm4_moe", Kind.F32), None),
        "mtp in blocks": (file(place / "blocks", "qwen3_5_text", Kind.Q8_0, wide=True), None),
        "experts in blocks": (file(place / "sparse", "qwen3_5_moe_text", Kind.Q5_1, wide=True), None),
        "dflash": (qwen, dflash(place / "dflash")),
        "jetspec": (qwen, dflash(place / "jetspec", causal=True)),
        "eagle3": (llama, eagle3(place / "eagle3")),
        "specblock": (llama, specblock(place / "specblock")),
    }


def file(folder: Path, family: str, kind: Kind, *, wide: bool = False) -> Path:
    return file_with_module(folder, family, kind, wide=wide).write(folder / "a.gguf")


def assembled(target: Path, drafter: str, **changes: object) -> Assembly:
    """A file's matrices stay in blocks."""
    others = {"load_dtype": "auto", "state_dir": target.parent / "state"} if target.suffix == ".gguf" else {}
    changes = {"drafter": drafter, "budget_policy": "fixed", **others, **changes}
    return assemble(settings_for(target).model_copy(update=changes))


def asked(temperature: float) -> Any:
    return requests(list(random_prompts(4, 10)), temperature=temperature, tokens=TOKENS)


def assert_serves(assembly: Assembly, kind: str) -> None:
    for temperature, name in ((0.0, kind), (0.9, f"memory+{kind}")):
        plain = texts(assembly.engine(assembly.drafter("none")), asked(temperature))
        engine = assembly.engine(assembly.drafter(name))
        assert texts(engine, asked(temperature)) == plain
        assert engine.drafter.name == name
        assert engine.drafter.num_blocks > 0


IN_FILES = ["mtp in a file", "mtp in blocks", "experts in blocks"]


@pytest.mark.parametrize("kind", ["mtp", "mtp of experts", "mtp with gates", *IN_FILES])
def test_a_targets_own_module_drafts_without_a_path(folders: Folders, kind: str) -> None:
    target, _ = folders[kind]
    assembly = assembled(target, "auto")
    assert assembly.drafter_name == "memory+mtp"
    assert (kind in IN_FILES[1:]) <= assembly.loaded.in_blocks
    assert assembled(target, "mtp").drafter().name == "mtp"
    assert_serves(assembly, "mtp")


def test_a_target_without_one_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"drafter mtp needs trained weights for .*set drafter_path"):
        assembled(tiny_model("qwen2", tmp_path), "mtp")


def test_the_form_of_a_folder_says_its_kind(folders: Folders) -> None:
    for kind in ("dflash", "jetspec", "eagle3", "specblock"):
        target, folder = folders[kind]
        assembly = assembled(target, "auto", drafter_path=folder)
        assert assembly.drafter_name == f"memory+{kind}"
        assert_serves(assembly, kind)
    with pytest.raises(StartupError, match="holds a drafter of kind specblock: set drafter to auto, specblock or"):
        assembled(target, "eagle3", drafter_path=folder)


def test_such_a_folder_stays_where_it_lies(folders: Folders) -> None:
    _, folder = folders["eagle3"]
    assert folder is not None
    with pytest.raises(StartupError, match="authors' format: serve it directly, set drafter_path to it"):
        described(folder)


@pytest.mark.parametrize(
    "kind", ["mtp", "mtp of experts", "mtp with gates", "mtp in blocks", "eagle3", "dflash", "specblock"]
)
def test_it_learns_while_it_serves(folders: Folders, kind: str, tmp_path: Path) -> None:
    target, folder = folders[kind]
    assembly = assembled(target, "auto", drafter_path=folder)
    prompts = requests(list(random_prompts(16, 10)), temperature=0.9, tokens=32)
    assert_learns(assembly, tmp_path, prompts)
