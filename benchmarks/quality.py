"""How well a drafter predicts: figures over the steps that a recorder wrote down."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from statistics import fmean

from benchmarks.draft_records import StepRecord, Survival, TokenPath
from service.bench.experiment import Row

COVERED = (1, 2, 4, 8)
TREES = (1, 2, 3, 5, 8)
_RANKS = 8
_TABLE = 4  # depths and ranks of `by_rank`
_BINS = 10


def quality_of(steps: Sequence[StepRecord]) -> Row:
    """Return the figures of these steps; None for a figure without a case.

    A *place* is where a token of the text had to be predicted: after a step's root or after an accepted node.
    `named`: share of places where the drafter proposed any token; `covered` by k: of those, share where the token is
    among its k most likely; `right_by_rank`: of those with so many proposals, share where the token is the last of
    them; `total_variation`: mean distance to the target's distribution, both at temperature 1; `by_rank`, by depth and
    rank among siblings: candidates, verified or not, whose parent is on the text's path, the conditional survival that
    they claim on average, and the share that is on the path, too; `accepted_by_best`: mean accepted length of trees of
    the 1, 2, 3, 5, 8 likeliest candidates; `claimed_error` and `corrected_error`: expected calibration error of the
    survival of verified nodes, as the drafter states it and as the budget corrects it.
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
        "by_rank": _by_rank(steps),
        "accepted_by_best": {
            str(count): _share(sum(path == step.truth[: len(path)] for path in _best(step, count)) for step in steps)
            for count in TREES
        },
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


def _by_rank(steps: Sequence[StepRecord]) -> list[Row]:
    found: defaultdict[tuple[int, int], list[tuple[float, bool]]] = defaultdict(list)
    for step in steps:
        siblings = Counter[TokenPath]()
        for path in _best(step, len(step.candidates)):
            parent, depth, siblings[path[:-1]] = path[:-1], len(path), siblings[path[:-1]] + 1
            if (
                max(depth, siblings[parent]) <= _TABLE
                and len(step.truth) >= depth
                and parent == step.truth[: depth - 1]
            ):
                claim = step.candidates[path] / step.candidates.get(parent, 1.0)
                found[depth, siblings[parent]].append((claim, path == step.truth[:depth]))
    return [
        {
            "depth": depth,
            "rank": rank,
            "labels": len(labels),
            "claimed": fmean(c for c, _ in labels),
            "accepted": fmean(a for _, a in labels),
        }
        for (depth, rank), labels in sorted(found.items())
    ]


def _best(step: StepRecord, count: int) -> list[TokenPath]:
    return sorted(step.candidates, key=step.candidates.__getitem__, reverse=True)[:count]


def _error(estimates: Iterable[tuple[StepRecord, Survival]]) -> float | None:
    """Return the calibration error over verified nodes."""
    return calibration_error(
        [(survival[path], path == step.truth[: len(path)]) for step, survival in estimates for path in step.verified]
    )


def _share(outcomes: Iterable[float]) -> float | None:
    seen = list(outcomes)
    return sum(seen) / len(seen) if seen else None
