"""The budget of a step: which sequences draft, whether the drafter runs, and how many drafted nodes are verified. A
matter of speed only: no choice changes the text.

By cost: one decision for the whole batch, made anew in every step. With candidates of all sequences sorted by survival,
S(N) the sum of the first N, B drafting sequences (or their weights) and R rows without nodes:

    N* = argmax_N (B + S(N)) / (T_draft + T(B) + T_verify(R + N) - T_verify(R))

Where steps are captured, every tree has rows for the same number of nodes w, one of a few: N = B * w and S counts the
w likeliest nodes of each sequence.

T(B) is what a plain step of these B sequences takes; prompt rows of the same step are paid anyway and do not count.
"""

import json
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from drafters.decision import GainPosterior, RegretLedger
from drafters.tree import MAX_NODES
from service.engine.costs import CostTable, DraftCosts, FloatArray, OnlineCosts, OnlineDraftCosts, write_whole
from service.engine.draft_gate import DraftGate, SequenceGain
from service.engine.stats import DraftingOutlook, StepStats

logger = logging.getLogger(__name__)

REASONS = ("no_candidates", "does_not_pay", "cost", "fixed", "slots", "suspended", "reference", "forced")
"""Why a step has as many nodes as it has, as metrics name it."""

_PLAIN_SURE = 0.03
"""Standard deviation up to which a plain step is known well enough: a third of that of a gain that is seen all the time
(0.09, drafters/decision.py). The next one is learnt from some five steps later."""
_MOST_TIMES = 1.5  # cap on a step's seconds, in expected ones: a hiccup of the machine says nothing of the drafter
_NO_PRICES = np.empty(0)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLoad:
    """Rows and sequences of a step before any node is drafted."""

    num_rows: int  # rows of the forward without nodes: roots and prompt chunks
    context: float  # mean context length of the step's sequences, tokens
    free_slots: int  # most nodes in all
    num_sequences: int
    decoding: tuple[SequenceGain, ...]  # those that run the drafter stand first
    prefilling: tuple[SequenceGain, ...] = ()
    num_drafting: int = 0  # how many of `decoding` run the drafter
    tree_widths: tuple[int, ...] | None = None  # nodes that rows of a tree may be laid out for, from 0; None: any

    @property
    def num_decoding(self) -> int:
        """Sequences that may have a tree."""
        return len(self.decoding)

    @property
    def drafting(self) -> tuple[SequenceGain, ...]:
        """The sequences that run the drafter."""
        return self.decoding[: self.num_drafting]

    @property
    def skipped(self) -> tuple[SequenceGain, ...]:
        """The decoding sequences that do not run the drafter."""
        return self.decoding[self.num_drafting :]

    @property
    def obstacle(self) -> str | None:
        """Why no sequence can have a tree, one of REASONS; None: some can."""
        if not any(one.may_draft for one in self.decoding):
            return "no_candidates"
        smallest = 1 if self.tree_widths is None else self.num_decoding * self.tree_widths[1]
        return "slots" if smallest > self.free_slots else None

    def arranged(self, chosen: Collection[SequenceGain]) -> "StepLoad":
        """The load with those decoding sequences first that were chosen to draft."""
        decoding = sorted(self.decoding, key=lambda one: one not in chosen)
        return replace(self, decoding=tuple(decoding), num_drafting=sum(one in chosen for one in decoding))

    def node_rows(self, num_candidates: int) -> FloatArray:
        """Rows of nodes that the step may have, rising from 0. # -> [choices]"""
        if self.tree_widths is None:
            return np.arange(num_candidates + 1.0)
        return np.array(self.tree_widths, dtype=np.float64) * self.num_decoding


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftBudget:
    """What a step drafts and verifies, and why. Tuples have one entry for each sequence of the step.

    `Budget.decide` makes it; the number of nodes follows from the candidates, and their count from the device.
    """

    load: StepLoad
    reason: str  # one of REASONS
    drafted: bool  # whether the drafter runs
    followed: bool  # whether the drafter reads and commits with the step, as some sequence may draft later
    max_nodes: int = MAX_NODES  # most nodes of a tree
    seconds: Callable[[StepLoad, int], FloatArray] = lambda load, num_candidates: _NO_PRICES
    """Seconds of the step by number of nodes, as `CostBudget.step_seconds`; empty where the budget is not by cost."""
    node_rows: tuple[int, ...] = ()  # rows laid out for nodes, padding included
    tree_sizes: Tensor | None = None  # [decoding, SIZES] int64 as of `Pruned`, on the device; None: no trees
    num_nodes: tuple[int, ...] = ()  # nodes verified, once the host knows them

    @property
    def is_plain(self) -> bool:
        """Whether the step is plain decoding: the drafter did not run, and no known token is verified either."""
        return not self.drafted and not any(self.node_rows)

    @property
    def num_rows(self) -> int:
        """Rows of the step's forward, padding of trees included."""
        return self.load.num_rows + sum(self.node_rows)


class Budget(ABC):
    """Decides what each step drafts, and learns from the seconds of steps."""

    is_priced = False  # whether steps have prices: `DraftBudget.seconds`

    @abstractmethod
    def decide(self, load: StepLoad, *, starts: bool) -> DraftBudget:
        """Choose which sequences draft, now or once their prompts are read, and whether the drafter runs in this step.
        The load is arranged by it. `starts`: whether a sequence starts to run."""

    def learn(self, budget: DraftBudget, stats: StepStats) -> float | None:
        """Learn from the seconds of a step, and set the seconds saved in its record. Returns the verify seconds that
        had been predicted; None without predictions."""
        return None

    def outlook(self, load: StepLoad) -> DraftingOutlook | None:
        """Expected gain of drafting at this load, for metrics."""
        return None

    def on_weights_changed(self) -> None:  # noqa: B027  # a default, not a stub
        """Called after the drafter's weights were replaced."""

    def state(self) -> Any:
        """Serializable state for `restore`, as JSON."""
        return None

    def restore(self, state: Any, age_seconds: float) -> None:  # noqa: B027  # a default, not a stub
        """Begin with a state of `age_seconds` ago. Raises ValueError, KeyError or TypeError for anything else, and then
        changes nothing."""


class FixedBudget(Budget):
    """The same number of nodes in every step, or one for each number of decoding sequences."""

    def __init__(self, nodes: int | Mapping[int, int]) -> None:
        """A mapping gives the nodes of each sequence from that many sequences on; it must have a key 1."""
        table = {1: nodes} if isinstance(nodes, int) else nodes
        assert 1 in table, "the table has no entry for a single sequence"
        self._nodes_from = sorted(table.items())

    def decide(self, load: StepLoad, *, starts: bool) -> DraftBudget:
        nodes = [nodes for batch, nodes in self._nodes_from if batch <= max(1, load.num_decoding)][-1]
        drafts = any(nodes for _, nodes in self._nodes_from)
        chosen = {one for one in (*load.decoding, *load.prefilling) if drafts and one.may_draft}
        return DraftBudget(
            load=load.arranged(chosen),
            reason=load.obstacle or "fixed",
            drafted=nodes > 0 and load.obstacle is None,
            followed=bool(chosen),
            max_nodes=nodes,
        )


class CostBudget(Budget):
    """The number of nodes that maximises expected tokens per second over the whole batch; none is plain decoding.

    Every N is looked at, because cost curves are staircases. Whether the drafter runs is decided by what whole steps
    gained over plain ones of the same sequences. A plain step is taken as a baseline where its uncertainty is the
    larger part of the doubt in a gain that may be none.
    """

    is_priced = True

    def __init__(self, costs: CostTable, drafts: DraftCosts, ledger: RegretLedger) -> None:
        """`ledger`: the server's, in which drafters have accounts too."""
        self._costs = OnlineCosts(costs)
        self._drafts = OnlineDraftCosts(drafts)
        self.gate = DraftGate(ledger, float(costs.verify_seconds(np.ones(1), 0.0)[0]))
        self._was_plain = False  # the last step
        self._step_seconds = 0.0  # seconds of the last step without a prompt

    def decide(self, load: StepLoad, *, starts: bool) -> DraftBudget:
        sequences = *load.decoding, *load.prefilling
        # The worst case is a step that emits no more than a plain one, and so loses a part of itself.
        drafts = self.gate.choose(sequences, starts=starts, step_seconds=self._step_seconds)
        chosen = {one for one, drafting in zip(sequences, drafts, strict=True) if drafting and one.may_draft}
        load = load.arranged(chosen)
        reason = load.obstacle or self._reason(load)
        return DraftBudget(
            load=load, reason=reason, drafted=reason == "cost", followed=bool(chosen), seconds=self.step_seconds
        )

    def step_seconds(self, load: StepLoad, num_candidates: int) -> FloatArray:
        """Seconds of a step with each of `load.node_rows`, without what its prompt rows take; infinite above the free
        slots. # -> [choices]"""
        nodes = load.node_rows(num_candidates)
        verify = self._costs.verify_seconds(load.num_rows + nodes, load.context, load.num_sequences)
        draft = self._drafts.draft_seconds(load.num_drafting) if load.num_drafting else 0.0
        seconds: FloatArray = verify + (draft + self._plain_seconds(load) - verify[0])
        if nodes[-1] > load.free_slots:
            seconds[nodes > load.free_slots] = np.inf
        return seconds

    def on_weights_changed(self) -> None:
        self.gate.on_weights_changed()

    def learn(self, budget: DraftBudget, stats: StepStats) -> float | None:
        load = budget.load
        stats.saved_seconds = 0.0
        if load.num_rows == load.num_decoding:
            self._step_seconds = stats.seconds
        if self._is_known(budget):
            self.gate.skip(load.decoding, load.num_sequences)
            self._forwards(load).advance()
            return None
        # Learnt first: what a step took must not become what it was expected to take.
        if budget.drafted:
            self._learn_drafted(budget, stats)
        elif load.num_decoding:
            self._learn_plain(budget, stats)
        predicted = self._costs.learn(budget.num_rows, load.context, load.num_sequences, stats.verify_seconds)
        self._was_plain = budget.is_plain
        return predicted

    def outlook(self, load: StepLoad) -> DraftingOutlook:
        return self.gate.outlook((*load.decoding, *load.prefilling), load.num_sequences)

    def state(self) -> Any:
        return self.gate.decision.state()

    def restore(self, state: Any, age_seconds: float) -> None:
        self.gate.restore(state, age_seconds)

    def _reason(self, load: StepLoad) -> str:
        """Why the drafter runs or not, where trees are possible."""
        if not load.num_drafting:
            return "suspended"
        return "reference" if self.gate.needs_plain_step(load.drafting, load.num_sequences) else "cost"

    def _is_known(self, budget: DraftBudget) -> bool:
        """Whether to skip learning from this plain step: its time is known well, and learning takes 3 % of a small
        model's step."""
        load, alone = budget.load, budget.is_plain and not budget.followed and self._was_plain
        return alone and load.num_rows == load.num_decoding and self._forwards(load).sd < _PLAIN_SURE

    def _plain_seconds(self, load: StepLoad) -> float:
        """Seconds of a plain step of the decoding sequences alone, without the prompts of the same step."""
        return self._forward_seconds(load) * self._forwards(load).mean

    def _forward_seconds(self, load: StepLoad) -> float:
        batch = max(1, load.num_decoding)
        return self._costs.forward_seconds(batch, load.context, batch)

    def _forwards(self, load: StepLoad) -> GainPosterior:
        """Posterior of a plain step's seconds, in predicted forwards of the decoding sequences alone."""
        return self.gate.decision.baseline(load.num_sequences)

    def _learn_plain(self, budget: DraftBudget, stats: StepStats) -> None:
        """Update the baseline by a plain step, and charge the drafter's time to follow it."""
        load = budget.load
        if budget.followed:  # a drafter that does not follow takes time too, which no decision could save
            stats.saved_seconds = -stats.follow_seconds
            for one in load.decoding:
                self.gate.settle(one.traffic, -stats.follow_seconds / load.num_decoding)
        self.gate.skip(load.decoding, load.num_sequences)
        # A plain step right after one with drafts finds the rows of these in the caches.
        if self._was_plain and budget.is_plain:
            whole = self._costs.forward_seconds(load.num_rows, load.context, load.num_sequences)
            # The decoding share of the verify: a difference would carry the error of all prompt rows.
            others = stats.seconds - stats.verify_seconds - stats.follow_seconds
            self._forwards(load).observe(stats.verify_seconds / whole + others / self._forward_seconds(load))

    def _learn_drafted(self, budget: DraftBudget, stats: StepStats) -> None:
        """Enter the gain of a step: the plain steps that its accepted tokens save, less its time beyond one plain
        step."""
        load = budget.load
        context, sequences = load.context, load.num_sequences
        predicted = self._costs.forward_seconds(budget.num_rows, context, sequences)
        without_nodes = min(predicted, self._costs.forward_seconds(load.num_rows, context, sequences))
        forward, forwards = self._forward_seconds(load), self._forwards(load)
        plain, prompts = forward * forwards.mean, without_nodes - forward
        draft = self._drafts.learn(load.num_drafting, stats.draft_seconds)
        expected = draft + predicted + plain - forward
        seconds = min(draft + stats.verify_seconds + stats.other_seconds, _MOST_TIMES * expected)
        extra = seconds - prompts - plain
        drafting, one_step = load.drafting, plain / load.num_decoding  # seconds of a plain step per sequence
        accepted = _accepted_lengths(budget, stats)[: len(drafting)]
        # Leaving out one of several sequences would save what its nodes take.
        per_node = max(0.0, stats.verify_seconds - without_nodes) / max(1, sum(budget.num_nodes))
        own_extra = [extra] if len(drafting) == 1 else [per_node * count for count in budget.num_nodes[: len(drafting)]]
        gains = [length - extra / len(drafting) / one_step for length in accepted]
        stats.saved_seconds = sum(gains) * one_step
        for one, gain in zip(drafting, gains, strict=True):
            self.gate.settle(one.traffic, gain * one_step)
        own_gains = [length - own / one_step for length, own in zip(accepted, own_extra, strict=True)]
        self.gate.observe(drafting, gains, own_gains, sequences, all_drafted=not load.skipped)
        self.gate.skip(load.skipped, sequences)
        forwards.advance()


def _accepted_lengths(budget: DraftBudget, stats: StepStats) -> list[int]:
    """Accepted length of each decoding sequence, 0 where its tree had no nodes."""
    accepted = iter(stats.accepted_per_sequence)
    return [next(accepted) if count else 0 for count in budget.num_nodes[: budget.load.num_decoding]]


def restore_gains(policy: Budget, file: Path, now: float | None = None) -> None:
    """Restore the gains that an earlier start saved, widened by their age. A missing file is skipped, a damaged one is
    skipped with a warning."""
    try:
        content = json.loads(file.read_text())
        policy.restore(content["state"], max(0.0, (now or time.time()) - float(content["saved"])))
        logger.info("gains of drafting restored from %s", file)
    except FileNotFoundError:
        return
    except (OSError, ValueError, KeyError, TypeError) as error:
        logger.warning("gains in %s cannot be read (%s): drafting is learnt anew", file, error)


def keep_gains(policy: Budget, file: Path) -> None:
    """Save the gains for the next start."""
    write_whole(file, {"saved": time.time(), "state": policy.state()})
