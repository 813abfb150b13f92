"""One tree of what texts have said and what a network proposes, which is asked while that pays.
Legend: batch; rows = sequences of the engine's table."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from importlib.resources import files
from operator import add
from typing import NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from drafters import readback
from drafters.asking import AskGate
from drafters.calibration import MIN_SURVIVAL
from drafters.memory.counts import MemoryCounts
from drafters.memory.shares import Shares
from drafters.protocol import Committed, DraftContext, Drafter, DraftingSizes, Noise, RankOutcomes, Read, StepTimes
from drafters.readback import Observe
from drafters.tree import MAX_DEPTH, Candidates, DraftTree
from kernels import ops
from kernels.graph_runner import by_batch
from kernels.memory import BUCKET_BYTES, CONTEXT, NO_TOKEN, ORDERS, PAST, PREDICTION, TEXT, WAYS, Memory

_Told = TypeVar("_Told", Read, Committed)

ANSWERED = 8192
"""Tokens of a text whose contexts all have a place; longer ones lose what is rarest."""
_RATE = 0.1  # AdaGrad's, of a weight that has not been learnt: 0.05 to 0.3 give the same trees
_SAMPLE_EVERY, _SAMPLED = 64, 1024  # steps, and buckets at least: a share of places in use within 1/64
_PRIOR_SQUARES = 20.0  # what the prior's weights count for, in squared gradients: some hundred labels


@dataclass(frozen=True, slots=True)
class PastAnswers:
    """What is remembered of a scope, in views that steps go on writing to."""

    scope: str
    share: int
    renewals: int  # of the share: another number later says that it began again, maybe for another scope
    entries: Tensor  # [buckets, WAYS] int64
    weights: Tensor  # [KINDS, FEATURES] float32
    squares: Tensor  # like weights


class _Answer(NamedTuple):
    """A text that goes on growing while it runs."""

    scope: str
    text: Sequence[int]
    num_known: int  # of its tokens, when it began


class PastListener(Protocol):
    """Hears what becomes of past answers, from the engine thread."""

    def answered(self, scope: str, tokens: Sequence[int], num_new: int) -> None:
        """The last `num_new` tokens were remembered; up to CONTEXT others stand before them."""

    def forgot(self, scope: str | None) -> None: ...


class MemoryDrafter(Drafter):
    """Remembers texts, and asks a network beside them if it has one."""

    def __init__(self, sizes: DraftingSizes, network: Drafter | None = None) -> None:
        device, rows = sizes.device, sizes.max_sequences + 1
        self.network = network
        self._max_nodes = sizes.max_nodes
        self._own = text_buckets(sizes.max_length)
        num_shares = sizes.memory.owners * sizes.memory.scopes
        self._past = _power_of_two(sizes.memory.num_bytes // (num_shares * BUCKET_BYTES))  # buckets of a share
        buckets = num_shares * self._past + 2 * rows * self._own
        self._spare = rows  # a row of no sequence
        self._memory = Memory.empty(rows + 1, buckets, num_shares + 1, sizes.max_nodes, device)
        past = num_shares * self._past
        self._counts = MemoryCounts(reserved_bytes=past * BUCKET_BYTES, known_tokens=(0,) * len(ORDERS))
        self._sample = self._memory.entries[: past : max(1, past // _SAMPLED)]
        self._num_commits = 0
        self._nobody = num_shares  # weights of rows that have no share
        self._shares = Shares(sizes.memory)
        self._held: dict[int, int] = {}  # share of each running row that has one
        self._answering: dict[int, _Answer] = {}  # by row, of those that store
        self._renewals = [0] * num_shares
        self.listeners: list[PastListener] = []
        self._memory.weights[:] = _prior()
        self._memory.squares[:] = _PRIOR_SQUARES
        self._ops = ops.on(self._memory.entries.device)
        self._gate = None if network is None else AskGate(network.name, sizes.ledger)
        self._survivals, self._outcomes = (readback.readback_of(device) for _ in range(2))
        self._expected = 0.0  # tokens per sequence by the last trees without the network that were read back
        self._has_asked = False
        self._follows = True  # texts, for the network
        self._credits = {} if network is None else {"memory": 0, network.name: 0}
        most, capture = sizes.max_sequences, sizes.capture
        padding, trees = torch.full((most,), most, device=device), DraftTree.padding(most, sizes.max_nodes, device)
        nothing = padding.new_full((most, MAX_DEPTH + 1), NO_TOKEN), torch.zeros_like(padding)
        choices = padding.new_zeros(most, sizes.max_nodes + 1)
        self._grow_alone = by_batch(self._run_grow, capture, most, (padding,))
        self._join = by_batch(self._run_grow, capture, most, (padding, trees))
        self._learn = by_batch(self._run_learn, capture, most, (padding, *nothing, trees, choices))

    @property
    def name(self) -> str:
        """Of those who draft: a network that is yet to be made leaves the memory alone."""
        network = self.network
        return "memory" if network is None or not network.ready else f"memory+{network.name}"

    @property
    def sources(self) -> tuple[str, ...]:
        return tuple(self._credits) or (self.name,)

    @property
    def version(self) -> int:
        return 0 if self.network is None else self.network.version

    @property
    def tap_layers(self) -> tuple[int, ...]:
        return () if self.network is None else self.network.tap_layers

    @property
    def reads_prompts(self) -> bool:
        return self.network is not None and self.network.reads_prompts

    @property
    def wants_scores(self) -> bool:
        return self.network is not None and self.network.wants_scores

    @property
    def num_blocks(self) -> int:
        return 0 if self.network is None else self.network.num_blocks

    def credits(self) -> dict[str, int]:
        return self._credits

    def start(self, contexts: Sequence[DraftContext]) -> None:
        for context in contexts:
            self._start(context)
        if self.network is None:
            return
        assert self._gate is not None
        if contexts:  # of a text that it has not followed from its beginning the network knows too little
            warm = any(context.warm for context in contexts)
            self._follows = self.network.ready and self._gate.can_afford_sequence(warm=warm)
        self.network.start(contexts)

    def read(self, read: Read) -> None:
        assert self.network is not None
        self.network.read(_followed(read, follow=self._follows))

    def grow(self, rows: Tensor, noise: Noise) -> Candidates:
        if noise.warm:
            self._memory.seeds[rows], self._memory.roots[rows] = noise.seeds, noise.positions
        tree = self.recall(rows)
        if self.network is None or not self.network.ready:
            return tree
        assert self._gate is not None
        self._gate.begin(rows.shape[0], warm=noise.warm)
        self._survivals.read(tree.survival.sum()[None] / max(1, rows.shape[0]), self._observe_expected)
        self._has_asked = self._gate.ask(self._expected, can_answer=self._follows)
        if not self._has_asked:
            return tree
        proposed = self.network.grow(rows, noise)
        return self._join((rows, proposed)).first(rows.shape[0])

    def recall(self, rows: Tensor) -> DraftTree:
        """What texts alone propose. # rows [batch] int64"""
        return self._grow_alone((rows,)).first(rows.shape[0])

    def commit(self, committed: Committed) -> None:
        told = committed.rows, committed.tokens, committed.counts, committed.tree, committed.result.target_tokens
        observe = None if self._gate is None or not self._has_asked else self._gate.end()
        counts = self._with_usage(self._learn(told))
        self._outcomes.read(counts, partial(self._credit, observe))
        self._has_asked = False
        if self.network is None:
            return
        assert self._gate is not None
        self._follows = self._follows and self._gate.may_gain
        self.network.commit(_followed(committed, follow=self._follows))

    def finish(self, rows: Sequence[int]) -> list[int]:
        for row in rows:
            self._release(row)
        if self.network is not None:
            self.network.finish(rows)
        predicted: list[int] = self._memory.predicted[list(rows)].tolist()  # planned transfer
        return predicted

    def forget(self, scope: str | None = None) -> None:
        """Forget past answers of this scope, or of all, and what was learnt from them."""
        shares = self._shares.forget(scope)
        self._clear(shares)
        for row, answer in self._answering.items():  # listeners hear only of what follows
            if self._held[row] in shares:
                self._answering[row] = answer._replace(num_known=len(answer.text))
        self._counts = replace(self._counts, forgotten_shares=self._counts.forgotten_shares + len(shares))
        for listener in self.listeners:
            listener.forgot(scope)

    @property
    def share_buckets(self) -> int:
        """Of each share; 0: no past answers are remembered."""
        return self._past

    def past_answers(self) -> list[PastAnswers]:
        """By scope, what was used longest ago first."""
        return [self._past_of(scope, share) for scope, share in self._shares.held().items()]

    def is_current(self, past: PastAnswers) -> bool:
        """Whether the share has not begun again since; from any thread."""
        return self._renewals[past.share] == past.renewals

    def adopt(self, scope: str) -> PastAnswers | None:
        """Room for what was remembered of this scope at an earlier time: its share, or an unused one, or None."""
        share = self._shares.adopt(scope)
        return None if share is None else self._past_of(scope, share)

    def add_answer(self, scope: str, tokens: Sequence[int], num_new: int) -> None:
        """Remember what another engine answered in this scope, as of `PastListener.answered`, if there is a share."""
        memory, row = self._memory, self._spare
        share = self._take_share(row, scope, stores=True)
        if share is None:
            return
        memory.parts[row] = torch.tensor([[0, 0], [0, 0], [share * self._past, self._past]])
        memory.tails[row] = NO_TOKEN
        first = len(tokens) - num_new
        for part, added in ((TEXT, tokens[:first]), (PAST, tokens[first:])):
            if added:
                self._ops.add_text(memory, row, part, torch.tensor(added, device=memory.entries.device))
        self._release(row)

    def timed(self, times: StepTimes) -> None:
        if self._gate is not None and self.network is not None:
            self._gate.timed(times, followed=self._follows)
            self.network.timed(times)

    def on_weights_changed(self) -> None:
        if self._gate is not None and self.network is not None:
            self._gate.on_weights_changed()
            self._follows = self.network.ready
            self.network.on_weights_changed()

    def rank_outcomes(self) -> RankOutcomes:
        return RankOutcomes() if self.network is None else self.network.rank_outcomes()

    def memory_counts(self) -> MemoryCounts:
        return self._counts

    def _run_grow(self, rows: Tensor, proposed: DraftTree | None = None) -> DraftTree:
        return self._ops.grow_joint_tree(self._memory, rows, proposed, self._max_nodes, MIN_SURVIVAL)

    def _run_learn(self, rows: Tensor, tokens: Tensor, counts: Tensor, verified: DraftTree, choices: Tensor) -> Tensor:
        return self._ops.learn_committed(self._memory, rows, tokens, counts, verified, choices, _RATE)

    def _start(self, context: DraftContext) -> None:
        """Take in a text: its prompt, the prediction that may follow, and what it has answered so far."""
        memory, row, own = self._memory, context.row, self._own
        first = self._nobody * self._past + 2 * row * own
        num_predicted = own if context.prediction else 0
        memory.entries[first : first + own + num_predicted] = 0
        share = self._take_share(row, context.scope, stores=context.store)
        past = (0, 0) if share is None else (share * self._past, self._past)
        memory.parts[row] = torch.tensor([[first, own], [first + own, num_predicted], past])
        memory.scopes[row] = self._nobody if share is None else share
        memory.tails[row] = NO_TOKEN
        memory.predicted[row] = memory.alone.num_nodes[row] = memory.network.num_nodes[row] = 0
        memory.warm[row], memory.stores[row] = context.warm, context.store and share is not None
        if context.store and context.scope is not None and share is not None:
            self._answering[row] = _Answer(context.scope, context.tokens, len(context.tokens))
        num_prompt = len(context.tokens) - context.num_generated
        texts = (
            (TEXT, context.tokens[:num_prompt]),
            (PREDICTION, context.prediction),
            (TEXT, context.tokens[num_prompt:]),
        )
        for part, tokens in texts:
            if tokens:
                self._ops.add_text(memory, row, part, torch.tensor(tokens, device=memory.entries.device))

    def _take_share(self, row: int, scope: str | None, *, stores: bool) -> int | None:
        """The share that the row reads, and adds to if it stores; None for none."""
        self._release(row)
        if scope is None:
            return None
        share, evicted = (self._shares.take(scope) or (None, None)) if stores else (self._shares.read(scope), None)
        if share is not None:
            self._held[row] = share
        if share is not None and evicted is not None:
            self._clear([share])
            self._counts = replace(self._counts, evicted_scopes=self._counts.evicted_scopes + 1)
        return share

    def _release(self, row: int) -> None:
        if row in self._held:
            self._shares.release(self._held.pop(row))
        if row in self._answering:
            scope, text, known = self._answering.pop(row)
            num_new = len(text) - known
            for listener in self.listeners if num_new > 0 else ():
                listener.answered(scope, text[max(0, known - CONTEXT) :], num_new)

    def _past_of(self, scope: str, share: int) -> PastAnswers:
        memory, first = self._memory, share * self._past
        entries = memory.entries[first : first + self._past]
        return PastAnswers(scope, share, self._renewals[share], entries, memory.weights[share], memory.squares[share])

    def _clear(self, shares: Iterable[int]) -> None:
        """Begin again with nothing remembered in these shares."""
        for share in shares:
            self._renewals[share] += 1  # first: who copies while this clears shall see that its copy is void
            self._memory.entries[share * self._past : (share + 1) * self._past] = 0
            self._memory.weights[share] = _prior()
            self._memory.squares[share] = _PRIOR_SQUARES

    def _observe_expected(self, expected: Sequence[float]) -> None:
        (self._expected,) = expected

    def _credit(self, observe: Observe | None, outcome: Sequence[float]) -> None:
        """Credit a network that was asked with the accepted tokens that the memory alone would not have had."""
        alone, accepted, committed, remembered, *known = map(int, outcome)
        self._count(remembered, known[: len(ORDERS)], *known[len(ORDERS) :])
        extra = max(0, accepted - alone) if observe is not None else 0
        if self.network is None:
            return
        self._credits["memory"] += accepted - extra
        self._credits[self.network.name] += extra
        if observe is not None:
            observe((extra, committed))

    def _with_usage(self, counts: Tensor) -> Tensor:
        """What was counted and, now and then, how many places of the sample are in use."""
        self._num_commits += 1
        if self._num_commits % _SAMPLE_EVERY != 1 or not self._past:
            return counts
        return torch.cat([counts, (self._sample != 0).sum()[None]])

    def _count(self, remembered: int, known: Sequence[int], used: int | None = None) -> None:
        counts = self._counts
        self._counts = replace(
            counts,
            used_share=counts.used_share if used is None else used / self._sample.numel(),
            remembered_tokens=counts.remembered_tokens + remembered,
            known_tokens=tuple(map(add, counts.known_tokens, known)),
        )


def text_buckets(max_length: int) -> int:
    """Buckets for the contexts of one text of so many tokens; each running text has as many for its prediction."""
    return _power_of_two(min(max_length, ANSWERED) * len(ORDERS) // WAYS)


def _followed(what: _Told, *, follow: bool) -> _Told:
    """What a network is to take in; `follow`: whether it follows texts at present."""
    return what if follow else replace(what, follow=False)


def _power_of_two(most: int) -> int:
    """The largest one that is not above; 0 for 0."""
    return 1 << most.bit_length() - 1 if most else 0


@cache
def _prior() -> Tensor:
    """Weights to begin with, fitted by penalised maximum likelihood to 161,000 labels of answers to training prompts at
    T = 0 and 0.7. # [KINDS, FEATURES]"""
    return torch.tensor(json.loads(files(__package__).joinpath("prior.json").read_text()))
