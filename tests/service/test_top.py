"""What a terminal shows of a feed, and what is said where there is none."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from io import StringIO
from typing import Any

import pydantic_core
import pytest
from rich.console import Console
from typer.testing import CliRunner

from service.cli import app
from service.observability.live import Live
from service.observability.top import Screen
from tests.service.scripted import STATUS
from tests.service.test_metrics import LOAD, OUTLOOK, STEP


def moment(**changes: Any) -> dict[str, Any]:
    live = Live()
    live.observe_load(LOAD)
    live.observe_step(replace(STEP, drafting=OUTLOOK))
    live.observe_adaptation(STATUS)
    told = pydantic_core.to_jsonable_python({"state": "ready", **pydantic_core.to_jsonable_python(live.tick())})
    return {**json.loads(pydantic_core.to_json(told, inf_nan_mode="strings")), **changes}


def shown(*news: tuple[str, dict[str, Any]]) -> str:
    screen = Screen("http://here")
    for name, told in news:
        screen.update(name, told)
    console = Console(file=StringIO(), width=120)
    console.print(screen.drawn())
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


def line_of(text: str, name: str) -> str:
    (line,) = [line for line in text.splitlines() if line.strip().startswith(name)]
    return line


def test_a_moment_is_shown() -> None:
    text = shown(("moment", moment(tau=2.5, tokens_per_second=81.25, budget=7.0)))
    assert "http://here  ready" in text
    assert line_of(text, "tau").split()[1] == "2.50"
    assert line_of(text, "tokens/s").split()[1] == "81.2"
    assert "7.0 (gain)" in line_of(text, "budget")
    assert "may still lose 0.75 s" in line_of(text, "drafting gains")
    assert "0.25 ± 0.05 plain steps" in text
    assert "1,234 tokens remembered, 12% full" in line_of(text, "past answers")
    assert "60% of accepted tokens come from the memory" in line_of(text, "past answers")
    assert line_of(text, "head").split() == ["head", "0.5000", "3", "3"]
    assert line_of(text, "full").split() == ["full", "inf", "0", "1"]
    assert "2 published, 1 refused, 1 rolled back" in text


def test_where_no_answer_is_remembered_or_no_token_accepted() -> None:
    assert "past answers" not in shown(("moment", moment(memory=None)))
    assert "come from the memory" not in shown(("moment", moment(accepted_by_source={})))


def test_the_last_minute_is_a_curve_with_gaps() -> None:
    past = {"points": [{**moment(), "tau": tau} for tau in (1.0, None, 2.0)], "events": []}
    text = shown(("past", past), ("moment", moment(tau=3.0)))
    assert line_of(text, "tau").rstrip().endswith("▁ ▅█")


def test_events_are_shown_and_learning_may_be_off() -> None:
    event = {"unix_seconds": 1.0, "kind": "published", "reason": "better", "version": 3, "numbers": {}}
    assert "published (better), version 3" in shown(("past", {"points": [], "events": [event]}), ("moment", moment()))
    assert "not learning" in shown(("moment", moment(learning=None)))


@contextmanager
def server(status: int, body: bytes) -> Iterator[str]:
    """Answers one request in this way."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Nothing: the test's own output matters."""

    with HTTPServer(("127.0.0.1", 0), Handler) as listening:
        thread = threading.Thread(target=listening.handle_request)
        thread.start()
        yield f"http://127.0.0.1:{listening.server_address[1]}"
        thread.join()


def frames() -> bytes:
    past = b"event: past\ndata: " + json.dumps({"points": [], "events": []}).encode()
    return past + b"\n\n: ping\n\ndata: " + json.dumps(moment(tau=2.5)).encode() + b"\n\n"


def test_one_moment_is_printed_on_demand() -> None:
    with server(200, frames()) as url:
        result = CliRunner().invoke(app, ["top", "--url", url, "--once"])
    assert (result.exit_code, line_of(result.output, "tau").split()[1]) == (0, "2.50")


@pytest.mark.parametrize(
    ("status", "body", "words"),
    [
        (401, b"", "requires an API key: set it with --key"),
        (403, b"", "add it to its allowed_hosts"),
        (404, b"", "has no feed (status 404)"),
        (200, frames(), "has ended its feed: it is shutting down"),
    ],
)
def test_why_there_is_nothing_to_show(status: int, body: bytes, words: str) -> None:
    with server(status, body) as url:
        result = CliRunner().invoke(app, ["top", "--url", url + "/"])
    assert result.exit_code == 1
    assert words in result.stderr.replace("\n", " ")


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "nonsense", "http://[bad"])
def test_where_no_server_is(url: str) -> None:
    result = CliRunner().invoke(app, ["top", "--url", url])
    assert result.exit_code == 1
    assert f"no server answers at {url}" in result.stderr
    assert "adaptree serve" in result.stderr
    assert "Traceback" not in result.stderr


def test_an_interrupt_is_a_clean_end(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(url: str, key: str | None) -> Iterator[tuple[str, dict[str, Any]]]:
        yield "moment", moment()
        raise KeyboardInterrupt

    replaced: Callable[..., object] = interrupted
    monkeypatch.setattr("service.observability.top.moments", replaced)
    result = CliRunner().invoke(app, ["top"])
    assert (result.exit_code, result.stderr) == (0, "")
