"""One tree from a drafter that is always asked and a costlier one that is asked while that pays; and who was right.
Legend: batch, nodes as in drafters/tree.py; rows = sequences of the engine's table."""

from collections.abc import Sequence

import torch
from torch import Tensor

from drafters import readback
from drafters.gating import AskGate
from drafters.proposals import Field, ProposalLog
from drafters.protocol import Committed, DraftContext, Drafter, DraftingSizes, Noise, RankOutcomes, Read, StepTimes
from drafters.taps import SharedTaps
from drafters.tree import MAX_DEPTH, ROOT, Candidates, DraftTree, joined_trees
from kernels import ops
from kernels.graph_runner import by_batch


class MergedDrafter(Drafter):
    """Asks a cheap drafter and a costly one, and merges what they propose."""

    tap_layers: tuple[int, ...] = ()
    reads_prompts = False

    def __init__(self, cheap: Drafter, costly: Drafter, sizes: DraftingSizes) -> None:
        device, max_nodes = sizes.device, sizes.max_nodes
        self._cheap, self._costly = cheap, costly
        self._taps = SharedTaps(cheap, costly)
        self.tap_layers = self._taps.layers
        self.reads_prompts = cheap.reads_prompts or costly.reads_prompts
        self._max_nodes = max_nodes
        self._gate = AskGate(costly.name, sizes.ledger)
        self._survivals, self._outcomes, self._totals = (readback.readback_of(device) for _ in range(3))
        self._expected = 0.0  # tokens per sequence by the cheap one's last trees that were read back
        self._has_grown = self._has_asked = False
        self._follows = True  # texts, for the costly one
        both = (2 * max_nodes,)  # the cheap one's nodes, then the costly one's
        fields = {"tokens": Field(both, 0), "parents": Field(both, ROOT), "depths": Field(both, 0, forgotten=True)}
        self._proposals = ProposalLog(sizes, fields)
        self._num_cheap = max_nodes  # nodes of the cheap one's trees; captured, they are padded to as many
        self._credits = torch.zeros(3, dtype=torch.int64, device=device)  # right: cheap, costly, costly alone
        self._ops = ops.on(self._credits.device)
        self._known_credits = {cheap.name: 0, costly.name: 0}
        most, capture = sizes.max_sequences, sizes.capture
        rows = torch.full((most,), most, device=device)
        none, nodes = torch.zeros_like(rows), rows.new_zeros(most, max_nodes)
        committed = rows.new_full((most, MAX_DEPTH + 1), -1)
        tree = DraftTree(nodes, nodes + ROOT, nodes, nodes.float(), none)
        self._merge = by_batch(self._run_merge, capture, most, (rows, tree, tree))
        self._judge = by_batch(self._run_judge, capture, most, (rows, committed, none, none))

    @property
    def name(self) -> str:
        """Of those who draft: a costly one that is yet to be made leaves the cheap one alone."""
        return f"{self._cheap.name}+{self._costly.name}" if self._costly.ready else self._cheap.name

    @property
    def sources(self) -> tuple[str, ...]:
        return self._cheap.name, self._costly.name

    @property
    def version(self) -> int:
        return max(self._cheap.version, self._costly.version)

    @property
    def wants_scores(self) -> bool:
        return self._cheap.wants_scores or self._costly.wants_scores

    @property
    def num_blocks(self) -> int:
        return self._cheap.num_blocks + self._costly.num_blocks

    def credits(self) -> dict[str, int]:
        return self._known_credits if self._costly.ready else {}

    def start(self, contexts: Sequence[DraftContext]) -> None:
        if contexts:  # of a text that it has not followed from its beginning the costly one knows too little
            warm = any(context.warm for context in contexts)
            self._follows = self._costly.ready and self._gate.affords_text(warm=warm)
        self._cheap.start(contexts)
        self._costly.start(contexts)

    def read(self, read: Read) -> None:
        for one, follow in ((self._cheap, True), (self._costly, self._follows)):
            if one.reads_prompts:
                one.read(self._taps.told(one, read, follow=follow))

    def grow(self, rows: Tensor, noise: Noise) -> Candidates:
        cheap = self._cheap.grow(rows, noise)
        self._has_grown = self._costly.ready
        if not self._has_grown:
            return cheap
        self._gate.begin(rows.shape[0], warm=noise.warm)
        self._survivals.read(cheap.survival.sum()[None] / max(1, rows.shape[0]), self._observe_expected)
        self._num_cheap = cheap.width
        self._has_asked = self._gate.ask(self._expected, can_answer=self._follows)
        if not self._has_asked:
            return cheap
        tree = self._merge((rows, cheap, self._costly.grow(rows, noise)))
        return tree.first(rows.shape[0])

    def commit(self, committed: Committed) -> None:
        if self._has_grown:
            self._give_credit(committed)
        self._has_grown = False
        self._follows = self._follows and self._gate.promises
        self._cheap.commit(self._taps.told(self._cheap, committed, follow=True))
        self._costly.commit(self._taps.told(self._costly, committed, follow=self._follows))

    def finish(self, rows: Sequence[int]) -> list[int]:
        self._proposals.forget(rows)
        predicted = zip(self._cheap.finish(rows), self._costly.finish(rows), strict=True)
        return [max(counts) for counts in predicted]

    def timed(self, times: StepTimes) -> None:
        self._gate.took(times, followed=self._follows)
        self._cheap.timed(times)
        self._costly.timed(times)

    def renew(self) -> None:
        self._gate.renew()
        self._follows = self._costly.ready
        self._cheap.renew()
        self._costly.renew()

    def rank_outcomes(self) -> RankOutcomes:
        """Of the one that has a rank head."""
        outcomes = self._costly.rank_outcomes()
        return outcomes if outcomes.predicted else self._cheap.rank_outcomes()

    def _run_merge(self, rows: Tensor, cheap: DraftTree, costly: DraftTree) -> DraftTree:
        both = joined_trees(cheap, costly)
        self._proposals.keep(rows, tokens=both.tokens, parents=both.parents, depths=both.depths)
        return self._ops.merge_trees(both, self._max_nodes)[0]

    def _observe_expected(self, expected: Sequence[float]) -> None:
        (self._expected,) = expected

    def _observe_credits(self, credits: Sequence[float]) -> None:
        cheap, costly, _ = map(int, credits)
        self._known_credits = {self._cheap.name: cheap, self._costly.name: costly}

    def _give_credit(self, committed: Committed) -> None:
        """Count, for each accepted token, who had proposed the path to it."""
        if not self._has_asked:
            self._credits[:1] += committed.result.num_accepted.sum()
            self._totals.read(self._credits, self._observe_credits)
            return
        asked = committed.rows, committed.tokens, committed.result.num_accepted, committed.counts
        extra = self._judge(asked)
        self._totals.read(self._credits, self._observe_credits)
        observe = self._gate.end()
        if observe is not None:
            self._outcomes.read(extra, observe)

    def _run_judge(self, rows: Tensor, committed: Tensor, num_accepted: Tensor, counts: Tensor) -> Tensor:
        """# rows, num_accepted, counts [batch]; committed [batch, depth + 1] -> [2] int64: accepted tokens that the
        costly one alone had right, and how many tokens there are"""
        tokens, parents, depths = self._proposals.of(rows, "tokens", "parents", "depths")
        _, right = self._ops.fates(tokens, parents, depths, committed, num_accepted)
        cheap, costly = right[:, : self._num_cheap].sum(1), right[:, self._num_cheap :].sum(1)  # of a path each
        credits = torch.stack([cheap, costly, (costly - cheap).clamp(min=0)]).sum(1)
        self._credits += credits
        self._proposals.forget(rows)
        return torch.stack([credits[2], counts.sum()])
