"""What bad and perfect drafters come to beside plain decoding, by stretches of steps.

Every player emits the same tokens, so a step is compared with what plain decoding took for just these tokens: how long
a context was and how fast the machine was just then cancels. Steps that read prompts, here or in the plain run, are
left out, because drafting can neither help nor hurt them. Plain arithmetic on records.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np

from service.bench.generate import Run, tokens_per_second
from service.bench.speed import mismatches
from service.engine.stats import StepStats

WINDOW_STEPS = 100
"""Within so many steps a budget must have understood its drafter."""

_STANDS_DOWN = "stands_down"
_RESAMPLES = 2000
_INTERVAL = (2.5, 97.5)


@dataclass(frozen=True, slots=True)
class PricedStep:
    """A decoding step, and what plain decoding took for its tokens."""

    turn: int
    stats: StepStats
    tokens: int
    verifies: int  # sequences that emitted
    seconds: float
    plain_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """Some steps of one player, one after the other."""

    steps: int
    tokens: int
    tokens_per_second: float
    plain_tokens_per_second: float  # plain decoding of the same tokens
    over_plain: float
    tau: float
    nodes_per_step: float
    drafting_share: float  # of the seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowRow:
    """One hundred steps of one player, or what is left at the end."""

    player: str
    window: int
    stretch: Stretch

    def as_json(self) -> dict[str, object]:
        return {"player": self.player, "window": self.window, **asdict(self.stretch)}


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayerSummary:
    """One player over all texts."""

    whole: Stretch
    first: Stretch  # the first hundred steps
    later: Stretch | None  # all others; None where there are none
    later_over_plain_interval: tuple[float, float] | None  # holds 95 % of resampled texts
    with_prompts_over_plain: float  # every step of every text
    stopped_after_steps: int | None  # decoding steps until the budget refused to ask the drafter; None: it never did
    mismatched_tokens: int

    def as_json(self) -> dict[str, object]:
        return asdict(self)


def priced_steps(runs: Sequence[Run], plain: Sequence[Run]) -> list[PricedStep]:
    """A player's decoding steps over all texts."""
    return [
        step
        for turn, (mine, theirs) in enumerate(zip(runs, plain, strict=True))
        for step in _priced(turn, mine, _prices(theirs))
    ]


def rows_of(player: str, steps: Sequence[PricedStep]) -> list[WindowRow]:
    """The steps in windows."""
    firsts = range(0, len(steps), WINDOW_STEPS)
    return [
        WindowRow(player=player, window=window, stretch=stretch_of(steps[first : first + WINDOW_STEPS]))
        for window, first in enumerate(firsts)
    ]


def summary_of(runs: Sequence[Run], plain: Sequence[Run]) -> PlayerSummary:
    """One player against plain decoding; `plain` may be its own runs."""
    steps = priced_steps(runs, plain)
    later = steps[WINDOW_STEPS:]
    stopped = [place for place, step in enumerate(steps) if step.stats.budget_reason == _STANDS_DOWN]
    return PlayerSummary(
        whole=stretch_of(steps),
        first=stretch_of(steps[:WINDOW_STEPS]),
        later=stretch_of(later) if later else None,
        later_over_plain_interval=interval_of(later) if later else None,
        with_prompts_over_plain=tokens_per_second(runs) / tokens_per_second(plain),
        stopped_after_steps=stopped[0] if stopped else None,
        mismatched_tokens=mismatches(plain, runs),
    )


def stretch_of(steps: Sequence[PricedStep]) -> Stretch:
    """The figures of at least one step."""
    tokens, seconds = sum(step.tokens for step in steps), sum(step.seconds for step in steps)
    plain_seconds = sum(step.plain_seconds for step in steps)
    return Stretch(
        steps=len(steps),
        tokens=tokens,
        tokens_per_second=tokens / seconds,
        plain_tokens_per_second=tokens / plain_seconds,
        over_plain=plain_seconds / seconds,
        tau=tokens / sum(step.verifies for step in steps),
        nodes_per_step=sum(step.stats.drafted_nodes for step in steps) / len(steps),
        drafting_share=sum(step.stats.draft_seconds for step in steps) / seconds,
    )


def interval_of(steps: Sequence[PricedStep]) -> tuple[float, float]:
    """What holds 95 % of the ratios to plain decoding when texts are drawn anew (bootstrap)."""
    by_turn: defaultdict[int, list[PricedStep]] = defaultdict(list)
    for step in steps:
        by_turn[step.turn].append(step)
    sums = [(sum(step.plain_seconds for step in mine), sum(step.seconds for step in mine)) for mine in by_turn.values()]
    drawn = np.random.default_rng(0).integers(len(sums), size=(_RESAMPLES, len(sums)))
    plain_seconds, seconds = np.array(sums).T[:, drawn].sum(-1)  # [2, turns] -> [resamples] each
    low, high = np.percentile(plain_seconds / seconds, _INTERVAL)
    return float(low), float(high)


def _priced(turn: int, run: Run, prices: dict[str, list[float]]) -> list[PricedStep]:
    steps: list[PricedStep] = []
    emitted: Counter[str] = Counter()
    for step in run.steps:
        found = [prices[name][emitted[name] : emitted[name] + count] for name, count in step.emitted.items()]
        emitted.update(step.emitted)
        plain_seconds = sum(sum(mine) for mine in found)
        if step.stats.prompt_tokens or math.isnan(plain_seconds):
            continue
        tokens = sum(step.emitted.values())
        steps.append(PricedStep(turn, step.stats, tokens, len(step.emitted), step.seconds, plain_seconds))
    return steps


def _prices(plain: Run) -> dict[str, list[float]]:
    """Seconds of each token of each request; not a number where a prompt was read in the same step."""
    prices: defaultdict[str, list[float]] = defaultdict(list)
    for step in plain.steps:
        count = sum(step.emitted.values())
        for name, tokens in step.emitted.items():
            prices[name] += [math.nan if step.stats.prompt_tokens else step.seconds / count] * tokens
    return prices
