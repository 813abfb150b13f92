"""Tables of the learning metrics: EVENTS is updated by each learning event, ADAPTATION by the status at each scrape."""

import math
from collections.abc import Mapping
from typing import Any, Final, get_args

from adaptation.records import (
    AdaptationStatus,
    AlarmReason,
    Event,
    EventKind,
    GateReason,
    Outcome,
    QuotaReason,
    RefusalReason,
    Role,
    Stage,
)
from service.observability.metric_tables import Counter, Gauge, Table, histogram

OTHER: Final = "other"  # label of reasons that are free text; the log holds the text


def _words(literal: Any, *but: str) -> tuple[str, ...]:
    """Values of a Literal type, except those in `but`."""
    return tuple(word for word in get_args(literal) if word not in but)


EVENT_REASONS: Final[Mapping[EventKind, tuple[str, ...]]] = {
    "solved": ("enough_positions", OTHER),
    "published": ("better", OTHER),
    "refused": (*_words(GateReason, "better"), "not_stored", OTHER),
    "discarded": (*_words(Outcome, "applied"), OTHER),
    "rolled_back": ("operator", *_words(AlarmReason), OTHER),
    "changed": ("other_words", OTHER),
    "paused": ("operator", "inherited", OTHER),
    "resumed": ("operator", OTHER),
    "loaded": ("operator", "leader", OTHER),
    "restored": ("same_weights", OTHER),
    "failed": (*_words(Stage), "thread_died", OTHER),
    "not_stored": (OTHER,),
}


def label_of(kind: EventKind, reason: str) -> str:
    """Metric label of an event's reason: the word before the colon if EVENT_REASONS has it, else OTHER."""
    word = reason.partition(":")[0]
    return word if word in EVENT_REASONS[kind] else OTHER


_UPDATE_SECONDS: Final = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
_EVALUATED: Final = ("candidate", "serving", "anchor")
_LOSSES: Final = ("draft", "rank", "anchor")
_UPDATE_ENDS: Final[frozenset[EventKind]] = frozenset({"published", "refused", "discarded"})


def _finite(event: Event, names: Mapping[str, str]) -> dict[str, float]:
    """Finite numbers of an event by label; `names` maps each label to the number's name in the event."""
    found = {label: event.numbers.get(name, math.nan) for label, name in names.items()}
    return {label: value for label, value in found.items() if math.isfinite(value)}


EVENTS: Final[Table[Event]] = (
    Counter(
        "adaptation_events{event,reason}",
        "Events of learning, by reason.",
        lambda event: {f"{event.kind}:{label_of(event.kind, event.reason)}": 1},
        tuple(f"{kind}:{word}" for kind, words in EVENT_REASONS.items() for word in words),
    ),
    histogram(
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
        "Mean acceptance length (tau) in replays of the validation set.",
        lambda event: _finite(event, {drafter: drafter for drafter in _EVALUATED}),
        _EVALUATED,
    ),
)

# Metrics of the learning status, which is read at each scrape.

ARMS: Final = ("head", "full")
DECISIONS: Final = (
    *(f"skip:{reason}" for reason in ("warm_up", "not_admitted", "unusable", "no_gain", "not_covered", "never")),
    *(f"{arm}:{reason}" for arm in ARMS for reason in ("explore", "gain")),
)
EXCLUDED: Final = _words(QuotaReason, "admitted")
LEARNING_PHASES: Final = ("collecting", "learning")
ROLES: Final = _words(Role)
_REFUSALS: Final = _words(RefusalReason, "old", "fork")  # refusals of data from other replicas
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
        "1 for the current phase; collecting: gathering training data for the first drafter.",
        lambda s: {s.phase: 1.0},
        LEARNING_PHASES,
    ),
    Gauge(
        "adaptation_collected_positions", "Positions collected for the first drafter.", lambda s: s.collected_positions
    ),
    Gauge(
        "adaptation_wanted_positions",
        "Positions needed for the next solution of the first drafter; 0 if no further one is planned.",
        lambda s: s.wanted_positions,
    ),
    Gauge("adaptation_paused", "1 while an operator has paused learning.", lambda s: s.paused),
    Gauge(
        "adaptation_balance_seconds",
        "Serving time that learning may still take; absent if it is not counted.",
        lambda s: math.nan if s.balance_seconds is None else s.balance_seconds,
    ),
    Gauge("adaptation_validation_texts", "Texts in the validation set.", lambda s: s.validation_texts),
    Gauge(
        "adaptation_kl_to_anchor",
        "KL divergence of the serving drafter from the deployed one; absent until it is measured.",
        lambda s: math.nan if s.kl_to_anchor is None else s.kl_to_anchor,
    ),
    Gauge(
        "adaptation_predicted_gain",
        "Sum of the gains in tokens per step that the gate found in published updates.",
        lambda s: s.predicted_gain,
    ),
    Gauge(
        "adaptation_served_tau",
        "Tokens per step of queries that the current version served; absent before the first.",
        lambda s: math.nan if s.served_tau is None else s.served_tau,
    ),
    Gauge("adaptation_arm_value{arm}", "Gain of throughput per signal.", lambda s: s.values, ARMS),
    Gauge("adaptation_waiting_samples{arm}", "Training samples waiting in the buffer.", lambda s: s.waiting, ARMS),
    Counter("adaptation_queries", "Finished queries observed by the learner.", lambda s: s.queries_observed),
    Counter("adaptation_queries_dropped", "Finished queries dropped unobserved.", lambda s: s.queries_dropped),
    Counter("adaptation_samples_dropped", "Training samples dropped from a full buffer.", lambda s: s.samples_dropped),
    Counter(
        "adaptation_queries_excluded{reason}",
        "Finished queries excluded from training; over_share: quota of the client; resting: no gain expected.",
        lambda s: s.excluded,
        EXCLUDED,
    ),
    Counter("adaptation_decisions{choice,reason}", "Decisions of the policy.", lambda s: s.decisions, DECISIONS),
    Counter("adaptation_updates{arm}", "Updates that were computed to the end.", lambda s: s.updates, ARMS),
    Counter("adaptation_publishes", "Updates published to serving.", lambda s: s.publishes),
    Counter("adaptation_refusals", "Updates refused by the gate.", lambda s: s.refusals),
    Counter("adaptation_discards", "Updates that could not be computed.", lambda s: s.discards),
    Counter("adaptation_rollbacks", "Rollbacks to older weights.", lambda s: s.rollbacks),
    Counter("adaptation_training_seconds", "Seconds of training and evaluation.", lambda s: s.training_seconds),
    Counter("adaptation_failures{stage}", "Exceptions in the learning thread.", lambda s: s.failures, _words(Stage)),
    # Replicas; all zero for a single server.
    Gauge("replica_connected", "1 while the store of the replicas answers.", lambda s: s.replicas.connected),
    Gauge(
        "replica_role{role}",
        "1 for the role of this replica; alone: no other replica can be reached.",
        lambda s: {s.replicas.role: 1.0},
        ROLES,
    ),
    Gauge("replica_epoch", "Epoch of the leader whose version is served.", lambda s: s.replicas.epoch),
    Counter("replica_connections_lost", "Lost connections to the store.", lambda s: s.replicas.connections_lost),
    Counter("replica_queries{fate}", "Queries sent to the leader, by fate.", lambda s: s.replicas.queries, QUERY_FATES),
    Counter(
        "replica_versions{fate}", "Drafter versions shared, by fate.", lambda s: s.replicas.versions, VERSION_FATES
    ),
)
