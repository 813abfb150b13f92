"""How true the budget's numbers were over a run: errors of predicted seconds, and the calibration error of survival.

The calibration error is the engine's own running one, as /metrics shows it, with its memory of some 500 steps. Plain
arithmetic on records.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median

from service.bench.calibration import PlayedLeg
from service.bench.load_rows import cost_errors, percentile
from service.bench.shift_stream import Stream
from service.engine.stats import StepStats


@dataclass(frozen=True, slots=True, kw_only=True)
class CostError:
    """|predicted / measured - 1| of the seconds of a verify."""

    steps: int
    median: float
    p90: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SurvivalError:
    """A reading of survival's calibration error, and how many nodes its phase had verified by then."""

    nodes: int
    error: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LegRow:
    """One leg: a window of the run's course."""

    leg: int
    phase: str
    concurrency: int
    queries: int
    tokens_per_second: float
    nodes: int  # verified in this leg
    cost_error: CostError | None
    survival: SurvivalError | None  # the last reading by its end; None before the phase's first one

    def as_json(self) -> dict[str, object]:
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationSummary:
    """The whole run."""

    cost_error: CostError | None
    cost_error_by_concurrency: dict[int, CostError | None]
    cost_error_decoding: CostError | None  # of the steps that read no prompt
    cost_error_reading: CostError | None  # of those that did
    survival_before: SurvivalError | None  # once enough nodes were verified; None where they never were
    survival_after: SurvivalError | None  # likewise, counted from the change

    def as_json(self) -> dict[str, object]:
        return asdict(self)


def rows_of(played: Sequence[PlayedLeg], stream: Stream) -> list[LegRow]:
    """The run's course."""
    return [
        LegRow(
            leg=number,
            phase=stream.phases[mine.leg.phase].name,
            concurrency=mine.leg.concurrency,
            queries=len(mine.leg.requests),
            tokens_per_second=sum(len(served.token_ids) for served in mine.run.served) / mine.run.seconds,
            nodes=sum(step.drafted_nodes for step in mine.run.steps),
            cost_error=cost_error(mine.run.steps),
            survival=last_reading(_phase(played[: number + 1], mine.leg.phase)),
        )
        for number, mine in enumerate(played)
    ]


def summary_of(played: Sequence[PlayedLeg], nodes: int) -> CalibrationSummary:
    """The whole run; survival is judged once a phase has verified so many nodes."""
    steps = _steps(played)
    clients = dict.fromkeys(mine.leg.concurrency for mine in played)
    return CalibrationSummary(
        cost_error=cost_error(steps),
        cost_error_by_concurrency={
            count: cost_error(_steps([mine for mine in played if mine.leg.concurrency == count])) for count in clients
        },
        cost_error_decoding=cost_error([step for step in steps if not step.prompt_tokens]),
        cost_error_reading=cost_error([step for step in steps if step.prompt_tokens]),
        survival_before=first_reading_from(_phase(played, 0), nodes),
        survival_after=first_reading_from(_phase(played, 1), nodes),
    )


def cost_error(steps: Sequence[StepStats]) -> CostError | None:
    """Of the steps whose seconds had been predicted; None where there are none."""
    errors = cost_errors(steps)
    if not errors:
        return None
    return CostError(steps=len(errors), median=median(errors), p90=percentile(errors, 90))


def last_reading(steps: Sequence[StepStats]) -> SurvivalError | None:
    """The latest one in these steps."""
    found = readings(steps)
    return found[-1] if found else None


def first_reading_from(steps: Sequence[StepStats], nodes: int) -> SurvivalError | None:
    """The first one after so many nodes."""
    return next((reading for reading in readings(steps) if reading.nodes >= nodes), None)


def readings(steps: Sequence[StepStats]) -> list[SurvivalError]:
    """All readings, each with the nodes verified up to it."""
    found: list[SurvivalError] = []
    nodes = 0
    for step in steps:
        nodes += step.drafted_nodes
        if step.survival_error is not None:
            found.append(SurvivalError(nodes=nodes, error=step.survival_error))
    return found


def _phase(played: Sequence[PlayedLeg], phase: int) -> list[StepStats]:
    return _steps([mine for mine in played if mine.leg.phase == phase])


def _steps(played: Sequence[PlayedLeg]) -> list[StepStats]:
    return [step for mine in played for step in mine.run.steps]
