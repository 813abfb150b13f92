"""One loaded tiny model for all tests of the folder."""

from pathlib import Path

import pytest

from service.assembly import Assembly, assemble
from tests.service.bench.parts import assembled, save_drafter, save_two_layers, settings_for, written_prompts


def pytest_itemcollected(item: pytest.Item) -> None:
    item.add_marker(pytest.mark.slow("measurements, beside serving", covers="service/bench tests/service/bench"))


@pytest.fixture(scope="session")
def assembly(tmp_path_factory: pytest.TempPathFactory) -> Assembly:
    return assembled(save_two_layers(tmp_path_factory.mktemp("two-layers")))


@pytest.fixture(scope="session")
def trained_assembly(assembly: Assembly, tmp_path_factory: pytest.TempPathFactory) -> Assembly:
    """The same target with a random SpecBlock drafter, three blocks deep."""
    folder = Path(assembly.config.model)
    drafter = save_drafter(tmp_path_factory.mktemp("drafter"), assembly)
    changes: dict[str, object] = {
        "drafter": "memory+specblock",
        "drafter_path": drafter,
        "draft_blocks": 3,
        "max_budget": 24,
        "budget_policy": "fixed",  # drafts do not pay beside a target that takes no time
    }
    return assemble(settings_for(folder).model_copy(update=changes))


@pytest.fixture
def prompt_file(tmp_path: Path) -> Path:
    file = tmp_path / "some.jsonl"
    file.write_text("\n".join(written_prompts()))
    return file


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands leave the log alone."""
    monkeypatch.setattr("service.logging.configure_logging", lambda level, *, as_json: None)
