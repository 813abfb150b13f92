"""Tables of the exported metrics: names, help texts, labels, buckets, and how each value is read from a record. This
module holds the serving tables, `learning_tables` the learning tables; `metrics` exports both.

Names have no prefix, and counters no `_total`. Where vLLM has the same metric, name and unit are vLLM's. Label values
are listed here, because they must be known in advance and the modules that produce them import torch.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from drafters.memory_counts import MemoryCounts
from service.engine.stats import DraftingOutlook, FinishStats, LoadStats, StepStats
from service.observability.guard import PARTS

Record = TypeVar("Record", contravariant=True)


# No slots: calling a generic alias of a frozen class with slots fails on Python 3.11.
@dataclass(frozen=True)
class Row(Generic[Record]):
    """A metric with the signature `name{label}`, and the function that reads it from a record.

    `read` returns one number, numbers by key, or None, which leaves the metric unchanged. A key is the label's value,
    or two labels' values joined by `:`; `keys` lists all of them.
    """

    signature: str
    text: str
    read: Callable[[Record], float | Mapping[str, float] | None]
    keys: tuple[str, ...] = ("",)

    @property
    def name(self) -> str:
        """Name of the metric, without prefix and labels."""
        return self.signature.partition("{")[0]

    @property
    def labels(self) -> tuple[str, ...]:
        """Names of the labels."""
        _, _, labels = self.signature.rstrip("}").partition("{")
        return tuple(labels.split(",")) if labels else ()

    def values(self, record: Record) -> Mapping[str, float]:
        """Read a record's numbers by key; a metric without labels has the key ""; empty if there is nothing to set."""
        found = self.read(record)
        return found if isinstance(found, Mapping) else {} if found is None else {"": found}


class Gauge(Row[Record]):
    """A metric whose value is the last number that was read."""


class Counter(Row[Record]):
    """A metric whose value is the sum of all numbers that were read."""


class Histogram(Row[Record]):
    """A histogram. Its keys are the upper bounds of its buckets, whose counts are not cumulative, and `sum`."""


Table = Sequence[Row[Record]]


def histogram(
    name: str, text: str, buckets: Sequence[float], read: Callable[[Record], Iterable[float]]
) -> Histogram[Record]:
    """Build a histogram with these bucket bounds; `read` returns the values of a record to add to it."""
    bounds = (*(str(float(bound)) for bound in buckets), "+Inf")

    def counts(record: Record) -> Mapping[str, float]:
        found: defaultdict[str, float] = defaultdict(float)
        for value in read(record):
            found[bounds[bisect_left(buckets, value)]] += 1
            found["sum"] += value
        return found

    return Histogram(name, text, counts, (*bounds, "sum"))


# Labels and buckets of the serving metrics.

ACCEPTED_BY_SOURCE: Final = "accepted_tokens_by_source"
"""Metric whose label values (the drafter's sources) are known only once the drafter is loaded."""
FINISH_REASONS: Final = ("stop", "length", "abort", "error")
PHASES: Final = ("draft", "verify", "other")
SIZES: Final = ("1", "2", "4", "8", "16", "32", "64")
"""Lower bounds of batch-size buckets; each bucket ends before the next bound, the last one is unbounded."""
RANKS: Final = ("1", "2-4", "5-10")
"""Rank ranges of the rank head's classes that have candidates; its fourth class (beyond rank 10) has none."""
CONTEXTS: Final = ("1", "2", "4", "8")
"""Lengths in tokens of the contexts that the memory counts."""

_LATENCY: Final = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0)
_INTER_TOKEN: Final = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 5.0)
_ERROR: Final = (0.02, 0.05, 0.1, 0.2, 0.5, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerStatus:
    """State of the server process at a scrape: readiness, requests, failures of bookkeeping."""

    ready: bool
    requests_in_flight: int  # requests accepted and not completed
    requests_refused: int  # total of requests refused because the queue was full
    requests_limited: Mapping[str, float]  # totals by `LIMIT:NAME` of the limit and the API key
    loop_lag_seconds: float
    internal_errors: Mapping[str, float]  # totals by part
    switched_off: Mapping[str, float]  # Unix seconds of the switch-off, by part


LIMITS: Final = ("requests", "tokens", "concurrency", "budget")
"""The kinds of limits that an API key can have."""


def server_table(key_names: tuple[str, ...]) -> Table[ServerStatus]:
    """Build the metrics of the server process; `key_names`: names of API keys. Keys without a name share the label
    ""."""
    return (
        Gauge("ready", "1 if the server accepts requests.", lambda s: s.ready),
        Gauge("requests_in_flight", "Requests accepted and not finished.", lambda s: s.requests_in_flight),
        Counter("requests_refused", "Requests refused because too many were waiting.", lambda s: s.requests_refused),
        Gauge(
            "event_loop_lag_seconds", "Longest event loop delay since the last scrape.", lambda s: s.loop_lag_seconds
        ),
        Counter(
            "requests_limited{reason,key}",
            "Requests refused by a limit of their API key.",
            lambda s: s.requests_limited,
            tuple(f"{limit}:{name}" for limit in LIMITS for name in ("", *key_names)),
        ),
        Counter(
            "internal_errors{part}",
            "Exceptions in bookkeeping, by part; generation is not affected.",
            lambda s: s.internal_errors,
            PARTS,
        ),
        Gauge(
            "switched_off{part}",
            "1 for a bookkeeping part that is off until a restart, after three exceptions in a row.",
            lambda s: dict.fromkeys(s.switched_off, 1.0),
            PARTS,
        ),
    )


# LOAD, FINISH and `vllm_step_table` hold the metrics that are also exported under vLLM's names.

LOAD: Final[Table[LoadStats]] = (
    Gauge("num_requests_running", "Sequences being generated.", lambda s: s.num_running),
    Gauge("num_requests_waiting", "Sequences in the waiting queue.", lambda s: s.num_waiting),
    Gauge(
        "kv_cache_usage_perc",
        "Share of key/value slots in use, 0 to 1.",
        lambda s: s.slots_used / s.slots_total if s.slots_total else 0.0,
    ),
)

SLOTS: Final[Table[LoadStats]] = (
    Gauge(
        "kv_cache_tokens{layers,count}",
        "Tokens whose keys and values are in use, and that fit: in all layers, and in layers with a window if these "
        "keep fewer.",
        lambda s: {
            "all:used": s.slots_used,
            "all:total": s.slots_total,
            "window:used": s.places_used,
            "window:total": s.places_total,
        },
        ("all:used", "all:total", "window:used", "window:total"),
    ),
    Gauge("prefix_states", "Cached prefixes with a snapshot of the states of recurrent layers.", lambda s: s.snapshots),
)

FINISH: Final[Table[FinishStats]] = (
    Counter("request_success{finished_reason}", "Sequences finished.", lambda s: {s.finish_reason: 1}, FINISH_REASONS),
    Counter("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", lambda s: s.prompt_tokens),
    Counter("prefix_cache_hits", "Prompt tokens found in the prefix cache.", lambda s: s.cached_tokens),
    histogram(
        "time_to_first_token_seconds",
        "Time from arrival to the first token.",
        _LATENCY,
        lambda s: (s.timings.first_token_seconds,) if s.output_tokens else (),
    ),
    histogram(
        "e2e_request_latency_seconds", "Time from arrival to the end.", _LATENCY, lambda s: (s.timings.total_seconds,)
    ),
    histogram(
        "request_queue_time_seconds", "Time spent in the waiting queue.", _LATENCY, lambda s: (s.timings.queue_seconds,)
    ),
)


def vllm_step_table(max_depth: int) -> Table[StepStats]:
    """Build the step metrics that are also exported under vLLM's names; `max_depth`: deepest draft position."""
    return (
        Counter("prompt_tokens", "Prompt tokens prefilled.", lambda s: s.prompt_tokens),
        Counter("generation_tokens", "Tokens generated.", lambda s: s.emitted_tokens),
        histogram(
            "inter_token_latency_seconds", "Time between outputs of a sequence.", _INTER_TOKEN, lambda s: s.itl_seconds
        ),
        Counter("spec_decode_num_drafts", "Draft trees verified.", lambda s: s.drafts),
        Counter("spec_decode_num_draft_tokens", "Draft nodes verified.", lambda s: s.drafted_nodes),
        Counter("spec_decode_num_accepted_tokens", "Draft tokens accepted.", lambda s: s.accepted_tokens),
        Counter(
            "spec_decode_num_accepted_tokens_per_pos{position}",
            "Drafts accepted at least up to this position.",
            _accepted_per_position,
            tuple(map(str, range(max_depth))),
        ),
    )


def _size(outlook: DraftingOutlook) -> str:
    return str(min(outlook.sequences, int(SIZES[-1])))


DRAFTING: Final[Table[DraftingOutlook]] = (
    Gauge(
        "drafting_gain_steps{sequences}",
        "Estimated gain of drafting, in plain steps.",
        lambda d: {_size(d): d.gain},
        SIZES,
    ),
    Gauge(
        "drafting_gain_deviation_steps{sequences}",
        "Standard deviation of the estimated gain of drafting.",
        lambda d: {_size(d): d.gain_sd},
        SIZES,
    ),
    Gauge("drafting_balance_seconds", "Seconds drafting may lose before it is suspended.", lambda d: d.balance_seconds),
    Gauge("drafting_lost_seconds", "Seconds lost in steps with drafts, since the start.", lambda d: d.lost_seconds),
)
"""The cost budget's estimate of the gain of drafting; these metrics stay at 0 with a fixed budget."""


def step_table(budget_reasons: tuple[str, ...]) -> Table[StepStats]:
    """Build the step metrics that only this server has: drafting, acceptance, and the budget with its reason."""
    return (
        Counter("engine_steps", "Engine steps.", lambda s: 1),
        Counter("preemptions", "Sequences preempted for want of slots.", lambda s: s.preemptions),
        Counter("discarded_tokens", "Tokens computed for answers that had ended.", lambda s: s.discarded_tokens),
        Counter(
            "step_seconds{phase}",
            "Time spent in engine steps.",
            lambda s: {"draft": s.draft_seconds, "verify": s.verify_seconds, "other": s.other_seconds},
            PHASES,
        ),
        Counter(
            ACCEPTED_BY_SOURCE + "{source}",
            "Draft tokens accepted, by source of the draft.",
            lambda s: s.accepted_by_source,
            (),
        ),
        histogram(
            "accepted_length_tokens",
            "Draft tokens accepted per draft.",
            (*range(17), 24, 32, 48, 64),
            lambda s: s.accepted_per_sequence,
        ),
        Counter("drafted_blocks", "Blocks drafted by a trained drafter.", lambda s: s.drafted_blocks),
        Counter("verify_rows", "Rows of the target's forwards: prompts, roots, nodes.", lambda s: s.verify_rows),
        Counter("verify_rows_wasted", "Draft nodes rejected.", lambda s: s.drafted_nodes - s.accepted_tokens),
        Gauge("survival_calibration_error", "Calibration error of survival (0 to 1).", lambda s: s.survival_error),
        Gauge(
            "rank_head_predicted_tokens{rank}",
            "Predicted accepted tokens of recent candidates.",
            lambda s: s.rank_predicted,
            RANKS,
        ),
        Gauge("rank_head_right_tokens{rank}", "Accepted tokens among these candidates.", lambda s: s.rank_right, RANKS),
        Gauge("budget_nodes", "Draft nodes verified in the latest step.", lambda s: s.drafted_nodes),
        Counter(
            "budget_decisions{reason}", "Steps by reason of the budget.", lambda s: {s.budget_reason: 1}, budget_reasons
        ),
        histogram("cost_prediction_error_ratio", "Relative error of predicted verify seconds.", _ERROR, cost_errors),
    )


MEMORY: Final[Table[MemoryCounts]] = (
    Counter("memory_remembered_tokens", "Tokens of answers remembered.", lambda m: m.remembered_tokens),
    Counter(
        "memory_known_tokens{context}",
        "Generated tokens that remembered answers had after the same context, by its length in tokens.",
        lambda m: dict(zip(CONTEXTS, m.known_tokens, strict=True)),
        CONTEXTS,
    ),
    Gauge("memory_bytes", "Memory set aside for past answers.", lambda m: m.reserved_bytes),
    Gauge("memory_usage_ratio", "Share of that memory in use (0 to 1), estimated.", lambda m: m.used_share),
    Counter("memory_evicted_scopes", "Scopes evicted from past answers.", lambda m: m.evicted_scopes),
    Counter("memory_forgotten_shares", "Shares of past answers emptied on request.", lambda m: m.forgotten_shares),
)
"""Metrics of past answers; all stay at 0 for a drafter without a memory."""


def _accepted_per_position(stats: StepStats) -> dict[str, float]:
    accepted = stats.accepted_per_sequence
    return {str(position): sum(count > position for count in accepted) for position in range(max(accepted, default=0))}


def cost_errors(stats: StepStats) -> tuple[float, ...]:
    """|predicted / measured - 1| of the seconds of a step's verify; empty if they were not predicted."""
    if stats.predicted_verify_seconds is None or stats.verify_seconds <= 0:
        return ()
    return (abs(stats.predicted_verify_seconds / stats.verify_seconds - 1),)
