"""What a poisoning benchmark says: tau of honest clients' queries, attacked against unattacked, and against the anchor.

Every run answers the same honest queries, so that runs are compared query by query; what hostile clients were answered
is only counted. Knows nothing of engines.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from service.bench.poison_clients import HOSTILE
from service.bench.shift_figures import Window, json_event, mismatches, tau_gain, tau_of, windows_of
from service.bench.shift_learning import Counts, Noted
from service.bench.shift_stream import Stream, Turn
from service.bench.shift_turns import AnsweredQuery, Played

ATTACKED, UNATTACKED, ANCHOR = "attacked", "unattacked", "anchor"
RUNS = (ATTACKED, UNATTACKED, ANCHOR)

ASKED_RATIO = 0.97
STRETCH = 3  # windows


@dataclass(frozen=True, slots=True)
class Ratio:
    """Tau by another run's on the same queries, with what holds 95 % of resampled turns."""

    ratio: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Stretch:
    """Some windows in a row."""

    first_query: int
    tau: float
    anchor_tau: float

    @property
    def ratio(self) -> float:
        return self.tau / self.anchor_tau

    def as_json(self) -> dict[str, object]:
        return {**asdict(self), "ratio": self.ratio}


@dataclass(frozen=True, slots=True, kw_only=True)
class PoisonRow:
    """One window of one run; queries and tau are those of honest clients."""

    run: str
    window: int
    phase: str
    first_query: int
    queries: int
    hostile_queries: int
    tau: float
    counts: Counts

    def as_json(self) -> dict[str, object]:
        values = asdict(self)
        return {**values, **values.pop("counts")}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """One run over the whole stream, as honest clients saw it."""

    tau: float
    tau_by_phase: Mapping[str, float]
    over_anchor: Ratio
    worst: Stretch  # of all windows in a row, by the anchor's
    mismatched_tokens: int  # that differ from the anchor's
    counts: Counts
    events: tuple[Noted, ...]

    def as_json(self) -> dict[str, object]:
        values = asdict(self)
        events = [json_event(noted) for noted in self.events]
        return {**values, **values.pop("counts"), "worst": self.worst.as_json(), "events": events}


@dataclass(frozen=True, slots=True)
class HostileSummary:
    """What one hostile client was answered."""

    queries: int
    tokens: int
    tau: float


def honest_part(played: Sequence[Played], turns: Sequence[Turn]) -> list[Played]:
    """What a run did for honest clients, as if nobody else had asked: events are counted by honest queries too."""
    parts, answered = [], 0
    for mine, turn in zip(played, turns, strict=True):
        honest = [asked.client not in HOSTILE for asked in mine.turn.queries]
        queries = tuple(query for query, kept in zip(mine.queries, honest, strict=True) if kept)
        noted = tuple(
            replace(one, query=turn.first + sum(honest[: max(0, one.query - answered)])) for one in mine.noted
        )
        parts.append(replace(mine, turn=turn, queries=queries, noted=noted))
        answered += len(honest)
    return parts


def rows_of(run: str, played: Sequence[Played], hostile: Mapping[int, int], stream: Stream) -> list[PoisonRow]:
    """The honest part of a run, window by window; `hostile` has the number of hostile queries by window."""
    return [
        PoisonRow(
            run=run,
            window=window.number,
            phase=stream.phases[window.phase].name,
            first_query=window.first,
            queries=window.num_queries,
            hostile_queries=hostile.get(window.number, 0),
            tau=window.tau,
            counts=window.counts,
        )
        for window in windows_of(played)
    ]


def summary_of(played: Sequence[Played], anchor: Sequence[Played], stream: Stream, *, seed: int) -> RunSummary:
    """The honest part of a run against the anchor's."""
    return RunSummary(
        tau=tau_of(played),
        tau_by_phase={
            phase.name: tau_of(turn for turn in played if turn.turn.phase == index)
            for index, phase in enumerate(stream.phases)
        },
        over_anchor=ratio_of(played, anchor, seed=seed),
        worst=min(stretches(windows_of(played), windows_of(anchor)), key=lambda stretch: stretch.ratio),
        mismatched_tokens=mismatches(played, anchor),
        counts=sum((turn.counts for turn in played), Counts()),
        events=tuple(noted for turn in played for noted in turn.noted),
    )


def ratio_of(mine: Sequence[Played], theirs: Sequence[Played], *, seed: int) -> Ratio:
    """Tau of one run by that of another on the same queries."""
    gain = tau_gain(mine, theirs, seed=seed)
    return Ratio(*(1 + percent / 100 for percent in (gain.percent, gain.low, gain.high)))


def stretches(mine: Sequence[Window], anchor: Sequence[Window]) -> list[Stretch]:
    """Every three windows in a row, or all windows where there are fewer."""
    length = min(STRETCH, len(mine))
    starts = range(len(mine) - length + 1)
    return [_stretch(mine[start : start + length], anchor[start : start + length]) for start in starts]


def hostile_of(played: Sequence[Played]) -> dict[str, HostileSummary]:
    """What each hostile client was answered in the attacked run, those who never came left out."""
    return {client: _hostile(played, client) for client in HOSTILE if _came(played, client)}


def hostile_by_window(played: Sequence[Played]) -> dict[str, dict[int, int]]:
    """Queries of each hostile client, by window."""
    numbers = dict.fromkeys(turn.turn.window for turn in played)
    return {
        client: {number: _came([turn for turn in played if turn.turn.window == number], client) for number in numbers}
        for client in HOSTILE
    }


def _stretch(mine: Sequence[Window], anchor: Sequence[Window]) -> Stretch:
    tau, anchor_tau = (tau_of(turn for window in windows for turn in window.played) for windows in (mine, anchor))
    return Stretch(mine[0].first, tau, anchor_tau)


def _came(played: Sequence[Played], client: str) -> int:
    return sum(asked.client == client for turn in played for asked in turn.turn.queries)


def _hostile(played: Sequence[Played], client: str) -> HostileSummary:
    mine = [replace(turn, queries=_answers_to(turn, client)) for turn in played]
    return HostileSummary(_came(played, client), sum(turn.num_tokens for turn in mine), tau_of(mine))


def _answers_to(played: Played, client: str) -> tuple[AnsweredQuery, ...]:
    pairs = zip(played.turn.queries, played.queries, strict=True)
    return tuple(answer for asked, answer in pairs if asked.client == client)
