"""Prometheus metrics, written from plain records. The only module that imports prometheus_client.

All label sets are closed and every series exists from the start, so that a rate over a quiet hour is zero and not
missing.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, Generic

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

from adaptation.records import AdaptationStatus, Event
from service.engine.stats import FinishStats, LoadStats, StepStats
from service.observability.metric_tables import (
    ADAPTATION,
    EVENTS,
    FINISH,
    LOAD,
    REPLICAS,
    SERVER,
    VLLM_NAMES,
    Distribution,
    Record,
    Series,
    ServerStatus,
    Table,
    step_table,
)

PREFIX: Final = "adaptree_"
VLLM_PREFIX: Final = "vllm:"
_SEPARATOR = ":"  # between the values of several labels in a key

# One timestamp series beside each counter would double the page, and no tool here reads it.
disable_created_metrics()


class Metrics:
    """Everything the server exports, on a registry of its own. Safe to call from any thread."""

    def __init__(
        self,
        *,
        max_depth: int,
        budget_reasons: Sequence[str],
        sources: Sequence[str],
        vllm_model: str | None = None,
    ) -> None:
        """`vllm_model`: the name of the model under which to show vLLM's metrics too; None: not at all."""
        self._registry = CollectorRegistry()
        steps = step_table(max_depth=max_depth, budget_reasons=budget_reasons, sources=sources)
        self._load = _Observed(LOAD, self._registry)
        self._step = _Observed(steps, self._registry)
        self._finish = _Observed(FINISH, self._registry)
        self._events = _Observed(EVENTS, self._registry)
        self._server = _Collected(SERVER)
        self._adaptation = _Collected((*ADAPTATION, *REPLICAS))
        self._registry.register(self._server)
        self._registry.register(self._adaptation)
        if vllm_model is not None:
            shown = self._load.exported + self._step.exported + self._finish.exported
            self._registry.register(_Renamed(shown, {"model_name": vllm_model, "engine": "0"}))

    def observe_load(self, stats: LoadStats) -> None:
        """How busy the engine is, after a step or an abort."""
        self._load.observe(stats)

    def observe_step(self, stats: StepStats) -> None:
        """One engine step."""
        self._step.observe(stats)

    def observe_finish(self, stats: FinishStats) -> None:
        """One sequence that ended."""
        self._finish.observe(stats)

    def observe_event(self, event: Event) -> None:
        """One thing that learning did."""
        self._events.observe(event)

    def observe_adaptation(self, status: AdaptationStatus) -> None:
        """Learning as it is now; shown until the next one comes."""
        self._adaptation.source = lambda: status

    def watch_server(self, status: Callable[[], ServerStatus]) -> None:
        """Export what the server says of itself at each scrape."""
        self._server.source = status

    def render(self) -> tuple[bytes, str]:
        """The metrics page and its content type."""
        return generate_latest(self._registry), CONTENT_TYPE_LATEST


class _Observed(Generic[Record]):
    """The metrics of one table, changed by each record that is observed."""

    def __init__(self, table: Table[Record], registry: CollectorRegistry) -> None:
        pairs = [_made(series, registry) for series in table]
        self.exported = [metric for metric, _ in pairs]
        self._changes = [change for _, change in pairs]

    def observe(self, record: Record) -> None:
        for change in self._changes:
            change(record)


def _made(
    series: Series[Record] | Distribution[Record], registry: CollectorRegistry
) -> tuple[Counter | Gauge | Histogram, Callable[[Record], None]]:
    """A metric of the registry, and what a record does to it."""
    name, text = PREFIX + series.name, series.text
    if isinstance(series, Distribution):
        histogram = Histogram(name, text, buckets=series.buckets, registry=registry)

        def observe(record: Record) -> None:
            for value in series.read(record):
                histogram.observe(value)

        return histogram, observe
    metric = (Counter if series.kind == "counter" else Gauge)(name, text, series.labels, registry=registry)
    children = {key: metric.labels(*key.split(_SEPARATOR)) if key else metric for key in series.keys}
    changes = {key: child.inc if isinstance(child, Counter) else child.set for key, child in children.items()}

    def change(record: Record) -> None:
        for key, value in series.read(record).items():
            changes[key](value)

    return metric, change


class _Collected(Generic[Record]):
    """A collector of the metrics of one table, all read from one record per scrape; zeros while there is none."""

    def __init__(self, table: Sequence[Series[Record]]) -> None:
        self.source: Callable[[], Record | None] = lambda: None
        self._table = table

    def collect(self) -> Iterable[Metric]:
        record = self.source()
        for series in self._table:
            yield _family(series, {} if record is None else series.read(record))


def _family(series: Series[Record], values: Mapping[str, float]) -> Metric:
    kind = GaugeMetricFamily if series.kind == "gauge" else CounterMetricFamily
    family = kind(PREFIX + series.name, series.text, labels=series.labels)
    for key in series.keys:
        family.add_metric(key.split(_SEPARATOR) if series.labels else (), values.get(key, 0))
    return family


class _Renamed:
    """A collector that shows existing metrics a second time, as vLLM would: under its prefix and with its labels."""

    def __init__(self, metrics: Sequence[Counter | Gauge | Histogram], labels: Mapping[str, str]) -> None:
        self._metrics = metrics
        self._labels = labels

    def collect(self) -> Iterable[Metric]:
        for metric in self._metrics:
            for family in metric.collect():
                if family.name.removeprefix(PREFIX) in VLLM_NAMES:
                    renamed = Metric(_vllm_name(family.name), family.documentation, family.type)
                    renamed.samples = [
                        sample._replace(name=_vllm_name(sample.name), labels={**self._labels, **sample.labels})
                        for sample in family.samples
                    ]
                    yield renamed


def _vllm_name(name: str) -> str:
    return VLLM_PREFIX + name.removeprefix(PREFIX)
