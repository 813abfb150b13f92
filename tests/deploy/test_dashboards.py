"""The shipped dashboards as files: one schema, panels that explain themselves and do not overlap."""

from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.architecture.rules import ROOT
from tests.deploy.dashboards import FILES, FOLDER, dashboard

SCHEMA = 39
KINDS = {"timeseries", "stat", "bargauge", "heatmap"}
PROVISIONING = FOLDER.parent / "provisioning"


def source() -> dict[str, Any]:
    (found,) = yaml.safe_load((PROVISIONING / "datasources" / "prometheus.yml").read_text())["datasources"]
    return {"type": found["type"], "uid": found["uid"]}


def test_there_are_three() -> None:
    assert [file.stem for file in FILES] == ["adaptation", "overview", "speculation"]
    assert len({dashboard(file)["uid"] for file in FILES}) == len(FILES)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_all_have_one_schema_and_one_data_source(file: Path) -> None:
    content = dashboard(file)
    asking = [*content["panels"], *content["annotations"]["list"], *content["templating"]["list"]]
    assert content["schemaVersion"] == SCHEMA
    assert {tuple(part["datasource"].items()) for part in asking} == {tuple(source().items())}
    assert [variable["name"] for variable in content["templating"]["list"]] == ["instance"]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_panels_explain_themselves(file: Path) -> None:
    panels = dashboard(file)["panels"]
    assert [panel["id"] for panel in panels] == list(range(1, len(panels) + 1))
    assert len({panel["title"] for panel in panels}) == len(panels)
    for panel in panels:
        assert panel["type"] in KINDS
        assert panel["description"].endswith(".")
        assert panel["fieldConfig"]["defaults"]["unit"]
        assert panel["targets"]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_panels_of_a_replica_can_be_chosen(file: Path) -> None:
    content = dashboard(file)
    expressions = [target["expr"] for panel in content["panels"] for target in panel["targets"]]
    assert [expr for expr in expressions if 'instance=~"$instance"' not in expr] == []


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_panels_do_not_overlap(file: Path) -> None:
    places = [panel["gridPos"] for panel in dashboard(file)["panels"]]
    assert all(place["x"] + place["w"] <= 24 for place in places)
    for one, other in combinations(places, 2):
        beside = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        above = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        assert beside or above, f"{one} and {other}"


def test_publishes_and_rollbacks_are_annotations() -> None:
    content = dashboard(FOLDER / "adaptation.json")
    assert [note["name"] for note in content["annotations"]["list"]] == ["Published", "Rolled back"]


def test_the_dashboards_are_mounted_where_they_are_looked_for() -> None:
    (provider,) = yaml.safe_load((PROVISIONING / "dashboards" / "adaptree.yml").read_text())["providers"]
    mounted = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]["grafana"]["volumes"]
    assert f"./deploy/grafana/dashboards:{provider['options']['path']}:ro" in mounted
    assert "./deploy/grafana/provisioning:/etc/grafana/provisioning:ro" in mounted
