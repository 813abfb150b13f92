"""The shape of the code and of the repository: short functions, a docstring per module, no trace of where it was
written, a README that is short and true."""

import re
import subprocess
from pathlib import Path

import pytest

from tests.architecture.rules import (
    BENCHMARKS,
    PACKAGES,
    ROOT,
    complaints,
    foreign_words,
    has_docstring,
    long_functions,
    modules,
)

CEILING = 60
KERNEL_CEILING = 100
README_LINES = 150
TEXT_SUFFIXES = {".py", ".md", ".toml", ".txt", ".yaml", ".yml", ".json", ".html", ".js", ".css", ".cfg", ""}


def tracked_files() -> list[Path]:
    """What the next commit may hold: tracked, or neither tracked nor ignored."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    return [ROOT / name for name in listed if (ROOT / name).is_file()]


def test_functions_fit_on_a_screen() -> None:
    outside = modules("service", "adaptation", "drafters", BENCHMARKS)
    assert complaints(outside, lambda source: long_functions(source, CEILING)) == {}
    assert complaints(modules("kernels"), lambda source: long_functions(source, KERNEL_CEILING)) == {}


def test_every_module_says_what_it_is() -> None:
    assert [path for path in modules(*PACKAGES, BENCHMARKS) if not has_docstring(path.read_text())] == []


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a git checkout, so nothing says which files belong to it")
def test_nothing_speaks_of_the_place_it_was_written_in() -> None:
    texts = [path for path in tracked_files() if path.suffix in TEXT_SUFFIXES and path.name != "LICENSE"]
    foreign = {str(path.relative_to(ROOT)): foreign_words(path.read_text(errors="replace")) for path in texts}
    assert {name: words for name, words in foreign.items() if words} == {}


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= README_LINES


def test_the_readme_names_only_targets_there_are() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    named = set(re.findall(r"^make ([a-z-]+)|`make ([a-z-]+)", (ROOT / "README.md").read_text(), flags=re.MULTILINE))
    assert named
    assert {first or second for first, second in named} <= targets


def test_the_readme_links_only_to_files_there_are() -> None:
    links = re.findall(r"\]\((?!http)([^)#]+)\)", (ROOT / "README.md").read_text())
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_a_long_function_is_seen() -> None:
    source = "async def f():\n" + "    x = 1\n" * 60
    assert long_functions(source, 60) == ["f has 61 lines"]
    assert long_functions(source, 61) == []


def test_a_missing_docstring_is_seen() -> None:
    assert not has_docstring("import os\n")
    assert not has_docstring("")


@pytest.mark.parametrize(
    "text",
    [
        "/ho" + "me/someone/model.gguf",
        "see /wo" + "rk/main",
        'open("/tm' + 'p/x.json")',
        "written by a sub" + "agent",
        "left for the next ses" + "sion",
        "--find-links fi" + "le:///wheels",
    ],
)
def test_a_foreign_word_is_seen(text: str) -> None:
    assert len(foreign_words(text)) == 1


@pytest.mark.parametrize(
    "text", ["/v1/models", "https://example.org/home/x", "the client's TLS session", "ADAPTREE_TMP"]
)
def test_an_ordinary_word_passes(text: str) -> None:
    assert foreign_words(text) == []
