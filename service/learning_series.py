"""Which numbers of learning are exported, under which names and with which labels; tables only.

Label sets are written out, because they must be closed and the modules that produce their values need torch.
"""

import math
from collections.abc import Callable, Mapping
from typing import Final, Literal

from adaptation.events import Event, EventKind
from adaptation.status import AdaptationStatus
from service.replica_series import REPLICA_SERIES
from service.series import Asked, Levels, Split, Spread, Told

OTHER: Final = "other"  # reasons that are sentences; the log has them

_GATE: Final = ("too_little_evidence", "not_finite", "worse_than_serving", "worse_than_anchor", "within_noise")
_ALARMS: Final = ("not_finite", "worse_than_anchor", "worse_than_before", "falling", "collapsed")
_STAGES: Final = ("hear", "update", "command", "recover", "save")
_TRAINER: Final = (
    "nothing_to_learn",
    "interrupted",
    "loss_not_finite",
    "gradient_not_finite",
    "optimizer_not_finite",
    "weights_not_finite",
)

EVENT_REASONS: Final[Mapping[EventKind, tuple[str, ...]]] = {
    "published": ("better", OTHER),
    "refused": (*_GATE, "not_stored", OTHER),
    "discarded": (*_TRAINER, OTHER),
    "rolled_back": ("operator", *_ALARMS, OTHER),
    "alarm": (*_ALARMS, OTHER),
    "dismissed": ("other_traffic", OTHER),
    "changed": ("other_traffic", "other_words", OTHER),
    "paused": ("operator", OTHER),
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


Series = Asked[AdaptationStatus]


def _plain(
    kind: Literal["gauge", "counter"], name: str, text: str, read: Callable[[AdaptationStatus], float]
) -> Series:
    return Series(kind, name, text, lambda status: {"": read(status)})


_UPDATE_SECONDS: Final = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
_JUDGED: Final = ("candidate", "serving", "anchor")
_LOSSES: Final = ("draft", "rank", "anchor")
_UPDATE_ENDS: Final[frozenset[EventKind]] = frozenset({"published", "refused", "discarded"})


def _finite(event: Event, names: Mapping[str, str]) -> dict[str, float]:
    """Numbers that the event carries, by label; a mean over nothing is none."""
    found = {label: event.numbers.get(name, math.nan) for label, name in names.items()}
    return {label: value for label, value in found.items() if math.isfinite(value)}


EVENTS: Final[tuple[Told[Event], ...]] = (
    Split(
        "adaptation_events",
        "What learning did, by the reason.",
        ("event", "reason"),
        tuple(f"{kind}:{word}" for kind, words in EVENT_REASONS.items() for word in words),
        lambda event: {f"{event.kind}:{label_of(event.kind, event.reason)}": 1},
    ),
    Spread(
        "adaptation_update_seconds",
        "Seconds of an update, without its judging.",
        _UPDATE_SECONDS,
        lambda event: _finite(event, {"": "seconds"}).values() if event.kind in _UPDATE_ENDS else (),
    ),
    Levels(
        "adaptation_update_loss",
        "Loss that the last update ended with, by term.",
        "term",
        _LOSSES,
        lambda event: _finite(event, {term: f"{term}_loss" for term in _LOSSES}),
    ),
    Levels(
        "adaptation_replayed_tau",
        "Emitted tokens per verify of drafters replayed on the same held-back texts, at the last judgement.",
        "drafter",
        _JUDGED,
        lambda event: _finite(event, {drafter: drafter for drafter in _JUDGED}),
    ),
)


ARMS: Final = ("head", "full")
DECISIONS: Final = (
    *(f"skip:{reason}" for reason in ("warm_up", "blocked", "not_admitted", "unusable", "no_gain", "never")),
    *(f"{arm}:{reason}" for arm in ARMS for reason in ("untried", "explore", "gain", "fixed")),
)
EXCLUDED: Final = ("not_stored", "nothing_to_learn", "over_share", "resting")

SERIES: Final = (
    _plain("gauge", "drafter_version", "Version of the drafter that serves; 0 as deployed.", lambda s: s.version),
    _plain("gauge", "drafter_origin", "Version that first had the weights that serve.", lambda s: s.origin),
    _plain(
        "gauge",
        "drafter_exchanged_tokens",
        "Tokens that the drafter can propose, and could not as deployed.",
        lambda s: s.exchanged_tokens,
    ),
    _plain("gauge", "adaptation_paused", "1 while an operator has halted learning.", lambda s: s.paused),
    _plain("gauge", "adaptation_collapsed", "1 while drafting earns nothing.", lambda s: s.collapsed),
    _plain("gauge", "adaptation_held_back_texts", "Texts that judge new weights.", lambda s: s.held_back),
    _plain(
        "gauge",
        "adaptation_kl_to_anchor",
        "Divergence of the serving drafter from the deployed one; NaN until there are texts to measure it on.",
        lambda s: float("nan") if s.kl_to_anchor is None else s.kl_to_anchor,
    ),
    Series("gauge", "adaptation_arm_value", "Gain of throughput per signal.", lambda s: s.values, ("arm",), ARMS),
    Series("gauge", "adaptation_waiting_lessons", "Lessons in a buffer.", lambda s: s.waiting, ("arm",), ARMS),
    _plain("counter", "adaptation_queries", "Finished queries that were heard.", lambda s: s.queries_heard),
    _plain("counter", "adaptation_queries_dropped", "Finished queries nobody heard.", lambda s: s.queries_dropped),
    _plain("counter", "adaptation_lessons_dropped", "Lessons that made room for others.", lambda s: s.lessons_dropped),
    Series(
        "counter",
        "adaptation_queries_excluded",
        "Finished queries that were not learnt from, by the reason; over_share: their client has had its quota; "
        "resting: nothing promised a gain, so that they were not recorded.",
        lambda s: s.excluded,
        ("reason",),
        EXCLUDED,
    ),
    Series(
        "counter",
        "adaptation_decisions",
        "Finished queries by the buffer they were meant for, and why.",
        lambda s: s.decisions,
        ("choice", "reason"),
        DECISIONS,
    ),
    Series("counter", "adaptation_updates", "Updates computed to their end.", lambda s: s.updates, ("arm",), ARMS),
    _plain("counter", "adaptation_publishes", "Updates that came to serve.", lambda s: s.publishes),
    _plain("counter", "adaptation_refusals", "Updates kept from serving.", lambda s: s.refusals),
    _plain("counter", "adaptation_discards", "Updates that could not be computed.", lambda s: s.discards),
    _plain("counter", "adaptation_rollbacks", "Times older weights were brought back.", lambda s: s.rollbacks),
    _plain("counter", "adaptation_training_seconds", "Seconds of training and judging.", lambda s: s.training_seconds),
    Series(
        "counter",
        "adaptation_failures",
        "Exceptions in the learning thread, by what it was doing.",
        lambda s: s.failures,
        ("stage",),
        _STAGES,
    ),
    _plain("counter", "adaptation_restarts", "Times the learning thread was replaced.", lambda s: s.restarts),
    *REPLICA_SERIES,
)
