"""Who waits sees how far it is, at a terminal and in a log."""

import pytest

from service.progress import bar, counting


def test_a_log_gets_a_line_for_each_tenth(capsys: pytest.CaptureFixture[str]) -> None:
    with counting() as progress:
        task = progress.add_task("answering", total=40)
        for _ in range(40):
            progress.advance(task)
    out, err = capsys.readouterr()
    assert not out
    assert err.splitlines() == [f"answering {percent} %" for percent in range(10, 110, 10)]


def test_every_task_has_lines_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    with counting() as progress:
        first, second = progress.add_task("first", total=2), progress.add_task("second", total=1)
        progress.advance(first)
        progress.advance(second)
        progress.update(first, description="still the first")
        progress.advance(first)
    assert capsys.readouterr().err.splitlines() == ["first 50 %", "second 100 %", "still the first 100 %"]


def test_a_note_follows(capsys: pytest.CaptureFixture[str]) -> None:
    with bar("training", 1.0) as advance:
        advance(0.05, "step 1")
        advance(0.55, "step 2")
        advance(0.56, "step 3")
    assert capsys.readouterr().err.splitlines() == ["training 55 % step 2"]


def test_a_terminal_gets_a_bar(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    with counting() as progress:
        progress.advance(progress.add_task("answering", total=1))
    err = capsys.readouterr().err
    assert "━" in err
    assert "1/1" in err
    assert "100 %" not in err
