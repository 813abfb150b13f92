"""One JSON object per line for machines, text for people, on standard error."""

import json
import logging

import pytest

from service.logging import bar, configure_logging


def test_json_lines_carry_message_level_and_extras(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("info", as_json=True)
    logging.getLogger("service.x").warning("took %d ms", 7, extra={"request_id": "r1"})
    output = capsys.readouterr()
    entry = json.loads(output.err)
    assert output.out == ""
    assert entry.pop("time").endswith("+00:00")
    assert entry == {"level": "warning", "logger": "service.x", "message": "took 7 ms", "request_id": "r1"}


def test_json_lines_stay_one_line_with_an_exception(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("info", as_json=True)
    try:
        raise ValueError("two\nlines")
    except ValueError:
        logging.getLogger("service.x").exception("failed")
    (line,) = capsys.readouterr().err.splitlines()
    assert "ValueError: two\nlines" in json.loads(line)["exception"]


def test_the_level_is_kept(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("warning", as_json=False)
    logging.getLogger("service.x").info("quiet")
    logging.getLogger("service.x").warning("heard")
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("WARNING service.x: heard")


def test_libraries_do_not_log_each_request(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("info", as_json=False)
    logging.getLogger("httpx").info("GET /")
    assert capsys.readouterr().err == ""


def test_a_log_gets_a_line_for_each_tenth(capsys: pytest.CaptureFixture[str]) -> None:
    with bar("answering", 40) as advance:
        for number in range(40):
            advance(number + 1, "")
    out, err = capsys.readouterr()
    assert not out
    assert err.splitlines() == [f"answering {percent} %" for percent in range(10, 110, 10)]
