"""A server that no one uses: how often its threads wake."""

import time
from pathlib import Path

import pytest

from tests.processes import Process, serving_tiny

MOST_A_SECOND = 15
WATCHED_SECONDS = 3


def wake_ups(server: Process) -> int:
    """Times that threads of the server have waited for something, all together."""
    statuses = Path(f"/proc/{server.running.pid}/task").glob("*/status")
    lines = [line for status in statuses for line in status.read_text().splitlines()]
    return sum(int(line.split()[1]) for line in lines if line.startswith("voluntary_ctxt_switches"))


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="counts by Linux's /proc")
@pytest.mark.parametrize(
    "more", [{}, {"drafter": "auto", "adaptation": {"enabled": True}}], ids=["serving", "learning"]
)
def test_an_idle_server_sleeps(tmp_path: Path, more: dict[str, object]) -> None:
    server = serving_tiny(tmp_path, **more)
    try:
        body = {"model": "tiny", "prompt": "a", "max_tokens": 4}
        assert server.ask("POST", "/v1/completions", json=body).status_code == 200
        time.sleep(2)  # what follows an answer, such as a look at learning, is over
        before = wake_ups(server)
        time.sleep(WATCHED_SECONDS)
        assert wake_ups(server) - before <= MOST_A_SECOND * WATCHED_SECONDS
    finally:
        server.end()
