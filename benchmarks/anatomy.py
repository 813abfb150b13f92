"""How far drafts hold: which positions of a block, how good rank head and survival are, whose tokens were accepted."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product

from rich.table import Table

from benchmarks.draft_records import BlockRecord, Odds, Recorder, StepRecord, TokenPath, observed
from drafters.ranks import CLASS_OF_RANK
from drafters.registry import TrainedWeights, needs_of
from drafters.specblock.model import RANK_CLASSES
from service.assembly import Assembly
from service.bench.commands import (
    AnswerTokens,
    Concurrency,
    Limit,
    MorePromptFiles,
    Out,
    PromptFiles,
    Seed,
    Temperatures,
)
from service.bench.driver import generate
from service.bench.experiment import Measure, conclude, counted, prepare, read_sets, take_turns
from service.config import LoadedConfig
from service.engine.engine import Engine
from service.prompts import PromptSet

_BINS = 10


@dataclass(frozen=True, slots=True)
class Share:
    """So many of so many."""

    rate: float | None  # None: of none
    of: int

    @staticmethod
    def count(outcomes: Iterable[bool]) -> "Share":
        seen = list(outcomes)
        return Share(sum(seen) / len(seen) if seen else None, len(seen))


@dataclass(frozen=True, slots=True)
class PositionShare:
    """One position of the blocks of a tree's first forward, or of its later ones, where all before it was right."""

    forward: str  # first or later
    position: int  # from 1
    first_rank: Share  # the likeliest token was right
    any_rank: Share  # one of the ranks that can become nodes was


@dataclass(frozen=True, slots=True)
class ClassScore:
    """The rank head on one class: 0 = rank 1, 1 = ranks 2-4, 2 = ranks 5-10, 3 = beyond."""

    rank_class: int
    precision: Share
    recall: Share


@dataclass(frozen=True, slots=True)
class SourceCredit:
    """Accepted tokens that a source had proposed, and those that nobody else had."""

    accepted: int
    alone: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Anatomy:
    """Everything about some steps, under the names that reports have."""

    observed_steps: int
    drafted_steps: int
    alpha_of: str  # the source whose tree the alphas describe, or "tree" for all sources together
    alpha: tuple[Share, ...]  # by depth: the tree holds the token, given that it held the one before
    spine_alpha: tuple[Share, ...]  # the same for the likeliest path alone
    block_positions: tuple[PositionShare, ...]
    rank_head: tuple[ClassScore, ...]
    survival_ece: float | None  # of survival, over all candidates
    conditional_ece: float | None  # of survival by the parent's, over candidates whose parent came true
    observed_by_source: dict[str, SourceCredit]


def anatomy_of(steps: Sequence[StepRecord], *, depth: int, source: str | None) -> Anatomy:
    """Judge some steps; alphas down to `depth`, of one source's trees or (None) of the merged ones."""
    drafted = [step for step in steps if step.candidates]
    trees = [(_tree(step, source), step.truth) for step in steps if _was_asked(step, source)]
    places = [place for step in drafted for place in _places(step)]
    return Anatomy(
        observed_steps=len(steps),
        drafted_steps=len(drafted),
        alpha_of=source or "tree",
        alpha=tuple(alpha(trees, place) for place in range(1, depth + 1)),
        spine_alpha=tuple(alpha([(spine(tree), truth) for tree, truth in trees], n) for n in range(1, depth + 1)),
        block_positions=tuple(position_shares(places)),
        rank_head=tuple(class_scores(places)) if places else (),
        survival_ece=calibration_error([pair for step in drafted for pair in survival_pairs(step)]),
        conditional_ece=calibration_error([pair for step in drafted for pair in conditional_pairs(step)]),
        observed_by_source=credits_of(steps),
    )


def alpha(trees: Iterable[tuple[Odds, TokenPath]], depth: int) -> Share:
    """Trees that hold the true token at this depth, of those that hold all before it and whose truth is known there."""
    reached = ((tree, truth) for tree, truth in trees if len(truth) >= depth)
    return Share.count(truth[:depth] in tree for tree, truth in reached if depth == 1 or truth[: depth - 1] in tree)


def spine(tree: Odds) -> Odds:
    """The path that goes on with the likeliest child everywhere."""
    likeliest: dict[TokenPath, TokenPath] = {}
    for path, survival in tree.items():
        rival = likeliest.get(path[:-1])
        if rival is None or survival > tree[rival]:
            likeliest[path[:-1]] = path
    found: dict[TokenPath, float] = {}
    place: TokenPath = ()
    while place in likeliest:
        place = likeliest[place]
        found[place] = tree[place]
    return found


@dataclass(frozen=True, slots=True)
class Place:
    """One position of one block where all tokens before it were right."""

    is_first: bool  # of the tree's first forward
    position: int  # from 1
    rank: int | None  # of the true token, from 0; None when it is no candidate
    predicted: int  # class by the rank head

    @property
    def true_class(self) -> int:
        return RANK_CLASSES - 1 if self.rank is None else CLASS_OF_RANK[self.rank]


def places_of(block: BlockRecord, truth: TokenPath) -> Iterator[Place]:
    """The positions of a block that the text reached, up to the first whose likeliest token was wrong."""
    if truth[: len(block.start)] != block.start:
        return
    ahead = truth[len(block.start) :]
    for position, (ranks, predicted, token) in enumerate(zip(block.tokens, block.classes, ahead, strict=False), 1):
        rank = ranks.index(token) if token in ranks else None
        yield Place(block.forward == 0, position, rank, predicted)
        if rank != 0:
            return


def position_shares(places: Sequence[Place]) -> Iterator[PositionShare]:
    """By forward and position."""
    groups = sorted({(not place.is_first, place.position) for place in places})
    for is_later, position in groups:
        mine = [place for place in places if place.position == position and place.is_first != is_later]
        yield PositionShare(
            "later" if is_later else "first",
            position,
            first_rank=Share.count(place.rank == 0 for place in mine),
            any_rank=Share.count(place.rank is not None for place in mine),
        )


def class_scores(places: Sequence[Place]) -> Iterator[ClassScore]:
    """Precision and recall of the rank head, class by class."""
    for rank_class in range(RANK_CLASSES):
        yield ClassScore(
            rank_class,
            precision=Share.count(place.true_class == rank_class for place in places if place.predicted == rank_class),
            recall=Share.count(place.predicted == rank_class for place in places if place.true_class == rank_class),
        )


def survival_pairs(step: StepRecord) -> Iterator[tuple[float, bool]]:
    """Survival and fate of every candidate whose fate the text tells."""
    for path, survival in step.candidates.items():
        known = step.truth[: len(path)]
        if len(known) == len(path) or path[: len(known)] != known:
            yield survival, path == known


def conditional_pairs(step: StepRecord) -> Iterator[tuple[float, bool]]:
    """Survival given the parent's, and fate, of the candidates whose parent came true."""
    for path, survival in step.candidates.items():
        if len(step.truth) >= len(path) and step.truth[: len(path) - 1] == path[:-1]:
            yield survival / step.candidates.get(path[:-1], 1.0), path == step.truth[: len(path)]


def calibration_error(pairs: Sequence[tuple[float, bool]]) -> float | None:
    """Expected calibration error: over 10 bins of the estimate, |mean estimate - share that came true| by bin size."""
    if not pairs:
        return None
    bins: list[list[tuple[float, bool]]] = [[] for _ in range(_BINS)]
    for estimate, outcome in pairs:
        bins[min(_BINS - 1, int(estimate * _BINS))].append((estimate, outcome))
    gaps = (abs(sum(estimate for estimate, _ in mine) - sum(outcome for _, outcome in mine)) for mine in bins)
    return sum(gaps) / len(pairs)


def credits_of(steps: Iterable[StepRecord]) -> dict[str, SourceCredit]:
    """Who had proposed the accepted tokens; one that several had proposed counts for each of them."""
    accepted: Counter[str] = Counter()
    alone: Counter[str] = Counter()
    for step in steps:
        accepted.update(dict.fromkeys(step.proposals, 0))
        for depth in range(1, step.accepted + 1):
            right = [source for source, tree in step.proposals.items() if step.truth[:depth] in tree]
            accepted.update(right)
            alone.update(right if len(right) == 1 else [])
    return {source: SourceCredit(count, alone[source]) for source, count in sorted(accepted.items())}


def _places(step: StepRecord) -> Iterator[Place]:
    return (place for block in step.blocks for place in places_of(block, step.truth))


def _was_asked(step: StepRecord, source: str | None) -> bool:
    return bool(step.proposals) if source is None else source in step.proposals


def _tree(step: StepRecord, source: str | None) -> Odds:
    return step.candidates if source is None else step.proposals[source]


_CLASSES = ("rank 1", "ranks 2-4", "ranks 5-10", "beyond")


def anatomy_tables(anatomies: Sequence[tuple[str, Anatomy]]) -> list[Table]:
    """One line per named anatomy in each table; tables about what was not there are left out."""
    tables = [_alphas(anatomies), _credits(anatomies)]
    trained = [(name, anatomy) for name, anatomy in anatomies if anatomy.rank_head]
    return [*tables, _positions(trained), _rank_head(trained)] if trained else tables


def _alphas(anatomies: Sequence[tuple[str, Anatomy]]) -> Table:
    depths = range(1, 1 + len(anatomies[0][1].alpha))
    table = Table("", "of", "", *(f"alpha {depth}" for depth in depths), "ECE", "ECE, tried")
    for name, anatomy in anatomies:
        errors = [_share(anatomy.survival_ece), _share(anatomy.conditional_ece)]
        table.add_row(name, anatomy.alpha_of, "tree", *map(_rate, anatomy.alpha), *errors)
        table.add_row("", "", "spine", *map(_rate, anatomy.spine_alpha), end_section=True)
    table.caption = (
        "alpha k: share of drafts with the true token at depth k, of those with the true one at k - 1; "
        "ECE: calibration error of survival; tried: of survival given the parent, where the parent came true"
    )
    return table


def _positions(anatomies: Sequence[tuple[str, Anatomy]]) -> Table:
    size = max(place.position for _, anatomy in anatomies for place in anatomy.block_positions)
    table = Table("", "forward", "", *(f"position {number}" for number in range(1, size + 1)))
    for name, anatomy in anatomies:
        for forward in ("first", "later"):
            mine = {place.position: place for place in anatomy.block_positions if place.forward == forward}
            numbers = range(1, size + 1)
            first = [_rate(mine[number].first_rank) if number in mine else "" for number in numbers]
            any_rank = [_rate(mine[number].any_rank) if number in mine else "" for number in numbers]
            table.add_row(name, forward, "rank 1", *first)
            table.add_row("", "", "ranks 1-10", *any_rank, end_section=True)
    table.caption = "share of block positions where the true token stood there, all before it in the block being right"
    return table


def _rank_head(anatomies: Sequence[tuple[str, Anatomy]]) -> Table:
    table = Table("", "rank head", *_CLASSES)
    for name, anatomy in anatomies:
        table.add_row(name, "precision", *(_rate(score.precision) for score in anatomy.rank_head))
        table.add_row("", "recall", *(_rate(score.recall) for score in anatomy.rank_head))
        counts = (f"{score.recall.of:,}" for score in anatomy.rank_head)
        table.add_row("", "positions", *counts, end_section=True)
    return table


def _credits(anatomies: Sequence[tuple[str, Anatomy]]) -> Table:
    table = Table("", "source", "accepted", "alone", "drafted steps", "steps")
    for name, anatomy in anatomies:
        for source, credit in anatomy.observed_by_source.items():
            counts = (credit.accepted, credit.alone, anatomy.drafted_steps, anatomy.observed_steps)
            table.add_row(name, source, *(f"{count:,}" for count in counts))
    table.caption = "accepted tokens by who had proposed them; alone: nobody else had"
    return table


def _rate(share: Share) -> str:
    return _share(share.rate)


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


_DEPTH_WITHOUT_BLOCKS = 8


def observe_set(
    engine: Engine,
    recorder: Recorder,
    prompts: PromptSet,
    measure: Measure,
    advance: Callable[[int], None] = lambda prompts: None,
) -> list[StepRecord]:
    """The steps of one set's answers."""
    take_turns(prompts.prompts, {"observed": partial(generate, engine)}, measure, advance)
    return recorder.take()


def judged(assembly: Assembly, steps: Sequence[StepRecord]) -> Anatomy:
    """Statistics of the configured drafter's steps: of its trained source, if it has one, down to M * K."""
    weights = assembly.weights if "weights" in needs_of(assembly.drafter_name) else None
    return anatomy_of(steps, depth=alpha_depth(weights), source="specblock" if weights else None)


def alpha_depth(weights: TrainedWeights | None) -> int:
    """M * K, the deepest that blocks reach one after the other."""
    return weights.blocks * weights.network.config.block_size if weights else _DEPTH_WITHOUT_BLOCKS


def run(
    loaded: LoadedConfig,
    prompts: PromptFiles,
    more_prompts: MorePromptFiles = None,
    limit: Limit = 2,
    temperature: Temperatures = [0.0],  # noqa: B006  # read as a signature, never changed
    max_tokens: AnswerTokens = 128,
    concurrency: Concurrency = 1,
    seed: Seed = 0,
    out: Out = None,
) -> bool:
    """Look into every step's drafts: acceptance by depth, calibration of survival, the rank head, credits by source."""
    measures = [Measure(value, max_tokens, concurrency, seed) for value in dict.fromkeys(temperature)]
    assembly = prepare(loaded.config, out)
    sets = read_sets(assembly, [*prompts, *(more_prompts or [])], limit, max_tokens)
    by_temperature: dict[str, list[StepRecord]] = {}
    rows: list[dict[str, object]] = []
    total = len(measures) * sum(len(chosen.prompts) for chosen in sets)
    drafter, recorder = observed(assembly, assembly.drafter_name, assembly.weights)
    with counted(total, "observing") as advance:
        engine = assembly.engine(drafter=drafter)
        for measure, chosen in product(measures, sets):
            mine = observe_set(engine, recorder, chosen, measure, advance)
            by_temperature.setdefault(f"T = {measure.temperature:g}", []).extend(mine)
            rows.append({"set": chosen.name, "temperature": measure.temperature, **asdict(judged(assembly, mine))})
    tables = anatomy_tables([(name, judged(assembly, mine)) for name, mine in by_temperature.items()])
    return conclude(assembly, out, rows, {"observed_steps": sum(map(len, by_temperature.values()))}, *tables)
