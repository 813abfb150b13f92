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


def test_every_relative_link_leads_somewhere() -> None:
    links = [(page, link) for page in DOCUMENTS for link in LINK.findall(CODE.sub("", page.read_text()))]
    assert links
    assert [(page, link) for page, link in links if "://" not in link and not (page.parent / link).exists()] == []


@pytest.mark.parametrize(("name", "most"), [("README.md", 120), ("docs/architecture.md", 200)])
def test_a_document_is_short(name: str, most: int) -> None:
    assert len((ROOT / name).read_text().splitlines()) <= most


def test_every_result_is_listed() -> None:
    listed = (ROOT / "docs/results/README.md").read_text()
    stored = {path.name for path in (ROOT / "docs/results").glob("*.json")}
    assert not {name for name in stored if f"({name})" not in listed}


SHIPPED = re.compile(r"drafter weights \(`model.safetensors`, sha256\s+`(\w+)`, since (\S+)\)")


def used_shipped_weights(conditions: Mapping[str, str]) -> bool:
    """Whether a run drafted with the weights that were shipped then, for the embedded model."""
    command = conditions["command"]
    if "smollm2-135m" not in conditions.get("model", "") or "--drafter-path" in command:
        return False
    named = re.search(r"--drafter (\S+)", command)
    drafter = conditions.get("drafter") or (named[1] if named else "memory+specblock")
    return "specblock" in drafter or "specblock=smollm2-135m" in command


def test_no_result_is_of_weights_shipped_earlier() -> None:
    found = SHIPPED.search((ROOT / "docs/results/README.md").read_text())
    assert found, "the page names the weights that its results were measured with"
    digest, since = found.groups()
    weights = ROOT / "drafters/shipped/smollm2-135m/model.safetensors"
    assert sha256(weights.read_bytes()).hexdigest().startswith(digest), "other weights are shipped: measure again"
    described = {path.name: json.loads(path.read_text()) for path in (ROOT / "docs/results").glob("*.json")}
    used = {name: result["conditions"] for name, result in described.items()}
    assert not [name for name, one in used.items() if used_shipped_weights(one) and one["date"] < since]


def test_every_picture_is_on_a_page() -> None:
    pages = "".join(path.read_text() for path in [*DOCUMENTS, *(ROOT / "drafters").rglob("*.md")])
    pictures = [*(ROOT / "docs").rglob("*.png"), *(ROOT / "drafters").rglob("*.png")]
    assert not [picture.name for picture in pictures if f"{picture.name})" not in pages]
