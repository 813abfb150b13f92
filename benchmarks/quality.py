"""How well a drafter predicts: figures over the steps that a recorder wrote down."""

from collections.abc import Iterable, Sequence

from benchmarks.draft_records import StepRecord, Survival
from service.bench.experiment import Row

COVERED = (1, 2, 4, 8)
_RANKS = 8
_BINS = 10


def quality_of(steps: Sequence[StepRecord]) -> Row:
    """Return the figures of these steps; None for a figure without a case.

    A *place* is where a token of the text had to be predicted: after a step's root or after an accepted node.
    `named`: share of places where the drafter proposed any token; `covered` by k: of those, share where the token is
    among its k most likely; `right_by_rank`: of those with so many proposals, share where the token is the last of
    them; `total_variation`: mean distance to the target's distribution, both at temperature 1; `claimed_error` and
    `corrected_error`: expected calibration error of the survival of verified nodes, as the drafter states it and as
    the budget corrects it.
    """
    places = [(step.truth[at], step.ranked(step.truth[:at])) for step in steps for at in range(step.accepted + 1)]
    ranks = [(ranked.index(token) if token in ranked else None, len(ranked)) for token, ranked in places if ranked]
    distances = [one.distance for step in steps for one in step.distributions if one.distance is not None]
    return {
        "places": len(places),
        "named": _share(bool(ranked) for _, ranked in places),
        "covered": {str(k): _share(rank is not None and rank < k for rank, _ in ranks) for k in COVERED},
        "right_by_rank": [_share(rank == at for rank, count in ranks if count > at) for at in range(_RANKS)],
        "total_variation": sum(distances) / len(distances) if distances else None,
        "claimed_error": _error((step, step.candidates) for step in steps),
        "corrected_error": _error((step, step.verified) for step in steps),
    }


def calibration_error(pairs: Sequence[tuple[float, bool]]) -> float | None:
    """Return the expected calibration error over 10 bins of the estimate: |mean estimate - share that came true|,
    weighed by bin size."""
    if not pairs:
        return None
    bins: list[list[tuple[float, bool]]] = [[] for _ in range(_BINS)]
    for estimate, outcome in pairs:
        bins[min(_BINS - 1, int(estimate * _BINS))].append((estimate, outcome))
    gaps = (abs(sum(estimate for estimate, _ in mine) - sum(outcome for _, outcome in mine)) for mine in bins)
    return sum(gaps) / len(pairs)


def _error(estimates: Iterable[tuple[StepRecord, Survival]]) -> float | None:
    """Return the calibration error over verified nodes."""
    return calibration_error(
        [(survival[path], path == step.truth[: len(path)]) for step, survival in estimates for path in step.verified]
    )


def _share(outcomes: Iterable[bool]) -> float | None:
    seen = list(outcomes)
    return sum(seen) / len(seen) if seen else None
