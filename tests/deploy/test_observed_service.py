"""A real Prometheus watches two servers under load: no panel, rule or alert asks for what is not there.

One learns, with a budget that is fixed so that there is much to learn from; the other chooses its budget by costs.
"""

import re
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import pytest
import yaml

from tests.architecture.rules import ROOT
from tests.deploy.dashboards import FILES, questions
from tests.deploy.programs import promtool
from tests.deploy.watching import Prometheus, watching
from tests.e2e.test_learning_over_http import assembled
from tests.processes import Process, begin, write_settings
from tests.service.bench.parts import save_drafter
from tests.service.learning_parts import EAGER
from tests.tiny_models import served_by

pytestmark = pytest.mark.slow(
    "a real Prometheus scrapes two servers, in windows of a minute", covers="deploy service/observability tests/deploy"
)
PATIENCE_SECONDS = 120
CLIENTS = 2
SCRAPES = 6
_WORDS = ("that the other", "in the hat", "and again", "the line on the table")
_LEARNS_AT_ONCE = {
    **EAGER,
    "enabled": True,
    "policy": "full_only",
    "full_queries": 4,
    "full_steps": 32,
    "step_texts": 64,
    "warm_up_steps": 1,
    "learning_rate": 0.005,
    "validation_share": 0.4,
    "gate_alpha": 4.5,  # of 9 judgements: any gain passes
}


@dataclass(frozen=True)
class Observed:
    """Servers after some load, and who watched."""

    learning: Process
    prometheus: Prometheus
    began: float

    def numbers(self, expression: str) -> list[float]:
        return self.prometheus.numbers(expression, seconds=time.time() - self.began)


def running(folder: Path, name: str, settings: Mapping[str, object]) -> Process:
    """A server of the model in this folder."""
    served = served_by(
        folder / "model", max_model_len=128, max_sequences=2, max_budget=4, state_dir=str(folder / name), **settings
    )
    config = folder / f"{name}.yaml"
    return begin(["serve"], config, folder / f"{name}.log", numbers=write_settings(config, served))


@contextmanager
def load(server: Process) -> Iterator[None]:
    """Some clients that ask one thing after the other."""
    stop, numbers = threading.Event(), count()

    def ask() -> None:
        while not stop.is_set():
            number = next(numbers)
            fields = {"model": "tiny", "prompt": _WORDS[number % len(_WORDS)], "user": str(number % 8)}
            body = {**fields, "max_tokens": 24, "seed": number % 5, "temperature": 0, "ignore_eos": True}
            server.ask("POST", "/v1/completions", json=body).raise_for_status()

    clients = [threading.Thread(target=ask) for _ in range(CLIENTS)]
    for client in clients:
        client.start()
    try:
        yield
    finally:
        stop.set()
        for client in clients:
            client.join()


@pytest.fixture(scope="module")
def observed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Observed]:
    """Seen: an update that was published, one rollback, and some scrapes under load."""
    folder = tmp_path_factory.mktemp("observed")
    drafter = save_drafter(folder / "drafter", assembled(folder / "model", hidden_size=32))
    learns = {"drafter": "specblock", "drafter_path": str(drafter), "adaptation": _LEARNS_AT_ONCE}
    with ExitStack() as stack:
        learning = running(folder, "learning", {**learns, "budget_policy": "fixed"})
        stack.callback(learning.end)
        counting = running(folder, "counting", {"drafter": "memory"})
        stack.callback(counting.end)
        targets = [server.url.removeprefix("http://") for server in (learning, counting)]
        prometheus = stack.enter_context(watching(folder, *targets))
        began = time.time()
        # A counter that exists before the first scrape has never changed.
        wait_until(prometheus, f'adaptree_adaptation_publishes_total{{instance="{targets[0]}"}} == 0')
        with load(learning), load(counting):
            wait_until(prometheus, "adaptree_adaptation_publishes_total > 0")
            learning.ask("POST", "/v1/adaptation/rollback").raise_for_status()
            wait_until(prometheus, "changes(adaptree_adaptation_rollbacks_total[1m]) > 0")
            wait_until(prometheus, "adaptree_adaptation_kl_to_anchor >= 0")
            wait_until(prometheus, f"min(count_over_time(up[5m])) > {SCRAPES}")
        yield Observed(learning, prometheus, began)


def wait_until(prometheus: Prometheus, expression: str) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not prometheus.ask("query", query=expression)["result"]:
        assert time.monotonic() < deadline, f"never came true: {expression}"
        time.sleep(0.2)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_every_panel_and_annotation_shows_something(observed: Observed, file: Path) -> None:
    asked = dict(questions(file))
    empty = {where: expression for where, expression in asked.items() if not observed.numbers(expression)}
    assert asked
    assert empty == {}


def test_every_alert_reads_what_there_is(observed: Observed) -> None:
    """With `bool` a comparison answers 0 or 1 and not with nothing, so only a missing series leaves it empty."""
    rules = yaml.safe_load((ROOT / "deploy" / "prometheus" / "alerts.yml").read_text())
    alerts = {rule["alert"]: rule["expr"] for group in rules["groups"] for rule in group["rules"]}
    asked = {name: re.sub(r"(==|>=|<=|>|<) ", r"\1 bool ", expr) for name, expr in alerts.items()}
    assert all("bool" in expression for expression in asked.values())
    assert {name for name, expression in asked.items() if not observed.numbers(expression)} == set()


def test_every_rule_is_healthy_and_no_one_is_alarmed(observed: Observed) -> None:
    rules = observed.prometheus.rules()
    assert {rule["type"] for rule in rules} == {"alerting", "recording"}
    assert [rule["name"] for rule in rules if rule["health"] != "ok"] == []
    assert [rule["name"] for rule in rules if rule.get("state") == "firing"] == []


def test_the_page_has_nothing_that_promtool_complains_of(observed: Observed) -> None:
    page = observed.learning.ask("GET", "/metrics", headers={}).content
    ours = b"".join(line for line in page.splitlines(keepends=True) if b"vllm:" not in line)  # colons are vLLM's own
    assert promtool("check", "metrics", given=ours) == ""


def test_what_is_scraped_is_bounded(observed: Observed) -> None:
    scraped = observed.prometheus.ask("query", query="scrape_samples_scraped")["result"]
    assert len(scraped) == 2
    assert all(300 < float(series["value"][1]) <= 540 for series in scraped)
    labels = {label for label in observed.prometheus.ask("labels") if not label.startswith("__")}
    assert not labels & {"prompt", "user", "client", "key", "request_id"}
