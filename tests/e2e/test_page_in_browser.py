"""The live page in a real browser, served by a real process that learns: chat, charts, the operator's panel, and what
people with a keyboard, a small screen or a dark room need.
"""

import re
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import uvicorn
from fastapi import FastAPI

from service.assembly import assemble
from service.observability.live import Live
from tests.browser import Browser, browser
from tests.processes import Process, begin, write_settings
from tests.service.api.client import app_of
from tests.service.bench.parts import save_drafter, save_two_layers, settings_for
from tests.service.scripted import ScriptedEngine, runtime_of, say
from tests.service.test_metrics import OUTLOOK, STEP
from tests.tiny_models import served_by

TOKENS = 60
QUESTION = "say <b>it</b> again"
ENTER = 13
TAB = 9
ANSWER = "document.querySelectorAll('.turn.assistant')[0]"
DONE = "document.getElementById('talk').getAttribute('aria-busy') === 'false'"


CONTRAST = r"""(element) => {
    const channels = (colour) => colour.match(/[\d.]+/g).map(Number);
    const linear = (value) => value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4;
    const luminance = (colour) => {
        const [red, green, blue] = channels(colour).map((value) => linear(value / 255));
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
    };
    const background = (one) => getComputedStyle(one).backgroundColor;
    let behind = element;
    while (channels(background(behind))[3] === 0) behind = behind.parentElement;
    const [dark, light] = [luminance(getComputedStyle(element).color), luminance(background(behind))].sort();
    return (light + 0.05) / (dark + 0.05);
}"""
"""Of a text against what is behind it, by the formula of the accessibility guidelines."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    root = tmp_path_factory.mktemp("page")
    model = save_two_layers(root / "model")
    target = assemble(settings_for(model).model_copy(update={"budget_policy": "fixed"}))
    settings = served_by(
        model,
        drafter="memory+specblock",
        drafter_path=str(save_drafter(root / "drafter", target)),
        budget_policy="fixed",
        state_dir=str(root / "state"),
        adaptation={"enabled": True, "niceness": 0},
    )
    numbers = write_settings(root / "config.yaml", settings)
    running = begin(["serve"], root / "config.yaml", root / "log", numbers=numbers)
    yield running
    running.end()


@pytest.fixture(scope="module")
def page(server: Process, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """The page as it is after its first answer."""
    with browser(tmp_path_factory.mktemp("browser")) as opened:
        opened.resize(1280, 900)
        opened.open(server.url + "/")
        opened.until("document.querySelector('#state').className === 'ready'")
        ask(opened, QUESTION)
        yield opened


def ask(page: Browser, text: str) -> None:
    page.value(f"document.getElementById('max-tokens').value = {TOKENS}")
    page.click("#prompt")
    page.type(text)
    page.press("Enter", ENTER, "\r")
    page.until(f"document.querySelector('.figures') && {DONE}")


def texts_of(page: Browser, kind: str) -> list[str]:
    found: list[str] = page.value(f"[...{ANSWER}.querySelectorAll('.token.{kind}')].map(e => e.textContent)")
    return found


def test_the_answer_is_the_one_that_every_client_gets(page: Browser, server: Process) -> None:
    answer = server.official().chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": QUESTION}], temperature=0, max_tokens=TOKENS
    )
    expected = answer.choices[0].message.content or ""
    assert page.value(f"{ANSWER}.textContent") == expected
    assert len(expected) > 20


def test_tokens_are_coloured_by_who_came_up_with_them(page: Browser) -> None:
    """Each verify ends in one token of the target's own, and reading the prompt in another one."""
    verifies = int(re.search(r"over (\d+) steps", page.text(".figures"))[1])  # type: ignore[index]
    accepted, own = (len(texts_of(page, kind)) for kind in ("accepted", "bonus"))
    assert (accepted, own) == (TOKENS - verifies - 1, verifies + 1)
    assert accepted > 5
    style = "getComputedStyle({}.querySelector('.token.{}')).backgroundColor"
    assert page.value(style.format(ANSWER, "accepted")) != page.value(style.format(ANSWER, "bonus"))


def test_tokens_appear_one_step_after_the_other(page: Browser) -> None:
    page.value(
        "window.grown = []; new MutationObserver(() => grown.push(document.querySelectorAll('.token').length))"
        ".observe(document.getElementById('talk'), {childList: true, subtree: true}); 1"
    )
    ask(page, "and once more")
    counts = page.value("grown")
    assert counts == sorted(counts)
    assert len(set(counts)) > 5


def test_what_a_person_types_is_no_markup(page: Browser) -> None:
    assert page.text(".turn.user") == QUESTION
    assert page.value("document.querySelector('.turn b')") is None


def test_the_tree_of_each_step_can_be_looked_at(page: Browser) -> None:
    last = int(page.value("document.getElementById('step').max"))
    assert last > 5
    assert page.text("#step-text").startswith(f"{last} of {last}: ")
    page.value("document.getElementById('step').focus()")
    page.press("Home", 36)
    assert page.text("#step-text") == f"1 of {last}: Nothing was drafted: one pass, one token."
    shown = []
    for _ in range(last - 1):
        page.press("ArrowRight", 39)
        nodes = {
            kind: page.value(f"document.querySelectorAll('#tree-picture .node.{kind}').length")
            for kind in ("accepted", "rejected", "bonus")
        }
        words = page.text("#step-text")
        assert page.value("[...document.querySelectorAll('.token.chosen.accepted')].length") == nodes["accepted"]
        assert nodes["bonus"] == 1
        assert f"{nodes['accepted']} accepted" in words or "Nothing was drafted" in words
        shown.append(nodes)
    assert sum(nodes["accepted"] for nodes in shown) > 0
    assert sum(nodes["rejected"] for nodes in shown) > 0


def test_the_chart_moves(page: Browser) -> None:
    line = "document.querySelector('#chart-tau .line').getAttribute('d')"
    page.until(line)
    before = page.value(line)
    page.until(f"{line} !== {before!r}", 10)
    assert page.value("document.querySelector('#chart-tau svg').getAttribute('aria-label')").startswith(
        "Mean acceptance length"
    )
    assert page.value("document.querySelectorAll('.chart:not([hidden])').length") == 5


def test_an_operator_pauses_and_resumes_learning(page: Browser, server: Process) -> None:
    page.until("!document.getElementById('learning-body').hidden")
    buttons = "['pause', 'resume', 'rollback'].map(id => document.getElementById(id).disabled)"
    assert page.value(buttons) == [True, True, True]
    use_operator_key(page, "wrong")
    page.until("!document.getElementById('pause').disabled")
    page.click("#pause")
    page.until("document.getElementById('learning-answer').textContent.startsWith('This is for operators')")
    assert server.state()["paused"] is False
    use_operator_key(page, "boss")
    page.until("!document.getElementById('pause').disabled")
    page.click("#pause")
    page.until("document.getElementById('learning-answer').textContent.includes('paused by an operator')")
    assert server.state()["paused"] is True
    page.until("document.getElementById('events').textContent.includes('paused (operator)')")
    page.until("!document.getElementById('resume').disabled")
    page.click("#resume")
    page.until("!document.getElementById('pause').disabled")
    assert server.state()["paused"] is False


def use_operator_key(page: Browser, key: str) -> None:
    page.click("#keys summary")
    page.click("#operator-key")
    page.value("document.getElementById('operator-key').select()")
    page.type(key)
    page.press("Enter", ENTER, "\r")
    assert page.value("document.getElementById('keys').open") is False


def test_rolling_back_takes_two_presses(page: Browser, server: Process) -> None:
    use_operator_key(page, "boss")
    page.until("!document.getElementById('rollback').disabled")
    page.click("#rollback")
    assert page.text("#rollback") == "Press again to roll back"
    assert not any(event["kind"] == "rolled_back" for event in server.state()["events"])
    page.until("document.getElementById('rollback').textContent === 'Roll back'", 10)


def test_keys_are_kept_nowhere(page: Browser) -> None:
    assert page.value("document.cookie + JSON.stringify(localStorage) + JSON.stringify(sessionStorage)") == "{}{}"
    assert "boss" not in page.value("location.href")


def test_a_phone_shows_all_of_it_without_scrolling_sideways(page: Browser) -> None:
    page.resize(360, 740, mobile=True)
    try:
        assert page.value("document.documentElement.scrollWidth") == 360
        wide = page.value(
            "[...document.querySelectorAll('button, input, textarea, figure, table')].filter(e => e.offsetParent)"
            ".filter(e => e.getBoundingClientRect().right > 360).map(e => e.id)"
        )
        assert wide == []
    finally:
        page.resize(1280, 900)


def contrast(page: Browser, selector: str) -> float:
    ratio: float = page.value(f"({CONTRAST})(document.querySelector({selector!r}))")
    return ratio


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_can_be_read_by_day_and_by_night(page: Browser, scheme: str) -> None:
    page.prefer(scheme)
    background = page.value("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)")
    assert (sum(background) > 384) == (scheme == "light")
    for selector in ("h1", ".note", "label", ".token.accepted", ".turn.user", "button.main", "dt", ".key-first"):
        assert contrast(page, selector) >= 4.5, selector
    page.prefer("light")


def test_everything_can_be_reached_by_keyboard_and_has_a_name(page: Browser) -> None:
    wanted = set(
        page.value(
            "[...document.querySelectorAll('button:enabled, input, textarea')]"
            ".filter(field => field.checkVisibility()).map(field => field.id)"
        )
    )
    assert {"prompt", "send", "temperature", "step", "pause"} <= wanted
    page.value("document.activeElement.blur()")
    reached = set()
    for _ in range(40):
        page.press("Tab", TAB)
        reached.add(page.value("document.activeElement.id"))
    assert wanted <= reached
    page.send("Accessibility.enable")
    nodes = page.send("Accessibility.getFullAXTree")["nodes"]
    roles = {"button", "textbox", "spinbutton", "checkbox", "slider", "image", "log", "table"}
    named = [node for node in nodes if not node["ignored"] and node.get("role", {}).get("value") in roles]
    assert len(named) > 15
    assert [node["role"]["value"] for node in named if not node.get("name", {}).get("value")] == []


def test_nothing_foreign_was_loaded_and_no_one_complained(page: Browser, server: Process) -> None:
    assert [url for url in page.loaded if not url.startswith((server.url, "data:image/svg+xml,"))] == []
    refused = [words for words in page.complaints if "401" not in words]
    assert refused == []


def test_the_page_says_when_the_server_falls_silent_and_comes_back_by_itself(page: Browser, server: Process) -> None:
    server.running.send_signal(signal.SIGSTOP)
    try:
        page.until("document.getElementById('state').className === 'lost'", 30)
    finally:
        server.running.send_signal(signal.SIGCONT)
    page.until("document.getElementById('state').className === 'ready'", 30)


@contextmanager
def served(app: FastAPI) -> Iterator[str]:
    """An application in a thread of its own, as its address."""
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_config=None))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = True
    thread.join()


def test_where_all_is_closed_an_api_key_opens_feed_and_chat(page: Browser) -> None:
    app = app_of(runtime_of(ScriptedEngine(say("ab", "c"))), api_keys=("mine",), open_metrics=False)
    with served(app) as url:
        page.open(url + "/")
        page.until("document.getElementById('state-text').textContent.includes('needs an API key')")
        page.click("#prompt")
        page.type("hello")
        page.press("Enter", ENTER, "\r")
        page.until("document.querySelector('.problem')?.textContent.includes('API key')")
        page.click("#keys summary")
        page.click("#api-key")
        page.type("mine")
        page.press("Enter", ENTER, "\r")
        page.until("document.getElementById('state').className === 'ready'")
        page.until("document.getElementById('model').textContent.includes('tiny')")
        assert page.text("#learning-state") == "Learning is off; it is turned on by --adaptation.enabled true."
        page.open("about:blank")


def test_what_drafting_gains_and_past_answers_bring_is_reported(page: Browser) -> None:
    live = Live()
    with served(app_of(runtime_of(ScriptedEngine(say("ab"))), live=live)) as url:
        page.open(url + "/")
        page.until("document.getElementById('state').className === 'ready'")
        assert page.value("document.getElementById('memory').hidden")
        live.observe_step(replace(STEP, drafting=OUTLOOK))
        page.until("document.getElementById('drafting').textContent")
        assert page.text("#drafting") == (
            "Expected now: drafting gains 0.25 ± 0.05 plain steps per step of 2 requests or more "
            "(0.13 s lost so far, 0.75 s more allowed)."
        )
        page.until("!document.getElementById('memory').hidden")
        held = "Past answers: 1,234 tokens stored, 13 % of their memory full; "
        assert (
            page.text("#memory")
            == held + "60 % of the tokens accepted lately were copied from them or from their own text."
        )
        assert page.value("document.getElementById('gain').hidden && document.getElementById('chart-gain').hidden")
        live.observe_step(replace(STEP, accepted_by_source={"specblock": 5}, saved_seconds=STEP.seconds))
        page.until("document.getElementById('memory').textContent.includes('30 %')")
        assert page.text("#gain").startswith("Since start: 2.00 times as fast as plain decoding over 6 tokens. ")
        assert page.value("document.querySelectorAll('#chart-gain .line').length") == 2
        page.open("about:blank")


def test_open_pages_do_not_hold_up_the_end(page: Browser, server: Process) -> None:
    page.open(server.url + "/")
    page.until("document.getElementById('state').className === 'ready'")
    server.end()
    assert "timeout graceful shutdown exceeded" not in server.log.read_text()
    page.until("document.getElementById('state').className === 'lost'")
