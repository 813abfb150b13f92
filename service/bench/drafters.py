"""`adaptree bench drafters`: bad and perfect drafters beside plain decoding, behind the budget that is served.

All emit the same tokens, so a step is compared with what plain decoding took for just these tokens: how long a context
was and how fast the machine was just then cancels. Steps that read prompts, here or in the plain run, are left out.
What a budget has learnt of its drafter belongs to its engine and lasts from text to text.
"""

import math
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from rich.console import Console
from torch import Tensor

from drafters.protocol import Committed, DraftContext, Drafter, DraftingSizes, Noise
from drafters.random_tree import RandomTreeDrafter, random_depths, random_parents, random_tokens, sibling_ranks
from drafters.registry import NoDrafter
from drafters.tree import MAX_DEPTH, ROOT, Candidates, DraftTree
from service.assembly import Assembly, assemble
from service.bench.conditions import conditions_of, refuse_unwritable, write_report
from service.bench.driver import Run, generate
from service.bench.experiment import (
    PLAIN,
    EngineContestant,
    Measure,
    mismatches,
    paired_bootstrap,
    read_sets,
    take_turns,
    tokens_per_second,
)
from service.bench.report import Column, table_of
from service.bench.shift_play import mixed
from service.config import ServiceConfig
from service.engine import build
from service.engine.budget import FixedBudget
from service.engine.build import EngineLimits
from service.engine.engine import Engine
from service.engine.requests import GenerationRequest
from service.engine.stats import StepStats
from service.errors import StartupError
from service.logging import counting


class Script(Protocol):
    """What a scripted drafter proposes."""

    def begin(self, contexts: Sequence[DraftContext]) -> None:
        """Sequences begin, or begin again."""
        ...

    def propose(self, rows: Tensor) -> Candidates:
        """# rows [batch] int64"""
        ...

    def advance(self, committed: Committed) -> None:
        """Texts have gone on."""
        ...


class Lies:
    """Random trees, always as large as allowed, every node of which claims to survive for certain."""

    def __init__(self, seed: int, vocab_size: int, max_nodes: int, device: torch.device) -> None:
        self._generator = torch.Generator(device).manual_seed(seed)
        self._vocab_size = vocab_size
        self._max_nodes = max_nodes

    def begin(self, contexts: Sequence[DraftContext]) -> None:
        """A lie needs no text."""

    def propose(self, rows: Tensor) -> Candidates:
        depths = random_depths(rows.shape[0], self._max_nodes, self._generator)
        parents = random_parents(depths, self._generator)
        ranks, _ = sibling_ranks(parents)
        return DraftTree.of(random_tokens(parents, ranks, self._vocab_size, self._generator), parents)

    def advance(self, committed: Committed) -> None:
        """Nor a fate."""


class Replay:
    """The known answer as a chain, as deep as a tree may be. It arrives as the sequence's `prediction`."""

    def __init__(self, max_nodes: int, *, max_sequences: int, max_length: int, device: torch.device) -> None:
        self._depth = min(max_nodes, MAX_DEPTH)
        self._answers = torch.full((max_sequences, max_length + MAX_DEPTH), -1, device=device)
        self._generated = torch.zeros(max_sequences, dtype=torch.int64, device=device)

    def begin(self, contexts: Sequence[DraftContext]) -> None:
        for context in contexts:
            answer = torch.tensor(list(context.prediction), dtype=torch.int64, device=self._answers.device)
            self._answers[context.row] = -1
            self._answers[context.row, : answer.shape[0]] = answer
            self._generated[context.row] = context.num_generated

    def propose(self, rows: Tensor) -> Candidates:
        places = torch.arange(self._depth, device=rows.device)  # [depth]
        answers = self._answers[rows].gather(1, self._generated[rows][:, None] + places)  # [batch, depth]
        known = answers >= 0
        return DraftTree(
            tokens=answers * known,
            parents=torch.where(known, places - 1, ROOT),
            depths=(places + 1) * known,
            survival=known.float(),
            num_nodes=known.sum(1),
        )

    def advance(self, committed: Committed) -> None:
        self._generated[committed.rows] += committed.counts


class ScriptedDrafter(Drafter):
    """Proposes what its script says. Needs no features and has no weights."""

    def __init__(self, name: str, script: Script) -> None:
        self._name = name
        self._script = script

    @property
    def name(self) -> str:
        return self._name

    def start(self, contexts: Sequence[DraftContext]) -> None:
        self._script.begin(contexts)

    def grow(self, rows: Tensor, noise: Noise) -> Candidates:
        return self._script.propose(rows)

    def commit(self, committed: Committed) -> None:
        self._script.advance(committed)


WINDOW_STEPS = 100
"""Within so many steps a budget must have understood its drafter."""

_STANDS_DOWN = "stands_down"


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
    """What holds 95 % of the ratios to plain decoding when texts are drawn anew."""
    by_turn: defaultdict[int, list[PricedStep]] = defaultdict(list)
    for step in steps:
        by_turn[step.turn].append(step)
    sums = [(sum(step.plain_seconds for step in mine), sum(step.seconds for step in mine)) for mine in by_turn.values()]
    return paired_bootstrap(lambda columns: columns[0] / columns[1], np.array(sums).T, seed=0)[1:]


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


RANDOM = "random"
LIAR = "liar"
PERFECT = "perfect"

_WARM_UP_TOKENS = 16


def engines_of(assembly: Assembly, limits: EngineLimits, seed: int) -> dict[str, Engine]:
    """A new engine for every player, all on the assembly's target. Raises StartupError where nothing was measured."""
    if assembly.costs is None:
        raise StartupError("drafters are compared behind a budget by cost: set budget_policy to cost")
    drafters = _drafters(build.drafting_sizes(assembly.target, limits), seed)
    return {
        PLAIN: assembly.engine(drafter=NoDrafter(), policy=FixedBudget(0), limits=limits),
        **{name: assembly.engine(drafter=drafter, limits=limits) for name, drafter in drafters.items()},
    }


class Oracle:
    """Answers last, and is told the answers of another: each request comes with its answer as prediction."""

    def __init__(self, engine: Engine, source: EngineContestant) -> None:
        self.name = PERFECT
        self._engine = engine
        self._source = source

    def run(self, requests: Sequence[GenerationRequest]) -> Run:
        assert self._source.latest is not None, "the source answers first"
        return generate(self._engine, told(requests, self._source.latest))


def answer_all(
    engines: Mapping[str, Engine],
    prompts: Sequence[Sequence[int]],
    measure: Measure,
    advance: Callable[[int], None] = lambda texts: None,
) -> dict[str, list[Run]]:
    """Every player's runs over the texts, by its name."""
    blind = [EngineContestant(name, engine) for name, engine in engines.items() if name != PERFECT]
    plain = next(player for player in blind if player.name == PLAIN)
    return take_turns(prompts, blind, measure, advance, last=[Oracle(engines[PERFECT], plain)])


def told(requests: Sequence[GenerationRequest], answered: Run) -> list[GenerationRequest]:
    """The same requests, each with its answer as prediction."""
    pairs = zip(requests, answered.answers, strict=True)
    return [replace(request, prediction=answer.token_ids) for request, answer in pairs]


def _drafters(sizes: DraftingSizes, seed: int) -> dict[str, Drafter]:
    replay = Replay(
        sizes.max_nodes,
        max_sequences=sizes.max_sequences,
        max_length=sizes.max_length,
        device=torch.device(sizes.device),
    )
    return {
        RANDOM: RandomTreeDrafter(sizes, seed=seed, hit_rate=0.0),
        LIAR: ScriptedDrafter(LIAR, Lies(seed, sizes.vocab_size, sizes.max_nodes, torch.device(sizes.device))),
        PERFECT: ScriptedDrafter(PERFECT, replay),
    }


def run_drafters(
    config: ServiceConfig, files: Sequence[Path], measure: Measure, *, queries: int, out: Path | None
) -> bool:
    """Let every player answer the same texts and report; whether all texts were the same."""
    refuse_unwritable(out)
    assembly = assemble(config)
    sets = read_sets(assembly, files, None, measure.max_tokens)
    runs = _measured(assembly, mixed(sets, queries, random.Random(measure.seed)), measure)
    summaries = {name: summary_of(mine, runs[PLAIN]) for name, mine in runs.items()}
    Console().print(table_of(_COLUMNS, list(summaries.items()), caption=_CAPTION))
    mismatched = sum(summary.mismatched_tokens for summary in summaries.values())
    rows = [row.as_json() for name, mine in runs.items() for row in rows_of(name, priced_steps(mine, runs[PLAIN]))]
    players = {name: summary.as_json() for name, summary in summaries.items()}
    write_report(out, conditions_of(assembly), rows, {"mismatched_tokens": mismatched, "players": players})
    return mismatched == 0


def _measured(assembly: Assembly, prompts: Sequence[Sequence[int]], measure: Measure) -> dict[str, list[Run]]:
    limits = replace(assembly.limits, max_sequences=max(assembly.limits.max_sequences, measure.concurrency))
    # On other engines than those measured: what a budget makes of its first steps is part of the result.
    few = replace(measure, max_tokens=_WARM_UP_TOKENS)
    answer_all(engines_of(assembly, limits, measure.seed), [prompts[0]] * measure.concurrency, few)
    engines = engines_of(assembly, limits, measure.seed)
    with counting() as progress:
        task = progress.add_task("texts", total=len(prompts))
        return answer_all(engines, prompts, measure, lambda done: progress.advance(task, done))


_Player = tuple[str, PlayerSummary]
_COLUMNS: tuple[Column[_Player], ...] = (
    Column("drafter", lambda player: player[0]),
    Column("steps", lambda player: str(player[1].whole.steps)),
    Column("tokens/s", lambda player: f"{player[1].whole.tokens_per_second:.1f}"),
    Column("over plain", lambda player: f"{player[1].whole.over_plain:.3f}"),
    Column(f"first {WINDOW_STEPS}", lambda player: f"{player[1].first.over_plain:.3f}"),
    Column(f"after {WINDOW_STEPS}", lambda player: _later(player[1].later, player[1].later_over_plain_interval)),
    Column("tau", lambda player: f"{player[1].whole.tau:.2f}"),
    Column("nodes", lambda player: f"{player[1].whole.nodes_per_step:.1f}"),
    Column(
        "stopped", lambda player: "" if player[1].stopped_after_steps is None else str(player[1].stopped_after_steps)
    ),
    Column("mismatched", lambda player: str(player[1].mismatched_tokens)),
)
_CAPTION = (
    "steps that read prompts are left out; over plain: plain decoding's seconds for the same tokens by these, in "
    f"all steps, the first {WINDOW_STEPS} and those after them, with what holds 95 % of resampled texts; nodes: "
    "per step; stopped: steps until the budget no longer asked the drafter (it asks again for 1 % of the time)"
)


def _later(stretch: Stretch | None, interval: tuple[float, float] | None) -> str:
    if stretch is None or interval is None:
        return ""
    return f"{stretch.over_plain:.3f}\n[{interval[0]:.3f}, {interval[1]:.3f}]"
