"""Drafts from n-gram counts (`kernels.joint_tree`), combined with a network's proposals in one tree.
Legend: batch; rows = sequences of the engine's table."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from drafters import readback
from drafters.asking import GatedNetwork
from drafters.memory.past import PastAnswers, buckets_per_share, num_shares, power_of_two
from drafters.memory_counts import MemoryCounts
from drafters.protocol import Committed, DraftContext, Drafter, DraftingSizes, Noise, RankOutcomes, Read, StepTimes
from drafters.readback import Observe
from drafters.tree import MAX_DEPTH, Candidates, DraftTree
from kernels import ops
from kernels.graph_runner import by_batch, send, send_lines
from kernels.memory import NO_TOKEN, ORDERS, PAST, PREDICTION, TEXT, WAYS, Memory, past_lines

MAX_ANSWER_TOKENS = 8192
"""Tokens of a sequence for which its own part of the table has room; longer sequences lose the rarest contexts."""
LEARNING_RATE = 0.1  # of AdaGrad, for the joint distribution; 0.05 to 0.3 give the same trees


@dataclass(slots=True)
class _Late:
    """Tokens of steps without drafts, which are counted before the memory is next read."""

    texts: dict[int, Sequence[int]] = field(default_factory=dict)  # row -> tokens, which grow while the sequence runs
    known: dict[int, int] = field(default_factory=dict)  # row -> leading tokens that are counted
    has_grown: bool = False  # whether trees were grown since the last commit


class MemoryDrafter(Drafter):
    """Proposes tokens that followed the same context earlier: in the sequence itself, in the client's prediction, and
    in past answers of the same scope. With a network, one joint distribution ranks the proposals of both."""

    def __init__(self, sizes: DraftingSizes, network: Drafter | None = None) -> None:
        device, rows = sizes.device, sizes.max_sequences + 1
        shares, buckets = num_shares(sizes.memory), buckets_per_share(sizes.memory)
        self._own_buckets = text_buckets(sizes.max_length)
        self._first_own = shares * buckets
        self._no_share = shares  # row of the learned weights for sequences without a share
        total = self._first_own + 2 * rows * self._own_buckets
        self._memory = Memory.empty(rows + 1, total, shares + 1, sizes.max_nodes, device)
        self.past = PastAnswers(self._memory, sizes.memory)
        self._network = None if network is None else GatedNetwork(network, sizes)
        self._outcomes = readback.readback_of(device)
        self._late = _Late()
        self._predicted = set[int]()  # rows with a prediction
        most, capture = sizes.max_sequences, sizes.capture
        padding, trees = torch.full((most,), most, device=device), DraftTree.padding(most, sizes.max_nodes, device)
        nothing = padding.new_full((most, MAX_DEPTH + 1), NO_TOKEN), torch.zeros_like(padding)
        choices = padding.new_zeros(most, sizes.max_nodes + 1)
        grow = partial(_grow, self._memory, sizes)
        self._grow_alone = by_batch(grow, capture, most, (padding,))
        self._join = by_batch(grow, capture, most, (padding, trees))
        self._learn = by_batch(partial(_learn, self._memory), capture, most, (padding, *nothing, trees, choices))

    @property
    def network(self) -> Drafter | None:
        """The drafter that is combined with the memory, or None."""
        return None if self._network is None else self._network.drafter

    @property
    def name(self) -> str:
        """`memory`, or `memory+NAME` once the network of that name has weights."""
        network = self.network
        return "memory" if network is None or not network.ready else f"memory+{network.name}"

    @property
    def sources(self) -> tuple[str, ...]:
        return tuple(self.credits()) or (self.name,)

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
    def needs_roots(self) -> bool:
        return self.network is not None and self.network.needs_roots

    @property
    def num_blocks(self) -> int:
        return 0 if self.network is None else self.network.num_blocks

    def rank_outcomes(self) -> RankOutcomes:
        return RankOutcomes() if self.network is None else self.network.rank_outcomes()

    def credits(self) -> dict[str, int]:
        return {} if self._network is None else self._network.tokens

    def start(self, contexts: Sequence[DraftContext]) -> None:
        for context in contexts:
            self._start(context)
        if self._network is not None:
            self._network.start([replace(one, regression=partial(self._regression, one.row)) for one in contexts])

    def read(self, read: Read) -> None:
        assert self._network is not None
        self._network.read(read)

    def grow(self, rows: Tensor, noise: Noise) -> Candidates:
        self._catch_up()
        self._late.has_grown = True
        if noise.warm:
            self._memory.seeds[rows], self._memory.roots[rows] = noise.seeds, noise.positions
        tree = self.recall(rows)
        proposed = None if self._network is None else self._network.propose(rows, noise, tree.survival)
        return tree if proposed is None else self._join((rows, proposed)).first(rows.shape[0])

    def recall(self, rows: Tensor) -> DraftTree:
        """Grow trees from the memory alone, without the network. # rows [batch] int64 -> trees [batch, max_nodes]"""
        return self._grow_alone((rows,)).first(rows.shape[0])

    def commit(self, committed: Committed) -> None:
        network, target_tokens = self._network, committed.result.target_tokens
        observe = None if network is None else network.end_step()
        records = network is not None and network.drafter.wants_scores
        late = not (committed.follow or self._late.has_grown or committed.tree.width or records)
        if late and committed.host is not None:  # a suspended memory leaves the token of each row to `_catch_up`
            for row, root in zip(committed.host.rows, committed.host.roots, strict=True):
                if root - self._late.known.setdefault(row, root + 1) >= MAX_DEPTH:  # as many as a path has
                    self._catch_up()
        else:
            self._catch_up()
            self._late.known.clear()
            if records:
                committed = self._with_past(committed)
            counts = self._learn((committed.rows, committed.tokens, committed.counts, committed.tree, target_tokens))
            self._outcomes.read(self.past.with_usage(counts), partial(self._count, observe))
            self._late.has_grown = False
        if network is not None:
            network.commit(committed)

    def _with_past(self, committed: Committed) -> Committed:
        """Add for the recorder what past answers know of the committed tokens before these are added to them."""
        self._memory.roots.index_copy_(0, committed.rows, committed.positions)  # `grow` may not have been called
        return replace(committed, past=past_lines(self._memory, committed.rows, committed.tokens))

    def _regression(self, row: int) -> Tensor:
        """Return a copy of weights and squares of the row's scope. # -> [2, WEIGHT_SETS, FEATURES]"""
        memory, scope = self._memory, self._memory.scopes[row : row + 1]
        return torch.cat([memory.weights[scope], memory.squares[scope]])

    def _catch_up(self) -> None:
        """Count the tokens that were left, before anything else is read from the memory or written to it."""
        late = {row: known for row, known in self._late.known.items() if len(self._late.texts[row]) > known}
        if not late:
            return
        texts, device = [self._late.texts[row][known:] for row, known in late.items()], self._memory.entries.device
        longest = max(map(len, texts))
        self._late.known |= {row: len(self._late.texts[row]) for row in late}
        columns = list(late), [known - 1 for known in late.values()], [len(text) for text in texts]
        rows, roots, counts = send_lines(device, *columns)
        self._memory.roots[rows] = roots  # noise is that of the positions
        tokens = torch.stack(send_lines(device, *([*text, *[NO_TOKEN] * (longest - len(text))] for text in texts)))
        sums = self._learn((rows, tokens, counts, DraftTree.empty(len(late), device), torch.zeros_like(rows)[:, None]))
        self._outcomes.read(self.past.with_usage(sums), lambda outcome: self._count(None, (0, 0, *outcome[2:])))

    def finish(self, rows: Sequence[int]) -> list[int]:
        self._catch_up()
        for row in rows:
            self._late.known.pop(row, None)
            self.past.end(row)
        if self.network is not None:
            self.network.finish(rows)
        if self._predicted.isdisjoint(rows):
            return [0] * len(rows)
        self._predicted.difference_update(rows)
        predicted: list[int] = self._memory.predicted[list(rows)].tolist()  # planned transfer: with predictions
        return predicted

    def forget(self, scope: str | None = None) -> None:
        self._catch_up()
        self.past.forget(scope)

    def add_answer(self, scope: str, tokens: Sequence[int], num_new: int) -> None:
        """Add an answer of another replica to the past answers: the last `num_new` of `tokens`; those before are only
        context. Does nothing if the scope gets no share."""
        memory, row = self._memory, len(self._memory.parts) - 1  # a row that no sequence uses
        share = self.past.take(row, scope, stores=True)
        if share is None:
            return
        memory.parts[row] = torch.stack(send_lines(memory.entries.device, (0, 0), (0, 0), self._part_of(share)))
        memory.tails[row] = NO_TOKEN
        first = len(tokens) - num_new
        self._add_text(row, TEXT, tokens[:first])
        self._add_text(row, PAST, tokens[first:])
        self.past.end(row)

    def timed(self, times: StepTimes) -> None:
        if self._network is not None:
            self._network.timed(times)

    def on_weights_changed(self) -> None:
        if self._network is not None:
            self._network.on_weights_changed()

    def memory_counts(self) -> MemoryCounts:
        return self.past.counts

    def _start(self, context: DraftContext) -> None:
        """Assign a row its parts of the table, and add prompt, prediction and the answer so far to them."""
        memory, row, own = self._memory, context.row, self._own_buckets
        self._late.texts[row] = context.tokens
        if context.prediction:
            self._predicted.add(row)
        self._late.known.pop(row, None)
        first = self._first_own + 2 * row * own
        num_predicted = own if context.prediction else 0
        memory.entries[first : first + own + num_predicted] = 0
        share = self.past.begin(context)
        parts = (first, own), (first + own, num_predicted), self._part_of(share)
        memory.parts[row] = torch.stack(send_lines(memory.entries.device, *parts))
        memory.scopes[row] = self._no_share if share is None else share
        memory.tails[row] = NO_TOKEN
        memory.predicted[row] = memory.alone.num_nodes[row] = memory.network.num_nodes[row] = 0
        memory.warm[row], memory.stores[row] = context.warm, context.store and share is not None
        num_prompt = len(context.tokens) - context.num_generated
        self._add_text(row, TEXT, context.tokens[:num_prompt])
        self._add_text(row, PREDICTION, context.prediction)
        self._add_text(row, TEXT, context.tokens[num_prompt:])

    def _part_of(self, share: int | None) -> tuple[int, int]:
        """Return first bucket and number of buckets of a share, or (0, 0) for None."""
        buckets = self.past.share_buckets
        return (0, 0) if share is None else (share * buckets, buckets)

    def _add_text(self, row: int, part: int, tokens: Sequence[int]) -> None:
        if tokens:
            device = self._memory.entries.device
            ops.on(device).add_text(self._memory, row, part, send(device, tokens)[0])

    def _count(self, observe: Observe | None, outcome: Sequence[float]) -> None:
        """Update counts and credits by `outcome`: sums of `learn_committed`, then the table's usage if it was
        sampled."""
        alone, accepted, committed, remembered, *known = map(int, outcome)
        self.past.count(remembered, known[: len(ORDERS)], *known[len(ORDERS) :])
        if self._network is not None:
            self._network.credit(alone, accepted, committed, observe)


def text_buckets(max_length: int) -> int:
    """Return the buckets for the contexts of a sequence; each row has as many again for its prediction. `max_length`:
    tokens of the longest sequence."""
    return power_of_two(min(max_length, MAX_ANSWER_TOKENS) * len(ORDERS) // WAYS)


def _grow(memory: Memory, sizes: DraftingSizes, rows: Tensor, proposed: DraftTree | None = None) -> DraftTree:
    """Grow a tree for each row. # rows [batch] int64; proposed [batch, nodes] -> [batch, max_nodes]"""
    return ops.on(rows.device).grow_joint_tree(memory, rows, proposed, sizes.max_nodes, sizes.least_survival)


def _learn(memory: Memory, rows: Tensor, tokens: Tensor, counts: Tensor, tree: DraftTree, choices: Tensor) -> Tensor:
    """Update the memory with committed tokens. # shapes: see `learn_committed`"""
    given = memory, rows, tokens, counts, tree, choices, LEARNING_RATE
    return ops.on(rows.device).learn_committed(*given)
