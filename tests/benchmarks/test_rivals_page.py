"""The page of rivals: its tables and charts are those of the results."""

import pytest

from benchmarks import rivals_page
from benchmarks.rivals_page import PAGES, bars, table, written


def test_pages_say_what_the_results_say() -> None:
    for page in PAGES:
        text = page.read_text()
        assert written(text) == text, "run python -m benchmarks.rivals_page"


def test_tables_and_bars() -> None:
    assert table(["a", "b"], [[1, "x"]]) == "| a | b |\n| --- | --- |\n| 1 | x |\n"
    assert bars({"one": 1.0, "three": 2.0}) == f"```\none   {'█' * 16} 1.00\nthree {'█' * 32} 2.00\n```\n"


def test_only_what_is_between_marks_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rivals_page, "PARTS", {"one": lambda: "new\n"})
    assert written("a\n<!-- one -->\nold\n<!-- end -->\nb\n") == "a\n<!-- one -->\nnew\n<!-- end -->\nb\n"
    with pytest.raises(KeyError):
        written("<!-- two -->\n<!-- end -->\n")
