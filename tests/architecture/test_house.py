"""The size of the code and the words of its public functions: each figure may only get better."""

import re
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from tests.architecture import measures
from tests.architecture.rules import BENCHMARKS, PACKAGES, ROOT, complaints, modules

PRODUCT = modules(*PACKAGES)
OUTSIDE_KERNELS = modules("service", "adaptation", "drafters")

CODE_LINES = {
    "product": (PRODUCT, 35_204),
    BENCHMARKS: (modules(BENCHMARKS), 6_993),
    "tests": (modules("tests"), 40_309),
}
"""At most so many lines of code (no blank lines, comments, docstrings) in these files."""
NUM_FILES = 245

UNDOCUMENTED, WITHOUT_SHAPES = 0.03, 0.05  # of public functions, and of those that take or return tensors
MODULE_LINES = 400

GLOSSARY = re.compile(r"^\| ([a-z]+)[^|]*\|[^|]*\| (.*) \|$", re.MULTILINE)
LINK = re.compile(r"\]\(\.\./([^)]+)\)")
RIDDLES = re.compile(r"\b(?:twins?|told|said|wished|witness|nobody|whoever|somebody)\b|\bnobody's\b", re.IGNORECASE)
"""Words that the code once used for an implementation, an emitted token, a limit, an observer and a padding row."""


@pytest.mark.parametrize("name", CODE_LINES)
def test_the_code_does_not_grow(name: str) -> None:
    paths, ceiling = CODE_LINES[name]
    assert sum(map(measures.code_lines, paths)) <= ceiling


def test_files_do_not_become_more() -> None:
    assert len(PRODUCT) <= NUM_FILES


def test_public_functions_have_docstrings() -> None:
    public = [method for path in PRODUCT for method in measures.functions(path) if measures.is_public(method)]
    missing = measures.undocumented(PRODUCT)
    assert len(missing) <= UNDOCUMENTED * len(public), missing


def test_tensor_functions_name_shapes() -> None:
    found = [method for path in PRODUCT for method in measures.tensor_functions(path)]
    missing = measures.without_shapes(PRODUCT)
    assert len(missing) <= WITHOUT_SHAPES * len(found), missing


@pytest.mark.parametrize(
    ("rule", "broken"),
    [
        ("functions", lambda: measures.too_long(PRODUCT, 60)),
        ("parameters", lambda: measures.too_many_parameters(OUTSIDE_KERNELS, 7)),
        ("attributes", lambda: measures.too_many_attributes(PRODUCT, 12)),
        ("class names", lambda: measures.repeated_class_names(PRODUCT)),
    ],
)
def test_functions_and_classes_stay_small(rule: str, broken: Callable[[], Iterable[str]]) -> None:
    assert list(broken()) == [], rule


def test_modules_can_be_read() -> None:
    assert [path for path in PRODUCT if len(path.read_text().splitlines()) > MODULE_LINES] == []


def test_the_code_uses_the_words_of_the_glossary() -> None:
    rows = GLOSSARY.findall((ROOT / "docs" / "architecture.md").read_text().partition("## Glossary")[2])[1:]  # heading
    assert len(rows) == 20
    for word, homes in rows:
        for home in LINK.findall(homes):
            texts = [path.read_text().lower() for path in ([ROOT / home] if home.endswith(".py") else modules(home))]
            assert any(word in text for text in texts), f"{word} is not in {home}"


def test_words_that_the_glossary_replaces_are_gone() -> None:
    assert complaints(PRODUCT, lambda source: RIDDLES.findall(source.replace("_", " "))) == {}


def test_only_lines_of_code_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "some.py"
    path.write_text('"""A module."""\n\n# why\nx = (\n    1\n)\n\n\ndef f():\n    """It\n    does."""\n    return x\n')
    assert measures.code_lines(path) == 5


def test_what_breaks_a_rule_is_seen(tmp_path: Path) -> None:
    path, other = tmp_path / "some.py", tmp_path / "other.py"
    header = "def f(a: Tensor, b, c, d, e, f, g, h) -> Tensor:"
    path.write_text(f"{header}\n    return a\n\nclass A:\n    def __init__(self):\n        self.x, self.y = 1, 2\n")
    other.write_text('class A:\n    """One."""\n\ndef g(a: Tensor) -> None:\n    """It. # a [batch]"""\n')
    both = [path, other]
    assert measures.undocumented(both) == ["some.f"]
    assert measures.without_shapes(both) == ["some.f"]
    assert measures.too_long(both, 1) == ["some.f", "some.A.__init__", "other.g"]
    assert measures.too_many_parameters(both, 7) == ["some.f"]
    assert measures.too_many_attributes(both, 1) == ["some.A"]
    assert measures.repeated_class_names(both) == {"A": ["some", "other"]}
