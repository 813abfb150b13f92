"""`python -m benchmarks drafters`: kinds of drafters, each compared with plain decoding of the same prompts.

Every kind gets a freshly loaded target, because its tapped layers are planned with it; its own plain decoding takes
turns with it at every budget. Steps that read prompts are left out. How well a kind predicts is recorded in a separate
run, because recording takes time.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, pairwise
from pathlib import Path
from statistics import fmean
from typing import Annotated

import typer
from rich.table import Table

from benchmarks import baselines
from benchmarks.draft_records import SteeredDrafter, observed
from benchmarks.quality import COVERED, quality_of
from drafters.decision import RegretLedger
from drafters.tree import MAX_NODES
from service.assembly import Assembly
from service.bench import experiment
from service.bench.commands import Concurrency, Out, PromptFiles, Seed, Temperatures
from service.bench.driver import Run, TimedStep, generate
from service.bench.experiment import PLAIN, Column, Contestant, Measure, Row
from service.config import LoadedConfig
from service.engine.budget import FixedBudget
from service.errors import StartupError

SERVED, OBSERVED = "served", "observed"
"""SERVED stands for a number of nodes: the budget as it is configured."""

KindNames = Annotated[
    str, typer.Option(metavar="KIND[=FOLDER],...", help="Drafters to compare, each with the weights in its folder.")
]
_DEEPEST = 8  # depths whose acceptance is reported


@dataclass(frozen=True, slots=True)
class Kind:
    """A drafter by name, and the folder of its weights if one was given."""

    name: str
    folder: Path | None

    @property
    def title(self) -> str:
        """NAME or NAME=FOLDER."""
        return self.name if self.folder is None else f"{self.name}={self.folder.name}"


def kinds_of(names: str) -> list[Kind]:
    """Parse KIND[=FOLDER],... Raises StartupError."""
    kinds: dict[str, Kind] = {}
    for part in filter(None, map(str.strip, names.split(","))):
        name, _, folder = part.partition("=")
        kind = Kind(name, Path(folder) if folder else None)
        if kinds.setdefault(kind.title, kind) != kind:
            raise StartupError(f"--kinds names two folders that rows would call {kind.title}: rename one")
    if not kinds:
        raise StartupError("--kinds names no drafter: give some, as in memory,specblock=./my-drafter")
    return list(kinds.values())


def budgets_of(nodes: str) -> list[int | None]:
    """Parse N,... with `served` as None. Raises StartupError."""
    found: list[int | None] = []
    for part in filter(None, (part.strip() for part in nodes.split(","))):
        if part == SERVED:
            found.append(None)
        elif part.isdecimal() and 1 <= int(part) <= MAX_NODES:
            found.append(int(part))
        else:
            raise StartupError(f"--nodes {part}: give {SERVED}, or a number from 1 to {MAX_NODES}")
    if not found:
        raise StartupError(f"--nodes names no budget: give some, as in 8,32,{SERVED}")
    return list(dict.fromkeys(found))


def run(
    loaded: LoadedConfig,
    kinds: KindNames,
    prompts: PromptFiles,
    queries: Annotated[int, typer.Option(min=1, help="Prompts of each file.")] = 16,
    concurrency: Concurrency = 1,
    temperature: Temperatures = [0.0],  # noqa: B006  # read as a signature, never changed
    max_tokens: Annotated[int, typer.Option(min=2, help="Length of each answer.")] = 128,
    nodes: Annotated[
        str, typer.Option(metavar="N,...", help="Nodes of each tree; served: the budget as it is configured.")
    ] = "8,32,64,served",
    seed: Seed = 0,
    out: Out = None,
) -> bool:
    """Compare kinds of drafters: how well they predict, tau, cost and speedup. Exit code 1 if any token differs
    from plain decoding."""
    baselines.register()
    compared, budgets = kinds_of(kinds), budgets_of(nodes)
    measures = [Measure(value, max_tokens, concurrency, seed) for value in dict.fromkeys(temperature)]
    largest = max([loaded.config.max_budget, *(count for count in budgets if count is not None)])
    rows: list[Row] = []
    for kind in compared:
        folder = kind.folder or loaded.config.drafter_path
        update = {"drafter": kind.name, "max_budget": largest, "drafter_path": folder}
        assembly = experiment.prepare(loaded.config.model_copy(update=update), out)
        sets = experiment.read_sets(assembly, prompts, queries, max_tokens)
        rows += _rows_of(assembly, kind, list(chain.from_iterable(one.prompts for one in sets)), measures, budgets)
    mismatched = sum(row["mismatched_tokens"] for row in rows)
    return experiment.conclude(
        assembly, out, rows, {"kinds": len(compared), "mismatched_tokens": mismatched}, *tables_of(rows)
    )


def _rows_of(
    assembly: Assembly,
    kind: Kind,
    prompts: Sequence[Sequence[int]],
    measures: Sequence[Measure],
    budgets: Sequence[int | None],
) -> list[Row]:
    """Return one row per temperature and budget. Runs without the noise come last: drafters learn from them."""
    plain: Contestant = partial(generate, experiment.plain_engine(assembly))
    drafters: list[SteeredDrafter] = []
    contestants: dict[str, Contestant] = {}
    for nodes in budgets:
        ledger = RegretLedger()
        drafters.append(SteeredDrafter(assembly.drafter(ledger=ledger)))
        drafters[-1].hides_times = nodes is not None
        policy = None if nodes is None else FixedBudget(nodes)
        engine = assembly.engine(drafters[-1].as_drafter(), policy, ledger=ledger)
        contestants[SERVED if nodes is None else str(nodes)] = partial(generate, engine)
    experiment.warm_up({PLAIN: plain, **contestants}, prompts[0], measures[0])
    with experiment.counted(len(measures) * len(prompts), kind.title) as advance:
        runs = [experiment.take_turns(prompts, {PLAIN: plain, **contestants}, measure, advance) for measure in measures]
    quality = _quality(assembly, prompts, measures)
    for drafter in drafters:
        drafter.hides_noise = True
    blind = [
        experiment.take_turns(prompts, contestants, measure) if measure.temperature else {} for measure in measures
    ]
    return [
        {
            **{"kind": kind.title, "temperature": measure.temperature, "nodes": nodes},
            **figures_of(mine[nodes], mine[PLAIN], withheld.get(nodes, ())),
            **predicted,
        }
        for measure, mine, withheld, predicted in zip(measures, runs, blind, quality, strict=True)
        for nodes in contestants
    ]


def _quality(assembly: Assembly, prompts: Sequence[Sequence[int]], measures: Sequence[Measure]) -> list[Row]:
    """`quality_of` at each temperature, with trees of `max_budget` nodes."""
    recorder = observed(assembly)
    engine = assembly.engine(recorder.as_drafter(), FixedBudget(assembly.limits.max_budget))
    found = []
    for measure in measures:
        experiment.take_turns(prompts, {OBSERVED: partial(generate, engine)}, measure)
        found.append(quality_of(recorder.take()))
    return found


def figures_of(runs: Sequence[Run], plain: Sequence[Run], withheld: Sequence[Run] = ()) -> Row:
    """Compare a drafter's runs with plain ones; `withheld` are its runs without the noise.

    `alpha` [depth]: share of steps that accepted a node there, of those that accepted its parent. Costs are in plain
    steps."""
    steps, without = _decoding(runs), _decoding(plain)
    drafted = [step for step in steps if step.stats.drafts]
    plain_seconds = fmean(step.seconds for step in without)
    return {
        "tokens": sum(run.num_tokens for run in runs),
        "tau": experiment.tau(runs),
        "tau_withheld": experiment.tau(withheld) if withheld else None,
        "alpha": _alpha([count for run in runs for answer in run.answers for count in answer.accepted_per_step]),
        "mean_nodes": _mean([step.stats.drafted_nodes for step in drafted]),
        "draft_milliseconds": 1000 * _mean([step.stats.draft_seconds for step in drafted]),
        "step_milliseconds": 1000 * _mean([step.seconds for step in drafted]),
        "plain_milliseconds": 1000 * plain_seconds,
        "drafting_cost": _mean([step.stats.draft_seconds + step.stats.follow_seconds for step in drafted])
        / plain_seconds,
        "step_cost": _mean([step.seconds for step in drafted]) / plain_seconds,
        "speedup": experiment.decode_tokens_per_second(runs) / experiment.decode_tokens_per_second(plain),
        "mismatched_tokens": experiment.mismatches(plain, runs)
        + (experiment.mismatches(plain, withheld) if withheld else 0),
    }


def _decoding(runs: Sequence[Run]) -> list[TimedStep]:
    return [step for run in runs for step in run.steps if not step.stats.prompt_tokens]


def _mean(values: Sequence[float]) -> float:
    return fmean(values) if values else 0.0


def _alpha(accepted: Sequence[int]) -> list[float]:
    reached = [sum(count >= depth for count in accepted) for depth in range(_DEEPEST + 1)]
    return [there / before for before, there in pairwise(reached) if before]


def tables_of(rows: Sequence[Row]) -> tuple[Table, Table]:
    """Return a table of how well each kind predicts, and one of its speed at each budget."""

    def group(row: Row) -> tuple[str, float]:
        return row["kind"], row["temperature"]

    first = list({group(row): row for row in reversed(rows)}.values())[::-1]
    known = experiment.table_of((*_NAMES, *_QUALITY), first, caption=_QUALITY_CAPTION, section=lambda row: row["kind"])
    return known, experiment.table_of((*_NAMES, *_SPEED), rows, caption=_SPEED_CAPTION, section=group)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _numbers(values: Iterable[float | None]) -> str:
    return " ".join("-" if value is None else f"{value:.2f}" for value in values)


def _covered(k: int) -> Column:
    return f"top {k}", lambda row: _number(row["covered"][str(k)])


_NAMES: tuple[Column, ...] = (("kind", lambda row: row["kind"]), ("T", lambda row: f"{row['temperature']:g}"))
_QUALITY: tuple[Column, ...] = (
    ("places", lambda row: f"{row['places']:,}"),
    ("named", lambda row: _number(row["named"])),
    *map(_covered, COVERED),
    ("right by rank", lambda row: _numbers(row["right_by_rank"][:4])),
    ("TVD", lambda row: _number(row["total_variation"])),
    ("ECE, claimed", lambda row: _number(row["claimed_error"])),
    ("ECE, corrected", lambda row: _number(row["corrected_error"])),
)
_QUALITY_CAPTION = (
    "places: tokens of the text after a root or an accepted node; named: share where the drafter proposes any token; "
    "top k: of these, share where the target's token is among its k most likely; right by rank: of those with 1, 2, 3, "
    "4 proposals, share where it is the last of them; TVD: total variation distance to the target's distribution at "
    "temperature 1, empty where a kind has none; ECE: calibration error of survival, as claimed and as corrected"
)
_SPEED: tuple[Column, ...] = (
    ("nodes", lambda row: row["nodes"]),
    ("tau", lambda row: f"{row['tau']:.2f}"),
    ("withheld", lambda row: _number(row["tau_withheld"])),
    ("alpha by depth", lambda row: _numbers(row["alpha"][:4])),
    ("drafting, ms", lambda row: f"{row['draft_milliseconds']:.1f}"),
    ("step, ms", lambda row: f"{row['step_milliseconds']:.1f}"),
    ("drafting cost", lambda row: f"{row['drafting_cost']:.2f}"),
    ("step cost", lambda row: f"{row['step_cost']:.2f}"),
    ("speedup", lambda row: f"{row['speedup']:.2f}"),
    ("mismatched", lambda row: str(row["mismatched_tokens"])),
)
_SPEED_CAPTION = (
    "steps that read prompts are left out; withheld: tau without the sampling noise, empty at temperature 0; alpha: "
    "share of steps whose node at depth 1, 2, 3, 4 was accepted, of those that accepted its parent; costs of a drafted "
    "step, and of drafting, in plain steps; speedup: decoded tokens per second over plain decoding's"
)
