"""`python -m benchmarks decisions FILE...`: the policy of budgets, replayed against tables of prices without a model.

The real policy (`CostBudget` with its gate, ledger and online costs), the survival calibration and the pruning of trees
decide about made-up texts under a virtual clock. Plain decoding, fixed budgets and an oracle see the same texts: the
luck of each token and the errors of the drafter's claims are drawn once per text. Prices and texts, with the sources of
their numbers: benchmarks/decision_worlds.py. What differs between runs of one row is the policy alone.

A step takes the seconds of its forward, of drafting if the drafter ran, and what it takes outside of both. Answers that
end are followed by others at once, whose prompts are read, 256 rows a step, in steps of the others. All contestants
emit as many tokens as plain decoding.

Legend: depth = nodes of a chain.
"""

from collections.abc import Sequence
from itertools import product
from pathlib import Path
from statistics import fmean, geometric_mean
from typing import Annotated, Protocol

import numpy as np
import torch
import typer

from benchmarks.decision_worlds import (
    DEAR_ROWS,
    DEPTH,
    LONGEST_PROMPT,
    TEMPERATURES,
    Choice,
    Clock,
    Prices,
    Step,
    Text,
    Times,
    read_prices,
)
from drafters.calibration import SurvivalCalibration
from drafters.decision import RegretLedger
from drafters.tree import ROOT, DraftTree
from kernels.graph_runner import send_floats
from service.bench.commands import Out, Seed, numbers
from service.bench.experiment import Column, Row, counted, report, table_of
from service.conditions import refuse_unwritable, surroundings
from service.config import LoadedConfig
from service.engine.budget import CostBudget, DraftBudget, StepLoad
from service.engine.stats import StepStats
from service.engine.tree_pruning import TreePruning, TreeWidth

FIXED = (1, 2, 3, 5, 8, 16)
_MAX_BUDGET, _SLOTS = 48, 1 << 20  # nodes of a tree by default settings, and more slots than are ever needed
_FIRST = 500  # steps from nothing


class Contestant(Protocol):
    """Decides about the steps of a replay, and may learn from them."""

    def choose(self, step: Step) -> Choice:
        """Choose the trees of a step; may sort its decoding texts."""

    def learn(self, step: Step, choice: Choice, times: Times, lengths: Sequence[int]) -> None:
        """Learn from the seconds of a step and the accepted length of each decoding text."""


class Fixed:
    """The drafter always runs, and each text has so many nodes; 0: plain decoding."""

    def __init__(self, prices: Prices, nodes: int) -> None:
        widths = TreeWidth(_MAX_BUDGET, captured=prices.captured).choices
        self._nodes = nodes
        self._width = None if widths is None else min(width for width in widths if width >= nodes)

    def choose(self, step: Step) -> Choice:
        """As `Contestant`."""
        nodes = [min(self._nodes, text.deepest) for text in step.decoding]
        rows = sum(nodes) if self._width is None else self._width * len(nodes)
        return Choice(nodes, rows, len(nodes) if self._nodes else 0, self._nodes > 0)

    def learn(self, step: Step, choice: Choice, times: Times, lengths: Sequence[int]) -> None:
        """No-op."""


class Oracle:
    """Knows true prices and acceptance, and maximises the expected tokens per second of each step as the policy does:
    seconds of prompt rows, which are paid anyway, do not count."""

    def __init__(self, prices: Prices) -> None:
        self._prices, self._widths = prices, TreeWidth(_MAX_BUDGET, captured=prices.captured).choices

    def choose(self, step: Step) -> Choice:
        """As `Contestant`."""
        batch, prices = len(step.decoding), self._prices
        if not batch:
            return Choice([], 0, 0, followed=False)
        allowed = np.arange(DEPTH) < np.array([text.deepest for text in step.decoding])[:, None]
        survival = np.stack([text.survival for text in step.decoding]) * allowed  # [decoding, depth]
        if self._widths is None:
            expected = np.append(0.0, np.sort(survival, None)[::-1].cumsum())
            nodes = np.arange(survival.size + 1)
        else:
            expected = np.append(0.0, survival.sum(0).cumsum())[np.minimum(self._widths, DEPTH)]
            nodes = batch * np.array(self._widths)
        rows = (step.num_rows + nodes).astype(float)
        forwards = prices.verify.verify_seconds(rows, step.context, step.num_sequences)
        alone = float(prices.verify.verify_seconds(np.array([float(batch)]), step.context, batch)[0])
        seconds = forwards - forwards[0] + alone + prices.other(step.num_sequences, drafted=False)
        more = prices.other(step.num_sequences, drafted=True) - prices.other(step.num_sequences, drafted=False)
        seconds[1:] += prices.drafts.draft_seconds(batch) + more
        best = int(((batch + expected) / seconds).argmax())
        if not best:
            return Choice([0] * batch, 0, 0, followed=False)
        if self._widths is None:
            kept = np.zeros(survival.size, dtype=int)
            kept[np.argsort(-survival, None, kind="stable")[:best]] = 1
            return Choice(kept.reshape(survival.shape).sum(1).tolist(), best, batch, followed=True)
        return Choice(np.minimum(allowed.sum(1), self._widths[best]).tolist(), int(nodes[best]), batch, followed=True)

    def learn(self, step: Step, choice: Choice, times: Times, lengths: Sequence[int]) -> None:
        """No-op."""


class Policy:
    """The engine's policy from nothing, as `DraftStage` (service/engine/drafting.py) drives it."""

    def __init__(self, prices: Prices, batch: int, rng: np.random.Generator) -> None:
        self.ledger = RegretLedger()
        self.policy = CostBudget(*prices.measured(rng), self.ledger)
        self.width = TreeWidth(_MAX_BUDGET, captured=prices.captured)
        self.pruning = TreePruning(SurvivalCalibration(), max_batch=batch, width=self.width)
        self._budget: DraftBudget

    def choose(self, step: Step) -> Choice:
        """As `Contestant`."""
        load = StepLoad(
            num_rows=step.num_rows,
            context=step.context,
            free_slots=_SLOTS,
            num_sequences=step.num_sequences,
            decoding=tuple(text.gain for text in step.decoding),
            prefilling=tuple(text.gain for text in step.reading),
            tree_widths=self.width.choices,
        )
        self._budget = budget = self.policy.decide(load, starts=step.starts)
        drafting = {id(gain) for gain in budget.load.drafting}
        step.decoding.sort(key=lambda text: id(text.gain) not in drafting)
        budget.num_nodes = budget.node_rows = (0,) * step.num_sequences
        nodes = [0] * len(step.decoding)
        if budget.drafted:
            nodes = self._prune(step, budget)
        drafted = budget.load.num_drafting if budget.drafted else 0
        return Choice(nodes, sum(budget.node_rows), drafted, budget.followed)

    def _prune(self, step: Step, budget: DraftBudget) -> list[int]:
        """Draft, and prune to the budget. # -> nodes of each decoding text"""
        batch, drafting = len(step.decoding), budget.load.num_drafting
        places, runs = torch.arange(DEPTH).expand(batch, -1), (torch.arange(batch) < drafting)[:, None]
        survival = torch.tensor(np.stack([text.claims for text in step.decoding]), dtype=torch.float32) * runs
        counts = DEPTH * runs[:, 0]
        chains = DraftTree(places * runs, (places - 1) * runs + ROOT * ~runs, (places + 1) * runs, survival, counts)
        seconds = send_floats(survival.device, budget.seconds(budget.load, chains.tokens.numel()))
        width = self.width.choose(chains, budget.load.free_slots, budget.max_nodes)
        deepest = torch.tensor([text.deepest for text in step.decoding])
        most = torch.full((batch,), min(_MAX_BUDGET, budget.max_nodes))
        _, sizes = self.pruning.prune(chains, deepest, most, seconds, torch.ones(batch), width)
        rows = self.width.node_rows(sizes, width)
        wanted, kept, useful = zip(*sizes.tolist(), strict=True)
        self.width.learn(wanted)
        if not any(kept):
            budget.reason = "does_not_pay" if any(useful) else "no_candidates"
        reading = (0,) * len(step.reading)
        budget.node_rows, budget.num_nodes = (*rows, *reading), (*kept, *reading)
        return list(kept)

    def learn(self, step: Step, choice: Choice, times: Times, lengths: Sequence[int]) -> None:
        """As `Contestant`."""
        if self._budget.drafted and choice.node_rows:
            found = torch.tensor(lengths)
            after = torch.arange(DEPTH + 1)
            self.pruning.learn(after.where(after < found[:, None], DEPTH + 1), found + 1)
        accepted = tuple(length for length, count in zip(lengths, choice.nodes, strict=True) if count)
        stats = StepStats(
            prompt_tokens=step.num_rows - len(step.decoding),
            emitted_tokens=len(lengths) + sum(lengths),
            drafts=len(accepted),
            drafted_nodes=sum(choice.nodes),
            accepted_tokens=sum(lengths),
            accepted_per_sequence=accepted,
            accepted_by_source={},
            budget_reason=self._budget.reason,
            draft_seconds=times.draft,
            verify_seconds=times.verify,
            other_seconds=times.other,
            follow_seconds=times.follow,
            preemptions=0,
        )
        self.policy.learn(self._budget, stats)
        self.ledger.accrue(stats.seconds)


class Replay:
    """A contestant, and the time and tokens of its steps."""

    def __init__(self, prices: Prices, batch: int, temperature: float, seed: int, contestant: Contestant) -> None:
        self._temperature, self._seed, self._contestant = temperature, seed, contestant
        self._clock = Clock(prices, np.random.default_rng([seed, 1]))
        self._begun = 0
        self._texts = [self._next() for _ in range(batch)]
        self.seconds, self.tokens = [0.0], [0]  # since the start, after each step
        self.drafted: list[bool] = []

    def run(self, *, steps: int | None = None, tokens: int = 0) -> "Replay":
        """Step so often, or until there are so many tokens."""
        while len(self.drafted) < steps if steps is not None else self.tokens[-1] < tokens:
            self._step()
        return self

    def seconds_until(self, tokens: float) -> float:
        """Seconds until so many tokens were there."""
        return float(np.interp(tokens, self.tokens, self.seconds))

    def _next(self) -> Text:
        self._begun += 1
        return Text(self._temperature, np.random.default_rng([self._seed, 2, self._begun]))

    def _step(self) -> None:
        decoding, reading, room = [text for text in self._texts if not text.unread], list[Text](), LONGEST_PROMPT
        starts = False
        for text in self._texts:
            if text.unread and room:
                starts |= text.unread == text.prompt
                took = min(text.unread, room)
                text.unread, room = text.unread - took, room - took
                reading.append(text)
        context = fmean(text.prompt - text.unread + text.emitted for text in (*decoding, *reading))
        step = Step(decoding, reading, len(decoding) + LONGEST_PROMPT - room, context, starts)
        choice = self._contestant.choose(step)
        lengths = [text.accepted(nodes) for text, nodes in zip(step.decoding, choice.nodes, strict=True)]
        times = self._clock.times(step, choice)
        self.seconds.append(self.seconds[-1] + times.verify + times.draft + times.other)
        done = sum(text.unread == 0 for text in reading)
        self.tokens.append(self.tokens[-1] + len(lengths) + sum(lengths) + done)
        self.drafted.append(choice.drafting > 0)
        self._contestant.learn(step, choice, times, lengths)
        for text, length in zip(step.decoding, lengths, strict=True):
            text.emitted += 1 + length
        for text in reading:
            text.emitted += not text.unread
        self._texts = [text if text.emitted < text.length else self._next() for text in self._texts]


def measure(prices: Prices, batch: int, temperature: float, *, steps: int, seeds: Sequence[int]) -> Row:
    """Replay all contestants, once per seed. # -> figures of the policy over the others, geometric means"""
    found = dict[str, list[float]]()
    best = list[str]()
    for seed in seeds:
        place = prices, batch, temperature, seed
        plain = Replay(*place, Fixed(prices, 0)).run(steps=steps)
        end = plain.tokens[-1]
        fixed = {nodes: Replay(*place, Fixed(prices, nodes)).run(tokens=end) for nodes in FIXED}
        oracle = Replay(*place, Oracle(prices)).run(tokens=end)
        policy = Replay(*place, Policy(prices, batch, np.random.default_rng([seed, 3]))).run(tokens=end)
        first = policy.tokens[min(_FIRST, len(policy.tokens) - 1)]
        for name, until in (("", end), ("first_", min(first, end))):
            mine = policy.seconds_until(until)
            over = {nodes: one.seconds_until(until) for nodes, one in fixed.items()}
            found.setdefault(f"{name}over_plain", []).append(plain.seconds_until(until) / mine)
            found.setdefault(f"{name}over_fixed", []).append(min(over.values()) / mine)
            found.setdefault(f"{name}over_oracle", []).append(oracle.seconds_until(until) / mine)
        best.append(str(min(fixed, key=lambda nodes: fixed[nodes].seconds_until(end))))
        found.setdefault("drafted", []).append(1e-9 + fmean(policy.drafted))
        found.setdefault("oracle_drafted", []).append(1e-9 + fmean(oracle.drafted))
    figures = {name: geometric_mean(values) for name, values in found.items()}
    return {
        "prices": prices.name,
        "sequences": batch,
        "temperature": temperature,
        **figures,
        "best_fixed": "/".join(best),
    }


def run(
    loaded: LoadedConfig,
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="Reports of prices.", exists=True)],
    sequences: Annotated[str, typer.Option(metavar="N,...", help="Texts at a time.")] = "1,4,16,64",
    steps: Annotated[int, typer.Option(min=1, help="Plain steps of each replay.")] = 3000,
    seeds: Annotated[int, typer.Option(min=1, help="Replays of each row, with other texts.")] = 2,
    eager: Annotated[bool, typer.Option("--eager", help="GPUs run more than 32 rows kernel by kernel.")] = False,
    seed: Seed = 0,
    out: Out = None,
) -> bool:
    """Replay the policy of budgets against prices, over plain decoding, the best fixed budget and an oracle."""
    refuse_unwritable(out)
    machines = [*(one for file in files for one in read_prices(file, eager=eager)), DEAR_ROWS]
    cells = list(product(machines, numbers(sequences, "--sequences"), TEMPERATURES))
    rows = []
    with counted(len(cells), "rows") as advance:
        for prices, batch, temperature in cells:
            rows.append(measure(prices, batch, temperature, steps=steps, seeds=range(seed, seed + seeds)))
            advance(1)
    summary = {f"least_{name}": min(row[name] for row in rows) for name, _ in _RATIOS}
    summary["mean_over_oracle"] = geometric_mean([row["over_oracle"] for row in rows])
    return report(surroundings(), out, rows, summary, table_of(_COLUMNS, rows, section=lambda row: row["prices"]))


_RATIOS = [
    (f"{part}over_{other}", f"{title} over {other}")
    for part, title in (("", "all"), ("first_", f"first {_FIRST}"))
    for other in ("plain", "fixed", "oracle")
]
_COLUMNS: tuple[Column, ...] = (
    ("prices", lambda row: row["prices"]),
    ("texts", lambda row: str(row["sequences"])),
    ("T", lambda row: f"{row['temperature']:g}"),
    *((title, lambda row, name=name: f"{row[name]:.3f}") for name, title in _RATIOS),
    ("drafted", lambda row: f"{row['drafted']:.2f}"),
    ("by the oracle", lambda row: f"{row['oracle_drafted']:.2f}"),
    ("best fixed", lambda row: row["best_fixed"]),
)
