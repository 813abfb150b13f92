"""`python -m benchmarks drafters --kinds`: drafters against each other, each beside plain decoding of the same prompts.

Every kind gets the target anew, because what it taps of it is planned with it; its own plain decoding, in turn with it
at every budget, is what it is compared with. Steps that read prompts are left out. What a kind knows is looked at apart
from that, for looking takes time.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, pairwise
from pathlib import Path
from statistics import fmean

from matplotlib.figure import Figure
from rich.table import Table

from benchmarks.draft_records import observed, without_noise, without_times
from benchmarks.quality import COVERED, quality_of
from drafters.tree import MAX_NODES
from service.assembly import Assembly
from service.bench.driver import Run, TimedStep, generate
from service.bench.experiment import (
    PLAIN,
    Column,
    Contestant,
    Measure,
    Row,
    conclude,
    counted,
    decode_tokens_per_second,
    mismatches,
    plain_engine,
    prepare,
    read_sets,
    table_of,
    take_turns,
    tau,
    warm_up,
)
from service.config import ServiceConfig
from service.engine.budget import FixedBudget
from service.engine.engine import Engine
from service.errors import StartupError

SERVED, OBSERVED = "served", "observed"
"""The first in place of a number of nodes: the budget as it is configured."""

_CONTOURS = (0.8, 1.0, 1.25, 1.5, 2.0, 3.0)
_DEEPEST = 8  # depths of which acceptance is reported


@dataclass(frozen=True, slots=True)
class Kind:
    """A drafter by its name, with a folder of its own for its weights if one was named."""

    name: str
    folder: Path | None

    @property
    def title(self) -> str:
        return self.name if self.folder is None else f"{self.name}={self.folder.name}"


def kinds_of(names: str) -> list[Kind]:
    """KIND or KIND=FOLDER, with commas between. Raises StartupError."""
    kinds: dict[str, Kind] = {}
    for part in _parts(names):
        name, _, folder = part.partition("=")
        kind = Kind(name, Path(folder) if folder else None)
        if kinds.setdefault(kind.title, kind) != kind:
            raise StartupError(f"--kinds names two folders that rows would call {kind.title}: give one another name")
    if not kinds:
        raise StartupError("--kinds names no drafter: give some, as in memory,specblock=./my-drafter")
    return list(kinds.values())


def _parts(names: str) -> Iterator[str]:
    """What stands between commas outside of parentheses."""
    part, depth = "", 0
    for character in f"{names},":
        depth += (character == "(") - (character == ")")
        if character != "," or depth > 0:
            part += character
            continue
        if part.strip():
            yield part.strip()
        part = ""


def budgets_of(nodes: str) -> list[int | None]:
    """Numbers of nodes, with commas between, or `served`. # -> None for that; raises StartupError"""
    found: list[int | None] = []
    for part in filter(None, (part.strip() for part in nodes.split(","))):
        if part == SERVED:
            found.append(None)
        elif part.isdecimal() and 1 <= int(part) <= MAX_NODES:
            found.append(int(part))
        else:
            raise StartupError(f"--nodes {part}: say {SERVED}, or a number from 1 to {MAX_NODES}")
    if not found:
        raise StartupError(f"--nodes names no budget: give some, as in 8,32,{SERVED}")
    return list(dict.fromkeys(found))


def run_kinds(
    config: ServiceConfig,
    kinds: Sequence[Kind],
    files: Sequence[Path],
    measures: Sequence[Measure],
    *,
    budgets: Sequence[int | None],
    limit: int | None,
    out: Path | None,
) -> bool:
    """Let every kind answer every prompt at every budget and report; whether all texts were the same. A row has all
    columns: those of the kind at this temperature are the same at every budget."""
    rows: list[Row] = []
    most = max([config.max_budget, *(nodes for nodes in budgets if nodes is not None)])
    for kind in kinds:
        update = {"drafter": kind.name, "max_budget": most, "drafter_path": kind.folder or config.drafter_path}
        assembly = prepare(config.model_copy(update=update), out)
        rows += _rows_of(assembly, kind, files, measures, budgets, limit)
    mismatched = sum(row["mismatched_tokens"] for row in rows)
    if out is not None:
        plot_kinds(rows, out.with_suffix(".png"))
    return conclude(assembly, out, rows, {"kinds": len(kinds), "mismatched_tokens": mismatched}, *tables_of(rows))


def _rows_of(
    assembly: Assembly,
    kind: Kind,
    files: Sequence[Path],
    measures: Sequence[Measure],
    budgets: Sequence[int | None],
    limit: int | None,
) -> list[Row]:
    """With the noise withheld engines run last, for from then on their drafters know how it is without."""
    sets = read_sets(assembly, files, limit, measures[0].max_tokens)
    prompts = list(chain.from_iterable(chosen.prompts for chosen in sets))
    engines = {SERVED if nodes is None else str(nodes): _engine(assembly, nodes) for nodes in budgets}
    contestants: dict[str, Contestant] = {name: partial(generate, engine) for name, engine in engines.items()}
    everybody: dict[str, Contestant] = {PLAIN: partial(generate, plain_engine(assembly)), **contestants}
    warm_up(everybody, prompts[0], measures[0])
    with counted(len(measures) * len(prompts), kind.title) as advance:
        runs = [take_turns(prompts, everybody, measure, advance) for measure in measures]
    known = _known(assembly, prompts, measures)
    for engine in engines.values():
        without_noise(engine.drafter)
    withheld = [take_turns(prompts, contestants, measure) if measure.temperature else {} for measure in measures]
    return [
        {
            **{"kind": kind.title, "temperature": measure.temperature, "nodes": nodes},
            **figures_of(mine[nodes], mine[PLAIN], blind.get(nodes, ())),
            **quality,
        }
        for measure, mine, blind, quality in zip(measures, runs, withheld, known, strict=True)
        for nodes in engines
    ]


def _engine(assembly: Assembly, nodes: int | None) -> Engine:
    """With trees of so many nodes from every forward there is, whatever that takes; None: as it is served."""
    if nodes is None:
        return assembly.engine()
    engine = assembly.engine(policy=FixedBudget(nodes))
    without_times(engine.drafter)
    return engine


def _known(assembly: Assembly, prompts: Sequence[Sequence[int]], measures: Sequence[Measure]) -> list[Row]:
    """As `quality_of`, with as many nodes as any budget has. Of a switch nothing: looking changes the times by which it
    learns whom to ask."""
    if assembly.drafter_name.startswith("switch("):
        return [quality_of([]) for _ in measures]
    drafter, recorder = observed(assembly)
    engine = assembly.engine(drafter, FixedBudget(assembly.limits.max_budget))
    known = []
    for measure in measures:
        take_turns(prompts, {OBSERVED: partial(generate, engine)}, measure)
        known.append(quality_of(recorder.take()))
    return known


def figures_of(runs: Sequence[Run], plain: Sequence[Run], withheld: Sequence[Run] = ()) -> Row:
    """What a drafter was worth, and its tau where the noise was withheld from it. `alpha` [depth] is the share of steps
    that accepted a node there, of those that accepted its parent; costs are in plain steps."""
    steps, without = _decoding(runs), _decoding(plain)
    drafted = [step for step in steps if step.stats.drafts]
    plain_seconds = fmean(step.seconds for step in without)
    return {
        "tokens": sum(run.num_tokens for run in runs),
        "tau": tau(runs),
        "tau_withheld": tau(withheld) if withheld else None,
        "alpha": _alpha([count for run in runs for answer in run.answers for count in answer.accepted_per_step]),
        "mean_nodes": _mean([step.stats.drafted_nodes for step in drafted]),
        "draft_milliseconds": 1000 * _mean([step.stats.draft_seconds for step in drafted]),
        "step_milliseconds": 1000 * _mean([step.seconds for step in drafted]),
        "plain_milliseconds": 1000 * plain_seconds,
        "drafting_cost": _mean([step.stats.draft_seconds + step.stats.follow_seconds for step in drafted])
        / plain_seconds,
        "step_cost": _mean([step.seconds for step in drafted]) / plain_seconds,
        "speedup": decode_tokens_per_second(runs) / decode_tokens_per_second(plain),
        "mismatched_tokens": mismatches(plain, runs) + (mismatches(plain, withheld) if withheld else 0),
    }


def _decoding(runs: Sequence[Run]) -> list[TimedStep]:
    return [step for run in runs for step in run.steps if not step.stats.prompt_tokens]


def _mean(values: Sequence[float]) -> float:
    return fmean(values) if values else 0.0


def _alpha(accepted: Sequence[int]) -> list[float]:
    reached = [sum(count >= depth for count in accepted) for depth in range(_DEEPEST + 1)]
    return [there / before for before, there in pairwise(reached) if before]


def plot_kinds(rows: Sequence[Row], file: Path) -> None:
    """Tokens per step against what a step costs, with the lines of equal speedup. Fixed trees of a kind are joined; a
    hollow mark is what is served."""
    figure = Figure(figsize=(7.5, 6.0), layout="constrained")
    axes = figure.subplots()
    groups: dict[tuple[str, float], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["kind"], row["temperature"]), []).append(row)
    for (kind, temperature), mine in groups.items():
        fixed = [row for row in mine if row["nodes"] != SERVED]
        costs, taus = [row["step_cost"] for row in fixed], [row["tau"] for row in fixed]
        (line,) = axes.plot(costs, taus, marker="o", linewidth=0.8, label=f"{kind}, T = {temperature:g}")
        for row in mine:
            if row["nodes"] == SERVED:
                axes.plot(row["step_cost"], row["tau"], "o", markerfacecolor="none", color=line.get_color())
            axes.annotate(row["nodes"], (row["step_cost"], row["tau"]), fontsize=7)
    dearest, most = max([1.5, *(row["step_cost"] for row in rows)]), 1.1 * max(row["tau"] for row in rows)
    for speedup in _CONTOURS:
        end = min(dearest, most / speedup)
        axes.plot([1.0, end], [speedup, speedup * end], color="grey", linewidth=0.6, linestyle=":")
        axes.annotate(f"x{speedup:g}", (end, speedup * end), fontsize=7, color="grey", va="top")
    axes.set_xlabel("a step, in plain steps")
    axes.set_ylabel("tokens per step")
    axes.set_ylim(0.9, most)
    axes.legend(fontsize=7)
    figure.savefig(file, dpi=120)


def tables_of(rows: Sequence[Row]) -> tuple[Table, Table]:
    """What each kind knows, and what that is worth at each budget."""

    def group(row: Row) -> tuple[str, float]:
        return row["kind"], row["temperature"]

    first = list({group(row): row for row in reversed(rows)}.values())[::-1]
    known = table_of((*_NAMES, *_KNOWN), first, caption=_KNOWN_CAPTION, section=lambda row: row["kind"])
    return known, table_of((*_NAMES, *_WORTH), rows, caption=_WORTH_CAPTION, section=group)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _numbers(values: Iterable[float | None]) -> str:
    return " ".join("-" if value is None else f"{value:.2f}" for value in values)


def _covered(k: int) -> Column:
    return f"top {k}", lambda row: _number(row["covered"][str(k)])


_NAMES: tuple[Column, ...] = (("kind", lambda row: row["kind"]), ("T", lambda row: f"{row['temperature']:g}"))
_KNOWN: tuple[Column, ...] = (
    ("places", lambda row: f"{row['places']:,}"),
    ("named", lambda row: _number(row["named"])),
    *map(_covered, COVERED),
    ("right by rank", lambda row: _numbers(row["right_by_rank"][:4])),
    ("TVD", lambda row: _number(row["total_variation"])),
    ("ECE, claimed", lambda row: _number(row["claimed_error"])),
    ("ECE, corrected", lambda row: _number(row["corrected_error"])),
)
_KNOWN_CAPTION = (
    "places: tokens of the text behind a root or an accepted node; named: share of them at which the drafter names a "
    "token; top k: of these, at which the target's token is among its k likeliest; right by rank: of those at which it "
    "names 1, 2, 3, 4, at which it is the last of them; TVD: total variation distance to the target's distribution at "
    "temperature 1, empty where a kind has none; ECE: calibration error of survival, as the drafter claims it and as "
    "it is corrected"
)
_WORTH: tuple[Column, ...] = (
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
_WORTH_CAPTION = (
    "steps that read prompts are left out; withheld: tau where the drafter does not see the sampling noise, empty "
    "where there is none; alpha: share of steps whose node at depth 1, 2, 3, 4 was accepted, of those that accepted "
    "the one above; costs of a drafted step, and of what its drafter did, in plain steps; speedup: decoded tokens per "
    "second by plain decoding's on the same prompts"
)
