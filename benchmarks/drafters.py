"""`python -m benchmarks drafters`: bad and perfect drafters beside plain decoding, behind the budget that is served.

All emit the same tokens, so a step is compared with what plain decoding took for just these tokens: how long a context
was and how fast the machine was just then cancels. Steps that read prompts, here or in the plain run, are left out.
"""

import math
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from drafters.protocol import Noise
from drafters.random_tree import RandomTreeDrafter, random_depths, random_parents, random_tokens, sibling_ranks
from drafters.tree import MAX_DEPTH, ROOT, Candidates, DraftTree
from service.assembly import Assembly
from service.bench.driver import Run, generate
from service.bench.experiment import (
    PLAIN,
    Column,
    Measure,
    Row,
    conclude,
    counted,
    mismatches,
    paired_bootstrap,
    plain_engine,
    prepare,
    read_sets,
    table_of,
    take_turns,
    tokens_per_second,
)
from service.bench.shift_play import mixed
from service.config import ServiceConfig
from service.engine.build import drafting_sizes
from service.engine.engine import Engine
from service.engine.stats import StepStats
from service.errors import StartupError

RANDOM, LIAR, PERFECT = "random", "liar", "perfect"

WINDOW_STEPS = 100
"""Within so many steps a budget must have understood its drafter."""

_SUSPENDED = "suspended"
_WARM_UP_TOKENS = 16


class Liar(RandomTreeDrafter):
    """Random trees, always as large as allowed, every node of which claims to survive for certain."""

    name = LIAR

    def grow(self, rows: Tensor, noise: Noise) -> Candidates:
        parents = random_parents(random_depths(rows.shape[0], self._max_nodes, self._generator), self._generator)
        ranks, _ = sibling_ranks(parents)
        return DraftTree.of(random_tokens(parents, ranks, self._vocab_size, self._generator), parents)


class Perfect(RandomTreeDrafter):
    """Nothing random: the known answer as a chain, as deep as a tree may be."""

    name = PERFECT

    def grow(self, rows: Tensor, noise: Noise) -> Candidates:
        places = torch.arange(min(self._max_nodes, MAX_DEPTH), device=rows.device)  # [depth]
        answers = self._answers[rows].gather(1, self._generated[rows][:, None] + places)  # [batch, depth]
        known = answers >= 0
        return DraftTree(
            tokens=answers * known,
            parents=torch.where(known, places - 1, ROOT),
            depths=(places + 1) * known,
            survival=known.float(),
            num_nodes=known.sum(1),
        )


@dataclass(frozen=True, slots=True)
class PricedStep:
    """A decoding step, and what plain decoding took for its tokens."""

    turn: int
    stats: StepStats
    tokens: int
    verifies: int  # sequences that emitted
    seconds: float
    plain_seconds: float


def engines_of(assembly: Assembly, measure: Measure) -> dict[str, Engine]:
    """A new engine for every player, all on the assembly's target. Raises StartupError where nothing was measured."""
    if assembly.costs is None:
        raise StartupError("drafters are compared behind a budget by cost: set budget_policy to cost")
    limits = replace(assembly.limits, max_sequences=max(assembly.limits.max_sequences, measure.concurrency))
    engines = {PLAIN: plain_engine(assembly, limits)}
    for kind in (RandomTreeDrafter, Liar, Perfect):
        drafter = kind(drafting_sizes(assembly.target, limits), seed=measure.seed, hit_rate=0.0)
        engines[drafter.name] = assembly.engine(drafter=drafter, limits=limits)
    return engines


def answer_all(
    engines: Mapping[str, Engine],
    prompts: Sequence[Sequence[int]],
    measure: Measure,
    advance: Callable[[int], None] = lambda texts: None,
) -> dict[str, list[Run]]:
    """Every player's runs over the texts, by its name. The perfect one answers last, for it is told the answers."""
    players = {name: partial(generate, engine) for name, engine in engines.items()}
    told = {PERFECT: players.pop(PERFECT)}
    return take_turns(prompts, players, measure, advance, told=told)


def priced_steps(runs: Sequence[Run], plain: Sequence[Run]) -> list[PricedStep]:
    """A player's decoding steps over all texts."""
    steps: list[PricedStep] = []
    for turn, (mine, theirs) in enumerate(zip(runs, plain, strict=True)):
        prices, emitted = _prices(theirs), Counter[str]()
        for step in mine.steps:
            found = [prices[name][emitted[name] : emitted[name] + count] for name, count in step.emitted.items()]
            emitted.update(step.emitted)
            plain_seconds = sum(map(sum, found))
            if not step.stats.prompt_tokens and not math.isnan(plain_seconds):
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


def rows_of(player: str, steps: Sequence[PricedStep]) -> list[Row]:
    """The steps in windows of one hundred, and what is left at the end."""
    firsts = range(0, len(steps), WINDOW_STEPS)
    return [
        {"player": player, "window": window, **stretch_of(steps[first : first + WINDOW_STEPS])}
        for window, first in enumerate(firsts)
    ]


def summary_of(runs: Sequence[Run], plain: Sequence[Run]) -> Row:
    """One player against plain decoding; `plain` may be its own runs."""
    steps = priced_steps(runs, plain)
    later = steps[WINDOW_STEPS:]
    stopped = [place for place, step in enumerate(steps) if step.stats.budget_reason == _SUSPENDED]
    return {
        "whole": stretch_of(steps),
        "first": stretch_of(steps[:WINDOW_STEPS]),  # the first hundred steps
        "later": stretch_of(later) if later else None,  # all others; None where there are none
        "later_over_plain_interval": interval_of(later) if later else None,  # holds 95 % of resampled texts
        "with_prompts_over_plain": tokens_per_second(runs) / tokens_per_second(plain),  # every step of every text
        # decoding steps until the budget refused to ask the drafter; None: it never did
        "stopped_after_steps": stopped[0] if stopped else None,
        "mismatched_tokens": mismatches(plain, runs),
    }


def stretch_of(steps: Sequence[PricedStep]) -> Row:
    """The figures of at least one step."""
    tokens, seconds = sum(step.tokens for step in steps), sum(step.seconds for step in steps)
    plain_seconds = sum(step.plain_seconds for step in steps)
    return {
        "steps": len(steps),
        "tokens": tokens,
        "tokens_per_second": tokens / seconds,
        "plain_tokens_per_second": tokens / plain_seconds,  # plain decoding of the same tokens
        "over_plain": plain_seconds / seconds,
        "tau": tokens / sum(step.verifies for step in steps),
        "nodes_per_step": sum(step.stats.drafted_nodes for step in steps) / len(steps),
        "drafting_share": sum(step.stats.draft_seconds for step in steps) / seconds,  # of the seconds
    }


def interval_of(steps: Sequence[PricedStep]) -> tuple[float, float]:
    """What holds 95 % of the ratios to plain decoding when texts are drawn anew."""
    by_turn: defaultdict[int, list[PricedStep]] = defaultdict(list)
    for step in steps:
        by_turn[step.turn].append(step)
    sums = [(sum(step.plain_seconds for step in mine), sum(step.seconds for step in mine)) for mine in by_turn.values()]
    return paired_bootstrap(lambda columns: columns[0] / columns[1], np.array(sums).T, seed=0)[1:]


def run_drafters(
    config: ServiceConfig, files: Sequence[Path], measure: Measure, *, queries: int, out: Path | None
) -> bool:
    """Let every player answer the same texts and report; whether all texts were the same."""
    assembly = prepare(config, out)
    prompts = mixed(read_sets(assembly, files, None, measure.max_tokens), queries, random.Random(measure.seed))
    # On other engines than those measured: what a budget makes of its first steps is part of the result.
    few = replace(measure, max_tokens=_WARM_UP_TOKENS)
    answer_all(engines_of(assembly, measure), [prompts[0]] * measure.concurrency, few)
    with counted(len(prompts), "texts") as advance:
        runs = answer_all(engines_of(assembly, measure), prompts, measure, advance)
    players = {name: summary_of(mine, runs[PLAIN]) for name, mine in runs.items()}
    rows = [row for name, mine in runs.items() for row in rows_of(name, priced_steps(mine, runs[PLAIN]))]
    mismatched = sum(player["mismatched_tokens"] for player in players.values())
    table = table_of(_COLUMNS, [{"drafter": name, **player} for name, player in players.items()], caption=_CAPTION)
    return conclude(assembly, out, rows, {"mismatched_tokens": mismatched, "players": players}, table)


_COLUMNS: tuple[Column, ...] = (
    ("drafter", lambda row: row["drafter"]),
    ("steps", lambda row: str(row["whole"]["steps"])),
    ("tokens/s", lambda row: f"{row['whole']['tokens_per_second']:.1f}"),
    ("over plain", lambda row: f"{row['whole']['over_plain']:.3f}"),
    (f"first {WINDOW_STEPS}", lambda row: f"{row['first']['over_plain']:.3f}"),
    (f"after {WINDOW_STEPS}", lambda row: _later(row["later"], row["later_over_plain_interval"])),
    ("tau", lambda row: f"{row['whole']['tau']:.2f}"),
    ("nodes", lambda row: f"{row['whole']['nodes_per_step']:.1f}"),
    ("stopped", lambda row: "" if (stopped := row["stopped_after_steps"]) is None else str(stopped)),
    ("mismatched", lambda row: str(row["mismatched_tokens"])),
)
_CAPTION = (
    "steps that read prompts are left out; over plain: plain decoding's seconds for the same tokens by these, in "
    f"all steps, the first {WINDOW_STEPS} and those after them, with what holds 95 % of resampled texts; nodes: "
    "per step; stopped: steps until the budget no longer asked the drafter (it asks again for 1 % of the time)"
)


def _later(stretch: Row | None, interval: tuple[float, float] | None) -> str:
    if stretch is None or interval is None:
        return ""
    return f"{stretch['over_plain']:.3f}\n[{interval[0]:.3f}, {interval[1]:.3f}]"
