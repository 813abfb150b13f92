"""Counts that outlive the process that made them."""

import asyncio
import json
from pathlib import Path

import pytest

from service.api import limits
from service.api.limits import BUDGETS_FILE, MonthlyUse
from service.errors import StartupError

pytestmark = pytest.mark.anyio


async def test_counts_are_kept_through_a_restart(tmp_path: Path) -> None:
    first = MonthlyUse(tmp_path)
    async with first.kept():
        first.add("acme", 5)
        first.add("acme", 6)
    second = MonthlyUse(tmp_path)
    async with second.kept():
        assert (second.of("acme"), second.of("other")) == (11, 0)


async def test_counts_are_written_while_the_server_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "SAVE_SECONDS", 0.01)
    use = MonthlyUse(tmp_path)
    async with use.kept():
        use.add("acme", 5)
        while not (tmp_path / BUDGETS_FILE).exists():
            await asyncio.sleep(0.01)
        assert json.loads((tmp_path / BUDGETS_FILE).read_text())["used_tokens"] == {"acme": 5}


async def test_counts_of_an_earlier_month_are_none(tmp_path: Path) -> None:
    (tmp_path / BUDGETS_FILE).write_text('{"month": "2001-01", "used_tokens": {"acme": 5}}')
    use = MonthlyUse(tmp_path)
    async with use.kept():
        assert use.of("acme") == 0


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"month": "2026-11"}', '{"month": "2026-11", "used_tokens": {"a": -1}}']
)
async def test_a_damaged_file_stops_the_start(tmp_path: Path, text: str) -> None:
    (tmp_path / BUDGETS_FILE).write_text(text)
    with pytest.raises(StartupError, match=r"cannot be read: .*; remove the file"):
        MonthlyUse(tmp_path)


async def test_two_servers_cannot_keep_one_file(tmp_path: Path) -> None:
    async with MonthlyUse(tmp_path).kept():
        with pytest.raises(StartupError, match="give this one a state_dir of its own"):
            MonthlyUse(tmp_path)
    async with MonthlyUse(tmp_path).kept():
        pass


async def test_a_folder_that_is_none_stops_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StartupError, match="change state_dir"):
        MonthlyUse(tmp_path / "file")


async def test_a_disk_that_refuses_is_told_of_once_and_costs_no_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(limits, "SAVE_SECONDS", 0.01)
    attempts = 0

    def refuse(file: Path, text: str) -> None:
        nonlocal attempts
        attempts += 1
        raise OSError("no space left")

    monkeypatch.setattr(limits, "_write", refuse)
    use = MonthlyUse(tmp_path)
    async with use.kept():
        use.add("acme", 5)
        while attempts < 2:
            await asyncio.sleep(0.01)
        assert use.of("acme") == 5
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert "no space left" in caplog.text
