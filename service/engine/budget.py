"""The budget of a step: how many drafted nodes the next step verifies, and why. It changes the speed, never the text.

Who drafts: `DraftGate.choose`. A sequence drafts while the upper bounds of the mean gain of its class and of its own
steps are positive; in a losing class only in its trial steps, or while its own mean gain is positive. How much a class
may lose stands in its ledger (drafters/decision.py).

How many nodes: `CostBudget`, the default, maximises the expected tokens per second of the whole batch:

    N* = argmax_N (B + S(N)) / (T_draft + T(B) + T_verify(R + N) - T_verify(R))

B is the number of decoding sequences, S(N) the sum of the N highest survival probabilities of all their candidates, R
the rows without nodes, T(B) the seconds of a plain step of these sequences (prompt rows of the step are paid anyway and
cancel). If a pace is promised, each sequence's terms of B and S are weighted by `pace_weights` (drafting.py). The
denominator is `CostBudget.step_seconds`. S and the argmax are computed on the device by `allocate_nodes`
(kernels/survival.py) from survival as calibration corrects it; if N* exceeds the number of sequences, each one's best
node is among them. `FixedBudget` has no argmax: every tree gets the configured number, as far as there are candidates.

Limits: `DraftStage._limits` (drafting.py) bounds each tree by the settings' and the request's `max_budget`, and its
depth by the tokens left to emit. Under load the nodes must fit into the free slots, and with recurrent layers into the
room for their inputs (states.py), which counts as so many slots: `step_seconds` is infinite above them, and
`DraftStage._pruned` cuts fixed budgets to equal shares of them.

Captured steps lay out their rows before N* is known. All trees have one width, the least captured one that holds what
the step before wanted (`TreeWidth.choose`, tree_pruning.py), and are filled with their likeliest nodes, as padding
costs the same. N* of this step (`allocate_width`, kernels/survival.py) sets the width of the next. So such a step
verifies nodes even where N* is 0, unless not even the least width fits into the free slots.

Reasons (`REASONS`), with the function that decides on each:

- "cost", "fixed": the drafter ran, by the budget of that kind; "fixed" also if the configured number is 0 (`decide`).
- "no_candidates": no request wants drafts (`StepLoad.obstacle`); or a failed step is repeated, or losses cannot be
  entered in the ledger (`DraftStage.draft`); or the drafter proposed nothing (`DraftStage.count_nodes`).
- "slots": the smallest tree does not fit (`StepLoad.obstacle`), or a fixed budget was cut (`DraftStage._pruned`).
- "suspended": no sequence drafts (`DraftGate.choose`); "forced": the same, but known tokens of grammars or of resumed
  streams are verified without the drafter (`DraftStage.draft`).
- "reference": a plain step that measures the baseline of gains (`DraftGate.needs_plain_step`).
- "does_not_pay": the drafter ran, and no node was worth verifying (`DraftStage.count_nodes`); or captured trees
  of the least width cannot pay (`CostBudget._widest`).
"""

import json
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
from torch import Tensor

from drafters.decision import GainPosterior, RegretLedger
from drafters.tree import MAX_NODES
from kernels.graph_runner import Numbers
from service.engine.costs import CostTable, DraftCosts, FloatArray, OnlineCosts, OnlineDraftCosts, write_whole
from service.engine.draft_gate import DraftGate, SequenceGain
from service.engine.stats import DraftingOutlook, StepStats

logger = logging.getLogger(__name__)

REASONS = ("no_candidates", "does_not_pay", "cost", "fixed", "slots", "suspended", "reference", "forced")
"""Reasons for a step's number of nodes, as metrics name them; explained above."""

_PLAIN_SURE = 0.03
"""Standard deviation below which plain steps are not learnt from: a third of the 0.09 that the gain of an action
observed in every step has (drafters/decision.py). Drift raises it above this bound again within some five steps."""
_BROUGHT = partial(GainPosterior, mean=1.0, sd=1.5)
"""Accepted nodes of a text that drafts, in a step: from nothing to the four that drafters bring where they are best."""
_MOST_TIMES = 1.5  # cap on a step's seconds as a multiple of the expected ones, so that a hiccup hardly counts


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLoad:
    """Rows and sequences of a step before any node is drafted."""

    num_rows: int  # rows of the forward without nodes: roots and prompt chunks
    context: float  # mean context length of the step's sequences, tokens
    free_slots: int  # slots left for nodes of all trees
    num_sequences: int
    decoding: tuple[SequenceGain, ...]  # sequences that run the drafter stand first
    prefilling: tuple[SequenceGain, ...] = ()
    num_drafting: int = 0  # number of sequences in `decoding` that run the drafter
    num_unscored: int = 0  # rows of prompts whose scores are not computed
    tree_widths: tuple[int, ...] | None = None  # widths that trees may have, rising from 0; None allows any

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
        """Why no sequence can have a tree, one of REASONS. Returns None if some can."""
        if not any(one.may_draft for one in self.decoding):
            return "no_candidates"
        smallest = 1 if self.tree_widths is None else self.num_decoding * self.tree_widths[1]
        return "slots" if smallest > self.free_slots else None

    def arranged(self, chosen: Collection[SequenceGain]) -> "StepLoad":
        """Return a copy of the load in which the decoding sequences chosen to draft come first."""
        decoding = sorted(self.decoding, key=lambda one: one not in chosen)
        return replace(self, decoding=tuple(decoding), num_drafting=sum(one in chosen for one in decoding))

    def forward_rows(self, num_candidates: int) -> Sequence[int]:
        """Numbers of rows of the forwards that the step can choose from, rising from `num_rows`. # -> [choices]"""
        if self.tree_widths is None:
            return range(self.num_rows, self.num_rows + num_candidates + 1)
        return tuple(self.num_rows + width * self.num_decoding for width in self.tree_widths)


@dataclass(slots=True, kw_only=True)
class DraftBudget:
    """What a step drafts and verifies, and why. Tuples have one entry for each sequence of the step.

    `Budget.decide` creates it; `DraftStage` adds rows and sizes of the trees after pruning, and the numbers of nodes
    after they were read from the device.
    """

    load: StepLoad
    reason: str  # one of REASONS
    drafted: bool  # whether the drafter runs
    followed: bool  # whether the drafter reads the step's tokens, because some sequence drafts now or may do so later
    max_nodes: int = MAX_NODES  # maximum number of nodes of a tree
    seconds: Callable[[StepLoad, int], Numbers] = lambda load, num_candidates: ()
    """Function like `CostBudget.step_seconds`; returns nothing if the number of nodes is not chosen by cost."""
    node_rows: tuple[int, ...] = ()  # rows laid out for nodes, padding included
    tree_sizes: Tensor | None = None  # [decoding, SIZES] int64, see `Pruned`, on the device; None without trees
    num_nodes: tuple[int, ...] = ()  # verified nodes; empty until they are read from the device

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

    is_priced = False  # whether `DraftBudget.seconds` returns the seconds of a step by number of nodes

    @abstractmethod
    def decide(self, load: StepLoad, *, starts: bool) -> DraftBudget:
        """Choose which sequences draft, now or once their prompts are computed, and whether the drafter runs in this
        step. In the budget's load the drafting sequences come first. `starts`: whether a sequence starts to run."""

    def learn(self, budget: DraftBudget, stats: StepStats) -> float | None:
        """Learn from the seconds of a step, and set `stats.saved_seconds`. Returns the verify seconds predicted before
        this update, or None if no prediction was made."""
        return None

    def outlook(self, load: StepLoad) -> DraftingOutlook | None:
        """Expected gain of drafting at this load, for metrics."""
        return None

    def on_weights_changed(self) -> None:  # noqa: B027  # a default, not a stub
        """Called after the drafter's weights were replaced."""


class FixedBudget(Budget):
    """Budget with a configured number of nodes per tree, the same in every step."""

    def __init__(self, nodes: int) -> None:
        self._nodes = nodes

    def decide(self, load: StepLoad, *, starts: bool) -> DraftBudget:
        chosen = {one for one in (*load.decoding, *load.prefilling) if self._nodes and one.may_draft}
        return DraftBudget(
            load=load.arranged(chosen),
            reason=load.obstacle or "fixed",
            drafted=self._nodes > 0 and load.obstacle is None,
            followed=bool(chosen),
            max_nodes=self._nodes,
        )


class CostBudget(Budget):
    """Budget with the number of nodes that maximises the batch's expected tokens per second (see the module docstring).

    The argmax tries every N, because cost curves are staircases. Whether the drafter runs at all is decided before, by
    the measured gain of steps with drafts over plain steps of the same sequences. A plain step is inserted to measure
    that baseline if the sign of the gain is open mainly because the baseline is uncertain.
    """

    is_priced = True

    def __init__(self, costs: CostTable, drafts: DraftCosts, ledger: RegretLedger, *, head_share: float = 0.0) -> None:
        """`costs`, `drafts`: measured seconds to start from; `ledger`: the server's, shared with the drafters;
        `head_share`: see `OnlineCosts`."""
        self._costs = OnlineCosts(costs, head_share)
        self._drafts = OnlineDraftCosts(drafts)
        self.gate = DraftGate(ledger, float(costs.verify_seconds(np.ones(1), 0.0)[0]))
        self._was_plain = False  # whether the last step was plain
        self._resting = 0  # number of sequences for which nothing is decided until one starts or ends; 0 for none
        self._unlearnt = [0, 0]  # plain steps that were not learnt from, and how many more need not be
        self._step_seconds = 0.0  # seconds of the last step without a prompt
        self._brought = _BROUGHT()

    def decide(self, load: StepLoad, *, starts: bool) -> DraftBudget:
        if load.num_sequences == self._resting and not starts:
            return DraftBudget(load=load, reason=load.obstacle or "suspended", drafted=False, followed=False)
        sequences = *load.decoding, *load.prefilling
        # A step with drafts loses at most its own seconds, so the last step's seconds bound the loss.
        drafts = self.gate.choose(sequences, starts=starts, step_seconds=self._step_seconds)
        chosen = {one for one, drafting in zip(sequences, drafts, strict=True) if drafting and one.may_draft}
        self._resting = 0 if chosen or any(one.may_draft_alone for one in sequences) else load.num_sequences
        load = load.arranged(chosen)
        # Captured widths have one price each, whatever the candidates are.
        known = self.step_seconds(load, 0) if load.tree_widths is not None and load.num_drafting else None
        widest = MAX_NODES if known is None else self._widest(load, known)
        reason = load.obstacle or self._reason(load, widest)
        return DraftBudget(
            load=load,
            reason=reason,
            drafted=reason == "cost",
            followed=bool(chosen),
            max_nodes=widest or MAX_NODES,
            seconds=self.step_seconds if known is None else lambda load, num_candidates: known,
        )

    def step_seconds(self, load: StepLoad, num_candidates: int) -> FloatArray:
        """Predicted seconds of the step for each choice of `load.node_rows`, without the time of its prompt rows;
        infinite for more nodes than free slots. # -> [choices]"""
        rows = load.forward_rows(num_candidates)
        verify = self._costs.verify_seconds(rows, load.context, load.num_sequences, load.num_unscored)
        draft = self._drafts.draft_seconds(load.num_drafting) if load.num_drafting else 0.0
        verify += draft + self._plain_seconds(load) - verify[0]
        if rows[-1] - load.num_rows > load.free_slots:
            verify[np.array(rows) - load.num_rows > load.free_slots] = np.inf
        return verify

    def on_weights_changed(self) -> None:
        self.gate.on_weights_changed()
        self._resting = 0
        self._brought = _BROUGHT()

    def learn(self, budget: DraftBudget, stats: StepStats) -> float | None:
        load = budget.load
        stats.saved_seconds = 0.0
        if load.num_rows == load.num_decoding:
            self._step_seconds = stats.seconds
        is_alone = budget.is_plain and not budget.followed
        skipped, most = self._unlearnt
        if is_alone and skipped < most:
            self._unlearnt[0] += 1
            return None
        if skipped:
            self.gate.skip(load.decoding, load.num_sequences, skipped)
            self._forwards(load).advance(skipped)
        # The gate learns before the costs: a step's seconds must not change the prediction it is compared with.
        if budget.drafted:
            self._learn_drafted(budget, stats)
        elif load.num_decoding:
            self._learn_plain(budget, stats)
        sizes = budget.num_rows, load.context, load.num_sequences
        predicted = self._costs.learn(*sizes, stats.verify_seconds, load.num_unscored)
        # Plain steps that are known need not be learnt from: that takes 3 % of a small model's step, and more while the
        # outputs of the step before are sent.
        sure = is_alone and self._was_plain
        self._unlearnt = [0, self._forwards(load).steps_until(_PLAIN_SURE) if sure else 0]
        self._was_plain = budget.is_plain
        return predicted

    def outlook(self, load: StepLoad) -> DraftingOutlook:
        return self.gate.outlook((*load.decoding, *load.prefilling), load.num_sequences)

    def _widest(self, load: StepLoad, seconds: FloatArray) -> int:
        """The largest width of captured trees with which the step can have as many tokens a second as without drafts,
        if these bring what they brought lately, at best. Returns 0 if none can. `seconds`: see `step_seconds`."""
        most = self._plain_seconds(load) * (1 + self._brought.best_case * load.num_drafting / load.num_decoding)
        pairs = zip(load.tree_widths or (), seconds.tolist(), strict=True)  # planned transfer: numpy
        return max(width for width, one in pairs if one <= most or not width)

    def _reason(self, load: StepLoad, widest: int) -> str:
        """Why the drafter runs or does not run, one of REASONS, if trees are possible. `widest`: see `_widest`."""
        if not load.num_drafting:
            return "suspended"
        if not widest:
            self._brought.advance()
            return "does_not_pay"
        return "reference" if self.gate.needs_plain_step(load.drafting, load.num_sequences) else "cost"

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
        """Update the baseline by a plain step, and charge the time in which the drafter read its tokens."""
        load = budget.load
        if budget.followed:  # the seconds of a drafter that does not follow could not be saved by any decision
            stats.saved_seconds = -stats.follow_seconds
            for one in load.decoding:
                self.gate.settle(one.traffic, -stats.follow_seconds / load.num_decoding)
        self.gate.skip(load.decoding, load.num_sequences)
        # A plain step right after one with drafts is not typical: the caches still hold data of that step.
        if self._was_plain and budget.is_plain:
            whole = self._costs.forward_seconds(load.num_rows, load.context, load.num_sequences, load.num_unscored)
            forwards, forward = self._forwards(load), self._forward_seconds(load)
            # Scaled down to the decoding rows: subtracting the predicted seconds of prompts would add their whole
            # error. Still the noise is that of the whole step, and plain decoding a part of it.
            expected, plain = whole + (forwards.mean - 1.0) * forward, forwards.mean * forward
            noise = forwards.noise * expected / plain if load.prefilling else None
            forwards.observe(forwards.mean * (stats.seconds - stats.follow_seconds) / expected, noise)

    def _learn_drafted(self, budget: DraftBudget, stats: StepStats) -> None:
        """Learn the gain of a step with drafts: the plain steps that its accepted tokens save, minus the step's time
        beyond one plain step."""
        load = budget.load
        context, sequences = load.context, load.num_sequences
        predicted, without_nodes = (
            self._costs.forward_seconds(rows, context, sequences, load.num_unscored)
            for rows in (budget.num_rows, load.num_rows)
        )
        without_nodes = min(predicted, without_nodes)
        forward, forwards = self._forward_seconds(load), self._forwards(load)
        plain, prompts = forward * forwards.mean, without_nodes - forward
        draft = self._drafts.learn(load.num_drafting, stats.draft_seconds)
        expected = draft + predicted + plain - forward
        seconds = min(draft + stats.verify_seconds + stats.other_seconds, _MOST_TIMES * expected)
        extra = seconds * (1.0 - prompts / expected) - plain  # prompts by their share, as in `_learn_plain`
        if any(budget.num_nodes):
            self._brought.observe(sum(stats.accepted_per_sequence) / load.num_drafting)
        drafting, one_step = load.drafting, plain / load.num_decoding  # seconds of a plain step per sequence
        accepted = _accepted_lengths(budget, stats)[: len(drafting)]
        # Without one of several drafting sequences the step would be shorter by the time of that sequence's nodes.
        per_node = max(0.0, stats.verify_seconds - without_nodes) / max(1, sum(budget.num_nodes))
        own_extra = [extra] if len(drafting) == 1 else [per_node * count for count in budget.num_nodes[: len(drafting)]]
        gains = [length - extra / len(drafting) / one_step for length in accepted]
        stats.saved_seconds = sum(gains) * one_step
        for one, gain in zip(drafting, gains, strict=True):
            self.gate.settle(one.traffic, gain * one_step)
        own_gains = [length - own / one_step for length, own in zip(accepted, own_extra, strict=True)]
        noisier = expected / (expected - prompts) if load.prefilling else 1.0
        self.gate.observe(drafting, gains, own_gains, sequences, all_drafted=not load.skipped, noisier=noisier)
        self.gate.skip(load.skipped, sequences)
        forwards.advance()


def _accepted_lengths(budget: DraftBudget, stats: StepStats) -> list[int]:
    """Accepted length of each decoding sequence, 0 if its tree had no nodes."""
    accepted = iter(stats.accepted_per_sequence)
    return [next(accepted) if count else 0 for count in budget.num_nodes[: budget.load.num_decoding]]


def restore_gains(gate: DraftGate, file: Path, now: float | None = None) -> None:
    """Restore the gains saved by an earlier start of the server; the older they are, the less certain they become. A
    missing file is ignored, a damaged one is ignored with a warning."""
    try:
        content = json.loads(file.read_text())
        gate.restore(content["state"], max(0.0, (now or time.time()) - float(content["saved"])))
        logger.info("restored the learnt gains of drafting from %s", file)
    except FileNotFoundError:
        return
    except (OSError, ValueError, KeyError, TypeError) as error:
        logger.warning("cannot read the gains of drafting in %s (%s); learning them anew", file, error)


def keep_gains(gate: DraftGate, file: Path) -> None:
    """Save the learnt gains of drafting for the next start of the server."""
    write_whole(file, {"saved": time.time(), "state": gate.decision.state()})
