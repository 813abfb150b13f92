"""A server computes with as many threads as it is given: every further team would take the processors of the first."""

from pathlib import Path

import pytest

from tests.processes import serving_tiny


def threads_of_a_server(folder: Path, number: int) -> int:
    """Threads of a server's process that has loaded, measured and answered with so many."""
    server = serving_tiny(folder, threads=number)
    for _ in range(3):
        body = {"model": "tiny", "prompt": "Some rivers are", "max_tokens": 30, "ignore_eos": True}
        assert server.ask("POST", "/v1/completions", json=body).status_code == 200
    found = len(list(Path(f"/proc/{server.running.pid}/task").iterdir()))
    server.end()
    return found


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="counts what Linux tells of a process")
def test_loading_and_serving_share_one_team(tmp_path: Path) -> None:
    alone = threads_of_a_server(tmp_path / "one", 1)
    assert threads_of_a_server(tmp_path / "three", 3) == alone + 2
