"""What the metrics page says after known steps, and that its label sets are closed."""

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
from prometheus_client.parser import text_string_to_metric_families

from adaptation.config import AdaptationConfig
from adaptation.policy import ARMS as ALL_ARMS
from adaptation.policy import Reason
from adaptation.records import Event, EventKind, ReplicaStatus
from drafters.memory_counts import MemoryCounts
from drafters.tree import MAX_DEPTH
from service.config import ServiceConfig
from service.engine.requests import Timings
from service.engine.stats import DraftingOutlook, FinishStats, LoadStats, StepStats
from service.observability.learning_tables import (
    ADAPTATION,
    ARMS,
    DECISIONS,
    EVENT_REASONS,
    EVENTS,
    OTHER,
)
from service.observability.metric_tables import FINISH_REASONS, ServerStatus
from service.observability.metrics import Metrics
from service.serve import metrics_of
from tests.architecture.rules import ROOT
from tests.service.scripted import STATUS

REASONS = ("load", "gain", "off")
SOURCES = ("memory", "specblock")
PAGE = Path(__file__).with_name("metrics_page.txt")

MEMORY = MemoryCounts(
    reserved_bytes=4096,
    used_share=0.125,
    remembered_tokens=1234,
    known_tokens=(40, 30, 20, 10),
    evicted_scopes=2,
    forgotten_shares=1,
)
OUTLOOK = DraftingOutlook(sequences=2, gain=0.25, gain_sd=0.05, balance_seconds=0.75, lost_seconds=0.125)
STEP = StepStats(
    prompt_tokens=7,
    emitted_tokens=6,
    drafts=3,
    drafted_nodes=20,
    accepted_tokens=4,
    accepted_per_sequence=(3, 1, 0),
    accepted_by_source={"memory": 3, "specblock": 2},
    budget_reason="gain",
    draft_seconds=0.25,
    verify_seconds=0.5,
    other_seconds=0.125,
    preemptions=1,
    itl_seconds=(0.004, 0.3),
    predicted_verify_seconds=0.55,
    verify_rows=30,
    drafted_blocks=2,
    memory=MEMORY,
    survival_error=0.025,
    rank_predicted={"1": 8.0, "2-4": 4.0, "5-10": 1.0},
    rank_right={"1": 6.0, "2-4": 5.0, "5-10": 0.5},
)
LOAD = LoadStats(num_running=3, num_waiting=2, slots_used=25, slots_total=100)
FINISH = FinishStats(
    finish_reason="stop",
    timings=Timings(queue_seconds=0.5, first_token_seconds=0.75, total_seconds=4.0),
    prompt_tokens=7,
    cached_tokens=5,
    output_tokens=6,
)


SERVER = ServerStatus(
    ready=True,
    requests_in_flight=4,
    requests_refused=3,
    requests_limited={"tokens:acme": 2, "budget:": 1},
    loop_lag_seconds=0.01,
    internal_errors={"charge": 5, "learn": 1},
    switched_off={"charge": 1_700_000_000.0},
)


def made() -> Metrics:
    metrics = Metrics(max_depth=MAX_DEPTH, budget_reasons=REASONS, model="tiny", key_names=("acme",))
    metrics.credit(SOURCES)
    return metrics


def series(metrics: Metrics) -> dict[str, float]:
    """Every series of the page as `name{label}`; of several labels the values stand side by side."""
    page, _ = metrics.render()
    samples = [sample for family in text_string_to_metric_families(page.decode()) for sample in family.samples]
    return {f"{s.name}{{{' '.join(s.labels.values())}}}" if s.labels else s.name: s.value for s in samples}


HAPPENED = (
    Event("published", 1, "better", {"seconds": 2.5, "draft_loss": 1.5, "rank_loss": 0.5, "anchor_loss": 0.25}),
    Event("published", 2, "better", {"candidate": 2.0, "serving": 1.75, "anchor": 1.5}),
    Event("discarded", 2, "loss_not_finite", {"seconds": 0.5}),
    Event("refused", 2, "too_little_evidence", {"seconds": 0.5, "serving": math.nan}),
    Event("paused", 2, "operator"),
    Event("failed", 2, "update: RuntimeError: out of memory"),
    Event("not_stored", 2, "no space left on the device"),
)
REPLICAS = ReplicaStatus(
    role="leading", connected=True, epoch=4, queries={"observed": 3}, versions={"old": 1}, connections_lost=2
)


def test_the_page_after_known_records_is_the_one_on_file() -> None:
    """Names, texts, labels and values: all that dashboards, alerts and other tools read."""
    metrics = made()
    metrics.observe_load(LOAD)
    metrics.observe_step(replace(STEP, drafting=OUTLOOK))
    metrics.observe_finish(FINISH)
    metrics.observe_finish(replace(FINISH, cached_tokens=0))
    metrics.observe_server(SERVER)
    metrics.observe_adaptation(replace(STATUS, replicas=REPLICAS))
    for event in HAPPENED:
        metrics.observe_event(event)
    page, content_type = metrics.render()
    assert page.decode() == PAGE.read_text()
    assert content_type.startswith("text/plain")


def test_a_memory_is_shown_as_it_was_in_the_last_step() -> None:
    metrics = made()
    metrics.observe_step(STEP)
    metrics.observe_step(replace(STEP, memory=replace(MEMORY, remembered_tokens=1240)))
    metrics.observe_step(replace(STEP, memory=None))
    found = series(metrics)
    assert found["adaptree_memory_remembered_tokens_total"] == 1240
    assert found["adaptree_memory_known_tokens_total{8}"] == 10


def test_counters_add_up_and_gauges_follow() -> None:
    metrics = made()
    metrics.observe_step(STEP)
    metrics.observe_load(LOAD)
    late = replace(STEP, survival_error=None, rank_predicted={}, rank_right={})
    metrics.observe_step(replace(late, drafted_nodes=0, budget_reason="load"))
    metrics.observe_load(LoadStats(num_running=1, num_waiting=0, slots_used=0, slots_total=100))
    found = series(metrics)
    assert found["adaptree_generation_tokens_total"] == 12
    assert found["adaptree_num_requests_running"] == 1
    assert found["adaptree_kv_cache_usage_perc"] == 0
    assert found["adaptree_budget_decisions_total{load}"] == 1
    assert found["adaptree_survival_calibration_error"] == 0.025
    assert found["adaptree_rank_head_predicted_tokens{1}"] == 8


def test_a_sequence_without_a_token_has_no_first_one() -> None:
    metrics = made()
    metrics.observe_finish(replace(FINISH, finish_reason="abort", output_tokens=0))
    found = series(metrics)
    assert found["adaptree_time_to_first_token_seconds_count"] == 0
    assert found["adaptree_request_success_total{abort}"] == 1


def test_the_page_is_closed_and_small() -> None:
    metrics = made()
    at_start = set(series(metrics))
    for reason in REASONS:
        metrics.observe_step(replace(STEP, budget_reason=reason, accepted_per_sequence=(MAX_DEPTH,)))
    for reason in FINISH_REASONS:
        metrics.observe_finish(replace(FINISH, finish_reason=reason))
    metrics.observe_adaptation(replace(STATUS, kl_to_anchor=0.25, served_tau=2.0))
    for kind, reasons in EVENT_REASONS.items():
        for reason in (*reasons, "a sentence: with a colon"):
            metrics.observe_event(Event(kind, 1, reason))
    assert set(series(metrics)) == at_start
    assert 300 < len(series(metrics_of(ServiceConfig()))) <= 543


def test_an_unknown_label_is_refused() -> None:
    with pytest.raises(KeyError):
        made().observe_step(replace(STEP, budget_reason="whim"))
    with pytest.raises(KeyError):
        made().observe_finish(replace(FINISH, finish_reason="whim"))


# The label sets are exactly what the modules that produce their values can say.


def test_every_kind_of_event_is_counted() -> None:
    assert set(EVENT_REASONS) == set(get_args(EventKind))
    assert all(reasons[-1] == OTHER for reasons in EVENT_REASONS.values())


def test_decisions_are_those_of_the_policy() -> None:
    assert ALL_ARMS == ARMS
    assert {reason.partition(":")[2] for reason in DECISIONS} == set(get_args(Reason))


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
    assert len(guide.splitlines()) <= 160
