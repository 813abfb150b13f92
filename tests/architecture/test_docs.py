"""Documents point at what is there, and stay as short as they promise."""

import json
import re
from collections.abc import Mapping
from hashlib import sha256
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
    stored = {path.name for path in (ROOT / "docs/results").glob("*.json")}
    assert not {name for name in stored if f"results/{name})" not in listed}


OLDER = "†"
"""Stands after the link of a result that was measured with weights shipped earlier."""
SHIPPED = re.compile(r"weights shipped now \(`model.safetensors`, sha256 `(\w+)`, since (\S+)\)")


def used_shipped_weights(conditions: Mapping[str, str]) -> bool:
    """Whether a run drafted with the weights that were shipped then, for the embedded model."""
    command = conditions["command"]
    if "smollm2-135m" not in conditions.get("model", "") or "--drafter-path" in command:
        return False
    named = re.search(r"--drafter (\S+)", command)
    drafter = conditions.get("drafter") or (named[1] if named else "memory+specblock")
    return "specblock" in drafter or "specblock=smollm2-135m" in command


def test_results_of_weights_shipped_earlier_are_marked() -> None:
    page = (ROOT / "docs/results.md").read_text()
    found = SHIPPED.search(page)
    assert found, "the page names the weights that its marks refer to"
    digest, since = found.groups()
    weights = ROOT / "drafters/shipped/smollm2-135m/model.safetensors"
    assert sha256(weights.read_bytes()).hexdigest().startswith(digest), (
        "other weights are shipped: mark the older results"
    )
    for path in sorted((ROOT / "docs/results").glob("*.json")):
        conditions = json.loads(path.read_text())["conditions"]
        is_older = used_shipped_weights(conditions) and conditions["date"] < since
        marks = re.findall(rf"results/{re.escape(path.name)}\)({OLDER}?)", page)
        assert set(marks) == {OLDER if is_older else ""}, path.name


def test_every_picture_is_on_a_page() -> None:
    pages = "".join(path.read_text() for path in [*DOCUMENTS, *(ROOT / "drafters").rglob("*.md")])
    pictures = [*(ROOT / "docs").rglob("*.png"), *(ROOT / "drafters").rglob("*.png")]
    assert not [picture.name for picture in pictures if f"{picture.name})" not in pages]
