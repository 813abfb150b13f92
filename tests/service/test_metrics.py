"""What the metrics page says after known steps, and that its label sets are closed."""

import math
from dataclasses import replace

import pytest
from prometheus_client.parser import text_string_to_metric_families

from adaptation.records import Event
from drafters.calibration import CLASS_NAMES
from drafters.memory.counts import MemoryCounts
from drafters.tree import MAX_DEPTH
from kernels.memory import ORDERS
from service.config import ServiceConfig
from service.engine.stats import DraftingOutlook, FinishStats, LoadStats, StepStats
from service.observability.learning_tables import EVENT_REASONS
from service.observability.metric_tables import CONTEXTS, FINISH_REASONS, LIMITS, PHASES, RANKS, ServerStatus
from service.observability.metrics import Metrics
from service.serve import metrics_of
from tests.service.scripted import STATUS

REASONS = ("load", "gain", "off")
SOURCES = ("memory", "specblock")

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
    queue_seconds=0.5,
    first_token_seconds=0.75,
    total_seconds=4.0,
    prompt_tokens=7,
    cached_tokens=5,
    output_tokens=6,
)


VLLM_NAMES = """
    spec_decode_num_drafts spec_decode_num_draft_tokens spec_decode_num_accepted_tokens
    spec_decode_num_accepted_tokens_per_pos time_to_first_token_seconds inter_token_latency_seconds
    e2e_request_latency_seconds request_queue_time_seconds num_requests_running num_requests_waiting
    kv_cache_usage_perc prefix_cache_queries prefix_cache_hits prompt_tokens generation_tokens request_success
"""
SERVER = ServerStatus(
    ready=True,
    requests_in_flight=4,
    requests_refused=3,
    requests_limited={"tokens:acme": 2, "budget:": 1},
    loop_lag_seconds=0.01,
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


def test_a_step_is_exported() -> None:
    metrics = made()
    metrics.observe_load(LOAD)
    metrics.observe_step(STEP)
    found = series(metrics)
    expected = {
        "adaptree_engine_steps_total": 1,
        "adaptree_accepted_tokens_by_source_total{memory}": 3,
        "adaptree_accepted_tokens_by_source_total{specblock}": 2,
        "adaptree_num_requests_running": 3,
        "adaptree_num_requests_waiting": 2,
        "adaptree_kv_cache_usage_perc": 0.25,
        "adaptree_prompt_tokens_total": 7,
        "adaptree_generation_tokens_total": 6,
        "adaptree_spec_decode_num_drafts_total": 3,
        "adaptree_spec_decode_num_draft_tokens_total": 20,
        "adaptree_spec_decode_num_accepted_tokens_total": 4,
        "adaptree_spec_decode_num_accepted_tokens_per_pos_total{0}": 2,
        "adaptree_spec_decode_num_accepted_tokens_per_pos_total{1}": 1,
        "adaptree_spec_decode_num_accepted_tokens_per_pos_total{2}": 1,
        "adaptree_spec_decode_num_accepted_tokens_per_pos_total{3}": 0,
        "adaptree_accepted_length_tokens_bucket{0.0}": 1,
        "adaptree_accepted_length_tokens_bucket{1.0}": 2,
        "adaptree_accepted_length_tokens_bucket{2.0}": 2,
        "adaptree_accepted_length_tokens_bucket{3.0}": 3,
        "adaptree_accepted_length_tokens_sum": 4,
        "adaptree_budget_nodes": 20,
        "adaptree_budget_decisions_total{gain}": 1,
        "adaptree_budget_decisions_total{load}": 0,
        "adaptree_step_seconds_total{draft}": 0.25,
        "adaptree_step_seconds_total{verify}": 0.5,
        "adaptree_step_seconds_total{other}": 0.125,
        "adaptree_preemptions_total": 1,
        "adaptree_inter_token_latency_seconds_count": 2,
        "adaptree_inter_token_latency_seconds_bucket{0.005}": 1,
        "adaptree_cost_prediction_error_ratio_count": 1,
        "adaptree_cost_prediction_error_ratio_bucket{0.1}": 0,
        "adaptree_cost_prediction_error_ratio_bucket{0.2}": 1,
        "adaptree_survival_calibration_error": 0.025,
        "adaptree_verify_rows_total": 30,
        "adaptree_verify_rows_wasted_total": 16,
        "adaptree_drafted_blocks_total": 2,
        "adaptree_rank_head_predicted_tokens{1}": 8,
        "adaptree_rank_head_right_tokens{2-4}": 5,
        "adaptree_rank_head_right_tokens{5-10}": 0.5,
    }
    assert {name: found[name] for name in expected} == expected


def test_a_memory_is_shown_as_it_was_in_the_last_step() -> None:
    metrics = made()
    metrics.observe_step(STEP)
    metrics.observe_step(replace(STEP, memory=replace(MEMORY, remembered_tokens=1240)))
    metrics.observe_step(replace(STEP, memory=None))
    found = series(metrics)
    assert {name: value for name, value in found.items() if name.startswith("adaptree_memory_")} == {
        "adaptree_memory_remembered_tokens_total": 1240,
        "adaptree_memory_known_tokens_total{1}": 40,
        "adaptree_memory_known_tokens_total{2}": 30,
        "adaptree_memory_known_tokens_total{4}": 20,
        "adaptree_memory_known_tokens_total{8}": 10,
        "adaptree_memory_bytes": 4096,
        "adaptree_memory_usage_ratio": 0.125,
        "adaptree_memory_evicted_scopes_total": 2,
        "adaptree_memory_forgotten_shares_total": 1,
    }


def test_the_prefix_cache_is_counted_in_tokens() -> None:
    metrics = made()
    metrics.observe_finish(FINISH)
    metrics.observe_finish(replace(FINISH, cached_tokens=0))
    found = series(metrics)
    assert found["adaptree_prefix_cache_queries_total"] == 14
    assert found["adaptree_prefix_cache_hits_total"] == 5


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


def test_accepted_tokens_per_position_add_up_to_accepted_tokens() -> None:
    metrics = made()
    deep = replace(STEP, accepted_per_sequence=(MAX_DEPTH, 2, 0), accepted_tokens=MAX_DEPTH + 2)
    metrics.observe_step(deep)
    found = series(metrics)
    ours = {name: value for name, value in found.items() if name.startswith("adaptree_")}
    per_position = [value for name, value in ours.items() if "_per_pos_total" in name]
    assert len(per_position) == MAX_DEPTH
    assert sum(per_position) == found["adaptree_spec_decode_num_accepted_tokens_total"]


def test_a_finish_is_exported() -> None:
    metrics = made()
    metrics.observe_finish(FINISH)
    found = series(metrics)
    expected = {
        "adaptree_request_success_total{stop}": 1,
        "adaptree_request_success_total{length}": 0,
        "adaptree_request_queue_time_seconds_sum": 0.5,
        "adaptree_time_to_first_token_seconds_sum": 0.75,
        "adaptree_time_to_first_token_seconds_count": 1,
        "adaptree_e2e_request_latency_seconds_sum": 4,
    }
    assert {name: found[name] for name in expected} == expected


def test_a_sequence_without_a_token_has_no_first_one() -> None:
    metrics = made()
    metrics.observe_finish(replace(FINISH, finish_reason="abort", output_tokens=0, first_token_seconds=0.0))
    found = series(metrics)
    assert found["adaptree_time_to_first_token_seconds_count"] == 0
    assert found["adaptree_request_success_total{abort}"] == 1


def test_the_server_is_shown_as_it_was_observed_last() -> None:
    metrics = made()
    found = series(metrics)
    assert (found["adaptree_ready"], found["adaptree_requests_refused_total"]) == (0, 0)
    metrics.observe_server(SERVER)
    found = series(metrics)
    assert (found["adaptree_ready"], found["adaptree_event_loop_lag_seconds"]) == (1, 0.01)
    assert (found["adaptree_requests_in_flight"], found["adaptree_requests_refused_total"]) == (4, 3)
    limited = {name: value for name, value in found.items() if name.startswith("adaptree_requests_limited_total{")}
    assert len(limited) == 2 * len(LIMITS)
    assert {name: value for name, value in limited.items() if value} == {
        "adaptree_requests_limited_total{acme tokens}": 2,
        "adaptree_requests_limited_total{ budget}": 1,
    }
    metrics.observe_server(replace(SERVER, ready=False, loop_lag_seconds=0.02))
    found = series(metrics)
    assert (found["adaptree_ready"], found["adaptree_event_loop_lag_seconds"]) == (0, 0.02)


def test_the_page_is_closed_and_small() -> None:
    metrics = made()
    at_start = set(series(metrics))
    for reason in REASONS:
        metrics.observe_step(replace(STEP, budget_reason=reason, accepted_per_sequence=(MAX_DEPTH,)))
    for reason in FINISH_REASONS:
        metrics.observe_finish(replace(FINISH, finish_reason=reason))
    metrics.observe_adaptation(replace(STATUS, kl_to_anchor=0.25))
    for kind, reasons in EVENT_REASONS.items():
        for reason in (*reasons, "a sentence: with a colon"):
            metrics.observe_event(Event(kind, 1, reason))
    assert set(series(metrics)) == at_start
    assert len(at_start) <= 525


def test_the_page_of_a_server_holds_at_most_525_series() -> None:
    metrics = metrics_of(ServiceConfig())
    assert 300 < len(series(metrics)) <= 525


def test_an_unknown_label_is_refused() -> None:
    with pytest.raises(KeyError):
        made().observe_step(replace(STEP, budget_reason="whim"))
    with pytest.raises(KeyError):
        made().observe_finish(replace(FINISH, finish_reason="whim"))


def test_learning_is_exported_from_its_status() -> None:
    metrics = made()
    metrics.observe_adaptation(STATUS)
    found = series(metrics)
    expected = {
        "adaptree_drafter_version": 2,
        "adaptree_drafter_origin": 1,
        "adaptree_adaptation_paused": 0,
        "adaptree_adaptation_validation_texts": 5,
        "adaptree_adaptation_balance_seconds": 1.5,
        "adaptree_adaptation_arm_value{head}": 0.5,
        "adaptree_adaptation_arm_value{full}": math.inf,
        "adaptree_adaptation_waiting_samples{head}": 3,
        "adaptree_adaptation_queries_total": 40,
        "adaptree_adaptation_queries_dropped_total": 1,
        "adaptree_adaptation_samples_dropped_total": 7,
        "adaptree_adaptation_queries_excluded_total{over_share}": 4,
        "adaptree_adaptation_queries_excluded_total{nothing_to_learn}": 0,
        "adaptree_adaptation_decisions_total{skip warm_up}": 10,
        "adaptree_adaptation_decisions_total{head gain}": 8,
        "adaptree_adaptation_decisions_total{full explore}": 0,
        "adaptree_adaptation_updates_total{head}": 3,
        "adaptree_adaptation_updates_total{full}": 1,
        "adaptree_adaptation_publishes_total": 2,
        "adaptree_adaptation_refusals_total": 1,
        "adaptree_adaptation_rollbacks_total": 1,
        "adaptree_adaptation_discards_total": 0,
        "adaptree_adaptation_training_seconds_total": 1.5,
        "adaptree_adaptation_failures_total{update}": 1,
        "adaptree_adaptation_restarts_total": 0,
    }
    assert {name: found[name] for name in expected} == expected
    assert "adaptree_adaptation_kl_to_anchor" not in found, "not known yet"
    metrics.observe_adaptation(replace(STATUS, kl_to_anchor=0.25, paused=True))
    found = series(metrics)
    assert found["adaptree_adaptation_kl_to_anchor"] == 0.25
    assert found["adaptree_adaptation_paused"] == 1


def test_events_are_counted_by_kind_and_reason() -> None:
    metrics = made()
    for event in (
        Event("published", 1, "better", {"candidate": 2.0}),
        Event("published", 2, "better"),
        Event("failed", 2, "update: RuntimeError: out of memory"),
        Event("not_stored", 2, "no space left on the device"),
    ):
        metrics.observe_event(event)
    counted = {name: value for name, value in series(metrics).items() if "events_total" in name and value}
    assert counted == {
        "adaptree_adaptation_events_total{published better}": 2,
        "adaptree_adaptation_events_total{failed update}": 1,
        "adaptree_adaptation_events_total{not_stored other}": 1,
    }


def test_an_update_is_told_by_what_became_of_it() -> None:
    metrics = made()
    numbers = {"seconds": 2.5, "draft_loss": 1.5, "rank_loss": 0.5, "anchor_loss": 0.25}
    judged = {"candidate": 2.0, "serving": 1.75, "anchor": 1.5}
    metrics.observe_event(Event("published", 1, "better", {**numbers, **judged}))
    metrics.observe_event(Event("discarded", 1, "loss_not_finite", {"seconds": 0.5}))
    metrics.observe_event(Event("refused", 1, "too_little_evidence", {"seconds": 0.5, "serving": math.nan}))
    metrics.observe_event(Event("paused", 1, "operator"))
    found = series(metrics)
    assert found["adaptree_adaptation_update_seconds_count"] == 3
    assert found["adaptree_adaptation_update_seconds_sum"] == 3.5
    assert [found[f"adaptree_adaptation_update_loss{{{term}}}"] for term in ("draft", "rank", "anchor")] == [
        1.5,
        0.5,
        0.25,
    ]
    assert {name: found[f"adaptree_adaptation_replayed_tau{{{name}}}"] for name in judged} == judged


def test_names_are_ours_or_those_of_vllm() -> None:
    assert all(name.startswith(("adaptree_", "vllm:")) for name in series(made()))


def test_the_vllm_names_show_the_same_values_with_the_labels_of_vllm() -> None:
    metrics = made()
    metrics.observe_step(STEP)
    metrics.observe_load(LOAD)
    metrics.observe_finish(FINISH)
    page, _ = metrics.render()
    families = {family.name: family for family in text_string_to_metric_families(page.decode())}
    shown = {name.removeprefix("vllm:") for name in families if name.startswith("vllm:")}
    assert shown == set(VLLM_NAMES.split())
    for name in shown:
        ours, theirs = families[f"adaptree_{name}"], families[f"vllm:{name}"]
        assert (ours.type, ours.documentation) == (theirs.type, theirs.documentation)
        labels = {"model_name": "tiny", "engine": "0"}
        assert [(s.name, s.labels, s.value) for s in theirs.samples] == [
            (s.name.replace("adaptree_", "vllm:"), {**labels, **s.labels}, s.value) for s in ours.samples
        ]
    names = {sample.name for family in families.values() for sample in family.samples}
    assert {"vllm:spec_decode_num_drafts_total", "vllm:time_to_first_token_seconds_bucket"} <= names
    assert {"vllm:num_requests_running", "vllm:request_success_total"} <= names


def test_contexts_are_those_of_the_memory() -> None:
    assert tuple(map(str, ORDERS)) == CONTEXTS


def test_the_classes_of_the_rank_head_are_those_of_the_drafter() -> None:
    assert RANKS == CLASS_NAMES


def test_two_instances_do_not_meet() -> None:
    first, second = made(), made()
    first.observe_step(STEP)
    assert series(second)["adaptree_generation_tokens_total"] == 0


def test_the_page_has_a_prometheus_content_type() -> None:
    page, content_type = made().render()
    assert content_type.startswith("text/plain")
    assert page.endswith(b"\n")
    assert len(PHASES) == page.count(b"adaptree_step_seconds_total{")
