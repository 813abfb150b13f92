"""Which slow tests run after which changes."""

import re
import subprocess
from pathlib import Path

import pytest

from tests import changes


def git(folder: Path, *words: str) -> None:
    author = ("-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "init.defaultBranch=main")
    subprocess.run(["git", *author, *words], cwd=folder, check=True, capture_output=True)


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository of two commits on its main branch."""
    monkeypatch.setattr(changes, "ROOT", tmp_path)
    monkeypatch.setattr(changes, "changed_files", changes.changed_files.__wrapped__)  # not cached
    git(tmp_path, "init")
    for name in ("first", "second"):
        (tmp_path / name).write_text("")
        git(tmp_path, "add", ".")
        git(tmp_path, "commit", "-m", name)
    return tmp_path


def test_on_the_main_branch_the_last_commit_counts(repository: Path) -> None:
    assert changes.changed_files() == frozenset({"second"})


def test_on_a_branch_all_its_commits_and_the_working_tree_count(repository: Path) -> None:
    git(repository, "checkout", "-b", "branch")
    (repository / "third").write_text("")
    git(repository, "add", ".")
    git(repository, "commit", "-m", "third")
    (repository / "first").write_text("changed")
    (repository / "new").write_text("")
    assert changes.changed_files() == frozenset({"first", "third", "new"})


def test_without_history_nothing_is_known(repository: Path) -> None:
    git(repository, "checkout", "--orphan", "alone")
    git(repository, "branch", "-D", "main")
    assert changes.changed_files() is None
    git(repository, "commit", "-m", "alone")
    assert changes.changed_files() is None


def test_a_folder_covers_what_lies_below_it() -> None:
    assert changes.is_covered(["kernels/cpu/linear.cpp"], ["service", "kernels"])
    assert changes.is_covered(["service/door.py"], ["service/door.py"])
    assert not changes.is_covered(["kernels_of_others/a.py", "docs/kernels.md"], ["kernels", "service"])


COVERED, ALONE = pytest.mark.slow("some", covers="kernels"), pytest.mark.slow("others")


@pytest.mark.parametrize(
    ("marks", "changed", "expected"),
    [
        ((), {"docs/a.md"}, True),
        ((COVERED,), {"kernels/ops.py"}, True),
        ((COVERED,), {"tests/test_changes.py"}, True),
        ((COVERED,), {"docs/a.md"}, False),
        ((COVERED,), None, True),
        ((ALONE,), {"tests/test_changes.py"}, False),
        ((ALONE, COVERED), {"kernels/ops.py"}, False),
        ((ALONE,), None, False),
    ],
)
def test_a_slow_test_runs_if_every_mark_covers_a_change(
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    marks: tuple[pytest.MarkDecorator, ...],
    changed: frozenset[str] | None,
    expected: bool,
) -> None:
    monkeypatch.setattr(changes, "changed_files", lambda: changed)
    for mark in marks:
        request.node.add_marker(mark)
    items: list[pytest.Item] = [request.node]
    changes.deselect_slow(request.config, items, "changed")
    assert items == ([request.node] if expected else [])


def test_what_slow_tests_cover_is_there() -> None:
    texts = [path.read_text() for path in (changes.ROOT / "tests").rglob("*.py")]
    covered = [places for text in texts for places in re.findall(r'(?:covers=|COVERS = )"([^"]+)"', text)]
    assert len(covered) > 10
    assert [place for places in covered for place in places.split() if not (changes.ROOT / place).exists()] == []
