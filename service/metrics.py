"""Prometheus metrics, written from plain records. The only module that imports prometheus_client.

It decides names, units and buckets; what happened is told to it by `StepStats`, `FinishStats`, `Event` and
`AdaptationStatus`. All label sets are closed and every series exists from the start, so that a rate over a quiet hour
is zero and not missing.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Final

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    Metric,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from adaptation.events import Event
from adaptation.status import AdaptationStatus
from service.engine.stats import FinishStats, LoadStats, StepStats
from service.learning_series import EVENT_REASONS, SERIES, Series, label_of

PREFIX: Final = "adaptree"
FINISH_REASONS: Final = ("stop", "length", "abort", "error")
PHASES: Final = ("draft", "verify", "other")

_LATENCY_BUCKETS: Final = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0)
_ERROR_BUCKETS: Final = (0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
_INTER_TOKEN_BUCKETS: Final = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 5.0)

# One timestamp series beside each counter would double the page, and no tool here reads it.
disable_created_metrics()


class Metrics:
    """Everything the server exports, on a registry of its own. Safe to call from any thread."""

    def __init__(
        self, *, max_depth: int, budget_reasons: Sequence[str], sources: Sequence[str], vllm_names: bool = False
    ) -> None:
        self._registry = CollectorRegistry()
        self._load_metrics()
        self._speculation_metrics(max_depth, budget_reasons, sources)
        self._latency_metrics()
        self._learning_metrics()
        if vllm_names:
            counters = (self._drafts, self._draft_tokens, self._accepted_tokens, self._accepted_per_position)
            self._registry.register(_RenamedCounters(counters, f"{PREFIX}_", "vllm:"))

    def observe_load(self, stats: LoadStats) -> None:
        """How busy the engine is, after a step or an abort."""
        self._running.set(stats.num_running)
        self._waiting.set(stats.num_waiting)
        self._kv_cache_usage.set(stats.slots_used / stats.slots_total if stats.slots_total else 0.0)

    def observe_step(self, stats: StepStats) -> None:
        """One engine step."""
        self._steps.inc()
        self._prompt_tokens.inc(stats.prompt_tokens)
        self._generation_tokens.inc(stats.emitted_tokens)
        self._preemptions.inc(stats.preemptions)
        self._observe_speculation(stats)
        for phase, seconds in zip(
            PHASES, (stats.draft_seconds, stats.verify_seconds, stats.other_seconds), strict=True
        ):
            self._step_seconds[phase].inc(seconds)
        for seconds in stats.itl_seconds:
            self._inter_token_latency.observe(seconds)

    def observe_finish(self, stats: FinishStats) -> None:
        """One sequence that ended."""
        self._finished[stats.finish_reason].inc()
        self._prefix_queries.inc(stats.prompt_tokens)
        self._prefix_hits.inc(stats.cached_tokens)
        self._queue_time.observe(stats.queue_seconds)
        self._request_latency.observe(stats.total_seconds)
        if stats.output_tokens:
            self._time_to_first_token.observe(stats.first_token_seconds)

    def observe_event(self, event: Event) -> None:
        """One thing that learning did."""
        self._events[event.kind, label_of(event.kind, event.reason)].inc()

    def observe_adaptation(self, status: AdaptationStatus) -> None:
        """Learning as it is now; shown until the next one comes."""
        self._learning.status = status

    def watch_event_loop(self, lag_seconds: Callable[[], float]) -> None:
        """Export the event loop's lag, read from `lag_seconds` at each scrape."""
        self._event_loop_lag.set_function(lag_seconds)

    def render(self) -> tuple[bytes, str]:
        """The metrics page and its content type."""
        return generate_latest(self._registry), CONTENT_TYPE_LATEST

    def _observe_speculation(self, stats: StepStats) -> None:
        self._drafts.inc(stats.drafts)
        self._draft_tokens.inc(stats.drafted_nodes)
        self._accepted_tokens.inc(stats.accepted_tokens)
        for source, accepted in stats.accepted_by_source.items():
            self._accepted_by_source[source].inc(accepted)
        for accepted in stats.accepted_per_sequence:
            self._accepted_length.observe(accepted)
            for position in self._positions[:accepted]:
                position.inc()
        self._budget.set(stats.budget)
        self._budget_decisions[stats.budget_reason].inc()
        if stats.predicted_verify_seconds is not None and stats.verify_seconds > 0:
            self._cost_error.observe(abs(stats.predicted_verify_seconds / stats.verify_seconds - 1))
        if stats.survival_error is not None:
            self._survival_error.set(stats.survival_error)

    def _load_metrics(self) -> None:
        self._running = self._gauge("num_requests_running", "Sequences being generated.")
        self._waiting = self._gauge("num_requests_waiting", "Sequences waiting for a place.")
        self._kv_cache_usage = self._gauge("kv_cache_usage_perc", "Share of key/value slots in use, 0 to 1.")
        self._event_loop_lag = self._gauge("event_loop_lag_seconds", "Longest delay of the event loop since last read.")
        self._steps = self._counter("engine_steps", "Engine steps.")
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens read.")
        self._generation_tokens = self._counter("generation_tokens", "Tokens generated.")
        self._prefix_queries = self._counter("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.")
        self._prefix_hits = self._counter("prefix_cache_hits", "Prompt tokens found in the prefix cache.")
        self._preemptions = self._counter("preemptions", "Sequences put back into the queue for want of slots.")

    def _speculation_metrics(self, max_depth: int, budget_reasons: Sequence[str], sources: Sequence[str]) -> None:
        self._drafts = self._counter("spec_decode_num_drafts", "Drafts verified.")
        self._draft_tokens = self._counter("spec_decode_num_draft_tokens", "Drafted nodes verified.")
        self._accepted_tokens = self._counter("spec_decode_num_accepted_tokens", "Drafted tokens accepted.")
        self._accepted_per_position = self._counter(
            "spec_decode_num_accepted_tokens_per_pos", "Drafts accepted at least up to this position.", "position"
        )
        by_source = self._counter("accepted_tokens_by_source", "Drafted tokens accepted, by who proposed.", "source")
        self._accepted_by_source = {source: by_source.labels(source) for source in sources}
        self._positions = [self._accepted_per_position.labels(str(position)) for position in range(max_depth)]
        self._accepted_length = self._histogram(
            "accepted_length_tokens", "Drafted tokens accepted per draft.", range(max_depth + 1)
        )
        self._budget = self._gauge("budget_nodes", "Nodes the latest step was allowed to verify.")
        decisions = self._counter("budget_decisions", "Steps by the reason for their budget.", "reason")
        self._budget_decisions = {reason: decisions.labels(reason) for reason in budget_reasons}
        self._cost_error = self._histogram(
            "cost_prediction_error_ratio", "Predicted verify seconds against measured ones, relative.", _ERROR_BUCKETS
        )
        self._survival_error = self._gauge(
            "survival_calibration_error", "Expected calibration error of survival, 0 to 1."
        )
        seconds = self._counter("step_seconds", "Time spent in engine steps.", "phase")
        self._step_seconds = {phase: seconds.labels(phase) for phase in PHASES}

    def _latency_metrics(self) -> None:
        finished = self._counter("request_success", "Sequences ended, by the reason.", "finished_reason")
        self._finished = {reason: finished.labels(reason) for reason in FINISH_REASONS}
        self._time_to_first_token = self._histogram(
            "time_to_first_token_seconds", "Time from arrival to the first token.", _LATENCY_BUCKETS
        )
        self._inter_token_latency = self._histogram(
            "inter_token_latency_seconds", "Time between two emissions of a sequence.", _INTER_TOKEN_BUCKETS
        )
        self._request_latency = self._histogram(
            "e2e_request_latency_seconds", "Time from arrival to the end.", _LATENCY_BUCKETS
        )
        self._queue_time = self._histogram(
            "request_queue_time_seconds", "Time spent waiting for a place.", _LATENCY_BUCKETS
        )

    def _learning_metrics(self) -> None:
        events = self._counter("adaptation_events", "What learning did, by the reason.", "event", "reason")
        self._events = {
            (kind, word): events.labels(kind, word) for kind, words in EVENT_REASONS.items() for word in words
        }
        self._learning = _LearningCollector()
        self._registry.register(self._learning)

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(f"{PREFIX}_{name}", text, registry=self._registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"{PREFIX}_{name}", text, labels, registry=self._registry)

    def _histogram(self, name: str, text: str, buckets: Iterable[float]) -> Histogram:
        return Histogram(f"{PREFIX}_{name}", text, buckets=tuple(buckets), registry=self._registry)


class _RenamedCounters:
    """A collector that shows existing counters a second time, under another prefix."""

    def __init__(self, counters: Sequence[Counter], prefix: str, new_prefix: str) -> None:
        self._counters = counters
        self._prefix = prefix
        self._new_prefix = new_prefix

    def collect(self) -> Iterable[Metric]:
        for counter in self._counters:
            for family in counter.collect():
                yield self._renamed(family)

    def _renamed(self, family: Metric) -> Metric:
        renamed = Metric(self._new_name(family.name), family.documentation, family.type)
        renamed.samples = [sample._replace(name=self._new_name(sample.name)) for sample in family.samples]
        return renamed

    def _new_name(self, name: str) -> str:
        return self._new_prefix + name.removeprefix(self._prefix)


class _LearningCollector:
    """Shows the last status that was told; zeros before there is one, as nothing has been learnt then."""

    def __init__(self) -> None:
        self.status: AdaptationStatus | None = None

    def collect(self) -> Iterable[Metric]:
        for series in SERIES:
            yield self._family(series)

    def _family(self, series: Series) -> Metric:
        kind = GaugeMetricFamily if series.kind == "gauge" else CounterMetricFamily
        family = kind(f"{PREFIX}_{series.name}", series.text, labels=series.labels)
        values = {} if self.status is None else series.read(self.status)
        for key in series.keys:
            family.add_metric(key.split(":") if series.labels else (), values.get(key, 0))
        return family
