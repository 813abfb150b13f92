"""Documents point at what is there, and stay as short as they promise."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")
CODE = re.compile(r"```.*?```|`[^`]*`", re.DOTALL)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_relative_link_leads_somewhere(document: Path) -> None:
    links = [link for link in LINK.findall(CODE.sub("", document.read_text())) if "://" not in link]
    missing = [link for link in links if not (document.parent / link).exists()]
    assert not missing


@pytest.mark.parametrize(("name", "most"), [("README.md", 120), ("docs/architecture.md", 200)])
def test_a_document_is_short(name: str, most: int) -> None:
    assert len((ROOT / name).read_text().splitlines()) <= most


def test_every_result_is_listed() -> None:
    listed = (ROOT / "docs/results.md").read_text()
    stored = {path.stem for path in (ROOT / "docs/results").iterdir()}
    assert not {name for name in stored if f"results/{name}." not in listed}
