"""What a drafter knows: figures of its steps under observation, wherever the text went and the target has spoken."""

from collections.abc import Iterable, Sequence

from benchmarks.draft_records import Odds, StepRecord
from service.bench.experiment import Row

COVERED = (1, 2, 4, 8)
_RANKS = 8
_BINS = 10


def quality_of(steps: Sequence[StepRecord]) -> Row:
    """Figures are None where there is nothing to judge by. A place is where a token of the text was to be predicted:
    behind a step's root, or behind an accepted node.

    `named`: share of places at which the drafter names any token; `covered` by k: of those, at which the token is among
    its k likeliest; `right_by_rank`: of those at which it names so many, at which the token is the last of them.
    `total_variation`: mean distance of its distributions at places to the target's, all at temperature 1.
    `claimed_error` and `corrected_error`: expected calibration error of the survival of verified nodes, as the drafter
    states it and as the budget counts with it.
    """
    places = [(step.truth[at], step.ranked(step.truth[:at])) for step in steps for at in range(step.accepted + 1)]
    ranks = [(ranked.index(token) if token in ranked else None, len(ranked)) for token, ranked in places if ranked]
    distances = [place.distance for step in steps for place in step.places if place.distance is not None]
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
    """Expected calibration error: over 10 bins of the estimate, |mean estimate - share that came true| by bin size."""
    if not pairs:
        return None
    bins: list[list[tuple[float, bool]]] = [[] for _ in range(_BINS)]
    for estimate, outcome in pairs:
        bins[min(_BINS - 1, int(estimate * _BINS))].append((estimate, outcome))
    gaps = (abs(sum(estimate for estimate, _ in mine) - sum(outcome for _, outcome in mine)) for mine in bins)
    return sum(gaps) / len(pairs)


def _error(estimates: Iterable[tuple[StepRecord, Odds]]) -> float | None:
    """Of verified nodes."""
    return calibration_error(
        [(odds[path], path == step.truth[: len(path)]) for step, odds in estimates for path in step.verified]
    )


def _share(outcomes: Iterable[bool]) -> float | None:
    seen = list(outcomes)
    return sum(seen) / len(seen) if seen else None
