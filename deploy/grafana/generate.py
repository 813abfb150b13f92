"""Write the Grafana dashboards from panels.yaml: `python deploy/grafana/generate.py`. A test asserts that the files are
up to date.

In an expression of panels.yaml the selector of the chosen replicas is left out: it is put behind every metric name.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).parent
_SOURCE = {"type": "prometheus", "uid": "adaptree-prometheus"}
_METRIC = re.compile(r"\b(?:adaptree_\w+|instance:\w+:\w+)")
_COLUMNS = 24  # of Grafana's grid
_LAST = {"reduceOptions": {"calcs": ["lastNotNull"]}}
_OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "timeseries": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
    "stat": {**_LAST, "colorMode": "value", "graphMode": "area"},
    "bargauge": {**_LAST, "orientation": "vertical", "displayMode": "basic"},
    "heatmap": {"calculate": False, "yAxis": {"unit": "short"}, "color": {"scheme": "Blues", "mode": "scheme"}},
}
_SIZES = {"stat": (4, 4)}  # width and height; of all other types 8 and 7
_TARGETS: Mapping[str, Mapping[str, Any]] = {"heatmap": {"format": "heatmap"}, "bargauge": {"instant": True}}
_REPLICAS = {
    "name": "instance",
    "label": "Replica",
    "type": "query",
    "datasource": _SOURCE,
    "query": {"query": "label_values(adaptree_ready, instance)", "refId": "instance"},
    "refresh": 2,
    "sort": 1,
    "multi": True,
    "includeAll": True,
    "allValue": ".*",
    "current": {"text": "All", "value": "$__all"},
}
_LINK = {"type": "dashboards", "tags": ["adaptree"], "title": "adaptree"}


def generated() -> dict[str, str]:
    """The content of each dashboard file, by the file's name."""
    described = yaml.safe_load((FOLDER / "panels.yaml").read_text())
    return {f"{name}.json": json.dumps(_dashboard(name, one), indent=1) + "\n" for name, one in described.items()}


def _dashboard(name: str, described: Mapping[str, Any]) -> dict[str, Any]:
    panels: list[dict[str, Any]] = []
    x = y = row_height = 0
    for number, panel in enumerate(described["panels"], start=1):
        width, height = _SIZES.get(panel.get("type", "timeseries"), (8, 7))
        if x + width > _COLUMNS or (panels and height != row_height):
            x, y = 0, y + row_height
        row_height = height
        panels.append(_panel(number, panel, {"h": height, "w": width, "x": x, "y": y}))
        x += width
    return {
        "uid": f"adaptree-{name}",
        "title": f"adaptree: {name}",
        "description": described["description"],
        "tags": ["adaptree"],
        "schemaVersion": 39,
        "version": 1,
        "editable": False,
        "graphTooltip": 1,
        "refresh": "10s",
        "timezone": "",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {"list": [_REPLICAS]},
        "annotations": {"list": [_annotation(**one) for one in described.get("annotations", ())]},
        "links": [{**_LINK, "asDropdown": False, "includeVars": True, "keepTime": True}],
        "panels": panels,
    }


def _panel(number: int, panel: Mapping[str, Any], place: Mapping[str, int]) -> dict[str, Any]:
    kind = panel.get("type", "timeseries")
    defaults = {key: panel[key] for key in ("unit", "min", "max", "decimals") if key in panel}
    if kind == "timeseries":
        stack = panel.get("stack")
        custom = {"lineWidth": 1, "fillOpacity": panel.get("fill", 40 if stack else 10), "showPoints": "never"}
        defaults["custom"] = {**custom, **({"stacking": {"mode": stack, "group": "A"}} if stack else {})}
    return {
        "id": number,
        "type": kind,
        "title": panel["title"],
        "description": panel["description"],
        "datasource": _SOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": _OPTIONS[kind],
        "targets": [
            {"refId": chr(ord("A") + place), "expr": _selected(expr), "legendFormat": legend, **_TARGETS.get(kind, {})}
            for place, (legend, expr) in enumerate(panel["queries"].items())
        ],
    }


def _annotation(name: str, color: str, expr: str) -> dict[str, Any]:
    return {
        "name": name,
        "datasource": _SOURCE,
        "enable": True,
        "iconColor": color,
        "expr": _selected(expr),
        "step": "60s",
        "titleFormat": name,
        "textFormat": "{{instance}}",
    }


def _selected(expression: str) -> str:
    """The expression for the replicas that are chosen on the dashboard."""
    return _METRIC.sub(lambda match: match[0] + '{instance=~"$instance"}', expression)


if __name__ == "__main__":
    for name, content in generated().items():
        (FOLDER / "dashboards" / name).write_text(content)
