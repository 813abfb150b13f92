"""Prometheus metrics, collected from plain records. The only module that imports prometheus_client. All label values
are known in advance, and every series exists from the start: a rate over a quiet hour is zero and not missing."""

import math
from collections.abc import Iterable, Mapping
from itertools import accumulate
from threading import Lock
from typing import Any, Final

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from adaptation.records import AdaptationStatus, Event
from service.engine.stats import FinishStats, LoadStats, StepStats
from service.observability.learning_tables import ADAPTATION, EVENTS
from service.observability.metric_tables import (
    ACCEPTED_BY_SOURCE,
    DRAFTING,
    FINISH,
    LOAD,
    MEMORY,
    SLOTS,
    Gauge,
    Histogram,
    Record,
    Row,
    ServerStatus,
    Table,
    server_table,
    step_table,
    vllm_step_table,
)

PREFIX: Final = "adaptree_"
VLLM_PREFIX: Final = "vllm:"


class Metrics(Collector):
    """Holds all metrics of a server, updates them from records, and renders them for scrapes. Thread-safe."""

    def __init__(
        self,
        *,
        max_depth: int,
        budget_reasons: tuple[str, ...],
        model: str,
        key_names: tuple[str, ...] = (),
    ) -> None:
        """`model`: label of the metrics under vLLM's names; `key_names`: names of API keys, as label values."""
        shared = vllm_step_table(max_depth)
        self._steps = (*shared, *step_table(budget_reasons))
        self._server = server_table(key_names)
        rows: tuple[Row[Any], ...] = (
            *LOAD,
            *SLOTS,
            *self._steps,
            *DRAFTING,
            *MEMORY,
            *FINISH,
            *EVENTS,
            *self._server,
            *ADAPTATION,
        )
        self._values = {row.name: dict.fromkeys(row.keys, 0.0) for row in rows}
        self._shown: list[tuple[Row[Any], str, dict[str, str]]] = [(row, PREFIX, {}) for row in rows]
        labels = {"model_name": model, "engine": "0"}
        also_vllm: tuple[Row[Any], ...] = (*LOAD, *shared, *FINISH)
        self._shown += [(row, VLLM_PREFIX, labels) for row in also_vllm]
        self._lock = Lock()

    def credit(self, sources: Iterable[str]) -> None:
        """Create the series of the drafter's sources, which are known once the drafter is loaded."""
        with self._lock:
            self._values[ACCEPTED_BY_SOURCE] |= dict.fromkeys(sources, 0.0)

    def observe_load(self, stats: LoadStats) -> None:
        """Record the present load."""
        self._add((*LOAD, *SLOTS), stats)

    def observe_step(self, stats: StepStats) -> None:
        """Count an engine step."""
        self._add(self._steps, stats)
        if stats.memory is not None:
            self._set(MEMORY, stats.memory)
        if stats.drafting is not None:
            self._add(DRAFTING, stats.drafting)

    def observe_finish(self, stats: FinishStats) -> None:
        """Count a finished sequence."""
        self._add(FINISH, stats)

    def observe_event(self, event: Event) -> None:
        """Count an event of learning."""
        self._add(EVENTS, event)

    def observe_adaptation(self, status: AdaptationStatus) -> None:
        """Record the status of learning."""
        self._set(ADAPTATION, status)

    def observe_server(self, status: ServerStatus) -> None:
        """Record the state of the server process."""
        self._set(self._server, status)

    def render(self) -> tuple[bytes, str]:
        """Render the metrics page; returns its body and content type."""
        registry = CollectorRegistry()
        registry.register(self)
        return generate_latest(registry), CONTENT_TYPE_LATEST

    def collect(self) -> Iterable[Metric]:
        """Return all metrics as prometheus_client's metric families."""
        with self._lock:
            return [_family(row, self._values[row.name], prefix, labels) for row, prefix, labels in self._shown]

    def _add(self, table: Table[Record], record: Record) -> None:
        """Add to counters and buckets, and set gauges. Raises KeyError for an undeclared label."""
        with self._lock:
            for row in table:
                values = self._values[row.name]
                for key, value in row.values(record).items():
                    values[key] = value if isinstance(row, Gauge) else values[key] + value

    def _set(self, table: Table[Record], record: Record) -> None:
        """Set all values from a record that holds totals; a key that the record lacks becomes zero."""
        with self._lock:
            for row in table:
                found = row.values(record)
                self._values[row.name] = {key: found.get(key, 0.0) for key in row.keys}


def _family(row: Row[Any], values: Mapping[str, float], prefix: str, common: Mapping[str, str]) -> Metric:
    """Build a metric family with all series of a row; the `common` labels precede the row's own."""
    name, fixed = prefix + row.name, tuple(common.values())
    if isinstance(row, Histogram):
        *counts, total = values.values()
        histogram = HistogramMetricFamily(name, row.text, labels=tuple(common))
        histogram.add_metric(fixed, list(zip(row.keys[:-1], accumulate(counts), strict=True)), total)
        return histogram
    family_of = GaugeMetricFamily if isinstance(row, Gauge) else CounterMetricFamily
    family = family_of(name, row.text, labels=(*common, *row.labels))
    for key, value in values.items():
        if math.isnan(value):
            continue  # not known yet; scrapers would warn of a NaN sample and drop it
        family.add_metric((*fixed, *key.split(":")) if row.labels else fixed, value)
    return family
