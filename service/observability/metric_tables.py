"""Which numbers are exported, under which names, with which labels and buckets: tables that `metrics` adds up.

Names come without prefix, counters without their `_total`. Names and units are vLLM's wherever it has a metric of that
meaning. Label sets are written out, because they must be closed and the modules that produce their values need torch.
"""

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from adaptation.records import AdaptationStatus, Event, EventKind
from drafters.memory.counts import MemoryCounts
from service.engine.stats import FinishStats, LoadStats, StepStats

Record = TypeVar("Record", contravariant=True)


# No slots: calling a generic alias of a frozen class with slots fails on Python 3.11.
@dataclass(frozen=True)
class Row(Generic[Record]):
    """A metric `name{label}`, and what a record says of it: one number, or numbers by key; None leaves it as it was.
    A key is a value of the label, with `:` between those of two labels; `keys` are all there are."""

    signature: str
    text: str
    read: Callable[[Record], float | Mapping[str, float] | None]
    keys: tuple[str, ...] = ("",)

    @property
    def name(self) -> str:
        return self.signature.partition("{")[0]

    @property
    def labels(self) -> tuple[str, ...]:
        _, _, labels = self.signature.rstrip("}").partition("{")
        return tuple(labels.split(",")) if labels else ()

    def values(self, record: Record) -> Mapping[str, float]:
        found = self.read(record)
        return found if isinstance(found, Mapping) else {} if found is None else {"": found}


class Gauge(Row[Record]):
    """Follows what was read last."""


class Counter(Row[Record]):
    """Adds up what was read."""


class Histogram(Row[Record]):
    """Keys are the upper bounds of its buckets, each counted for itself, and the sum of what was observed."""


Table = Sequence[Row[Record]]


def _histogram(
    name: str, text: str, buckets: Sequence[float], read: Callable[[Record], Iterable[float]]
) -> Histogram[Record]:
    bounds = (*(str(float(bound)) for bound in buckets), "+Inf")

    def counts(record: Record) -> Mapping[str, float]:
        found: defaultdict[str, float] = defaultdict(float)
        for value in read(record):
            found[bounds[bisect_left(buckets, value)]] += 1
            found["sum"] += value
        return found

    return Histogram(name, text, counts, (*bounds, "sum"))


# Serving.

ACCEPTED_BY_SOURCE: Final = "accepted_tokens_by_source"
"""Its keys are the drafter's to say."""
FINISH_REASONS: Final = ("stop", "length", "abort", "error")
PHASES: Final = ("draft", "verify", "other")
SIZES: Final = ("1", "2", "4", "8", "16", "32", "64")
"""Sequences of a batch, each for up to twice as many, the last for all that are more."""
RANKS: Final = ("1", "2-4", "5-10")
"""Classes of the rank head that hold candidates; the fourth, beyond, holds none."""
CONTEXTS: Final = ("1", "2", "4", "8")
"""Lengths of the contexts that the memory counts, in tokens."""

_LATENCY: Final = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0)
_INTER_TOKEN: Final = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 5.0)
_ERROR: Final = (0.02, 0.05, 0.1, 0.2, 0.5, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerStatus:
    """The server process at the moment of a scrape."""

    ready: bool
    requests_in_flight: int  # accepted and not yet answered to their end
    requests_refused: int  # so far, because too many were waiting
    requests_limited: Mapping[str, float]  # so far, by the limit of a key and the key's name
    loop_lag_seconds: float


LIMITS: Final = ("requests", "tokens", "concurrency", "budget")
"""Of a key."""


def server_table(key_names: tuple[str, ...]) -> Table[ServerStatus]:
    """Keys without a name are counted under an empty one."""
    return (
        Gauge("ready", "1 while requests are taken.", lambda s: s.ready),
        Gauge("requests_in_flight", "Requests accepted and not finished.", lambda s: s.requests_in_flight),
        Counter(
            "requests_refused", "Requests answered 429 because too many were waiting.", lambda s: s.requests_refused
        ),
        Gauge(
            "event_loop_lag_seconds",
            "Longest delay of the event loop since the last scrape.",
            lambda s: s.loop_lag_seconds,
        ),
        Counter(
            "requests_limited{reason,key}",
            "Requests refused for a limit of their key, by the limit and the key's name.",
            lambda s: s.requests_limited,
            tuple(f"{limit}:{name}" for limit in LIMITS for name in ("", *key_names)),
        ),
    )


# All of vLLM's metrics stand in these three: LOAD, FINISH and `vllm_step_table`.

LOAD: Final[Table[LoadStats]] = (
    Gauge("num_requests_running", "Sequences being generated.", lambda s: s.num_running),
    Gauge("num_requests_waiting", "Sequences in the waiting queue.", lambda s: s.num_waiting),
    Gauge(
        "kv_cache_usage_perc",
        "Share of key/value slots in use, 0 to 1.",
        lambda s: s.slots_used / s.slots_total if s.slots_total else 0.0,
    ),
)

FINISH: Final[Table[FinishStats]] = (
    Counter("request_success{finished_reason}", "Sequences finished.", lambda s: {s.finish_reason: 1}, FINISH_REASONS),
    Counter("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", lambda s: s.prompt_tokens),
    Counter("prefix_cache_hits", "Prompt tokens found in the prefix cache.", lambda s: s.cached_tokens),
    _histogram(
        "time_to_first_token_seconds",
        "Time from arrival to the first token.",
        _LATENCY,
        lambda s: (s.first_token_seconds,) if s.output_tokens else (),
    ),
    _histogram("e2e_request_latency_seconds", "Time from arrival to the end.", _LATENCY, lambda s: (s.total_seconds,)),
    _histogram(
        "request_queue_time_seconds", "Time spent in the waiting queue.", _LATENCY, lambda s: (s.queue_seconds,)
    ),
)


def vllm_step_table(max_depth: int) -> Table[StepStats]:
    """What vLLM has a name for in a step."""
    return (
        Counter("prompt_tokens", "Prompt tokens prefilled.", lambda s: s.prompt_tokens),
        Counter("generation_tokens", "Tokens generated.", lambda s: s.emitted_tokens),
        _histogram(
            "inter_token_latency_seconds", "Time between a sequence's emissions.", _INTER_TOKEN, lambda s: s.itl_seconds
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


def _size(sequences: int) -> str:
    return str(min(sequences, int(SIZES[-1])))


_DRAFTING: Final[Table[StepStats]] = (
    Gauge(
        "drafting_gain_steps{sequences}",
        "Net gain of a step that drafts, in plain steps, as believed for so many sequences or up to twice as many.",
        lambda s: {} if s.drafting is None else {_size(s.drafting.sequences): s.drafting.gain},
        SIZES,
    ),
    Gauge(
        "drafting_gain_deviation_steps{sequences}",
        "Standard deviation of that belief.",
        lambda s: {} if s.drafting is None else {_size(s.drafting.sequences): s.drafting.gain_sd},
        SIZES,
    ),
    Gauge(
        "drafting_balance_seconds",
        "What drafting may lose before it is suspended.",
        lambda s: None if s.drafting is None else s.drafting.balance_seconds,
    ),
    Gauge(
        "drafting_lost_seconds",
        "Seconds lost by steps that drafted and lost, since the start.",
        lambda s: None if s.drafting is None else s.drafting.lost_seconds,
    ),
)
"""What the budget believes of drafting."""


def step_table(budget_reasons: tuple[str, ...]) -> Table[StepStats]:
    """The rest of a step: what was drafted, what became of it, how many nodes were verified and why."""
    return (
        Counter("engine_steps", "Engine steps.", lambda s: 1),
        Counter("preemptions", "Sequences preempted for want of slots.", lambda s: s.preemptions),
        Counter(
            "step_seconds{phase}",
            "Time spent in engine steps.",
            lambda s: {"draft": s.draft_seconds, "verify": s.verify_seconds, "other": s.other_seconds},
            PHASES,
        ),
        Counter(
            ACCEPTED_BY_SOURCE + "{source}",
            "Draft tokens accepted, by the drafter that proposed them.",
            lambda s: s.accepted_by_source,
            (),
        ),
        _histogram(
            "accepted_length_tokens",
            "Draft tokens accepted per draft.",
            (*range(17), 24, 32, 48, 64),
            lambda s: s.accepted_per_sequence,
        ),
        Counter("drafted_blocks", "Blocks drafted by a trained drafter.", lambda s: s.drafted_blocks),
        Counter("verify_rows", "Rows of the target's forwards: prompts, roots and nodes.", lambda s: s.verify_rows),
        Counter("verify_rows_wasted", "Draft nodes rejected.", lambda s: s.drafted_nodes - s.accepted_tokens),
        Gauge(
            "survival_calibration_error", "Expected calibration error of survival, 0 to 1.", lambda s: s.survival_error
        ),
        Gauge(
            "rank_head_predicted_tokens{rank}",
            "Accepted tokens among recent candidates of this rank, as the rank head predicted.",
            lambda s: s.rank_predicted,
            RANKS,
        ),
        Gauge(
            "rank_head_right_tokens{rank}", "Accepted among recent candidates of a rank.", lambda s: s.rank_right, RANKS
        ),
        Gauge("budget_nodes", "Draft nodes verified in the latest step.", lambda s: s.drafted_nodes),
        Counter(
            "budget_decisions{reason}",
            "Steps by reason for the budget.",
            lambda s: {s.budget_reason: 1},
            budget_reasons,
        ),
        *_DRAFTING,
        _histogram(
            "cost_prediction_error_ratio", "Relative error of the predicted verify seconds.", _ERROR, _cost_errors
        ),
    )


MEMORY: Final[Table[MemoryCounts]] = (
    Counter("memory_remembered_tokens", "Tokens of answers remembered.", lambda m: m.remembered_tokens),
    Counter(
        "memory_known_tokens{context}",
        "Tokens generated that remembered answers, this one included, had seen, by the longest context in tokens.",
        lambda m: dict(zip(CONTEXTS, m.known_tokens, strict=True)),
        CONTEXTS,
    ),
    Gauge("memory_bytes", "Memory set aside for past answers.", lambda m: m.reserved_bytes),
    Gauge("memory_usage_ratio", "Share of its places in use, 0 to 1, by a sample.", lambda m: m.used_share),
    Counter(
        "memory_evicted_scopes", "Scopes whose past answers made room for another one's.", lambda m: m.evicted_scopes
    ),
    Counter("memory_forgotten_shares", "Shares of past answers emptied on request.", lambda m: m.forgotten_shares),
)
"""What is remembered; of a drafter without a memory all stay at 0."""


def _accepted_per_position(stats: StepStats) -> dict[str, float]:
    accepted = stats.accepted_per_sequence
    return {str(position): sum(count > position for count in accepted) for position in range(max(accepted, default=0))}


def _cost_errors(stats: StepStats) -> tuple[float, ...]:
    if stats.predicted_verify_seconds is None or stats.verify_seconds <= 0:
        return ()
    return (abs(stats.predicted_verify_seconds / stats.verify_seconds - 1),)


# Learning while serving: events.

OTHER: Final = "other"  # reasons that are sentences; the log has them

_GATE: Final = ("too_little_evidence", "not_finite", "worse_than_serving", "worse_than_anchor", "within_noise")
_ALARMS: Final = ("not_finite", "worse_than_anchor", "worse_than_before")
_STAGES: Final = ("observe", "update", "command", "recover", "save")
_TRAINER: Final = (
    "nothing_to_learn",
    "interrupted",
    "loss_not_finite",
    "gradient_not_finite",
    "optimizer_not_finite",
    "weights_not_finite",
)

EVENT_REASONS: Final[Mapping[EventKind, tuple[str, ...]]] = {
    "solved": ("enough_positions", OTHER),
    "published": ("better", OTHER),
    "refused": (*_GATE, "not_stored", OTHER),
    "discarded": (*_TRAINER, OTHER),
    "rolled_back": ("operator", *_ALARMS, OTHER),
    "changed": ("other_words", OTHER),
    "paused": ("operator", "inherited", OTHER),
    "resumed": ("operator", OTHER),
    "loaded": ("operator", "leader", OTHER),
    "restored": ("same_weights", OTHER),
    "failed": (*_STAGES, "thread_died", OTHER),
    "not_stored": (OTHER,),
}


def label_of(kind: EventKind, reason: str) -> str:
    """The reason as a label: what stands before its details, if that is one of those we know."""
    word = reason.partition(":")[0]
    return word if word in EVENT_REASONS[kind] else OTHER


_UPDATE_SECONDS: Final = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
_EVALUATED: Final = ("candidate", "serving", "anchor")
_LOSSES: Final = ("draft", "rank", "anchor")
_UPDATE_ENDS: Final[frozenset[EventKind]] = frozenset({"published", "refused", "discarded"})


def _finite(event: Event, names: Mapping[str, str]) -> dict[str, float]:
    """Numbers that the event carries, by label; a mean over nothing is none."""
    found = {label: event.numbers.get(name, math.nan) for label, name in names.items()}
    return {label: value for label, value in found.items() if math.isfinite(value)}


EVENTS: Final[Table[Event]] = (
    Counter(
        "adaptation_events{event,reason}",
        "Events of learning, by reason.",
        lambda event: {f"{event.kind}:{label_of(event.kind, event.reason)}": 1},
        tuple(f"{kind}:{word}" for kind, words in EVENT_REASONS.items() for word in words),
    ),
    _histogram(
        "adaptation_update_seconds",
        "Seconds of an update, without its evaluation.",
        _UPDATE_SECONDS,
        lambda event: _finite(event, {"": "seconds"}).values() if event.kind in _UPDATE_ENDS else (),
    ),
    Gauge(
        "adaptation_update_loss{term}",
        "Loss at the end of the last update, by term.",
        lambda event: _finite(event, {term: f"{term}_loss" for term in _LOSSES}),
        _LOSSES,
    ),
    Gauge(
        "adaptation_replayed_tau{drafter}",
        "Mean acceptance length (tau) of drafters replayed on the validation set, at the last evaluation.",
        lambda event: _finite(event, {drafter: drafter for drafter in _EVALUATED}),
        _EVALUATED,
    ),
)

# Learning while serving: its status, read at each scrape.

ARMS: Final = ("head", "full")
DECISIONS: Final = (
    *(f"skip:{reason}" for reason in ("warm_up", "not_admitted", "unusable", "no_gain", "not_covered", "never")),
    *(f"{arm}:{reason}" for arm in ARMS for reason in ("explore", "gain", "fixed")),
)
EXCLUDED: Final = ("not_stored", "nothing_to_learn", "over_share", "resting")
LEARNING_PHASES: Final = ("collecting", "learning")
ROLES: Final = ("alone", "following", "leading")
_REFUSALS: Final = ("torn", "forged", "foreign", "misfit", "not_finite")  # of whatever arrives
QUERY_FATES: Final = (
    "sent",
    "observed",
    "duplicate",
    "queue_full",
    "too_large",
    "not_stored",
    "store_refused",
    "unusable",
    *_REFUSALS,
)
VERSION_FATES: Final = ("announced", "followed", "not_served", "old", "fork", *_REFUSALS)

ADAPTATION: Final[Table[AdaptationStatus]] = (
    Gauge("drafter_version", "Version of the serving drafter; 0 as deployed.", lambda s: s.version),
    Gauge("drafter_origin", "Version that first had the serving weights.", lambda s: s.origin),
    Gauge(
        "adaptation_phase{phase}",
        "1 for what learning does; collecting: positions of texts, of which a drafter is made.",
        lambda s: {s.phase: 1.0},
        LEARNING_PHASES,
    ),
    Gauge(
        "adaptation_collected_positions",
        "Positions of texts collected to make a drafter of.",
        lambda s: s.collected_positions,
    ),
    Gauge(
        "adaptation_wanted_positions", "Positions for the next attempt at that; 0: none.", lambda s: s.wanted_positions
    ),
    Gauge("adaptation_paused", "1 while an operator has paused learning.", lambda s: s.paused),
    Gauge(
        "adaptation_balance_seconds",
        "Serving time that learning may still lose; NaN where nobody counts it, or not yet.",
        lambda s: math.nan if s.balance_seconds is None else s.balance_seconds,
    ),
    Gauge("adaptation_validation_texts", "Texts in the validation set.", lambda s: s.validation_texts),
    Gauge(
        "adaptation_kl_to_anchor",
        "KL divergence of the serving drafter from the deployed one; NaN until there are texts to measure it on.",
        lambda s: math.nan if s.kl_to_anchor is None else s.kl_to_anchor,
    ),
    Gauge("adaptation_arm_value{arm}", "Gain of throughput per signal.", lambda s: s.values, ARMS),
    Gauge("adaptation_waiting_samples{arm}", "Training samples in a buffer.", lambda s: s.waiting, ARMS),
    Counter("adaptation_queries", "Finished queries observed by the learner.", lambda s: s.queries_observed),
    Counter("adaptation_queries_dropped", "Finished queries dropped unobserved.", lambda s: s.queries_dropped),
    Counter("adaptation_samples_dropped", "Training samples dropped from a full buffer.", lambda s: s.samples_dropped),
    Counter(
        "adaptation_queries_excluded{reason}",
        "Finished queries excluded from training, by reason; over_share: their client has used its quota; "
        "resting: nothing promised a gain, so that they were not recorded.",
        lambda s: s.excluded,
        EXCLUDED,
    ),
    Counter(
        "adaptation_decisions{choice,reason}", "Decisions of the policy, with reason.", lambda s: s.decisions, DECISIONS
    ),
    Counter("adaptation_updates{arm}", "Updates computed to their end.", lambda s: s.updates, ARMS),
    Counter("adaptation_publishes", "Updates published to serving.", lambda s: s.publishes),
    Counter("adaptation_refusals", "Updates refused by the gate.", lambda s: s.refusals),
    Counter("adaptation_discards", "Updates that could not be computed.", lambda s: s.discards),
    Counter("adaptation_rollbacks", "Rollbacks to older weights.", lambda s: s.rollbacks),
    Counter("adaptation_training_seconds", "Seconds of training and evaluation.", lambda s: s.training_seconds),
    Counter(
        "adaptation_failures{stage}", "Exceptions in the learning thread, by stage.", lambda s: s.failures, _STAGES
    ),
    Counter("adaptation_restarts", "Restarts of the learning thread.", lambda s: s.restarts),
    # Replicas; all zero where there are no others.
    Gauge("replica_connected", "1 while the store of the replicas answers.", lambda s: s.replicas.connected),
    Gauge(
        "replica_role{role}",
        "1 for the role of this replica; alone: there are no others, or they cannot be reached.",
        lambda s: {s.replicas.role: 1.0},
        ROLES,
    ),
    Gauge("replica_epoch", "Epoch of the leader whose version is served.", lambda s: s.replicas.epoch),
    Counter(
        "replica_connections_lost", "Lost connections to the replicas' store.", lambda s: s.replicas.connections_lost
    ),
    Counter("replica_queries{fate}", "Queries sent to the leader, by fate.", lambda s: s.replicas.queries, QUERY_FATES),
    Counter(
        "replica_versions{fate}", "Versions for the replicas, by fate.", lambda s: s.replicas.versions, VERSION_FATES
    ),
)
