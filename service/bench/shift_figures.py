"""What the turns of a shift benchmark say, as figures and as a picture."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from service.bench.experiment import count_mismatches
from service.bench.shift_play import PLAIN, Counts, Noted, Played, Stream

_RECOVERED = 0.9
_RESAMPLES = 2000
_INTERVAL = (2.5, 97.5)
_REPORTED = ("training_seconds", "updates_head", "updates_full", "publishes", "refusals", "rollbacks")

_Rate = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Window:
    """Some turns of one policy, one after the other."""

    played: tuple[Played, ...]

    @property
    def number(self) -> int:
        return self.played[0].turn.window

    @property
    def phase(self) -> int:
        return self.played[0].turn.phase

    @property
    def first(self) -> int:
        return self.played[0].turn.first

    @property
    def num_queries(self) -> int:
        return sum(len(turn.queries) for turn in self.played)

    @property
    def tau(self) -> float:
        return tau_of(self.played)

    @property
    def counts(self) -> Counts:
        return sum((turn.counts for turn in self.played), Counts())


@dataclass(frozen=True, slots=True)
class Gain:
    """Percent more tokens, per second or per verify, than another, with what holds 95 % of resampled turns."""

    percent: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicySummary:
    """One policy over the whole stream; `before` is its first phase and `after` its last."""

    net_tokens_per_second_before: float
    net_tokens_per_second_after: float
    engine_tokens_per_second_before: float
    engine_tokens_per_second_after: float
    net_gain_before: Gain | None  # None for the plain comparison itself
    net_gain_after: Gain | None
    tau_before: float
    tau_after: float
    final_tau_gain: float | None  # from the first to the last windows with something new, above the plain comparison's
    recovery_queries: int | None  # None where nothing was gained, or nothing published
    mismatched_tokens: int
    counts: Counts
    training_share: float  # training seconds of all net seconds
    waited_seconds: float  # between a turn's last answer and its end
    itl_p50_seconds: float
    itl_p99_seconds: float
    events: tuple[Noted, ...]

    def as_json(self) -> dict[str, object]:
        values = asdict(self)
        events = [json_event(noted) for noted in self.events]
        return {**values, **values.pop("counts"), "events": events}


def windows_of(played: Sequence[Played]) -> list[Window]:
    """A policy's turns, window by window."""
    numbers = dict.fromkeys(turn.turn.window for turn in played)
    return [Window(tuple(turn for turn in played if turn.turn.window == number)) for number in numbers]


def rows_of(policy: str, windows: Sequence[Window], stream: Stream) -> list[dict[str, object]]:
    """The windows as they are reported."""
    return [
        {
            "policy": policy,
            "window": window.number,
            "phase": stream.phases[window.phase].name,
            "first_query": window.first,
            "queries": window.num_queries,
            "tau": window.tau,
            "tokens_per_second": net_speed(window.played),  # all seconds of its turns, training included
            "engine_tokens_per_second": engine_speed(window.played),  # without waiting until training stood still
            **{name: getattr(window.counts, name) for name in _REPORTED},
        }
        for window in windows
    ]


def summary_of(played: Sequence[Played], plain: Sequence[Played], stream: Stream, *, seed: int) -> PolicySummary:
    """One policy against the plain comparison; `plain` may be its own turns."""
    before, after = _phase(played, 0), _phase(played, len(stream.phases) - 1)
    compares = played is not plain
    recovery = recovery_of(*(_new_windows(mine, stream) for mine in (played, plain)))
    counts = sum((turn.counts for turn in played), Counts())
    net_seconds = sum(turn.net_seconds for turn in played)
    p50, p99 = _quantiles([gap for turn in played for gap in turn.gaps], (50, 99))
    return PolicySummary(
        net_tokens_per_second_before=net_speed(before),
        net_tokens_per_second_after=net_speed(after),
        engine_tokens_per_second_before=engine_speed(before),
        engine_tokens_per_second_after=engine_speed(after),
        net_gain_before=net_gain(before, _phase(plain, 0), seed=seed) if compares else None,
        net_gain_after=net_gain(after, _phase(plain, len(stream.phases) - 1), seed=seed) if compares else None,
        tau_before=tau_of(before),
        tau_after=tau_of(after),
        final_tau_gain=recovery.final_gain if compares else None,
        recovery_queries=recovery.queries if counts.publishes else None,
        mismatched_tokens=mismatches(played, plain),
        counts=counts,
        training_share=counts.training_seconds / net_seconds,
        waited_seconds=net_seconds - sum(turn.engine_seconds for turn in played),
        itl_p50_seconds=p50,
        itl_p99_seconds=p99,
        events=tuple(noted for turn in played for noted in turn.noted),
    )


def tau_of(played: Iterable[Played]) -> float:
    """Mean emitted tokens per verify; 1 without any."""
    emitted, verifies = np.sum([(0, 0), *map(_emitted, played)], axis=0).tolist()
    return emitted / verifies if verifies else 1.0


def net_speed(played: Sequence[Played]) -> float:
    """Tokens per second of the turns, training included."""
    return sum(turn.num_tokens for turn in played) / sum(turn.net_seconds for turn in played)


def engine_speed(played: Sequence[Played]) -> float:
    """Tokens per second until each turn's last answer."""
    return sum(turn.num_tokens for turn in played) / sum(turn.engine_seconds for turn in played)


def net_gain(mine: Sequence[Played], plain: Sequence[Played], *, seed: int) -> Gain:
    """How much faster, training included."""
    return _paired_gain(
        *([(turn.num_tokens, turn.net_seconds) for turn in turns] for turns in (mine, plain)), seed=seed
    )


def tau_gain(mine: Sequence[Played], plain: Sequence[Played], *, seed: int) -> Gain:
    """How much more is emitted per verify."""
    return _paired_gain(list(map(_emitted, mine)), list(map(_emitted, plain)), seed=seed)


def _paired_gain(mine: Sequence[_Rate], plain: Sequence[_Rate], *, seed: int) -> Gain:
    """By tokens of a turn and the seconds or verifies they took; turns of the same queries are drawn together (paired
    bootstrap)."""
    table = np.concatenate([np.array(mine, float).T, np.array(plain, float).T])  # [tokens, units, plain ones; turns]
    drawn = np.random.default_rng(seed).integers(len(mine), size=(_RESAMPLES, len(mine)))
    low, high = np.percentile(_percent(table[:, drawn].sum(-1)), _INTERVAL)
    return Gain(float(_percent(table.sum(-1))), float(low), float(high))


def _percent(sums: np.ndarray) -> np.ndarray:  # [4, ...] -> [...]
    tokens, units, plain_tokens, plain_units = sums
    percent: np.ndarray = 100 * (tokens / units * plain_units / plain_tokens - 1)
    return percent


def _emitted(turn: Played) -> _Rate:
    """Emitted tokens and verifies."""
    verifies = sum(query.verifies for query in turn.queries)
    return verifies + sum(query.accepted for query in turn.queries), verifies


@dataclass(frozen=True, slots=True)
class Recovery:
    """How tau grew where there was something new, the plain comparison's own course taken off."""

    final_gain: float  # mean of the last quarter of windows minus the first window
    queries: int | None  # until a window had reached 90 % of that gain


def recovery_of(mine: Sequence[Window], plain: Sequence[Window]) -> Recovery:
    """Both policies' windows over the same queries."""
    ahead = [ours.tau - theirs.tau for ours, theirs in zip(mine, plain, strict=True)]
    final = fmean(ahead[-max(1, len(ahead) // 4) :]) - ahead[0]
    if final <= 0:
        return Recovery(final, None)
    reached = next(place for place, value in enumerate(ahead) if value - ahead[0] >= _RECOVERED * final)
    return Recovery(final, sum(window.num_queries for window in mine[: reached + 1]))


def mismatches(played: Sequence[Played], plain: Sequence[Played]) -> int:
    """Positions at which the answers of two policies differ."""
    return sum(
        count_mismatches(expected.token_ids, got.token_ids)
        for theirs, ours in zip(plain, played, strict=True)
        for expected, got in zip(theirs.queries, ours.queries, strict=True)
    )


def json_event(noted: Noted) -> dict[str, object]:
    """JSON knows no NaN, which is what a score without texts is."""
    numbers = {name: value if math.isfinite(value) else None for name, value in noted.event.numbers.items()}
    return {"query": noted.query, **asdict(noted.event), "numbers": numbers}


def _phase(played: Sequence[Played], phase: int) -> list[Played]:
    return [turn for turn in played if turn.turn.phase == phase]


def _new_windows(played: Sequence[Played], stream: Stream) -> list[Window]:
    return [window for window in windows_of(played) if window.first >= stream.new_from]


def _quantiles(values: Sequence[float], percents: tuple[int, ...]) -> tuple[float, ...]:
    """0 where nothing was measured."""
    return tuple(float(found) for found in np.percentile(values, percents)) if values else (0.0,) * len(percents)


_MARKS = {"published": ("^", "publish"), "refused": ("x", "refusal"), "rolled_back": ("v", "rollback")}


def draw(
    file: Path, windows: Mapping[str, Sequence[Window]], events: Mapping[str, Sequence[Noted]], stream: Stream
) -> None:
    """Draw all policies' windows, by name; the plain comparison is one of them."""
    figure = Figure(figsize=(13, 8), layout="constrained")
    (taus, speeds), (tau_gains, speed_gains) = figure.subplots(2, 2, sharex=True)
    plain = windows[PLAIN]
    for index, (policy, mine) in enumerate(windows.items()):
        style = {"color": f"C{index}", "label": policy}
        middles = [window.first + window.num_queries / 2 for window in mine]
        taus.plot(middles, [window.tau for window in mine], marker=".", **style)
        speeds.plot(middles, [net_speed(window.played) for window in mine], marker=".", **style)
        if policy != PLAIN:
            ahead = [ours.tau - theirs.tau for ours, theirs in zip(mine, plain, strict=True)]
            tau_gains.plot(middles, ahead, marker=".", **style)
            speed_gains.plot(middles, _percent_faster(mine, plain), marker=".", **style)
            mark(tau_gains, events[policy], mine, ahead, f"C{index}")
    name_axes(
        {
            taus: "tau",
            speeds: "net tokens per second, training included",
            tau_gains: f"tau above {PLAIN}, same queries",
            speed_gains: f"percent more net tokens per second than {PLAIN}, same queries",
        },
        stream,
    )
    taus.legend(fontsize=8)
    explain_marks(tau_gains)
    figure.savefig(file, dpi=110)


def mark(axes: Any, events: Sequence[Noted], windows: Sequence[Window], heights: Sequence[float], color: str) -> None:
    """Each event at its query, at the height of the window it fell into."""
    for kind, (marker, _) in _MARKS.items():
        queries = [noted.query for noted in events if noted.event.kind == kind]
        places = [max(0, sum(window.first < query for window in windows) - 1) for query in queries]
        axes.scatter(queries, [heights[place] for place in places], marker=marker, color=color, s=45, zorder=3)


def name_axes(titles: Mapping[Any, str], stream: Stream) -> None:
    """Title each axes, and show where phases begin."""
    for axes, title in titles.items():
        axes.set_title(title)
        axes.set_xlabel("queries")
        axes.grid(alpha=0.3)
        first = 0
        for phase in stream.phases:
            axes.axvline(first, color="grey", linestyle=":")
            place = {"xycoords": ("data", "axes fraction"), "va": "top"}
            axes.annotate(f" {phase.name}", (first, 0.99), fontsize=7, color="grey", **place)
            first += len(phase.prompts)


def explain_marks(axes: Any) -> None:
    """Say below the axes what the marks mean."""
    words = ", ".join(f"{marker} {name}" for marker, name in _MARKS.values())
    axes.set_xlabel(f"queries ({words})")


def _percent_faster(mine: Sequence[Window], plain: Sequence[Window]) -> list[float]:
    pairs = zip(mine, plain, strict=True)
    return [100 * (net_speed(ours.played) / net_speed(theirs.played) - 1) for ours, theirs in pairs]
