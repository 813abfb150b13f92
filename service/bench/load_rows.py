"""What runs under load come to: one row per policy and concurrency, and how the adaptive budget compares.

Plain arithmetic on records, so that it can be checked on ones made by hand.
"""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, median

from service.bench.generate import count_mismatches
from service.bench.load import LoadRun, Served
from service.engine.stats import StepStats

PLAIN = "plain"
ADAPTIVE = "adaptive"
FIXED = "fixed:"


@dataclass(frozen=True, slots=True)
class Slo:
    """What a request may wait to count as well served."""

    first_token_seconds: float
    token_seconds: float  # mean time per token after the first

    def is_met_by(self, request: Served) -> bool:
        slowest = fmean(request.gaps_seconds) if request.gaps_seconds else 0.0
        return request.first_token_seconds <= self.first_token_seconds and slowest <= self.token_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadRow:
    """One policy at one concurrency. Inter-token latency is per token: those of one step share its time."""

    policy: str
    concurrency: int
    arrival: str
    rate_per_second: float | None
    requests: int
    tokens: int
    seconds: float
    tokens_per_second: float  # while the load is steady
    goodput_tokens_per_second: float
    ttft_p50_seconds: float
    ttft_p95_seconds: float
    ttft_p99_seconds: float
    itl_p50_seconds: float
    itl_p95_seconds: float
    itl_p99_seconds: float
    mean_budget: float  # nodes per decoding sequence and step
    tau: float
    draft_share: float
    undrafted_share: float  # of the steps
    cost_error: float | None  # median of |predicted / measured - 1| over steps, for a verify
    survival_error: float | None  # calibration error of survival at the end
    mismatched_tokens: int

    def as_json(self) -> dict[str, object]:
        return asdict(self)


def row_of(
    policy: str,
    run: LoadRun,
    reference: LoadRun,
    *,
    concurrency: int,
    arrival: str,
    rate: float | None,
    slo: Slo,
) -> LoadRow:
    """A policy's run as one row; `reference` is another policy's run of the same requests."""
    served, steps, seconds = run.served, run.steps, run.seconds
    tokens = sum(len(request.token_ids) for request in served)
    well_served = sum(len(request.token_ids) for request in served if slo.is_met_by(request))
    speed = run.steady.tokens / run.steady.seconds
    gaps = [gap for request in served for gap in request.gaps_seconds]
    firsts = [request.first_token_seconds for request in served]
    accepted = [count for request in served for count in request.accepted_per_step]
    errors = cost_errors(steps)
    calibration = [step.survival_error for step in steps if step.survival_error is not None]
    return LoadRow(
        policy=policy,
        concurrency=concurrency,
        arrival=arrival,
        rate_per_second=rate,
        requests=len(served),
        tokens=tokens,
        seconds=seconds,
        tokens_per_second=speed,
        goodput_tokens_per_second=speed * well_served / tokens,
        ttft_p50_seconds=percentile(firsts, 50),
        ttft_p95_seconds=percentile(firsts, 95),
        ttft_p99_seconds=percentile(firsts, 99),
        itl_p50_seconds=percentile(gaps, 50),
        itl_p95_seconds=percentile(gaps, 95),
        itl_p99_seconds=percentile(gaps, 99),
        mean_budget=sum(step.drafted_nodes for step in steps) / max(1, len(accepted)),
        tau=1 + sum(accepted) / max(1, len(accepted)),
        draft_share=sum(step.draft_seconds for step in steps) / seconds,
        undrafted_share=fmean(step.drafted_nodes == 0 for step in steps),
        cost_error=median(errors) if errors else None,
        survival_error=calibration[-1] if calibration else None,
        mismatched_tokens=mismatches(reference, run),
    )


def cost_errors(steps: Iterable[StepStats]) -> list[float]:
    """|predicted / measured - 1| of each verify whose seconds had been predicted."""
    return [
        abs(step.predicted_verify_seconds / step.verify_seconds - 1.0)
        for step in steps
        if step.predicted_verify_seconds is not None and step.verify_seconds > 0
    ]


def mismatches(reference: LoadRun, run: LoadRun) -> int:
    """Positions at which the answers of two policies differ."""
    return sum(
        count_mismatches(expected.token_ids, got.token_ids)
        for expected, got in zip(reference.served, run.served, strict=True)
    )


def percentile(values: Iterable[float], percent: int) -> float:
    """The smallest value that so many per cent do not exceed; 0 of nothing."""
    ordered = sorted(values)
    if not ordered:
        return 0.0
    return ordered[max(0, -(-len(ordered) * percent // 100) - 1)]


def summary_of(rows: Sequence[LoadRow]) -> dict[str, object]:
    """Means per policy, and what the adaptive budget is worth beside plain decoding and fixed budgets."""
    policies = list(dict.fromkeys(row.policy for row in rows))
    means = {policy: fmean(_speeds(rows, policy)) for policy in policies}
    summary: dict[str, object] = {
        "mean_tokens_per_second": means,
        "mismatched_tokens": sum(row.mismatched_tokens for row in rows),
    }
    if ADAPTIVE in means:
        summary |= _adaptive_summary(rows, means)
    return summary


def _adaptive_summary(rows: Sequence[LoadRow], means: dict[str, float]) -> dict[str, object]:
    mine = _speeds(rows, ADAPTIVE)
    fixed = [_speeds(rows, policy) for policy in means if policy.startswith(FIXED)]
    found: dict[str, object] = {}
    if PLAIN in means:
        found["adaptive_over_plain_lowest"] = min(_ratios(mine, _speeds(rows, PLAIN)))
    if fixed:
        best = [max(speeds) for speeds in zip(*fixed, strict=True)]
        found["adaptive_over_best_fixed_lowest"] = min(_ratios(mine, best))
        found["adaptive_over_best_single_fixed_mean"] = min(fmean(_ratios(mine, speeds)) for speeds in fixed)
    return found


def _speeds(rows: Sequence[LoadRow], policy: str) -> list[float]:
    """By concurrency."""
    return [row.tokens_per_second for row in rows if row.policy == policy]


def _ratios(speeds: Sequence[float], others: Sequence[float]) -> list[float]:
    return [speed / other for speed, other in zip(speeds, others, strict=True)]
