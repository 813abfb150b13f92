"""The operators' guide names every setting, its default, and panels and alerts there are."""

import re
from collections.abc import Iterator

import yaml

from service.config import SETTINGS, panel_of
from tests.architecture.rules import ROOT
from tests.deploy.dashboards import FILES, dashboard
from tests.deploy.watching import SHIPPED

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
