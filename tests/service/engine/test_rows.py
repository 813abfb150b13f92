"""Slots around a forward: extends stay, accepted nodes join the table in order, everything else is free again."""

import torch

from drafters.tree import DraftTree
from kernels.rows import ExtendRows
from service.engine.kv_pool import SlotPool, SlotTable
from service.engine.rows import RowLayout, committed_of
from service.engine.target import TargetOutput
from service.engine.verify import VerifyStage
from tests.service.engine.harness import greedy
from tests.service.engine.test_scheduler import sequence_of
from tests.service.engine.test_target import tree_of

CPU = torch.device("cpu")


class Step:
    """One forward of two sequences: one with a tree, one that reads its prompt."""

    def __init__(self, target_tokens: list[int], wants_scores: bool = False) -> None:
        self.slots, self.table = SlotPool(50, CPU), SlotTable(3, 40, CPU)
        tree = tree_of([11, 12, 13, 14, 15], [-1, -1, 1, 1, 3])
        both = DraftTree.concatenated([tree, DraftTree(*map(torch.zeros_like, tree))])
        extends = [ExtendRows(2, 7, [10], completes=True), ExtendRows(0, 3, [20, 21, 22], completes=False)]
        self.rows = RowLayout(self.slots, self.table)(extends, both)
        self.node_slots = self.rows.attention.node_slots[0, :5].tolist()
        self.logits = torch.randn(6, 100, generator=torch.Generator().manual_seed(0))
        self.logits[torch.arange(6), torch.tensor(target_tokens)] = 9.0
        verified = VerifyStage(self.table).verify([sequence_of(8, greedy())], self.rows, both, self.logits)
        output = TargetOutput(self.logits, torch.arange(self.rows.num_rows).float()[:, None])
        self.committed = committed_of(verified, both, output, wants_scores=wants_scores)
        self.slots.free(verified.freed[: 5 - int(verified.num_accepted)])


def test_accepted_nodes_follow_the_root_in_the_table() -> None:
    step = Step([12, 0, 14, 0, 15, 99])  # the path is node 1, node 3, node 4
    expected = [step.node_slots[node] for node in (1, 3, 4)]
    assert step.table.slots[2, 8:11].tolist() == expected
    assert step.table.slots[2, 11] == 0
    assert step.slots.num_free == step.slots.capacity - 4 - 3
    assert not set(step.slots.free_slots().tolist()) & set(expected)


def test_what_became_permanent_is_said() -> None:
    committed = Step([12, 0, 14, 0, 15, 99]).committed
    assert committed.rows.tolist() == [2]
    assert committed.counts.tolist() == [4]
    assert committed.tokens[0, :4].tolist() == [12, 14, 15, 99]
    assert (committed.tokens[0, 4:] == -1).all()


def test_features_are_those_of_the_root_and_the_accepted_nodes() -> None:
    step = Step([12, 0, 14, 0, 15, 99])
    assert step.committed.features is not None
    rows = [step.rows.slots.tolist().index(step.node_slots[node]) for node in (1, 3, 4)]
    assert step.committed.features[0, :4, 0].tolist() == [0, *rows]


def test_scores_are_those_behind_the_root_and_the_accepted_nodes() -> None:
    step = Step([12, 0, 14, 0, 15, 99], wants_scores=True)
    scores = step.committed.scores
    assert scores is not None
    assert torch.equal(scores.logits, step.logits[[0, 2, 4, 5]])
    assert step.committed.tokens.flatten()[scores.places].tolist() == [12, 14, 15, 99]


def test_scores_are_the_readers_own() -> None:
    step = Step([12, 0, 14, 0, 15, 99], wants_scores=True)
    assert step.committed.scores is not None
    before = step.committed.scores.logits.clone()
    step.logits.fill_(0.0)  # as the next captured forward would
    assert torch.equal(step.committed.scores.logits, before)


def test_nobody_copies_what_nobody_wants() -> None:
    assert Step([12, 0, 14, 0, 15, 99]).committed.scores is None


def test_with_nothing_accepted_only_the_chains_stay() -> None:
    step = Step([98, 0, 0, 0, 0, 0])
    assert step.committed.tokens[0, 0] == 98
    assert step.committed.counts.tolist() == [1]
    assert step.slots.num_free == step.slots.capacity - 4
    assert set(step.node_slots) <= set(step.slots.free_slots().tolist())


def test_extend_rows_stand_in_the_table_before_the_forward() -> None:
    step = Step([98, 0, 0, 0, 0, 0])
    extend_slots = step.rows.slots[: step.rows.num_extend_rows].tolist()
    assert [int(step.table.slots[2, 7]), *step.table.slots[0, 3:6].tolist()] == extend_slots
