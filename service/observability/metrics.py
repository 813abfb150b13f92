"""Prometheus metrics, added up from plain records by one collector. The only module that imports prometheus_client.
All label sets are closed and every series exists before anything happens: a rate over a quiet hour is zero and not
missing."""

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
from service.observability.metric_tables import (
    ACCEPTED_BY_SOURCE,
    ADAPTATION,
    EVENTS,
    FINISH,
    LOAD,
    MEMORY,
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
    """Everything the server exports, on a registry of its own. Safe to call from any thread."""

    def __init__(
        self,
        *,
        max_depth: int,
        budget_reasons: tuple[str, ...],
        model: str,
        key_names: tuple[str, ...] = (),
    ) -> None:
        """`model`: the name under which vLLM's metrics are shown too, which other tools read. `key_names`: of those
        API keys that have one."""
        shared = vllm_step_table(max_depth)
        self._steps = (*shared, *step_table(budget_reasons))
        self._server = server_table(key_names)
        rows: tuple[Row[Any], ...] = (*LOAD, *self._steps, *MEMORY, *FINISH, *EVENTS, *self._server, *ADAPTATION)
        self._values = {row.name: dict.fromkeys(row.keys, 0.0) for row in rows}
        self._shown: list[tuple[Row[Any], str, dict[str, str]]] = [(row, PREFIX, {}) for row in rows]
        labels = {"model_name": model, "engine": "0"}
        theirs: tuple[Row[Any], ...] = (*LOAD, *shared, *FINISH)
        self._shown += [(row, VLLM_PREFIX, labels) for row in theirs]
        self._lock = Lock()

    def credit(self, sources: Iterable[str]) -> None:
        """Those who may propose tokens, known once the drafter is there."""
        with self._lock:
            self._values[ACCEPTED_BY_SOURCE] |= dict.fromkeys(sources, 0.0)

    def observe_load(self, stats: LoadStats) -> None:
        self._add(LOAD, stats)

    def observe_step(self, stats: StepStats) -> None:
        self._add(self._steps, stats)
        if stats.memory is not None:
            self._set(MEMORY, stats.memory)

    def observe_finish(self, stats: FinishStats) -> None:
        self._add(FINISH, stats)

    def observe_event(self, event: Event) -> None:
        self._add(EVENTS, event)

    def observe_adaptation(self, status: AdaptationStatus) -> None:
        self._set(ADAPTATION, status)

    def observe_server(self, status: ServerStatus) -> None:
        self._set(self._server, status)

    def render(self) -> tuple[bytes, str]:
        """The metrics page and its content type."""
        registry = CollectorRegistry()
        registry.register(self)
        return generate_latest(registry), CONTENT_TYPE_LATEST

    def collect(self) -> Iterable[Metric]:
        with self._lock:
            return [_family(row, self._values[row.name], prefix, labels) for row, prefix, labels in self._shown]

    def _add(self, table: Table[Record], record: Record) -> None:
        """Counters and buckets grow, gauges follow. Raises KeyError for a label that there is not."""
        with self._lock:
            for row in table:
                values = self._values[row.name]
                for key, value in row.values(record).items():
                    values[key] = value if isinstance(row, Gauge) else values[key] + value

    def _set(self, table: Table[Record], record: Record) -> None:
        """What the record holds in all; zero is what it does not name."""
        with self._lock:
            for row in table:
                found = row.values(record)
                self._values[row.name] = {key: found.get(key, 0.0) for key in row.keys}


def _family(row: Row[Any], values: Mapping[str, float], prefix: str, common: Mapping[str, str]) -> Metric:
    """A metric with all its series, each with the `common` labels before its own."""
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
            continue  # not known yet: scrapers warn of such a sample and drop it
        family.add_metric((*fixed, *key.split(":")) if row.labels else fixed, value)
    return family
