"""The shipped dashboards are what panels.yaml generates; panels explain themselves."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.grafana.generate import generated
from service.config import SETTINGS, panel_of
from tests.architecture.rules import ROOT
from tests.deploy.dashboards import FILES, FOLDER, dashboard
from tests.deploy.programs import promtool
from tests.deploy.watching import SHIPPED

PROVISIONING = FOLDER.parent / "provisioning"


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_the_files_are_what_the_panels_generate(file: Path) -> None:
    assert file.read_text() == generated()[file.name], "run `python deploy/grafana/generate.py`"


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_panels_explain_themselves(file: Path) -> None:
    panels = dashboard(file)["panels"]
    assert len({panel["title"] for panel in panels}) == len(panels)
    assert all(panel["description"].endswith((".", "?")) for panel in panels)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_queries_are_limited_to_the_chosen_replicas(file: Path) -> None:
    expressions = [target["expr"] for panel in dashboard(file)["panels"] for target in panel["targets"]]
    assert [expr for expr in expressions if 'instance=~"$instance"' not in expr] == []


def test_the_dashboards_ask_the_provisioned_data_source() -> None:
    (source,) = yaml.safe_load((PROVISIONING / "datasources" / "prometheus.yml").read_text())["datasources"]
    asked = {tuple(panel["datasource"].items()) for file in FILES for panel in dashboard(file)["panels"]}
    assert asked == {(("type", source["type"]), ("uid", source["uid"]))}


def test_publishes_and_rollbacks_are_annotations() -> None:
    content = dashboard(FOLDER / "adaptation.json")
    assert [note["name"] for note in content["annotations"]["list"]] == ["Published", "Rolled back"]


def test_the_dashboards_are_mounted_where_they_are_looked_for() -> None:
    (provider,) = yaml.safe_load((PROVISIONING / "dashboards" / "adaptree.yml").read_text())["providers"]
    mounted = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]["grafana"]["volumes"]
    assert f"./deploy/grafana/dashboards:{provider['options']['path']}:ro" in mounted
    assert "./deploy/grafana/provisioning:/etc/grafana/provisioning:ro" in mounted


# The operators' guide names every setting, its default, and panels and alerts there are.

GUIDE = (ROOT / "docs" / "operating.md").read_text()
WORDED = {"none": None, "shipped": None}


def rows(heading: str) -> Iterator[list[str]]:
    """Cells of the tables below a heading of the second level."""
    _, _, section = GUIDE.partition(f"\n## {heading}\n")
    section, _, _ = section.partition("\n## ")
    for line in section.splitlines():
        if line.startswith("| `"):
            yield [cell.strip() for cell in line.strip("|").split("|")]


def test_every_setting_is_there_once_and_no_other() -> None:
    named = [cells[0].strip("`") for cells in rows("Settings")]
    assert len(named) == len(set(named))
    assert set(named) == set(SETTINGS)


def test_the_defaults_are_those_in_force() -> None:
    for name, _, shown, *_ in rows("Settings"):
        if name == "`state_dir`":
            continue  # depends on the machine
        default = SETTINGS[name.strip("`")].get_default()
        if isinstance(default, tuple) and default:
            assert tuple(map(float, shown.split(","))) == default, name
            continue
        read = WORDED[shown] if shown in WORDED else yaml.safe_load(shown)
        assert read == (None if default == () else default) or float(shown) == default, name


def test_every_panel_that_is_named_exists() -> None:
    titles = {panel["title"] for file in FILES for panel in dashboard(file)["panels"]}
    named = set(re.findall(r"(?<![\w`])_([A-Z][^_`\n|]+)_(?!\w)", GUIDE))
    assert named
    assert named - titles == set()


def test_every_setting_says_when_to_turn_it_and_what_to_watch() -> None:
    for name, _, _, when, watched in rows("Settings"):
        assert when, name
        measured = panel_of(name.strip("`")) in ("Speculation", "Learning while serving")
        assert watched.startswith("_") or (not watched and not measured), name


def test_every_alert_is_explained() -> None:
    groups = yaml.safe_load((SHIPPED / "alerts.yml").read_text())["groups"]
    alerts = [rule["alert"] for group in groups for rule in group["rules"]]
    assert [cells[0].strip("`") for cells in rows("Alerts")] == alerts


def test_settings_named_in_the_incidents_exist() -> None:
    _, _, incidents = GUIDE.partition("\n## Three incidents\n")
    known = {name.rpartition(".")[2] for name in SETTINGS}
    named = set(re.findall(r"`([a-z]+(?:_[a-z]+)+)`", incidents))
    events = {"suspended", "other_traffic", "within_noise", "too_little_evidence", "over_share"}
    events |= {"worse_than_before", "worse_than_anchor"}
    assert named - known - events == set()


# Configuration, rules and alerts as files: valid for promtool, alerts tested each way, guide and runbooks there.


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
