"""What every test starts from: the same random numbers, the same examples, no variable of ours set; and how large the
long ones are, and what becomes of their figures."""

import logging
import os
import random
from collections.abc import Callable, Generator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.changes import deselect_slow

# Triton decides when it is imported, which torch may do at any time, whether kernels are compiled or interpreted.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# A time limit per example would fail on a busy machine and say nothing about the code.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")


LONG_FOLDERS = ("tests/service/learning", "tests/e2e", "tests/drafters", "tests/adaptation")


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput") and config.getoption("dist", "no") != "no":
        return  # only hands tests out
    import torch  # after the variable

    torch.set_num_threads(1)  # sums of several threads may differ, and tests run side by side


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol() -> Generator[None, object, object]:
    """Commands configure logging for their process; what a test runs in ours must not log into the next test."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    try:
        return (yield)
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
        logging.captureWarnings(False)


def pytest_addoption(parser: pytest.Parser) -> None:
    slow = ("none", "changed", "all")
    parser.addoption(
        "--slow", choices=slow, default="all", help="which slow tests run (tests/changes.py); default: all"
    )
    parser.addoption("--size", type=int, metavar="N", help="of long tests, in what each counts; unset: its own")
    parser.addoption("--figures", type=Path, metavar="FILE", help="also write what long tests tell, as JSON")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    deselect_slow(config, items, config.getoption("--slow"))
    # Files are handed out whole. Folders with long ones come first, so that no worker waits for the last of them.
    items.sort(key=lambda item: not item.nodeid.startswith(LONG_FOLDERS))


@pytest.fixture
def sized(pytestconfig: pytest.Config) -> Callable[[int], int]:
    """The size that is asked for, or a long test's own."""
    asked: int | None = pytestconfig.getoption("--size")
    return lambda own: own if asked is None else asked


@pytest.fixture
def tell(record_property: Callable[[str, object], None]) -> Callable[..., None]:
    """Figures of a long test by their names: a line at the end of all tests, and of the file for figures."""
    return lambda **figures: record_property("figures", figures)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    rows = [
        {"test": report.nodeid, "outcome": report.outcome, **figures}
        for outcome in ("passed", "failed")
        for report in terminalreporter.getreports(outcome)
        if report.when == "call"
        for name, figures in report.user_properties
        if name == "figures"
    ]
    for row in rows:
        terminalreporter.write_line(", ".join(f"{name} {value}" for name, value in row.items()))
    if (file := config.getoption("--figures")) is not None:
        from service.conditions import surroundings, write_report  # torch comes with it

        failed = terminalreporter.getreports("failed") + terminalreporter.getreports("error")
        write_report(file, surroundings(), rows, {"failed": len(failed)})


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("ADAPTREE_")]:
        monkeypatch.delenv(name)


@pytest.fixture(autouse=True)
def _same_random_numbers() -> None:
    random.seed(0)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"
