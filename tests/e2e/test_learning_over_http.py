"""A server that learns, as a process of its own: asked over HTTP by clients and by an operator, then ended and begun
again."""

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from service.assembly import Assembly, assemble
from service.observability.learning_tables import ADAPTATION
from tests.processes import Process, begin, write_settings
from tests.service.bench.parts import save_drafter, save_two_layers, settings_for
from tests.tiny_models import served_by


@dataclass(frozen=True)
class Files:
    """A target, drafters for it and for others, and the configuration of a server."""

    config: Path
    state: Path
    drafters: Path
    numbers: Mapping[str, object]

    def begin(self, log: Path) -> Process:
        return begin(["serve"], self.config, log, numbers=self.numbers)


def assembled(folder: Path, *, hidden_size: int) -> Assembly:
    settings = settings_for(save_two_layers(folder, hidden_size=hidden_size))
    return assemble(settings.model_copy(update={"budget_policy": "fixed"}))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    root = tmp_path_factory.mktemp("learning")
    mine, foreign = assembled(root / "model", hidden_size=32), assembled(root / "other", hidden_size=48)
    drafters = root / "drafters"
    save_drafter(drafters / "deployed", mine)
    save_drafter(drafters / "good", mine, seed=1)
    save_drafter(drafters / "shorter", mine, block_size=2)
    save_drafter(drafters / "foreign", foreign)
    settings = served_by(
        root / "model",
        drafter="memory+specblock",
        drafter_path=str(drafters / "deployed"),
        budget_policy="fixed",
        state_dir=str(root / "state"),
        adaptation={"enabled": True, "policy": "head_only", "head_queries": 1, "validation_share": 0.3},
    )
    numbers = write_settings(root / "config.yaml", settings)
    return Files(root / "config.yaml", root / "state", drafters, numbers)


@pytest.fixture(scope="module")
def server(files: Files, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    running = files.begin(tmp_path_factory.mktemp("log") / "log")
    yield running
    running.end()


def until(server: Process, reached: Any) -> Any:
    """The state once it is so, or as it is when patience ends."""
    deadline = time.monotonic() + 20
    while not reached(state := server.state()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return state


def say(server: Process, text: str, **fields: Any) -> str:
    messages: Any = [{"role": "user", "content": text}]
    answer = server.official().chat.completions.create(
        model="tiny", messages=messages, seed=5, max_completion_tokens=24, extra_body={"ignore_eos": True}, **fields
    )
    return answer.choices[0].message.content or ""


def load(server: Process, folder: Path) -> tuple[int, bool, str]:
    response = server.ask("POST", "/update_weights_from_disk", json={"model_path": str(folder)})
    return response.status_code, response.json()["success"], response.json()["message"]


def test_what_clients_ask_is_heard(server: Process) -> None:
    before = server.state()["queries_observed"]
    texts = [say(server, "that the other") for _ in range(4)]
    state = until(server, lambda state: state["queries_observed"] >= before + 4)
    assert state["queries_observed"] == before + 4
    assert (state["policy"], state["paused"]) == ("head_only", False)
    assert len(set(texts)) == 1


def test_what_must_not_be_stored_is_not_learnt_from(server: Process) -> None:
    before = server.state()["excluded"].get("not_stored", 0)
    say(server, "a secret", store=False)
    state = until(server, lambda state: state["excluded"].get("not_stored", 0) > before)
    assert state["excluded"]["not_stored"] == before + 1


def test_the_metrics_show_what_is_learnt(server: Process) -> None:
    say(server, "in the hat")
    heard = until(server, lambda state: state["queries_observed"] > 0)["queries_observed"]
    page = server.ask("GET", "/metrics", headers={}).text
    assert f"adaptree_adaptation_queries_total {heard:.1f}\n" in page
    assert all(f"# TYPE adaptree_{series.name}" in page for series in ADAPTATION)


def test_weights_come_from_a_folder_and_are_taken_back(server: Process, files: Files) -> None:
    text = say(server, "the line on the table", temperature=0.8)
    before = server.state()["newest"]
    status, success, message = load(server, files.drafters / "good")
    assert (status, success) == (200, True)
    assert message.endswith(f"as version {before + 1}.")
    loaded = until(server, lambda state: state["version"] > before)
    assert (loaded["version"], loaded["origin"]) == (before + 1, before + 1)
    assert say(server, "the line on the table", temperature=0.8) == text
    server.ask("POST", "/v1/adaptation/rollback")
    back = until(server, lambda state: state["version"] > before + 1)
    assert back["version"] == before + 2
    assert back["origin"] <= before
    assert before + 1 in back["condemned"]
    assert say(server, "the line on the table", temperature=0.8) == text


@pytest.mark.parametrize(
    ("name", "reason"),
    [("shorter", "shapes"), ("foreign", "target"), ("missing", "cannot be read"), ("damaged", "cannot be read")],
)
def test_weights_that_do_not_fit_are_refused(server: Process, files: Files, name: str, reason: str) -> None:
    if name == "damaged":
        damaged, good = files.drafters / "damaged", files.drafters / "good"
        damaged.mkdir()
        (damaged / "config.json").write_bytes((good / "config.json").read_bytes())
        (damaged / "model.safetensors").write_bytes((good / "model.safetensors").read_bytes()[:-100])
    before = server.state()["newest"]
    status, success, message = load(server, files.drafters / name)
    assert (status, success) == (400, False)
    assert reason in message
    assert server.state()["newest"] == before


def test_what_was_learnt_outlives_the_process(server: Process, files: Files, tmp_path: Path) -> None:
    assert load(server, files.drafters / "good")[1]
    version = until(server, lambda state: state["version"] == state["newest"])["newest"]
    text = say(server, "that the other")
    server.end()
    log = server.log.read_text()
    assert "learning: loaded (operator)" in log
    assert "Traceback" not in log
    again = files.begin(tmp_path / "log")
    try:
        state = until(again, lambda state: state["version"] == state["newest"])
        assert state["version"] > version
        assert state["origin"] == version
        assert say(again, "that the other") == text
    finally:
        again.end()
