"""`adaptree bench drafters --kinds`: drafters against each other, each beside plain decoding of the same prompts.

Every kind gets the target anew, because what it taps of it is planned with it; its own plain decoding, in turn with it
at every budget, is what it is compared with. Steps that read prompts are left out.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, pairwise
from pathlib import Path
from statistics import fmean

from matplotlib.figure import Figure

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
from service.errors import StartupError

SERVED = "served"
"""In place of a number of nodes: the budget as it is configured."""

_COMMA = re.compile(r",(?![^(]*\))")  # outside of parentheses
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
    kinds = []
    for part in filter(None, (part.strip() for part in _COMMA.split(names))):
        name, _, folder = part.partition("=")
        kinds.append(Kind(name, Path(folder) if folder else None))
    if not kinds:
        raise StartupError("--kinds names no drafter: give some, as in lookup,specblock=./my-drafter")
    return list(dict.fromkeys(kinds))


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
    """Let every kind answer every prompt at every budget and report; whether all texts were the same."""
    rows: list[Row] = []
    most = max([config.max_budget, *(nodes for nodes in budgets if nodes is not None)])
    for kind in kinds:
        update = {"drafter": kind.name, "max_budget": most, "drafter_path": kind.folder or config.drafter_path}
        assembly = prepare(config.model_copy(update=update), out)
        rows += _rows_of(assembly, kind, files, measures, budgets, limit)
    mismatched = sum(row["mismatched_tokens"] for row in rows)
    if out is not None:
        plot_kinds(rows, out.with_suffix(".png"))
    table = table_of(_COLUMNS, rows, caption=_CAPTION, section=lambda row: (row["kind"], row["temperature"]))
    return conclude(assembly, out, rows, {"kinds": len(kinds), "mismatched_tokens": mismatched}, table)


def _rows_of(
    assembly: Assembly,
    kind: Kind,
    files: Sequence[Path],
    measures: Sequence[Measure],
    budgets: Sequence[int | None],
    limit: int | None,
) -> list[Row]:
    sets = read_sets(assembly, files, limit, measures[0].max_tokens)
    prompts = list(chain.from_iterable(chosen.prompts for chosen in sets))
    contestants = contestants_of(assembly, budgets)
    warm_up(contestants, prompts[0], measures[0])
    rows = []
    with counted(len(measures) * len(prompts), kind.title) as advance:
        for measure in measures:
            runs = take_turns(prompts, contestants, measure, advance)
            plain = runs.pop(PLAIN)
            rows += [
                {"kind": kind.title, "temperature": measure.temperature, "nodes": nodes, **figures_of(mine, plain)}
                for nodes, mine in runs.items()
            ]
    return rows


def contestants_of(assembly: Assembly, budgets: Sequence[int | None]) -> dict[str, Contestant]:
    """Plain decoding, and the assembly's drafter behind each budget."""
    engines = {PLAIN: plain_engine(assembly)}
    for nodes in budgets:
        policy = None if nodes is None else FixedBudget(nodes)
        engines[SERVED if nodes is None else str(nodes)] = assembly.engine(policy=policy)
    return {name: partial(generate, engine) for name, engine in engines.items()}


def figures_of(runs: Sequence[Run], plain: Sequence[Run]) -> Row:
    """What a drafter was worth. `alpha` [depth] is the share of steps that accepted a node there, of those that
    accepted its parent; costs are in plain steps."""
    steps, without = _decoding(runs), _decoding(plain)
    drafted = [step for step in steps if step.stats.drafts]
    plain_seconds = fmean(step.seconds for step in without)
    errors = [step.stats.survival_error for step in steps if step.stats.survival_error is not None]
    return {
        "tokens": sum(run.num_tokens for run in runs),
        "tau": tau(runs),
        "alpha": _alpha([count for run in runs for answer in run.answers for count in answer.accepted_per_step]),
        "mean_nodes": _mean([step.stats.drafted_nodes for step in drafted]),
        "draft_milliseconds": 1000 * _mean([step.stats.draft_seconds for step in drafted]),
        "drafting_cost": _mean([step.stats.draft_seconds + step.stats.follow_seconds for step in drafted])
        / plain_seconds,
        "step_cost": _mean([step.seconds for step in drafted]) / plain_seconds,
        "speedup": decode_tokens_per_second(runs) / decode_tokens_per_second(plain),
        "survival_error": errors[-1] if errors else None,  # expected calibration error
        "mismatched_tokens": mismatches(plain, runs),
    }


def _decoding(runs: Sequence[Run]) -> list[TimedStep]:
    return [step for run in runs for step in run.steps if not step.stats.prompt_tokens]


def _mean(values: Sequence[float]) -> float:
    return fmean(values) if values else 0.0


def _alpha(accepted: Sequence[int]) -> list[float]:
    reached = [sum(count >= depth for count in accepted) for depth in range(_DEEPEST + 1)]
    return [there / before for before, there in pairwise(reached) if before]


def plot_kinds(rows: Sequence[Row], file: Path) -> None:
    """Tokens per step against what a step costs, with the lines of equal speedup."""
    figure = Figure(figsize=(7.5, 6.0), layout="constrained")
    axes = figure.subplots()
    groups: dict[tuple[str, float], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["kind"], row["temperature"]), []).append(row)
    for (kind, temperature), mine in groups.items():
        costs, taus = [row["step_cost"] for row in mine], [row["tau"] for row in mine]
        axes.plot(costs, taus, marker="o", linewidth=0.8, label=f"{kind}, T = {temperature:g}")
        for row in mine:
            axes.annotate(row["nodes"], (row["step_cost"], row["tau"]), fontsize=7)
    dearest = max([1.5, *(row["step_cost"] for row in rows)])
    for speedup in _CONTOURS:
        axes.plot([1.0, dearest], [speedup, speedup * dearest], color="grey", linewidth=0.6, linestyle=":")
        axes.annotate(f"x{speedup:g}", (dearest, speedup * dearest), fontsize=7, color="grey")
    axes.set_xlabel("a step, in plain steps")
    axes.set_ylabel("tokens per step")
    axes.set_ylim(0.9, 1.1 * max(row["tau"] for row in rows))
    axes.legend(fontsize=7)
    figure.savefig(file, dpi=120)


def _of_depths(row: Mapping[str, list[float]]) -> str:
    return " ".join(f"{share:.2f}" for share in row["alpha"][:4])


_COLUMNS: tuple[Column, ...] = (
    ("kind", lambda row: row["kind"]),
    ("T", lambda row: f"{row['temperature']:g}"),
    ("nodes", lambda row: row["nodes"]),
    ("tau", lambda row: f"{row['tau']:.2f}"),
    ("alpha by depth", _of_depths),
    ("drafting, ms", lambda row: f"{row['draft_milliseconds']:.1f}"),
    ("drafting cost", lambda row: f"{row['drafting_cost']:.2f}"),
    ("step cost", lambda row: f"{row['step_cost']:.2f}"),
    ("speedup", lambda row: f"{row['speedup']:.2f}"),
    ("mismatched", lambda row: str(row["mismatched_tokens"])),
)
_CAPTION = (
    "steps that read prompts are left out; alpha: share of steps whose node at depth 1, 2, 3, 4 was accepted, of those "
    "that accepted the one above; costs of a drafted step, and of what its drafter did, in plain steps; speedup: "
    "decoded tokens per second by plain decoding's on the same prompts"
)
