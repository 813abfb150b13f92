"""What `adaptree bench poison` does around the measurement: load, show progress, print the table, write and draw."""

import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import cycle
from pathlib import Path

from rich.console import Console
from rich.table import Table

from adaptation.config import PolicyName
from service.assembly import Assembly, assemble
from service.bench import poison_clients
from service.bench.conditions import conditions_of, refuse_unwritable, write_report
from service.bench.poison_clients import Content, visits_of
from service.bench.poison_figures import (
    ANCHOR,
    ASKED_RATIO,
    ATTACKED,
    RUNS,
    STRETCH,
    UNATTACKED,
    HostileSummary,
    Ratio,
    RunSummary,
    honest_part,
    hostile_by_window,
    hostile_of,
    ratio_of,
    rows_of,
    summary_of,
)
from service.bench.poison_picture import draw
from service.bench.poison_stream import attacked, honest_stream, honest_turns
from service.bench.prompts import refuse_too_long
from service.bench.shift_figures import PLAIN, windows_of
from service.bench.shift_players import play_with_bars, players_of
from service.bench.shift_stream import Prompt, Stream, Turn, mixed
from service.bench.shift_turns import Played
from service.bench.speed import Measure
from service.bench.speed_report import read_sets
from service.config import ServiceConfig
from service.errors import StartupError


@dataclass(frozen=True, slots=True, kw_only=True)
class Attack:
    """Who asks what."""

    honest: tuple[Path, ...]
    narrow: tuple[Path, ...]  # none: built-in prompts
    queries: int  # honest ones
    honest_clients: int
    share: float  # of all queries, sent by hostile clients
    turn_queries: int  # honest ones


@dataclass(frozen=True, slots=True)
class Scene:
    """The honest queries, and what each run answers."""

    stream: Stream
    honest: list[Turn]
    turns: dict[str, list[Turn]]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What each run did for honest clients, and the attacked one for all."""

    honest: dict[str, list[Played]]
    attacked: list[Played]
    summaries: dict[str, RunSummary]
    ratio: Ratio  # attacked / unattacked


def run_poison(config: ServiceConfig, attack: Attack, measure: Measure, *, out: Path | None) -> bool:
    """Let the runs take turns and report; whether honest clients got the same texts in all of them."""
    refuse_unwritable(out)
    policies = policies_of(config.adaptation.policy)
    assembly = assemble(config)
    scene = scene_of(assembly, attack, measure)
    with players_of(assembly, policies, measure.seed) as players:
        played = play_with_bars(players, scene.turns, measure)
    outcome = outcome_of(played, scene, seed=measure.seed)
    Console().print(table_of(outcome))
    _write(out, assembly, outcome, scene, attack)
    return not any(summary.mismatched_tokens for summary in outcome.summaries.values())


def policies_of(learning: PolicyName) -> dict[str, PolicyName]:
    """Who decides about updates in each run. Raises StartupError where nobody would learn."""
    if learning == PLAIN:
        raise StartupError(f"--adaptation.policy {PLAIN} learns nothing that could be poisoned: choose another one")
    return {ATTACKED: learning, UNATTACKED: learning, ANCHOR: PLAIN}


def scene_of(assembly: Assembly, attack: Attack, measure: Measure) -> Scene:
    """The honest queries in turns, with and without hostile ones between. Raises StartupError."""
    rng = random.Random(measure.seed)
    visits = visits_of(attack.queries, attack.share, rng)
    lent = sum(visit.content == "honest" for visit in visits)
    sets = read_sets(assembly, attack.honest, None, measure.max_tokens)
    prompts = mixed(sets, attack.queries + lent, rng)
    stream = honest_stream(prompts[: attack.queries])
    honest = honest_turns(stream, attack.turn_queries, attack.honest_clients, rng)
    contents: dict[Content, Iterator[Prompt]] = {
        "honest": iter(prompts[attack.queries :]),
        "garbage": poison_clients.garbage(assembly.tokenizer, assembly.target.vocab_size, rng),
        "narrow": _narrow(assembly, attack.narrow, measure, rng),
    }
    poisoned = attacked(honest, visits, contents)
    everything = [prompt for turn in poisoned for prompt in turn.prompts]
    refuse_too_long(everything, measure.max_tokens, assembly.limits.max_model_len, "hostile prompts")
    return Scene(stream, honest, {ATTACKED: poisoned, UNATTACKED: honest, ANCHOR: honest})


def _narrow(assembly: Assembly, files: Sequence[Path], measure: Measure, rng: random.Random) -> Iterator[Prompt]:
    if not files:
        return poison_clients.narrow(assembly.tokenizer, rng)
    return cycle(prompt for chosen in read_sets(assembly, files, None, measure.max_tokens) for prompt in chosen.prompts)


def outcome_of(played: Mapping[str, Sequence[Played]], scene: Scene, *, seed: int) -> Outcome:
    """Every run's honest part, by itself and against the others'."""
    honest = {run: honest_part(mine, scene.honest) for run, mine in played.items()}
    summaries = {run: summary_of(mine, honest[ANCHOR], scene.stream, seed=seed) for run, mine in honest.items()}
    ratio = ratio_of(honest[ATTACKED], honest[UNATTACKED], seed=seed)
    return Outcome(honest, list(played[ATTACKED]), summaries, ratio)


def _write(out: Path | None, assembly: Assembly, outcome: Outcome, scene: Scene, attack: Attack) -> None:
    if out is None:
        return
    by_client = hostile_by_window(outcome.attacked)
    by_window = sum(map(Counter, by_client.values()), Counter())
    rows = [
        row.as_json()
        for run in RUNS
        for row in rows_of(run, outcome.honest[run], by_window if run == ATTACKED else {}, scene.stream)
    ]
    write_report(out, conditions_of(assembly), rows, summary_json(outcome, attack))
    windows = {run: windows_of(outcome.honest[run]) for run in RUNS}
    events = {run: outcome.summaries[run].events for run in RUNS}
    draw(out.with_suffix(".png"), windows, events, by_client, scene.stream)


def summary_json(outcome: Outcome, attack: Attack) -> dict[str, object]:
    """What is asked for, first, and then everything by run and by client."""
    hostile = hostile_of(outcome.attacked)
    num_hostile = sum(client.queries for client in hostile.values())
    return {
        "queries": attack.queries,
        "hostile_queries": num_hostile,
        "hostile_share": num_hostile / (num_hostile + attack.queries),
        "honest_clients": attack.honest_clients,
        "ratio": asdict(outcome.ratio),
        "asked_ratio": ASKED_RATIO,
        "worst_three_windows": outcome.summaries[ATTACKED].worst.as_json(),
        "over_share": outcome.summaries[ATTACKED].counts.over_share,
        "mismatched_tokens": sum(summary.mismatched_tokens for summary in outcome.summaries.values()),
        "runs": {run: outcome.summaries[run].as_json() for run in RUNS},
        "hostile": {name: asdict(client) for name, client in hostile.items()},
    }


def table_of(outcome: Outcome) -> Table:
    """One column per run."""
    columns = [_cells(outcome.summaries[run]) for run in RUNS]
    table = Table("honest clients", *RUNS)
    for title in columns[0]:
        table.add_row(title, *(column[title] for column in columns), end_section=title in _SECTION_ENDS)
    ratio, hostile = outcome.ratio, hostile_of(outcome.attacked)
    table.caption = (
        f"{ATTACKED} / {UNATTACKED}: {_ratio(ratio)}, asked for are {ASKED_RATIO}; intervals hold 95 % of resampled "
        f"turns; worst: the lowest of every {STRETCH} windows in a row by the {ANCHOR}'s, and from which honest query "
        f"on; hostile: {_visitors(hostile)}"
    )
    return table


_SECTION_ENDS = ("mismatched", "its query", "over share")


def _cells(summary: RunSummary) -> dict[str, str]:
    return {
        "mismatched": str(summary.mismatched_tokens),
        "tau": f"{summary.tau:.3f}",
        **{f"tau {phase}": f"{tau:.3f}" for phase, tau in summary.tau_by_phase.items()},
        f"tau / {ANCHOR}": _ratio(summary.over_anchor).replace(" ", "\n", 1),
        "worst": f"{summary.worst.ratio:.3f}",
        "its query": str(summary.worst.first_query),
        **_learning(summary),
    }


def _learning(summary: RunSummary) -> dict[str, str]:
    counts = summary.counts
    return {
        "updates, head": str(counts.updates_head),
        "updates, full": str(counts.updates_full),
        "publishes": str(counts.publishes),
        "refusals": str(counts.refusals),
        "rollbacks": str(counts.rollbacks),
        "over share": str(counts.over_share),
        "training": f"{counts.training_seconds:.1f} s",
    }


def _ratio(ratio: Ratio) -> str:
    return f"{ratio.ratio:.3f} [{ratio.low:.3f}, {ratio.high:.3f}]"


def _visitors(hostile: Mapping[str, HostileSummary]) -> str:
    told = [f"{name} {client.queries} queries, tau {client.tau:.2f}" for name, client in hostile.items()]
    return ", ".join(told) or "nobody"
