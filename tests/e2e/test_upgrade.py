"""A server takes over what the server of 0.2.0 left in `state_dir`."""

import json
import shutil
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from adaptation.checkpoint import Snapshot, SnapshotInfo, now, write_snapshot
from tests.e2e.test_learning_over_http import assembled
from tests.processes import Process, begin, write_settings
from tests.tiny_models import served_by

LEFT = Path(__file__).with_name("state-0.2.0")
(LEARNT,) = (LEFT / "state/adaptation").iterdir()
STATE = json.loads((LEARNT / "learner.json").read_text())["content"]["state"]

TRAINING, VERSION = f"state/adaptation/{LEARNT.name}/training", "snapshots/0000000001/weights.safetensors"
USED = json.loads((LEFT / "state/budgets.json").read_text())["used_tokens"]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("upgrade")
    assembled(folder / "model", hidden_size=32)
    shutil.copytree(LEFT, folder, dirs_exist_ok=True)
    month = datetime.now(UTC).strftime("%Y-%m")  # what another month used does not count
    (folder / "state/budgets.json").write_text(json.dumps({"month": month, "used_tokens": USED}))
    moments = {name: torch.rand(shape) for name, shape in json.loads((LEFT / "moments.json").read_text()).items()}
    weights = {f"weights.{name}": value for name, value in load_file(LEARNT / VERSION).items()}
    write_snapshot(folder / TRAINING, Snapshot(SnapshotInfo(1, 1, now(), {}), weights | moments))
    return folder


@pytest.fixture(scope="module")
def server(root: Path) -> Iterator[Process]:
    settings = served_by(
        root / "model",
        drafter="memory+specblock",
        drafter_path=str(root / "deployed"),
        state_dir=str(root / "state"),
        api_keys=[{"key": "k1", "name": "team", "budget_tokens": USED["team"]}],
        adaptation={"enabled": True, "policy": "bandit"},
    )
    settings.pop("budget_policy", None)
    numbers = write_settings(root / "config.yaml", settings)
    running = begin(["serve"], root / "config.yaml", root / "log", numbers=numbers)
    yield running
    running.end()


def test_the_learnt_drafter_serves_again(server: Process, root: Path) -> None:
    state = server.state()
    assert (state["origin"], state["snapshots"]) == (1, [1])
    assert "learning: restored (same_weights), drafter version 2: origin 1" in server.log.read_text()
    (folder,) = (root / "state/adaptation").iterdir()
    torch.testing.assert_close(load_file(folder / VERSION), load_file(LEARNT / VERSION), rtol=0, atol=0)


def test_what_the_bandit_knows_goes_on(server: Process) -> None:
    assert server.state()["balance_seconds"] == STATE["parts"]["policy"]["knowledge"]["balance"]


def test_a_key_has_used_what_it_had_used(server: Process) -> None:
    asked = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
    refused = server.ask("POST", "/v1/chat/completions", json=asked, headers={"authorization": "Bearer k1"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "insufficient_quota")


def test_costs_are_measured_anew_beside_the_old_ones(server: Process, root: Path) -> None:
    server.state()
    costs = {file.name for file in (root / "state/costs").glob("costs-*.json")}
    assert costs > {file.name for file in (LEFT / "state/costs").iterdir()}
    assert f"costs in {root / 'state/costs'} are for another version, model or machine" in server.log.read_text()


def test_training_goes_on_with_its_moments(server: Process, root: Path) -> None:
    """The last test: it ends the server, which saves the training copy."""
    server.state()
    server.end()
    before, after = (load_file(root / TRAINING / f"{number:010d}/weights.safetensors") for number in (1, 2))
    kept = {name: value for name, value in before.items() if not name.startswith("head.")}
    torch.testing.assert_close(after, kept, rtol=0, atol=0)
    assert "ignoring optimizer moments of head updates in" in server.log.read_text()
    assert "ignoring token counts" in server.log.read_text()
