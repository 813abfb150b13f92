"""What a second adds up to, what is kept of the last minutes, and that observing waits for nobody."""

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

from adaptation.records import Event
from service.cli import app
from service.engine.stats import StepStats
from service.observability.live import KEPT_MOMENTS, Live
from service.observability.top import Screen
from tests.service.scripted import STATUS
from tests.service.test_metrics import FINISH, LOAD, MEMORY, OUTLOOK, STEP


class Clock:
    def __init__(self) -> None:
        self.seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


def live_at(clock: Clock) -> Live:
    return Live(now=lambda: 1_000 + clock.seconds, clock=clock)


def test_a_second_is_added_up() -> None:
    clock = Clock()
    live = live_at(clock)
    live.observe_load(LOAD)
    live.observe_step(STEP)
    live.observe_step(replace(STEP, drafted_nodes=7, budget_reason="load"))
    live.observe_step(replace(STEP, drafted_nodes=3, accepted_by_source={"memory": 1}))
    live.observe_finish(FINISH)
    clock.seconds += 2
    moment = live.tick()
    assert (moment["unix_seconds"], moment["seconds"]) == (1_102, 2)
    assert (moment["tokens_per_second"], moment["prompt_tokens_per_second"]) == (9, 10.5)
    assert moment["tau"] == 1 + 12 / 6
    assert (moment["budget"], moment["budget_reason"]) == (10, "gain")
    assert moment["accepted_by_source"] == {"memory": 7, "specblock": 4}
    assert moment["phase_seconds"] == {"draft": 0.75, "verify": 1.5, "other": 0.375}
    assert moment["finished"] == {"stop": 1}
    assert (moment["running"], moment["waiting"], moment["slots_used_share"]) == (3, 2, 0.25)
    assert (moment["learning"], moment["events"], moment["drafting"]) == (None, [], None)
    live.observe_step(STEP)
    live.observe_step(replace(STEP, memory=replace(MEMORY, remembered_tokens=9)))
    for _ in range(2):
        assert live.tick()["memory"] == replace(MEMORY, remembered_tokens=9), "it holds until it is told anew"
    assert [point["accepted_by_source"] for point in live.past()["points"]] == [
        {"memory": 7, "specblock": 4},
        {"memory": 6, "specblock": 4},
        {},
    ]


def test_a_second_in_which_nothing_happens() -> None:
    clock = Clock()
    live = live_at(clock)
    live.observe_load(LOAD)
    live.observe_step(STEP)
    live.tick()
    clock.seconds += 1
    moment = live.tick()
    assert (moment["tau"], moment["budget"], moment["budget_reason"], moment["tokens_per_second"]) == (
        None,
        None,
        None,
        0,
    )
    assert moment["running"] == 3  # how busy it is holds until it is told anew


def first_token(stats: StepStats) -> StepStats:
    return replace(stats, itl_seconds=(), accepted_tokens=0)


def test_reading_a_prompt_is_no_verify() -> None:
    live = Live()
    live.observe_step(first_token(STEP))
    assert live.tick()["tau"] is None


def test_two_ticks_at_once_divide_by_nothing() -> None:
    live = live_at(Clock())
    live.observe_step(STEP)
    assert live.tick()["tokens_per_second"] == 0


def test_learning_is_shown_as_last_told() -> None:
    live = Live()
    live.observe_adaptation(STATUS)
    for _ in range(2):
        learning = live.tick()["learning"]
        assert learning == replace(STATUS, events=())
    assert [point["version"] for point in live.past()["points"]] == [2, 2]
    assert live.past()["points"][0]["values"] == STATUS.values


@pytest.mark.parametrize(
    ("reason", "shown"), [("operator", "operator"), ("cannot read /somewhere/secret/drafter.json", "other")]
)
def test_an_event_is_told_once_and_kept_in_closed_words(reason: str, shown: str) -> None:
    clock = Clock()
    live = live_at(clock)
    live.observe_event(Event("loaded", 4, reason, {"tau": 2.5}))
    (event,) = live.tick()["events"]
    assert (event["kind"], event["reason"], event["version"], event["numbers"]) == ("loaded", shown, 4, {"tau": 2.5})
    assert event["unix_seconds"] == 1_100
    assert live.tick()["events"] == []
    assert live.past()["events"] == [event]


def test_the_past_is_bounded_and_oldest_first() -> None:
    clock = Clock()
    live = live_at(clock)
    for _ in range(KEPT_MOMENTS + 7):
        clock.seconds += 1
        live.tick()
    times = [point["unix_seconds"] for point in live.past()["points"]]
    assert len(times) == KEPT_MOMENTS
    assert times == sorted(times)
    assert times[-1] == 1_000 + clock.seconds


def test_speed_is_compared_with_plain_decoding_since_the_start() -> None:
    live = Live()
    live.observe_step(STEP)  # not measured
    assert live.tick()["against_plain"] is None
    measured = replace(STEP, saved_seconds=0.25)
    for _ in range(700):
        live.observe_step(measured)
        live.observe_step(STEP)
        now = live.tick()["against_plain"]
    assert now == {"tokens": 6, "seconds": STEP.seconds, "plain_seconds": STEP.seconds + 0.25}
    spans = live.past()["since_start"]
    assert 100 < len(spans) <= 240
    assert [sum(span[place] for span in spans) for place in range(3)] == pytest.approx(
        [700 * 6, 700 * STEP.seconds, 700 * (STEP.seconds + 0.25)]
    )
    assert {span.seconds for span in spans[:-1]} == {spans[0].seconds}, "equally long, but for the last"
    terminal = shown(("moment", {**moment(), "against_plain": now}))
    assert line_of(terminal, "speed-up").split()[1] == f"{1 + 0.25 / STEP.seconds:.2f}"


def test_records_nobody_adds_up_do_not_pile_up() -> None:
    live = Live()
    for _ in range(70_000):
        live.observe_finish(FINISH)
    assert live.tick()["finished"]["stop"] == 65_536


# What a terminal shows of a feed, and what is said where there is none.


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
    assert "1,234 tokens stored, 12% full" in line_of(text, "past answers")
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


def test_what_is_switched_off_is_shown() -> None:
    assert "switched off" not in shown(("moment", moment()))
    text = shown(("moment", moment(switched_off={"charge": 1.0, "learn": 2.0})))
    assert "switched off after errors: charge, learn" in text


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
