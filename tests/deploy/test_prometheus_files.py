"""Configuration, rules and alerts as files: valid for promtool, alerts tested each way, guide and runbooks there."""

import re
from typing import Any

import pytest
import yaml

from tests.architecture.rules import ROOT
from tests.deploy.programs import promtool
from tests.deploy.watching import SHIPPED


def alerts() -> dict[str, dict[str, Any]]:
    groups = yaml.safe_load((SHIPPED / "alerts.yml").read_text())["groups"]
    return {rule["alert"]: rule for group in groups for rule in group["rules"]}


def test_promtool_has_no_complaint() -> None:
    assert "SUCCESS" in promtool("check", "config", "--lint-fatal", SHIPPED / "prometheus.yml")
    assert "SUCCESS" in promtool("check", "rules", "--lint-fatal", SHIPPED / "recording.yml", SHIPPED / "alerts.yml")


def test_alerts_and_ratios_come_out_as_their_cases_say() -> None:
    assert "SUCCESS" in promtool("test", "rules", SHIPPED / "alerts.test.yml")


def test_every_alert_is_tested_to_fire_and_to_be_silent() -> None:
    cases = [
        case
        for test in yaml.safe_load((SHIPPED / "alerts.test.yml").read_text())["tests"]
        for case in test.get("alert_rule_test", [])
    ]
    assert {case["alertname"] for case in cases if case["exp_alerts"]} == set(alerts())
    assert {case["alertname"] for case in cases if not case["exp_alerts"]} == set(alerts())


@pytest.mark.parametrize("name", alerts())
def test_an_alert_says_what_to_do(name: str) -> None:
    rule = alerts()[name]
    assert rule["labels"]["severity"] in ("critical", "warning", "info")
    guide = (ROOT / "docs" / "operating.md").read_text()
    assert f"`{name}`" in guide
    headings = {line.strip("# ").lower() for line in guide.splitlines() if line.startswith("#")}
    for incident in re.findall(r"See '([^']+)'|see '([^']+)'", rule["annotations"]["description"]):
        assert any(name and name in heading for name in incident for heading in headings)
