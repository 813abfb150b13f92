"""What each part of a trained drafter is worth: variants without it, over the same prompts, with as many nodes."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from benchmarks.anatomy import Share, anatomy_of, observe_set
from benchmarks.draft_records import observed, without_noise
from drafters.protocol import Drafter
from drafters.registry import TrainedWeights
from drafters.specblock.checkpoint import DrafterError, read_config
from drafters.specblock.growth import POLICIES
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
from service.bench.driver import Run, generate
from service.bench.experiment import (
    PLAIN,
    Measure,
    conclude,
    counted,
    mismatches,
    plain_engine,
    prepare,
    read_sets,
    take_turns,
    tau,
    tokens_per_second,
    warm_up,
)
from service.config import LoadedConfig, ServiceConfig
from service.engine import build, drafter_weights
from service.engine.budget import FixedBudget
from service.errors import StartupError
from service.prompts import PromptSet

DRAFTER = "specblock"
FULL = "full"
"""The variant with everything, and the folder of its weights."""

BY_WEIGHTS: Mapping[str, str] = {
    "shift": "no shift between layers",
    "broadcast": "condition for the first position only",
    "valid_prefix": "trained without the valid-prefix mask",
    "prefix": "the other prefix entries",
}
ABLATIONS = ("shift", "broadcast", "rank", "valid_prefix", "coupling", "prefix")
_ALPHAS = 4


@dataclass(frozen=True, slots=True)
class Variant:
    """One drafter to compare."""

    ablation: str
    name: str
    weights: TrainedWeights
    coupled: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class AblationRow:
    """One variant at one temperature, all prompt sets together."""

    ablation: str
    variant: str
    temperature: float
    prompts: int
    tokens: int
    nodes_per_step: float
    tokens_per_second: float
    speedup: float
    tau: float
    alpha: tuple[Share, ...]
    mismatched_tokens: int


def config_for(config: ServiceConfig, folder: Path | None) -> ServiceConfig:
    """The same configuration with the trained drafter alone: the one in `folder`/full, or the configured one."""
    if config.drafter == "none":
        raise StartupError("--ablate compares drafters: leave drafter unset")
    path = config.drafter_path if folder is None else folder / FULL
    return config.model_copy(update={"drafter": DRAFTER, "drafter_path": path})


def refuse_impossible(ablations: Sequence[str], folder: Path | None, temperatures: Sequence[float]) -> None:
    """Raise StartupError for ablations that have nothing to compare."""
    unknown = [name for name in ablations if name not in ABLATIONS]
    if unknown:
        raise StartupError(f"--ablate {','.join(unknown)}: choose from {', '.join(ABLATIONS)}")
    trained_ones = [name for name in ablations if name in BY_WEIGHTS]
    if trained_ones and folder is None:
        raise StartupError(
            f"--ablate {','.join(trained_ones)} needs weights trained so: give --ablation-weights DIR "
            f"with the folders {', '.join([FULL, *trained_ones])}"
        )
    if "coupling" in ablations and not any(temperatures):
        raise StartupError("--ablate coupling needs a temperature above 0: add --temperature 1")


def variants_of(assembly: Assembly, ablations: Sequence[str], folder: Path | None) -> list[Variant]:
    """The full drafter and what it is compared with. Raises StartupError for missing or foreign weights."""
    full = assembly.weights
    assert full is not None, "an ablation is assembled with trained weights"
    return [Variant("", FULL, full), *(variant for name in ablations for variant in _compared(assembly, name, folder))]


def measure_variants(
    assembly: Assembly,
    sets: Sequence[PromptSet],
    variants: Sequence[Variant],
    measure: Measure,
    *,
    nodes: int,
    observe: int,
    advance: Callable[[int], None] = lambda prompts: None,
) -> list[AblationRow]:
    """Every variant at one temperature, in turn with plain decoding; then `observe` prompts of each set for alpha."""
    met = [variant for variant in variants if variant.coupled or measure.temperature > 0]
    policy = FixedBudget(nodes)
    engines = {PLAIN: plain_engine(assembly)}
    engines |= {v.name: assembly.engine(_drafter(assembly, v), policy) for v in met}
    contestants = {name: partial(generate, engine) for name, engine in engines.items()}
    warm_up(contestants, sets[0].prompts[0], measure)
    turns = [take_turns(prompts.prompts, contestants, measure, advance) for prompts in sets]
    runs = {name: [run for turn in turns for run in turn[name]] for name in contestants}
    few = [replace(prompts, prompts=prompts.prompts[:observe]) for prompts in sets]
    rows = []
    for variant in met:
        drafter, recorder = observed(assembly, DRAFTER, variant.weights, coupled=variant.coupled)
        engine = assembly.engine(drafter, policy)
        steps = [step for prompts in few for step in observe_set(engine, recorder, prompts, measure)]
        alpha = anatomy_of(steps, depth=_ALPHAS, source=DRAFTER).alpha
        rows.append(_row(variant, runs[variant.name], runs[PLAIN], measure, alpha))
    return rows


def _compared(assembly: Assembly, ablation: str, folder: Path | None) -> Iterator[Variant]:
    full = assembly.weights
    assert full is not None
    if ablation == "rank":
        policies = [policy for policy in POLICIES if policy != full.policy]
        yield from (Variant(ablation, f"growth {policy}", replace(full, policy=policy)) for policy in policies)
    elif ablation == "coupling":
        yield Variant(ablation, "noise withheld", full, coupled=False)
    else:
        assert folder is not None
        yield Variant(ablation, BY_WEIGHTS[ablation], _weights(assembly, folder / ablation))


def _weights(assembly: Assembly, folder: Path) -> TrainedWeights:
    assert assembly.weights is not None
    expected = assembly.weights.network.config.tap_layers
    try:
        taps = read_config(folder).tap_layers
    except DrafterError as error:
        raise StartupError(str(error)) from error
    if taps != expected:
        raise StartupError(f"drafter {folder}: reads target layers {taps}, the full drafter reads {expected}")
    return drafter_weights.load_replaceable(folder, assembly.loaded, blocks=assembly.config.draft_blocks).weights


def _drafter(assembly: Assembly, variant: Variant) -> Drafter:
    drafter = build.make_drafter(DRAFTER, assembly.target, assembly.limits, variant.weights)
    return drafter if variant.coupled else without_noise(drafter)


def _row(
    variant: Variant, runs: Sequence[Run], plain: Sequence[Run], measure: Measure, alpha: tuple[Share, ...]
) -> AblationRow:
    steps = [step for run in runs for step in run.steps if not step.stats.prompt_tokens]
    speed = tokens_per_second(runs)
    return AblationRow(
        ablation=variant.ablation,
        variant=variant.name,
        temperature=measure.temperature,
        prompts=sum(len(run.answers) for run in runs),
        tokens=sum(run.num_tokens for run in runs),
        nodes_per_step=sum(step.stats.drafted_nodes for step in steps) / max(1, len(steps)),
        tokens_per_second=speed,
        speedup=speed / tokens_per_second(plain),
        tau=tau(runs),
        alpha=alpha,
        mismatched_tokens=mismatches(plain, runs),
    )


def run(
    loaded: LoadedConfig,
    prompts: PromptFiles,
    ablate: Annotated[
        str, typer.Option(metavar="PART,...", help=f"What to leave out, one at a time: {', '.join(ABLATIONS)}.")
    ],
    more_prompts: MorePromptFiles = None,
    limit: Limit = None,
    temperature: Temperatures = [0.0],  # noqa: B006  # read as a signature, never changed
    max_tokens: AnswerTokens = 128,
    concurrency: Concurrency = 1,
    observe: Annotated[int, typer.Option(min=0, help="Prompts of each file to answer once more, for alpha.")] = 2,
    ablation_weights: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Drafters trained equally long: DIR/full, and DIR/PART for each.")
    ] = None,
    ablation_nodes: Annotated[int, typer.Option(min=1, max=64, help="Nodes of each step.")] = 16,
    seed: Seed = 0,
    out: Out = None,
) -> bool:
    """What each part of a trained drafter is worth: variants without it, on the same prompts with as many nodes."""
    measures = [Measure(value, max_tokens, concurrency, seed) for value in dict.fromkeys(temperature)]
    ablations = list(dict.fromkeys(part.strip() for part in ablate.split(",")))
    weights, nodes = ablation_weights, ablation_nodes
    refuse_impossible(ablations, weights, [measure.temperature for measure in measures])
    assembly = prepare(config_for(loaded.config, weights), out)
    sets = read_sets(assembly, [*prompts, *(more_prompts or [])], limit, max_tokens)
    variants = variants_of(assembly, ablations, weights)
    rows: list[AblationRow] = []
    with counted(len(measures) * sum(len(prompts.prompts) for prompts in sets)) as advance:
        for measure in measures:
            advance(0, f"T = {measure.temperature:g}")
            rows += measure_variants(assembly, sets, variants, measure, nodes=nodes, observe=observe, advance=advance)
    mismatched = sum(row.mismatched_tokens for row in rows)
    summary = {"variants": len(variants), "nodes": nodes, "mismatched_tokens": mismatched}
    return conclude(assembly, out, rows, summary, _table(rows, nodes))


def _table(rows: Sequence[AblationRow], nodes: int) -> Table:
    alphas = [f"alpha {depth}" for depth in range(1, len(rows[0].alpha) + 1)]
    table = Table("ablation", "variant", "T", "tau", "speedup", "nodes", *alphas, "tokens", "mismatched")
    for row in rows:
        measured = (f"{row.temperature:g}", f"{row.tau:.2f}", f"{row.speedup:.2f}", f"{row.nodes_per_step:.1f}")
        shares = ("-" if share.rate is None else f"{share.rate:.2f}" for share in row.alpha)
        table.add_row(row.ablation, row.variant, *measured, *shares, f"{row.tokens:,}", str(row.mismatched_tokens))
    table.caption = (
        f"the trained drafter alone, at most {nodes} nodes a step; nodes: verified per step; speedup over plain "
        "decoding; alpha k: share of drafts with the true token at depth k, of those with the true one at k - 1"
    )
    return table
