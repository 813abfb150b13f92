"""The shipped dashboards are what panels.yaml generates; panels explain themselves."""

from pathlib import Path

import pytest
import yaml

from deploy.grafana.generate import generated
from tests.architecture.rules import ROOT
from tests.deploy.dashboards import FILES, FOLDER, dashboard

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
