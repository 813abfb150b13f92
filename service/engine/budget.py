"""How many drafted nodes each sequence verifies in a step, and whether to draft at all. A matter of speed only: no
choice changes the text.

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
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from drafters.regret import GainPosterior, RegretLedger
from drafters.tree import MAX_NODES
from service.engine.costs import CostTable, DraftCosts, FloatArray, OnlineCosts, OnlineDraftCosts, write_whole
from service.engine.draft_gate import DraftGate, SequenceGain
from service.engine.sequence import Sequence as Running
from service.engine.stats import DraftingOutlook, StepStats

logger = logging.getLogger(__name__)

REASONS = ("no_candidates", "does_not_pay", "cost", "fixed", "slots", "suspended", "reference", "forced")
"""Why a step has as many nodes as it has, as metrics name it."""

_MOST_URGENT = 4.0
_BASELINE_STEPS = 2.0
"""Plain steps that one with drafts takes at most where it hardly pays: an error in the plain one counts so often."""
_PLAIN_NOISE = 0.1
_PLAIN_DRIFT = _PLAIN_NOISE**2 / 512
"""Of a plain step in predicted forwards: after 512 steps without one it is as uncertain as after the first."""
_PLAIN_SURE = 0.03
"""Standard deviation up to which a plain step is known well enough: a third of that of a gain that is seen all the time
(0.09, drafters/regret.py). The next one is learnt from some five steps later."""
_MOST_TIMES = 1.5  # the expected seconds: a hiccup of the machine says nothing of the drafter


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLoad:
    """What a step runs before any node is drafted."""

    num_rows: int  # rows of the forward without nodes: roots and prompt chunks
    context: float  # mean context length of the step's sequences, tokens
    free_slots: int  # most nodes in all
    num_sequences: int
    decoding: tuple[SequenceGain, ...]  # sequences that may have a tree; those that run the drafter stand first
    num_drafting: int  # how many of `decoding` run the drafter
    prefilling: tuple[SequenceGain, ...] = ()
    weights: Tensor | None = None  # [decoding] float32, value of one token of each; None: all the same
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
    def has_room(self) -> bool:
        """Whether the smallest trees fit into the free slots."""
        return (1 if self.tree_widths is None else self.num_decoding * self.tree_widths[1]) <= self.free_slots

    def node_counts(self, num_candidates: int) -> FloatArray:
        """Rows of nodes that the step may have, rising from 0. # -> [choices]"""
        if self.tree_widths is None:
            return np.arange(num_candidates + 1.0)
        return np.array(self.tree_widths, dtype=np.float64) * self.num_decoding


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftBudget:
    """How many nodes a step verifies, and why. Tuples have one entry for each sequence of the step."""

    load: StepLoad
    reason: str  # one of REASONS
    node_rows: tuple[int, ...]  # rows laid out for nodes, padding included
    drafted: bool  # whether the drafter ran
    followed: bool  # whether the drafter takes in what the step reads and commits
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


def pace_weights(sequences: Sequence[Running], pace_seconds: float, now: float, device: torch.device) -> Tensor:
    """Value of one token of each sequence where latency matters. # -> [sequences] float32

    Token n is due n times the pace after the first; n tokens in s seconds count s / (n * pace), between 1 and 4.
    """

    def weight(sequence: Running) -> float:
        if sequence.first_token_seconds is None:
            return 1.0
        due = pace_seconds * max(1, sequence.num_generated)
        return min(_MOST_URGENT, max(1.0, (now - sequence.first_token_seconds) / due))

    return torch.tensor([weight(sequence) for sequence in sequences], device=device)


_NO_PRICES = np.empty(0)


class BudgetPolicy(ABC):
    """Decides for which sequences to draft, and how many nodes a step verifies."""

    is_priced = False  # whether `step_seconds` returns prices

    def select(self, sequences: Sequence[SequenceGain], *, starts: bool) -> list[bool]:
        """Choose which of a step's sequences draft, now or once their prompts are read; `starts`: whether one starts to
        run. The drafter follows the step if any is chosen."""
        return [True] * len(sequences)

    @abstractmethod
    def refusal(self, load: StepLoad) -> str | None:
        """Why the drafter does not run in this step, one of REASONS; None: it runs."""

    def max_nodes(self, load: StepLoad) -> int:
        """Most nodes of each tree."""
        return MAX_NODES

    def step_seconds(self, load: StepLoad, num_candidates: int) -> FloatArray:
        """Seconds of a step with each of `load.node_counts`, infinite above the free slots; empty where the budget is
        not by cost. # -> [choices]"""
        return _NO_PRICES

    def on_weights_changed(self) -> None:  # noqa: B027  # a default, not a stub
        """Forget what holds for the old weights of the drafter alone."""

    def learn(self, budget: DraftBudget, stats: StepStats) -> float | None:
        """Take in what a step took, and set the seconds saved in its record. Return the verify seconds that had been
        predicted, None without predictions."""
        return None

    def outlook(self, load: StepLoad) -> DraftingOutlook | None:
        """What is believed of drafting at this load, for metrics."""
        return None

    def state(self) -> Any:
        """What was learnt of drafting, as JSON, for `restore`."""
        return None

    def restore(self, state: Any, age_seconds: float) -> None:  # noqa: B027  # a default, not a stub
        """Begin with a state of `age_seconds` ago. Raises ValueError, KeyError or TypeError for anything else, and then
        changes nothing."""


class FixedBudget(BudgetPolicy):
    """The same number of nodes in every step, or one for each number of drafting sequences."""

    def __init__(self, nodes: int | Mapping[int, int]) -> None:
        """A mapping gives the nodes of each sequence from that many sequences on; it must have a key 1."""
        table = {1: nodes} if isinstance(nodes, int) else nodes
        assert 1 in table, "the table has no entry for a single sequence"
        self._nodes_from = sorted(table.items())

    def select(self, sequences: Sequence[SequenceGain], *, starts: bool) -> list[bool]:
        return [any(nodes for _, nodes in self._nodes_from)] * len(sequences)

    def refusal(self, load: StepLoad) -> str | None:
        return None if self.max_nodes(load) else "fixed"

    def max_nodes(self, load: StepLoad) -> int:
        return [nodes for batch, nodes in self._nodes_from if batch <= max(1, load.num_decoding)][-1]


class CostBudget(BudgetPolicy):
    """The number of nodes that maximises expected tokens per second over the whole batch; none is plain decoding.

    Every N is looked at, because cost curves are staircases. Whether the drafter runs is decided by what whole steps
    gained over plain ones of the same sequences (`DraftGate`). A plain step is taken as a baseline where its
    uncertainty is the larger part of the doubt in a gain that may be none.
    """

    is_priced = True

    def __init__(self, costs: CostTable, drafts: DraftCosts, ledger: RegretLedger) -> None:
        """`ledger`: the server's, in which drafters have accounts too."""
        self._costs = OnlineCosts(costs)
        self._drafts = OnlineDraftCosts(drafts)
        self.gate = DraftGate(ledger, float(costs.verify_seconds(np.ones(1), 0.0)[0]))
        self._plain: defaultdict[int, GainPosterior] = defaultdict(_plain_forwards)  # by size of batch
        self._was_plain = False  # the last step
        self._step_seconds = 0.0  # of the last step without a prompt

    def select(self, sequences: Sequence[SequenceGain], *, starts: bool) -> list[bool]:
        # The worst case is a step that emits no more than a plain one, and so loses a part of itself.
        return self.gate.select(sequences, starts=starts, step_seconds=self._step_seconds)

    def refusal(self, load: StepLoad) -> str | None:
        if not load.num_drafting:
            return "suspended"
        baseline_sd = _BASELINE_STEPS * self._forwards(load).sd
        return "reference" if self.gate.needs_plain_step(load.drafting, load.num_sequences, baseline_sd) else None

    def step_seconds(self, load: StepLoad, num_candidates: int) -> FloatArray:
        """Without what the step's prompt rows take. # -> [choices]"""
        nodes = load.node_counts(num_candidates)
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
        return {"gains": self.gate.state(), "plain": [[size, one.state()] for size, one in self._plain.items()]}

    def restore(self, state: Any, age_seconds: float) -> None:
        plain: defaultdict[int, GainPosterior] = defaultdict(_plain_forwards)
        for size, one in state["plain"]:
            plain[size].restore(one)
        self.gate.restore(state["gains"], age_seconds)
        self._plain = plain

    def _is_known(self, budget: DraftBudget) -> bool:
        """Whether a plain step among others tells too little: to learn from it takes 3 % of a small model's step."""
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
        return self._plain[load.num_sequences.bit_length()]

    def _learn_plain(self, budget: DraftBudget, stats: StepStats) -> None:
        """Correct what a plain step takes, and charge what the drafter took to follow it."""
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
        """Enter what a step gained: the plain steps that its accepted tokens save, less what it took beyond one."""
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


def _plain_forwards() -> GainPosterior:
    return GainPosterior(mean=1.0, noise=_PLAIN_NOISE, drift=_PLAIN_DRIFT)


def restore_gains(policy: BudgetPolicy, file: Path, now: float | None = None) -> None:
    """Let the policy begin with what an earlier start learnt of drafting, widened by its age. A missing file is
    skipped, a damaged one is skipped with a warning."""
    try:
        content = json.loads(file.read_text())
        policy.restore(content["state"], max(0.0, (now or time.time()) - float(content["saved"])))
        logger.info("what drafting gained before the last stop is known from %s", file)
    except FileNotFoundError:
        return
    except (OSError, ValueError, KeyError, TypeError) as error:
        logger.warning("gains in %s cannot be read (%s): drafting is learnt anew", file, error)


def keep_gains(policy: BudgetPolicy, file: Path) -> None:
    """Save what the policy learnt of drafting, for the next start."""
    write_whole(file, {"saved": time.time(), "state": policy.state()})
