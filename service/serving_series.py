"""Which numbers of serving are exported, under which names, with which labels and buckets; tables only.

Names and units are vLLM's wherever it has a metric of that meaning, so that dashboards and tools carry over.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from service.engine.stats import FinishStats, LoadStats, StepStats
from service.series import Asked, Count, Level, Levels, Split, Spread, Told

FINISH_REASONS: Final = ("stop", "length", "abort", "error")
PHASES: Final = ("draft", "verify", "other")
RANKS: Final = ("1", "2-4", "5-10")
"""Classes of the rank head that hold candidates; the fourth, beyond, holds none."""

VLLM_NAMES: Final = frozenset(
    {
        "spec_decode_num_drafts",
        "spec_decode_num_draft_tokens",
        "spec_decode_num_accepted_tokens",
        "spec_decode_num_accepted_tokens_per_pos",
        "time_to_first_token_seconds",
        "inter_token_latency_seconds",
        "e2e_request_latency_seconds",
        "request_queue_time_seconds",
        "num_requests_running",
        "num_requests_waiting",
        "kv_cache_usage_perc",
        "prefix_cache_queries",
        "prefix_cache_hits",
        "prompt_tokens",
        "generation_tokens",
        "request_success",
    }
)
"""Those that may be shown a second time as `vllm:...`."""

_LATENCY: Final = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0)
_INTER_TOKEN: Final = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 5.0)
_ERROR: Final = (0.02, 0.05, 0.1, 0.2, 0.5, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerStatus:
    """The server process at the moment it is asked."""

    ready: bool
    requests_in_flight: int  # accepted and not yet answered to their end
    requests_refused: int  # so far, because too many were waiting
    loop_lag_seconds: float


LOAD: Final[tuple[Told[LoadStats], ...]] = (
    Level("num_requests_running", "Sequences being generated.", lambda s: s.num_running),
    Level("num_requests_waiting", "Sequences waiting for a place.", lambda s: s.num_waiting),
    Level(
        "kv_cache_usage_perc",
        "Share of key/value slots in use, 0 to 1.",
        lambda s: s.slots_used / s.slots_total if s.slots_total else 0.0,
    ),
)

FINISH: Final[tuple[Told[FinishStats], ...]] = (
    Split(
        "request_success",
        "Sequences ended, by the reason.",
        ("finished_reason",),
        FINISH_REASONS,
        lambda s: {s.finish_reason: 1},
    ),
    Count("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", lambda s: s.prompt_tokens),
    Count("prefix_cache_hits", "Prompt tokens found in the prefix cache.", lambda s: s.cached_tokens),
    Spread(
        "time_to_first_token_seconds",
        "Time from arrival to the first token.",
        _LATENCY,
        lambda s: (s.first_token_seconds,) if s.output_tokens else (),
    ),
    Spread(
        "e2e_request_latency_seconds",
        "Time from arrival to the end.",
        _LATENCY,
        lambda s: (s.total_seconds,),
    ),
    Spread(
        "request_queue_time_seconds",
        "Time spent waiting for a place.",
        _LATENCY,
        lambda s: (s.queue_seconds,),
    ),
)

SERVER: Final[tuple[Asked[ServerStatus], ...]] = (
    Asked("gauge", "ready", "1 while requests are taken.", lambda s: {"": s.ready}),
    Asked("gauge", "requests_in_flight", "Requests accepted and not yet ended.", lambda s: {"": s.requests_in_flight}),
    Asked("counter", "requests_refused", "Requests answered 429.", lambda s: {"": s.requests_refused}),
    Asked(
        "gauge",
        "event_loop_lag_seconds",
        "Longest delay of the event loop since last read.",
        lambda s: {"": s.loop_lag_seconds},
    ),
)


def step_series(
    *, max_depth: int, budget_reasons: Sequence[str], sources: Sequence[str]
) -> tuple[Told[StepStats], ...]:
    """One engine step."""
    return (
        Count("engine_steps", "Engine steps.", lambda s: 1),
        Count("prompt_tokens", "Prompt tokens read.", lambda s: s.prompt_tokens),
        Count("generation_tokens", "Tokens generated.", lambda s: s.emitted_tokens),
        Count("preemptions", "Sequences put back into the queue for want of slots.", lambda s: s.preemptions),
        Split(
            "step_seconds",
            "Time spent in engine steps.",
            ("phase",),
            PHASES,
            lambda s: dict(zip(PHASES, (s.draft_seconds, s.verify_seconds, s.other_seconds), strict=True)),
        ),
        Spread(
            "inter_token_latency_seconds",
            "Time between two emissions of a sequence.",
            _INTER_TOKEN,
            lambda s: s.itl_seconds,
        ),
        *_draft_series(max_depth, sources),
        *_budget_series(budget_reasons),
    )


def _draft_series(max_depth: int, sources: Sequence[str]) -> tuple[Told[StepStats], ...]:
    """What was drafted and what became of it."""
    return (
        Count("spec_decode_num_drafts", "Drafts verified.", lambda s: s.drafts),
        Count("spec_decode_num_draft_tokens", "Drafted nodes verified.", lambda s: s.drafted_nodes),
        Count("spec_decode_num_accepted_tokens", "Drafted tokens accepted.", lambda s: s.accepted_tokens),
        Split(
            "spec_decode_num_accepted_tokens_per_pos",
            "Drafts accepted at least up to this position.",
            ("position",),
            tuple(map(str, range(max_depth))),
            _accepted_per_position,
        ),
        Split(
            "accepted_tokens_by_source",
            "Drafted tokens accepted, by who proposed.",
            ("source",),
            tuple(sources),
            lambda s: s.accepted_by_source,
        ),
        Spread(
            "accepted_length_tokens",
            "Drafted tokens accepted per draft.",
            tuple(range(max_depth + 1)),
            lambda s: s.accepted_per_sequence,
        ),
        Count("drafted_blocks", "Blocks a trained drafter proposed.", lambda s: s.drafted_blocks),
        Count("verify_rows", "Rows of the target's forwards: prompts, roots and nodes.", lambda s: s.verify_rows),
        Count(
            "verify_rows_wasted",
            "Rows whose drafted node was rejected.",
            lambda s: s.drafted_nodes - s.accepted_tokens,
        ),
        Level(
            "survival_calibration_error",
            "Expected calibration error of survival, 0 to 1.",
            lambda s: s.survival_error,
        ),
        Levels(
            "rank_head_foretold_tokens",
            "Tokens that candidates of this rank were lately to have right, by the rank head.",
            "rank",
            RANKS,
            lambda s: s.rank_foretold,
        ),
        Levels(
            "rank_head_right_tokens",
            "Tokens that candidates of this rank lately had right.",
            "rank",
            RANKS,
            lambda s: s.rank_right,
        ),
    )


def _budget_series(reasons: Sequence[str]) -> tuple[Told[StepStats], ...]:
    """How many nodes were verified, why, and how well their cost was foretold."""
    return (
        Level("budget_nodes", "Nodes the latest step was allowed to verify.", lambda s: s.budget),
        Split(
            "budget_decisions",
            "Steps by the reason for their budget.",
            ("reason",),
            tuple(reasons),
            lambda s: {s.budget_reason: 1},
        ),
        Spread(
            "cost_prediction_error_ratio",
            "Predicted verify seconds against measured ones, relative.",
            _ERROR,
            _cost_errors,
        ),
    )


def _accepted_per_position(stats: StepStats) -> dict[str, float]:
    accepted = stats.accepted_per_sequence
    return {str(position): sum(count > position for count in accepted) for position in range(max(accepted, default=0))}


def _cost_errors(stats: StepStats) -> tuple[float, ...]:
    if stats.predicted_verify_seconds is None or stats.verify_seconds <= 0:
        return ()
    return (abs(stats.predicted_verify_seconds / stats.verify_seconds - 1),)
