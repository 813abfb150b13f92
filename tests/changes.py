"""Which slow tests run: none, all, or those that cover a file that has changed since the branch left the main one."""

import subprocess
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
MAIN_BRANCHES = ("origin/main", "main")


def deselect_slow(config: pytest.Config, items: list[pytest.Item], which: str) -> None:
    """Take the slow tests that do not run off `items`; `which` is the value of `--slow`."""
    if which == "all":
        return
    left_out = {item for item in items if _is_slow(item) and not (which == "changed" and _covers_a_change(item))}
    config.hook.pytest_deselected(items=list(left_out))
    items[:] = [item for item in items if item not in left_out]


def _is_slow(item: pytest.Item) -> bool:
    return item.get_closest_marker("slow") is not None


def _covers_a_change(item: pytest.Item) -> bool:
    """Whether its own file has changed, or a file below those that its mark names. Every mark must name some."""
    covered, changed = [mark.kwargs.get("covers", "").split() for mark in item.iter_markers("slow")], changed_files()
    own = item.path.relative_to(ROOT).as_posix()
    return all(places and (changed is None or is_covered(changed, [own, *places])) for places in covered)


def is_covered(changed: Iterable[str], covered: Iterable[str]) -> bool:
    """Whether one of the changed files is covered, or lies below a covered folder."""
    return any(name == place or name.startswith(f"{place}/") for place in covered for name in changed)


@cache
def changed_files() -> frozenset[str] | None:
    """Paths that differ between the working tree and where the branch left the main one, or the commit before, where
    there is only the main branch. None without that history: then every file counts as changed."""
    head = _git("rev-parse", "HEAD")
    bases = [_git("merge-base", "HEAD", branch) for branch in MAIN_BRANCHES]
    base = next((base for base in bases if base not in (None, head)), _git("rev-parse", "--verify", "HEAD~1"))
    if base is None:
        return None
    committed, new = (
        _git("diff", "--name-only", "--no-renames", base),
        _git("ls-files", "--others", "--exclude-standard"),
    )
    return None if committed is None or new is None else frozenset([*committed.splitlines(), *new.splitlines()])


def _git(*words: str) -> str | None:
    """What git prints. None if it fails or is not there."""
    try:
        done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None
