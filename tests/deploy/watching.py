"""A real Prometheus with the shipped configuration, faster and pointed at some servers, and what it knows."""

import json
import math
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from benchmarks.fleets import free_port
from tests.architecture.rules import ROOT
from tests.deploy.programs import program

SHIPPED = ROOT / "deploy" / "prometheus"
INTERVAL = "1s"
_PATIENCE_SECONDS = 30


@dataclass(frozen=True)
class Prometheus:
    """A running one."""

    url: str

    def ask(self, path: str, **parameters: object) -> Any:
        """The data of an answer of its HTTP interface."""
        query = urllib.parse.urlencode(parameters)
        try:
            with urllib.request.urlopen(f"{self.url}/api/v1/{path}?{query}", timeout=_PATIENCE_SECONDS) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{path}?{query}: {error.read().decode()}") from error

    def numbers(self, expression: str, *, seconds: float) -> list[float]:
        """All finite values of an expression over the last seconds, of which now is one."""
        now = time.time()
        found = self.ask("query_range", query=expression, start=now - math.ceil(seconds), end=now, step=INTERVAL)
        values = [float(value) for series in found["result"] for _, value in series["values"]]
        return [value for value in values if math.isfinite(value)]

    def rules(self) -> list[dict[str, Any]]:
        """Every rule with its health and state."""
        return [rule for group in self.ask("rules")["groups"] for rule in group["rules"]]


@contextmanager
def watching(folder: Path, *targets: str) -> Iterator[Prometheus]:
    """Prometheus with its data in a folder, scraping these targets (host:port)."""
    address = f"127.0.0.1:{free_port()}"
    command = [
        program("prometheus"),
        f"--config.file={_configuration(folder, targets)}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address={address}",
    ]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=folder)
    try:
        _wait_until_ready(f"http://{address}", process, folder / "log")
        yield Prometheus(f"http://{address}")
    finally:
        process.terminate()
        process.wait(_PATIENCE_SECONDS)


def _configuration(folder: Path, targets: Sequence[str]) -> Path:
    """The shipped one, with the pace of a test and rules by their whole path."""
    settings = yaml.safe_load((SHIPPED / "prometheus.yml").read_text())
    settings["global"] = dict.fromkeys(settings["global"], INTERVAL)
    settings["rule_files"] = [str(SHIPPED / name) for name in settings["rule_files"]]
    (job,) = settings["scrape_configs"]
    job["static_configs"] = [{"targets": list(targets)}]
    file = folder / "prometheus.yml"
    file.write_text(yaml.safe_dump(settings))
    return file


def _wait_until_ready(url: str, process: "subprocess.Popen[bytes]", log: Path) -> None:
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(f"{url}/-/ready", timeout=1):
                return
        except OSError:
            time.sleep(0.05)
    raise AssertionError(f"prometheus did not become ready:\n{log.read_text()}")
