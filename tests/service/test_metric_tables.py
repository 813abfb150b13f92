"""The label sets are exactly what the modules that produce their values can say."""

import re
from typing import get_args

import pytest

from adaptation.config import AdaptationConfig
from adaptation.policy import ARMS as ALL_ARMS
from adaptation.policy import Reason
from adaptation.records import EventKind, RefusalReason
from service.observability.learning_tables import (
    ADAPTATION,
    ARMS,
    DECISIONS,
    EVENT_REASONS,
    EVENTS,
    OTHER,
    QUERY_FATES,
    VERSION_FATES,
    label_of,
)
from tests.architecture.rules import ROOT


def test_every_kind_of_event_is_counted() -> None:
    assert set(EVENT_REASONS) == set(get_args(EventKind))
    assert all(reasons[-1] == OTHER for reasons in EVENT_REASONS.values())


def test_decisions_are_those_of_the_policy() -> None:
    assert ALL_ARMS == ARMS
    assert {reason.partition(":")[2] for reason in DECISIONS} == set(get_args(Reason))


def test_names_are_unique_and_counters_leave_their_suffix_to_the_exporter() -> None:
    names = [series.name for series in ADAPTATION]
    assert len(set(names)) == len(names)
    assert not any(name.endswith("_total") for name in names)


@pytest.mark.parametrize(
    ("kind", "reason", "label"),
    [
        ("failed", "update: RuntimeError: boom", "update"),
        ("failed", "thread_died", "thread_died"),
        ("restored", "same_weights", "same_weights"),
        ("restored", "version 3: the hash differs", OTHER),
        ("refused", "update", OTHER),
    ],
)
def test_sentences_become_labels(kind: EventKind, reason: str, label: str) -> None:
    assert label_of(kind, reason) == label


def test_the_guide_names_knobs_and_metrics_there_are() -> None:
    guide = (ROOT / "docs" / "adaptation.md").read_text()
    _, _, knobs = guide.partition("## Knobs")
    knobs, _, rest = knobs.partition("## Whose traffic")
    _, _, metrics = rest.partition("## What to watch")
    rows = [line.split("|")[1] for line in knobs.splitlines() if line.startswith("| `")]
    assert {name for row in rows for name in re.findall(r"`(\w+)`", row)} <= set(AdaptationConfig.model_fields)
    rows = [line.split("|")[1] for line in metrics.splitlines() if line.startswith("| `")]
    named = {name.removesuffix("_total") for row in rows for name in re.findall(r"`(\w+?)(?:\{[\w,]+\})?`", row)}
    full = {f"adaptation{name}" if name.startswith("_") else name for name in named}
    assert full <= {series.name for series in ADAPTATION} | {series.name for series in EVENTS}
    assert len(guide.splitlines()) <= 120


_COUNTED = re.compile(r'(?:counts|versions)\["(\w+)"\]|_drop\(entry_id, "(\w+)"|_put_off\([\w.]+, "(\w+)"')


def fates_of(name: str) -> set[str]:
    """Every word under which this module counts something."""
    source = (ROOT / "adaptation" / "replicas" / f"{name}.py").read_text()
    return {word for found in _COUNTED.findall(source) for word in found if word}


def test_every_fate_has_a_series() -> None:
    arriving = {"torn", "forged", "foreign", "misfit", "not_finite"}
    told = fates_of("follower") | fates_of("leader") | arriving | {*get_args(RefusalReason), "announced"}
    assert told == {*QUERY_FATES, *VERSION_FATES}
