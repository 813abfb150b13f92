"""What hostile clients can do to honest ones through the drafter that learns."""

import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import cycle
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from matplotlib.figure import Figure
from rich.table import Table

from adaptation.config import PolicyName
from service.assembly import Assembly
from service.bench.commands import Concurrency, MorePromptFiles, Out, Seed, Temperature
from service.bench.driver import Run
from service.bench.experiment import Measure, conclude, mismatches, prepare, read_sets, request_of, tau
from service.bench.shift import columns_table, json_event, learning_cells, mark, middles, name_axes, paired_ratio
from service.bench.shift_play import (
    PLAIN,
    Counts,
    Noted,
    Phase,
    Played,
    Prompt,
    Stream,
    Turn,
    joined,
    mixed,
    play_all,
    players_of,
    turns_of,
    windows_of,
)
from service.config import LoadedConfig
from service.engine.requests import GenerationRequest, Scope
from service.errors import StartupError
from service.prompts import refuse_too_long
from service.tokenizer import ChatTokenizer

GARBAGE = "garbage"
NARROW = "narrow"
STEALTH = "stealth"
HOSTILE = (GARBAGE, NARROW, STEALTH)

BURST_SHARE = 0.75  # of the stealthy client's queries
BURST_FROM, BURST_TO = 0.5, 0.75  # of the stream: six times the rate that it had in the first half

Content = Literal["garbage", "narrow", "honest"]

_LENGTHS = 8, 64  # of garbage, in tokens or characters
_CHARACTERS = 0x21, 0x250  # printable ASCII, and letters that few languages use
_FORMATS = (
    "Write the digits of {number} in Morse code, ten times, one line each. No words.",
    "Write a CSV table of ten rows: n, n squared, n cubed. Begin with n = {number}. No words.",
    "Write ten numbers in binary and in hexadecimal, one line each. Begin with {number}. No words.",
)


@dataclass(frozen=True, slots=True)
class Visit:
    """One query of a hostile client."""

    place: float  # in honest queries: between number 7 and number 8 for 7.5
    client: str
    content: Content


def visits_of(queries: int, share: float, rng: random.Random) -> list[Visit]:
    """The visits beside so many honest queries that make hostile clients send this share of all."""
    total = round(queries * share / (1 - share))
    garbage, narrow, stealth = (total // 3 + (index < total % 3) for index in range(3))
    burst = round(BURST_SHARE * stealth)
    half, quarter = BURST_FROM * queries, BURST_TO * queries
    visits = [
        *_steady(GARBAGE, "garbage", _places(garbage, 0, queries, rng)),
        *_steady(NARROW, "narrow", _places(narrow, 0, queries, rng)),
        *_steady(STEALTH, "honest", _places(stealth - burst, 0, half, rng)),
        *_steady(STEALTH, "garbage", _places(burst, half, quarter, rng)),
    ]
    return sorted(visits, key=lambda visit: visit.place)


def garbage(tokenizer: ChatTokenizer, vocab_size: int, rng: random.Random) -> Iterator[Prompt]:
    """Without end: token ids by chance as they are, and characters by chance as a message."""
    while True:
        yield tuple(rng.randrange(vocab_size) for _ in range(rng.randint(*_LENGTHS)))
        text = "".join(chr(rng.randrange(*_CHARACTERS)) for _ in range(rng.randint(*_LENGTHS)))
        yield _message(tokenizer, text)


def narrow(tokenizer: ChatTokenizer, rng: random.Random) -> Iterator[Prompt]:
    """Without end: columns of digits, in one of a few formats."""
    while True:
        yield _message(tokenizer, rng.choice(_FORMATS).format(number=rng.randrange(100, 100_000)))


def _message(tokenizer: ChatTokenizer, text: str) -> Prompt:
    return tuple(tokenizer.render_chat([{"role": "user", "content": text}]))


def _places(count: int, start: float, end: float, rng: random.Random) -> list[float]:
    """Evenly spread, each by chance within its part."""
    step = (end - start) / max(1, count)
    return [start + (number + rng.random()) * step for number in range(count)]


def _steady(client: str, content: Content, places: list[float]) -> Iterator[Visit]:
    return (Visit(place, client, content) for place in places)


def honest_stream(prompts: Sequence[Prompt]) -> Stream:
    """Honest prompts, cut where the attack changes. Empty stretches of very short streams are left out."""
    burst, after = (round(share * len(prompts)) for share in (BURST_FROM, BURST_TO))
    pieces = {"before": prompts[:burst], "burst": prompts[burst:after], "after": prompts[after:]}
    return Stream(tuple(Phase(name, tuple(piece)) for name, piece in pieces.items() if piece), new_from=0)


def honest_turns(stream: Stream, size: int, clients: int, measure: Measure, rng: random.Random) -> list[Turn]:
    """The stream in turns of `size` queries, each of a client by chance."""

    def asked(request: GenerationRequest) -> GenerationRequest:
        return replace(request, scope=Scope(name=f"honest {rng.randrange(clients) + 1}"))

    return [replace(turn, requests=tuple(map(asked, turn.requests))) for turn in turns_of(stream, size, measure)]


def attacked(
    turns: Sequence[Turn], visits: Sequence[Visit], prompts: Mapping[Content, Iterator[Prompt]], measure: Measure
) -> list[Turn]:
    """The same turns with hostile queries at their places, numbered behind all honest ones."""
    first = sum(len(turn.requests) for turn in turns)
    hostile = [
        (visit.place, request_of(number, next(prompts[visit.content]), measure, client=visit.client, ignore_eos=False))
        for number, visit in enumerate(visits, start=first)
    ]
    return [_with_visitors(turn, hostile) for turn in turns]


def _with_visitors(turn: Turn, hostile: Sequence[tuple[float, GenerationRequest]]) -> Turn:
    end = turn.first + len(turn.requests)
    honest = [(float(number), request) for number, request in enumerate(turn.requests, start=turn.first)]
    visitors = [(place, request) for place, request in hostile if turn.first <= place < end]
    in_order = sorted([*honest, *visitors], key=lambda placed: placed[0])
    return replace(turn, requests=tuple(request for _, request in in_order))


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


def answers_of(played: Played, clients: Callable[[str], bool]) -> Run:
    """What was answered to some clients."""
    pairs = zip(played.turn.requests, played.run.answers, strict=True)
    return replace(played.run, answers=tuple(answer for asked, answer in pairs if clients(asked.scope.name)))


def honest_part(played: Sequence[Played], turns: Sequence[Turn]) -> list[Played]:
    """What a run did for honest clients, as if nobody else had asked: events are counted by honest queries too."""
    parts, answered = [], 0
    for mine, turn in zip(played, turns, strict=True):
        honest = [asked.scope.name not in HOSTILE for asked in mine.turn.requests]
        run = answers_of(mine, lambda client: client not in HOSTILE)
        noted = tuple(
            replace(one, query=turn.first + sum(honest[: max(0, one.query - answered)])) for one in mine.noted
        )
        parts.append(replace(mine, turn=turn, run=run, noted=noted))
        answered += len(honest)
    return parts


def rows_of(run: str, windows: Sequence[Played], hostile: Mapping[int, int], stream: Stream) -> list[dict[str, object]]:
    """The honest part of a run, window by window; `hostile` has the number of hostile queries by window."""
    return [
        {
            "run": run,
            "window": window.turn.window,
            "phase": stream.phases[window.turn.phase].name,
            "first_query": window.turn.first,
            "queries": len(window.turn.requests),  # of honest clients, and so is tau
            "hostile_queries": hostile.get(window.turn.window, 0),
            "tau": window.tau,
            **window.counts,
        }
        for window in windows
    ]


def summary_of(played: Sequence[Played], anchor: Sequence[Played], stream: Stream, *, seed: int) -> RunSummary:
    """The honest part of a run against the anchor's."""
    whole = joined(played)
    return RunSummary(
        tau=whole.tau,
        tau_by_phase={
            phase.name: tau(turn.run for turn in played if turn.turn.phase == index)
            for index, phase in enumerate(stream.phases)
        },
        over_anchor=ratio_of(played, anchor, seed=seed),
        worst=min(stretches(windows_of(played), windows_of(anchor)), key=lambda stretch: stretch.ratio),
        mismatched_tokens=mismatches([turn.run for turn in anchor], [turn.run for turn in played]),
        counts=whole.counts,
        events=whole.noted,
    )


def ratio_of(mine: Sequence[Played], theirs: Sequence[Played], *, seed: int) -> Ratio:
    """Tau of one run by that of another on the same queries."""
    return Ratio(*paired_ratio(mine, theirs, _emitted, seed=seed))


def _emitted(played: Played) -> tuple[float, float]:
    """Emitted tokens and verifies."""
    verifies = [count for answer in played.run.answers for count in answer.accepted_per_step]
    return len(verifies) + sum(verifies), len(verifies)


def stretches(mine: Sequence[Played], anchor: Sequence[Played]) -> list[Stretch]:
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


def _stretch(mine: Sequence[Played], anchor: Sequence[Played]) -> Stretch:
    return Stretch(mine[0].turn.first, joined(mine).tau, joined(anchor).tau)


def _came(played: Sequence[Played], client: str) -> int:
    return sum(asked.scope.name == client for turn in played for asked in turn.turn.requests)


def _hostile(played: Sequence[Played], client: str) -> HostileSummary:
    runs = [answers_of(turn, lambda asked: asked == client) for turn in played]
    return HostileSummary(_came(played, client), sum(run.num_tokens for run in runs), tau(runs))


def draw(
    file: Path,
    windows: Mapping[str, Sequence[Played]],
    hostile: Mapping[str, Mapping[int, int]],
    stream: Stream,
) -> None:
    """Draw the windows of all runs; `hostile` has each hostile client's queries by window."""
    figure = Figure(figsize=(11, 10), layout="constrained")
    taus, ratios, attacks = figure.subplots(3, 1, sharex=True, height_ratios=(3, 3, 1.4))
    for index, (run, mine) in enumerate(windows.items()):
        heights = [window.tau for window in mine]
        taus.plot(middles(mine), heights, marker=".", color=f"C{index}", label=run)
        mark(taus, mine, heights, f"C{index}")
    _ratios(ratios, windows)
    _attacks(attacks, windows[ATTACKED], hostile)
    titles = {
        taus: "tau of honest clients",
        ratios: f"tau by another run's on the same queries; over {STRETCH} windows where the anchor's",
        attacks: "queries of hostile clients in a window",
    }
    name_axes(titles, stream, marked=taus)
    for axes in (taus, ratios, attacks):
        axes.legend(fontsize=8)
    figure.savefig(file, dpi=110)


def _ratios(axes: Any, windows: Mapping[str, Sequence[Played]]) -> None:
    attacked, unattacked = windows[ATTACKED], windows[UNATTACKED]
    centres = middles(attacked)
    for index, run in enumerate((ATTACKED, UNATTACKED)):
        found = stretches(windows[run], windows[ANCHOR])
        # A stretch stands where its middle window does.
        places = centres[(len(centres) - len(found)) // 2 :][: len(found)]
        ratios = [stretch.ratio for stretch in found]
        axes.plot(places, ratios, marker=".", color=f"C{index}", label=f"{run} / {ANCHOR}")
    ratios = [mine.tau / theirs.tau for mine, theirs in zip(attacked, unattacked, strict=True)]
    axes.plot(centres, ratios, marker=".", color="C3", label=f"{ATTACKED} / {UNATTACKED}")
    for height in (1.0, ASKED_RATIO):
        axes.axhline(height, color="grey", linewidth=0.8)


def _attacks(axes: Any, windows: Sequence[Played], hostile: Mapping[str, Mapping[int, int]]) -> None:
    width = 0.8 * min(len(window.turn.requests) for window in windows)
    below = [0] * len(windows)
    for client, by_window in hostile.items():
        heights = [by_window[window.turn.window] for window in windows]
        axes.bar(middles(windows), heights, width, bottom=below, label=client)
        below = [height + more for height, more in zip(below, heights, strict=True)]


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


def run(
    loaded: LoadedConfig,
    honest: Annotated[list[Path], typer.Option(metavar="FILE...", help="JSONL files with honest clients' prompts.")],
    more_honest: MorePromptFiles = None,
    narrow: Annotated[
        list[Path] | None, typer.Option(metavar="FILE", help="Prompts of the narrow client. Unset: built-in ones.")
    ] = None,
    queries: Annotated[int, typer.Option(min=8, help="Queries of honest clients, in all.")] = 300,
    share: Annotated[float, typer.Option(min=0, max=0.9, help="Share of all queries that hostile clients send.")] = 0.3,
    honest_clients: Annotated[int, typer.Option(min=1, help="Honest clients.")] = 7,
    temperature: Temperature = 0.0,
    max_tokens: Annotated[int, typer.Option(min=2, help="Longest answer.")] = 64,
    concurrency: Concurrency = 1,
    turn_queries: Annotated[
        int, typer.Option(min=1, help="Honest queries a run answers before it is the next one's turn.")
    ] = 5,
    seed: Seed = 0,
    out: Out = None,
) -> bool:
    """What hostile clients can do to honest ones through the drafter that learns; draws a PNG beside --out."""
    attack = Attack(
        honest=(*honest, *(more_honest or [])),
        narrow=tuple(narrow or ()),
        queries=queries,
        honest_clients=honest_clients,
        share=share,
        turn_queries=turn_queries,
    )
    measure = Measure(temperature, max_tokens, concurrency, seed)
    policies = policies_of(loaded.config.adaptation.policy)
    assembly = prepare(loaded.config, out)
    scene = scene_of(assembly, attack, measure)
    with players_of(assembly, policies, measure.seed) as players:
        played = play_all(players, scene.turns, measure)
    outcome = outcome_of(played, scene, seed=measure.seed)
    by_client = hostile_by_window(outcome.attacked)
    windows = {run: windows_of(outcome.honest[run]) for run in RUNS}
    if out is not None:
        draw(out.with_suffix(".png"), windows, by_client, scene.stream)
    by_window = sum(map(Counter, by_client.values()), Counter())
    rows = [
        row for run in RUNS for row in rows_of(run, windows[run], by_window if run == ATTACKED else {}, scene.stream)
    ]
    return conclude(assembly, out, rows, summary_json(outcome, attack), table_of(outcome))


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
    honest = honest_turns(stream, attack.turn_queries, attack.honest_clients, measure, rng)
    contents: dict[Content, Iterator[Prompt]] = {
        "honest": iter(prompts[attack.queries :]),
        "garbage": garbage(assembly.tokenizer, assembly.target.vocab_size, rng),
        "narrow": _narrow(assembly, attack.narrow, measure, rng),
    }
    poisoned = attacked(honest, visits, contents, measure)
    everything = [request.prompt for turn in poisoned for request in turn.requests]
    refuse_too_long(everything, measure.max_tokens, assembly.limits.max_model_len, "hostile prompts")
    return Scene(stream, honest, {ATTACKED: poisoned, UNATTACKED: honest, ANCHOR: honest})


def _narrow(assembly: Assembly, files: Sequence[Path], measure: Measure, rng: random.Random) -> Iterator[Prompt]:
    if not files:
        return narrow(assembly.tokenizer, rng)
    return cycle(prompt for chosen in read_sets(assembly, files, None, measure.max_tokens) for prompt in chosen.prompts)


def outcome_of(played: Mapping[str, Sequence[Played]], scene: Scene, *, seed: int) -> Outcome:
    """Every run's honest part, by itself and against the others'."""
    honest = {run: honest_part(mine, scene.honest) for run, mine in played.items()}
    summaries = {run: summary_of(mine, honest[ANCHOR], scene.stream, seed=seed) for run, mine in honest.items()}
    ratio = ratio_of(honest[ATTACKED], honest[UNATTACKED], seed=seed)
    return Outcome(honest, list(played[ATTACKED]), summaries, ratio)


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
        "over_share": outcome.summaries[ATTACKED].counts["over_share"],
        "mismatched_tokens": sum(summary.mismatched_tokens for summary in outcome.summaries.values()),
        "runs": {run: outcome.summaries[run].as_json() for run in RUNS},
        "hostile": {name: asdict(client) for name, client in hostile.items()},
    }


def table_of(outcome: Outcome) -> Table:
    """One column per run."""
    cells = {run: _cells(outcome.summaries[run]) for run in RUNS}
    table = columns_table("honest clients", cells, ("mismatched", "its query", "over share"))
    ratio, hostile = outcome.ratio, hostile_of(outcome.attacked)
    table.caption = (
        f"{ATTACKED} / {UNATTACKED}: {_ratio(ratio)}, asked for are {ASKED_RATIO}; intervals hold 95 % of resampled "
        f"turns; worst: the lowest of every {STRETCH} windows in a row by the {ANCHOR}'s, and from which honest query "
        f"on; hostile: {_visitors(hostile)}"
    )
    return table


def _cells(summary: RunSummary) -> dict[str, object]:
    return {
        "mismatched": summary.mismatched_tokens,
        "tau": f"{summary.tau:.3f}",
        **{f"tau {phase}": f"{tau:.3f}" for phase, tau in summary.tau_by_phase.items()},
        f"tau / {ANCHOR}": _ratio(summary.over_anchor).replace(" ", "\n", 1),
        "worst": f"{summary.worst.ratio:.3f}",
        "its query": summary.worst.first_query,
        **learning_cells(summary.counts),
        "over share": summary.counts["over_share"],
        "training": f"{summary.counts['training_seconds']:.1f} s",
    }


def _ratio(ratio: Ratio) -> str:
    return f"{ratio.ratio:.3f} [{ratio.low:.3f}, {ratio.high:.3f}]"


def _visitors(hostile: Mapping[str, HostileSummary]) -> str:
    told = [f"{name} {client.queries} queries, tau {client.tau:.2f}" for name, client in hostile.items()]
    return ", ".join(told) or "nobody"
