"""`python -m benchmarks trees`: trees against chains of the same drafter, with as many nodes in every step.

A chain is the path with the largest sum of survival. A network grows it by as many forwards as it has blocks, each with
one block at the end of the one before; trees are grown as configured, and a block begins where it gains most. A node
that is accepted in less than one step in 400 is drafted by neither. Prompts are answered by turns; the memory of past
answers is empty before each temperature.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, product
from math import comb
from typing import Annotated

import torch
import typer
from torch import Tensor
from torch.nn.functional import pad

from benchmarks.draft_records import SteeredDrafter
from benchmarks.kinds import Kind, KindNames, kinds_of
from benchmarks.rivals import cell_of
from drafters.network.blocks import TrainedWeights
from drafters.protocol import Noise
from drafters.tree import Candidates, DraftTree
from kernels.lattice import Lattice, Picked, StartNodes
from kernels.ops import Ops
from kernels.trees import accumulated, ancestor_matrix, likeliest_nodes
from service.assembly import Assembly
from service.bench import experiment
from service.bench.commands import AnswerTokens, MorePromptFiles, Out, PromptFiles, Seed, Temperatures, numbers
from service.bench.driver import Run, generate
from service.bench.experiment import PLAIN, Contestant, Measure, Row, rate_ratio, speed_ratio
from service.config import LoadedConfig
from service.engine.budget import FixedBudget

TREE, CHAIN, AGAIN = "tree", "chain", "again"


class Chains(SteeredDrafter):
    """Keeps one chain of each of a drafter's trees."""

    count = 1  # largest number of nodes

    def grow(self, rows: Tensor, noise: Noise) -> Candidates:
        """As `Drafter`. rows [batch] int64"""
        return chain_of(super().grow(rows, noise), self.count)


def chain_of(tree: DraftTree, count: int) -> DraftTree:
    """Return each tree's path of at most `count` nodes with the largest sum of survival."""
    if tree.width == 0:
        return tree
    sums = accumulated(pad(tree.survival, (0, 1)), tree.parents, torch.add)
    end = sums.masked_fill(~tree.valid | (tree.depths > count), -1.0).argmax(1)
    path = ancestor_matrix(tree.parents)[torch.arange(tree.batch), end] & tree.valid
    return likeliest_nodes(tree._replace(survival=tree.survival * path), tree.width)[0]


def chain_weights(weights: TrainedWeights, count: int) -> TrainedWeights:
    """Return these weights with ops by which every forward adds one block at the end of the one before, and with as
    many forwards as a chain of so many nodes needs."""
    network, config = copy.copy(weights.network), weights.network.config
    grow, further = network.ops.grow_lattice, config.trained_blocks > 1 and not network.traits.one_forward

    def grown(
        origin: StartNodes, tokens: Tensor, predicted: Tensor, trust: Tensor, first: int, least: float, starts: int
    ) -> tuple[Lattice, Picked]:
        block, ranks = trust.shape
        likeliest = torch.where(torch.arange(ranks) == 0, predicted, 0.0)
        lattice, _ = grow(origin, tokens, likeliest, trust, first, least, starts)
        end = torch.full((len(tokens), starts), (block - 1) * ranks)
        begun = StartNodes(first + end, lattice.depths.gather(1, end), lattice.survival.gather(1, end))
        return lattice, Picked(begun, tokens.flatten(1).gather(1, end), torch.zeros_like(end), end // ranks)

    network.ops = Ops(**{**vars(network.ops), "grow_lattice": grown})
    blocks = -(-count // config.block_size) if further else weights.blocks
    return replace(weights, network=network, blocks=blocks, starts=1)


def run(
    loaded: LoadedConfig,
    kinds: KindNames,
    prompts: PromptFiles,
    more_prompts: MorePromptFiles = None,
    limit: Annotated[int, typer.Option(min=1, help="Prompts of each file.")] = 5,
    temperature: Temperatures = [0.0, 1.0],  # noqa: B006  # read as a signature, never changed
    max_tokens: AnswerTokens = 64,
    nodes: Annotated[str, typer.Option(metavar="N,...", help="Nodes of trees and chains.")] = "2,4,8,16",
    seed: Seed = 0,
    out: Out = None,
) -> bool:
    """Compare trees with chains of the same drafter: tokens a forward, and seconds. Exit code 1 if any token differs
    from plain decoding."""
    counts, rows = sorted(numbers(nodes)), list[Row]()
    measures = [Measure(value, max_tokens, 1, seed) for value in temperature]
    for kind in kinds_of(kinds):
        folder = kind.folder or loaded.config.drafter_path
        largest = max(loaded.config.max_budget, *counts)
        changes = {"drafter": kind.name, "drafter_path": folder, "max_budget": largest, "budget_policy": "fixed"}
        assembly = experiment.prepare(loaded.config.model_copy(update=changes), out)
        sets = experiment.read_sets(assembly, (*prompts, *(more_prompts or ())), limit, max_tokens)
        chosen = list(chain.from_iterable(one.prompts for one in sets))
        rows += _rows_of(assembly, kind, chosen, measures, counts)
    differ = sum(row["mismatched_tokens"] for row in rows)
    columns = [(name, partial(cell_of, name)) for name in rows[0] if name != "mismatched_tokens"]
    table = experiment.table_of(columns, rows, caption=_CAPTION, section=lambda row: (row["kind"], row["temperature"]))
    return experiment.conclude(assembly, out, rows, {"mismatched_tokens": differ, "prompts": len(chosen)}, table)


def _rows_of(
    assembly: Assembly,
    kind: Kind,
    prompts: Sequence[Sequence[int]],
    measures: Sequence[Measure],
    counts: Sequence[int],
) -> list[Row]:
    """Return a row for each temperature and number of nodes."""
    contestants: dict[str, Contestant] = {PLAIN: partial(generate, experiment.plain_engine(assembly))}
    drafters: list[SteeredDrafter] = []
    for shape, count in (*product((TREE, CHAIN), counts), (AGAIN, counts[-1])):
        weights, steer = assembly.weights, SteeredDrafter if shape != CHAIN else Chains
        if shape == CHAIN and weights is not None:
            weights = chain_weights(weights, count)
        drafters.append(steer(assembly.drafter(weights=weights)))
        vars(drafters[-1]).update(hides_times=True, count=count)
        engine = assembly.engine(drafters[-1].as_drafter(), FixedBudget(count))
        contestants[f"{shape} {count}"] = partial(generate, engine)
    experiment.warm_up(contestants, prompts[0], measures[0])
    runs = list[dict[str, list[Run]]]()
    with experiment.counted(len(measures) * len(prompts), kind.title) as advance:
        for measure in measures:
            for drafter in drafters:
                drafter.drafter.forget()
            runs.append(experiment.take_turns(prompts, contestants, measure, advance))
    return [
        {"kind": kind.title, "temperature": measure.temperature, "nodes": count, **compared(mine, count, counts)}
        for measure, mine in zip(measures, runs, strict=True)
        for count in counts
    ]


def compared(runs: Mapping[str, Sequence[Run]], count: int, counts: Sequence[int]) -> Row:
    """Compare trees of so many nodes with chains of as many in tokens a forward, and with the fastest chain of at most
    as many in tokens a second, and both with plain decoding."""
    tree, deepest = runs[f"{TREE} {count}"], runs[f"{CHAIN} {count}"]
    chains = {depth: runs[f"{CHAIN} {depth}"] for depth in counts if depth <= count}
    fastest = max(chains, key=lambda depth: speed_ratio(chains[depth], runs[PLAIN])[0])
    more, fewer, p = sign_test(tree, deepest)
    return {
        "tree_tokens": experiment.tau(tree),
        "chain_tokens": experiment.tau(deepest),
        "tree_nodes": _nodes(tree),
        "chain_nodes": _nodes(deepest),
        "tokens": rate_ratio(_rates(tree), _rates(deepest)),
        "prompts_more": more,
        "prompts_fewer": fewer,
        "sign_test_p": p,
        "fastest_chain": fastest,
        "seconds": speed_ratio(tree, chains[fastest]),
        "tree_over_plain": speed_ratio(tree, runs[PLAIN]),
        "chain_over_plain": speed_ratio(chains[fastest], runs[PLAIN]),
        "noise": speed_ratio(runs[f"{AGAIN} {counts[-1]}"], runs[f"{TREE} {counts[-1]}"]),
        "mismatched_tokens": sum(experiment.mismatches(runs[PLAIN], some) for some in (tree, deepest)),
    }


def _rates(runs: Sequence[Run]) -> list[tuple[float, float]]:
    steps = [[count for answer in run.answers for count in answer.accepted_per_step] for run in runs]
    return [(len(some) + sum(some), len(some)) for some in steps]


def _nodes(runs: Sequence[Run]) -> float:
    drafted = [step.stats.drafted_nodes for run in runs for step in run.steps if step.stats.drafts]
    return sum(drafted) / max(1, len(drafted))


def sign_test(mine: Sequence[Run], others: Sequence[Run]) -> tuple[int, int, float]:
    """Return the number of prompts with more and with fewer tokens a forward, and the probability of a split at least
    as uneven if both were equally likely."""
    ratios = [one[0] * other[1] - other[0] * one[1] for one, other in zip(_rates(mine), _rates(others), strict=True)]
    more, fewer = sum(value > 0 for value in ratios), sum(value < 0 for value in ratios)
    tail = sum(comb(more + fewer, count) for count in range(min(more, fewer) + 1)) / 2 ** (more + fewer)
    return more, fewer, min(1.0, 2 * tail)


_CAPTION = (
    "tokens: a forward, over those of a chain of as many nodes; seconds: tokens a second over those of the fastest "
    "chain of at most as many; over_plain: tokens a second over plain decoding's; noise: those "
    "of the largest trees over themselves"
)
