"""How many drafted nodes each sequence verifies in a step, and whether to draft at all. A matter of speed only: no
choice changes the text.

By cost: one decision for the whole batch, made anew in every step. With candidates of all sequences sorted by survival,
S(N) the sum of the first N, B drafting sequences (or what their certain tokens count) and R rows that run in any case:

    N* = argmax_N (B + S(N)) / (T_draft + T(B) + T_verify(R + N) - T_verify(R))

Where steps are captured, every tree has rows for the same number of nodes w, one of a few: N = B * w and S counts the
w likeliest nodes of each sequence.

T(B) is what a plain step of these B sequences takes; prompt rows of the same step are paid anyway and do not count.
"""

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from drafters.regret import TRIAL_STEPS, GainPosterior, RegretLedger, StepAccount
from drafters.tree import MAX_NODES
from service.engine.costs.model import CostTable, DraftCosts, FloatArray, OnlineCosts, OnlineDraftCosts
from service.engine.gains import DraftGains, TextGain
from service.engine.sequence import Sequence as Running
from service.engine.stats import DraftingOutlook, StepStats

REASONS = ("no_candidates", "does_not_pay", "cost", "fixed", "slots", "suspended", "reference", "forced")

_MOST_URGENT = 4.0

DRAFTING = "drafting"
"""Its accounts in the ledger begin so. Each kind of text has one: what one gains does not pay for another's losses."""
_BY_BASELINE = 2.0
"""Plain steps that one with drafts takes at most where it hardly pays: by so much an error in the plain one counts."""
_PLAIN_NOISE = 0.1
_PLAIN_DRIFT = _PLAIN_NOISE**2 / 512
"""Of what a plain step takes, in forwards as predicted: after 512 steps without one it is as uncertain as after one."""
_MOST_TIMES = 1.5  # what was expected: a hiccup is nobody's fault


@dataclass(frozen=True, slots=True)
class Load:
    """What a step carries beside draft trees."""

    num_rows: int  # rows that run in any case: roots and prompt chunks
    context: float  # mean context length of the step's sequences, tokens
    max_nodes: int  # most nodes in all, because slots are short
    num_drafting: int = 1  # sequences that may have a tree
    num_sequences: int = 1  # all of the step's sequences
    begins: bool = False  # whether a text begins with this step
    asks_drafter: bool = True  # False: trees hold what is known or forced, and no time goes into drafting
    weights: Tensor | None = None  # [drafting] float32, what a token of each counts; None: all the same
    texts: tuple[TextGain, ...] = ()  # the drafting ones, those that ask the drafter first; (): all ask, and are alike
    reading: tuple[TextGain, ...] = ()  # those whose prompts are read
    asked: int | None = None  # so many of `texts`, the first, ask the drafter; None: all
    widths: tuple[int, ...] | None = None  # nodes of each tree that rows may be laid out for, rising from 0; None: any

    @property
    def num_asked(self) -> int:
        """Sequences that ask the drafter."""
        return self.num_drafting if self.asked is None else self.asked

    @property
    def decoding(self) -> tuple[TextGain, ...]:
        """What is known of each drafting sequence."""
        return self.texts or tuple(TextGain() for _ in range(self.num_drafting))

    @property
    def asking(self) -> tuple[TextGain, ...]:
        """Those that ask the drafter."""
        return self.decoding[: self.num_asked]

    @property
    def has_room(self) -> bool:
        """Whether the smallest trees fit into the free slots."""
        return (1 if self.widths is None else self.num_drafting * self.widths[1]) <= self.max_nodes

    def node_rows(self, num_candidates: int) -> FloatArray:
        """Rows of nodes of the steps to choose among, rising from 0. # -> [choices]"""
        if self.widths is None:
            return np.arange(num_candidates + 1.0)
        return np.array(self.widths, dtype=np.float64) * self.num_drafting


@dataclass(frozen=True, slots=True)
class Budget:
    """A step's decision."""

    load: Load
    reason: str  # one of REASONS
    widths: tuple[int, ...]  # rows of nodes of each line of the step's trees
    drafted: bool  # whether the drafter was asked
    followed: bool  # whether it is to take in prompts and answers
    sizes: Tensor | None = None  # [drafting, SIZES] int64, as of `Pruned`; None: no trees
    nodes: tuple[int, ...] = ()  # verified of each line

    @property
    def is_plain(self) -> bool:
        """Whether the step is one of plain decoding: nobody was asked, and nothing known is verified either."""
        return not self.drafted and not any(self.widths)

    @property
    def num_rows(self) -> int:
        """Rows of the step's forward, with those that pad trees to their widths."""
        return self.load.num_rows + sum(self.widths)


def pace_weights(sequences: Sequence[Running], pace_seconds: float, now: float, device: torch.device) -> Tensor:
    """What one token of each sequence counts where latency matters. # -> [sequences] float32

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
    """Says how many nodes of each sequence are verified: so many at most, or what a step with so many takes."""

    is_priced = False  # whether `price` has prices

    def asks(self, texts: Sequence[TextGain], num_sequences: int, *, begins: bool) -> list[bool]:
        """For which of these texts to ask the drafter in a step of so many sequences, in which a text may begin."""
        return [True] * len(texts)

    @abstractmethod
    def refusal(self, load: Load) -> str | None:
        """Why nothing is to be drafted in this step, one of REASONS; None where the drafter is to be asked."""

    @abstractmethod
    def follows(self, load: Load) -> bool:
        """Whether the drafter is to take in what this step reads and commits: if not, it is not asked for long."""

    def most(self, load: Load) -> int:
        """Most nodes of each tree."""
        return MAX_NODES

    def price(self, load: Load, num_candidates: int) -> FloatArray:
        """Seconds of each step to choose among, as of `Load.node_rows`, infinite for more nodes than there is room for;
        none where all nodes are verified that are wished for. # -> [choices]"""
        return _NO_PRICES

    def on_weights_changed(self) -> None:  # noqa: B027
        """Other weights draft from now on."""

    def learn(self, budget: Budget, stats: StepStats) -> float | None:
        """Take in what a step took, as the host had to wait for it; returns the verify seconds that had been predicted,
        if any had."""
        return None

    def outlook(self, load: Load) -> DraftingOutlook | None:
        """What is believed of drafting at this load."""
        return None

    def state(self) -> Any:
        """What is known of drafting, as JSON, for `restore`."""
        return None

    def restore(self, state: Any, age_seconds: float) -> None:  # noqa: B027
        """Begin with what another one knew so long ago. Raises ValueError, KeyError, TypeError for anything else, and
        then knows what it did."""


class FixedBudget(BudgetPolicy):
    """The same number of nodes in every step, however likely they are, or one for each number of drafting sequences."""

    def __init__(self, nodes: int | Mapping[int, int]) -> None:
        """A mapping gives the nodes of each sequence from that many sequences on; it names 1."""
        table = {1: nodes} if isinstance(nodes, int) else nodes
        assert 1 in table, "the table says nothing of a single sequence"
        self._nodes_from = sorted(table.items())

    def refusal(self, load: Load) -> str | None:
        return None if self.most(load) else "fixed"

    def follows(self, load: Load) -> bool:
        return any(nodes for _, nodes in self._nodes_from)

    def most(self, load: Load) -> int:
        return [nodes for batch, nodes in self._nodes_from if batch <= max(1, load.num_drafting)][-1]


class CostBudget(BudgetPolicy):
    """The number of nodes that maximises expected tokens per second over the whole batch; none is plain decoding.

    Every N is looked at, because cost curves are staircases. For which texts the drafter is asked at all is decided by
    what whole steps gained against plain ones of the same sequences (service/engine/gains.py). Plain ones are a
    baseline: one is taken where its doubt is the larger part of the doubt in a gain that may be none.
    """

    is_priced = True

    def __init__(self, costs: CostTable, drafts: DraftCosts, ledger: RegretLedger) -> None:
        """`ledger`: of the server; others may have accounts in it."""
        self._costs = OnlineCosts(costs)
        self._drafts = OnlineDraftCosts(drafts)
        self._ledger = ledger
        self._accounts: dict[str, StepAccount] = {}  # by kind of text
        self._single_seconds = float(costs.verify_seconds(np.ones(1), 0.0)[0])  # of a plain step of one sequence
        self.gains = DraftGains()
        self._plain: defaultdict[int, GainPosterior] = defaultdict(_plain_forwards)  # by size of batch
        self._was_plain = False  # the last step
        self._step_seconds = 0.0  # of the last step that read no prompt

    def asks(self, texts: Sequence[TextGain], num_sequences: int, *, begins: bool) -> list[bool]:
        # The worst case is a step that emits no more than a plain one, and so loses a part of itself.
        kinds = {text.kind for text in texts}
        affordable, trials = (
            {kind for kind in kinds if self._account(kind).can_afford(steps, self._step_seconds)}
            for steps in (1.0, TRIAL_STEPS)
        )
        return self.gains.asks(texts, num_sequences, begins=begins, affordable=affordable, trials=trials)

    def refusal(self, load: Load) -> str | None:
        if not load.num_asked:
            return "suspended"
        baseline = _BY_BASELINE * self._forwards(load).sd
        gains = [self.gains.of(load.num_sequences, kind) for kind in {text.kind for text in load.asking}]
        unsure = any(baseline > gain.sd and not gain.is_sign_known(baseline) for gain in gains)
        return "reference" if unsure else None

    def follows(self, load: Load) -> bool:
        return any(self.asks((*load.decoding, *load.reading), load.num_sequences, begins=load.begins))

    def price(self, load: Load, num_candidates: int) -> FloatArray:
        """Without what the step's prompt rows take."""
        nodes = load.node_rows(num_candidates)
        verify = self._costs.verify_seconds(load.num_rows + nodes, load.context, load.num_sequences)
        drafting = self._drafts.draft_seconds(max(1, load.num_asked)) if load.asks_drafter else 0.0
        seconds: FloatArray = verify + (drafting + self._plain_seconds(load) - verify[0])
        if nodes[-1] > load.max_nodes:
            seconds[nodes > load.max_nodes] = np.inf
        return seconds

    def on_weights_changed(self) -> None:
        """What the old weights gained says little of the new ones."""
        self.gains.on_weights_changed()

    def learn(self, budget: Budget, stats: StepStats) -> float | None:
        load = budget.load
        if load.num_rows == load.num_drafting:
            self._step_seconds = stats.seconds
        # Settled first: what a step took must not become what it was expected to take.
        if budget.drafted:
            self._settle(budget, stats)
        elif load.num_drafting:
            self._settle_plain(budget, stats)
        predicted = self._costs.learn(budget.num_rows, load.context, load.num_sequences, stats.verify_seconds)
        self._was_plain = budget.is_plain
        return predicted

    def outlook(self, load: Load) -> DraftingOutlook:
        gains = [self.gains.of(load.num_sequences, text.kind) for text in (*load.decoding, *load.reading)]
        accounts = self._accounts.values()
        return DraftingOutlook(
            sequences=1 << (load.num_sequences.bit_length() - 1),
            gain=sum([gain.mean for gain in gains]) / len(gains),
            gain_sd=sum([gain.sd for gain in gains]) / len(gains),
            balance_seconds=sum([account.balance_seconds for account in accounts]),
            lost_seconds=sum([account.lost_seconds for account in accounts]),
        )

    def state(self) -> Any:
        return {"gains": self.gains.state(), "plain": [[size, one.state()] for size, one in self._plain.items()]}

    def restore(self, state: Any, age_seconds: float) -> None:
        gains = DraftGains()
        plain: defaultdict[int, GainPosterior] = defaultdict(_plain_forwards)
        gains.restore(state["gains"], age_seconds)
        for size, one in state["plain"]:
            plain[size].restore(one)
        self.gains, self._plain = gains, plain

    def _account(self, kind: str) -> StepAccount:
        if kind not in self._accounts:
            self._accounts[kind] = StepAccount(f"{DRAFTING} {kind}", self._ledger)
        return self._accounts[kind]

    def _settle_account(self, kind: str, gained_seconds: float) -> None:
        self._account(kind).record(gained_seconds, self._single_seconds)

    def _plain_seconds(self, load: Load) -> float:
        """Of a plain step of the drafting sequences alone, without the prompts that are read beside them."""
        return self._forward_seconds(load) * self._forwards(load).mean

    def _forward_seconds(self, load: Load) -> float:
        batch = max(1, load.num_drafting)
        return self._costs.forward_seconds(batch, load.context, batch)

    def _forwards(self, load: Load) -> GainPosterior:
        """What a plain step takes, in forwards of the drafting sequences alone as they are predicted."""
        return self._plain[load.num_sequences.bit_length()]

    def _settle_plain(self, budget: Budget, stats: StepStats) -> None:
        load = budget.load
        if budget.followed:  # what a drafter takes that does not follow is no decision's
            for text in load.decoding:
                self._settle_account(text.kind, -stats.follow_seconds / len(load.decoding))
        self.gains.elapse(load.decoding, load.num_sequences)
        # One that follows a step with drafts finds their rows in the caches.
        if self._was_plain and budget.is_plain:
            whole = self._costs.forward_seconds(load.num_rows, load.context, load.num_sequences)
            # Of the verify the share of those who draft: a difference would have the error of all that was read.
            others = stats.seconds - stats.verify_seconds - stats.follow_seconds
            self._forwards(load).observe(stats.verify_seconds / whole + others / self._forward_seconds(load))

    def _settle(self, budget: Budget, stats: StepStats) -> None:
        """Enter what a step gained: the plain ones that its accepted tokens save, less what it took beyond one."""
        load = budget.load
        context, sequences = load.context, load.num_sequences
        predicted = self._costs.forward_seconds(budget.num_rows, context, sequences)
        without = min(predicted, self._costs.forward_seconds(load.num_rows, context, sequences))
        forward, forwards = self._forward_seconds(load), self._forwards(load)
        plain, prompts = forward * forwards.mean, without - forward
        drafting = self._drafts.learn(load.num_asked, stats.draft_seconds)
        expected = drafting + predicted + plain - forward
        seconds = min(drafting + stats.verify_seconds + stats.other_seconds, _MOST_TIMES * expected)
        longer = seconds - prompts - plain
        asked, others = load.asking, load.decoding[load.num_asked :]
        accepted = _accepted_by_line(budget, stats)[: len(asked)]
        one = plain / load.num_drafting  # seconds of a plain step that are one sequence's
        # Leaving out one of several texts would save what its nodes take.
        per_node = max(0.0, stats.verify_seconds - without) / max(1, sum(budget.nodes))
        saved = [longer] if len(asked) == 1 else [per_node * nodes for nodes in budget.nodes[: len(asked)]]
        gains = [count - longer / len(asked) / one for count in accepted]
        for text, gain in zip(asked, gains, strict=True):
            self._settle_account(text.kind, gain * one)
        self.gains.observe(
            asked,
            gains,
            [count - less / one for count, less in zip(accepted, saved, strict=True)],
            sequences,
            all_asked=not others,
        )
        self.gains.elapse(others, sequences)
        forwards.advance()


def _accepted_by_line(budget: Budget, stats: StepStats) -> list[int]:
    """Accepted tokens of each drafting sequence, also of those whose trees had no nodes."""
    accepted = iter(stats.accepted_per_sequence)
    return [next(accepted) if nodes else 0 for nodes in budget.nodes[: budget.load.num_drafting]]


def _plain_forwards() -> GainPosterior:
    return GainPosterior(mean=1.0, noise=_PLAIN_NOISE, drift=_PLAIN_DRIFT)
