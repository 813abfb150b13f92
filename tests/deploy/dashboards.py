"""The shipped dashboards, and every question they put to Prometheus."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.architecture.rules import ROOT

FOLDER = ROOT / "deploy" / "grafana" / "dashboards"
FILES = sorted(FOLDER.glob("*.json"))


def dashboard(file: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(file.read_text())
    return content


def questions(file: Path, rate_interval: str = "4s") -> Iterator[tuple[str, str]]:
    """Where each expression stands, and the expression as Grafana would send it for all instances."""
    content = dashboard(file)
    for panel in content["panels"]:
        for target in panel["targets"]:
            yield f"{content['title']}, {panel['title']}, {target['refId']}", _filled(target["expr"], rate_interval)
    for note in content["annotations"]["list"]:
        yield f"{content['title']}, annotation {note['name']}", _filled(note["expr"], rate_interval)


def _filled(expression: str, rate_interval: str) -> str:
    return expression.replace("$instance", ".*").replace("$__rate_interval", rate_interval)
