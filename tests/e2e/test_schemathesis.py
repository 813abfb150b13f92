"""Requests that Schemathesis makes up from the server's own description of itself, good ones and bad: no 5xx, no hang.

The size is of how many requests, of which every operation has its share.
"""

import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.environments import python_environment
from tests.processes import begin, write_settings
from tests.tiny_models import served_by

HERE = Path(__file__).parent
REQUESTS = 30_000
ENDLESS = "/adaptree/feed"
OPTIONS = ("--checks", "not_a_server_error", "--request-timeout", "60", "--seed", "1", "--continue-on-failure")
QUIETLY = ("--no-color", "--warnings", "off", "--suppress-health-check", "all", "--generation-database", "none")


@pytest.mark.slow
def test_nothing_made_up_is_the_servers_fault(
    tmp_path: Path, sized: Callable[[int], int], tell: Callable[..., None]
) -> None:
    settings = served_by(Path("dummy(tiny)"), drafter="lookup", budget_policy="fixed", max_output_tokens=16)
    words = write_settings(tmp_path / "config.yaml", {**settings, "state_dir": str(tmp_path / "state")})
    server = begin(["serve"], tmp_path / "config.yaml", tmp_path / "log", program=words)
    try:
        paths = server.ask("GET", "/openapi.json").json()["paths"]
        operations = sum(len(of_path) for path, of_path in paths.items() if path != ENDLESS)
        program = python_environment(HERE / "schemathesis.txt") / "bin" / "st"
        each = str(max(1, sized(REQUESTS) // operations))
        asked = ("run", f"{server.url}/openapi.json", "--exclude-path", ENDLESS, "--max-examples", each)
        done = subprocess.run([program, *asked, *OPTIONS, *QUIETLY], cwd=tmp_path, capture_output=True, text=True)
        server.end()
    finally:
        server.kill()
    count = re.search(r"(\d+) generated", done.stdout)
    assert count is not None, done.stdout + done.stderr
    tell(requests=int(count[1]), operations=operations, server_errors=done.stdout.count("Server error"))
    assert done.returncode == 0, done.stdout
