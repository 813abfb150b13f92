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


def test_accepted_nodes_join_the_table_and_become_permanent() -> None:
    """The path is node 1, node 3, node 4."""
    step = Step([12, 0, 14, 0, 15, 99], wants_scores=True)
    committed, path_slots = step.committed, [step.node_slots[node] for node in (1, 3, 4)]
    assert step.table.slots[2, 8:12].tolist() == [*path_slots, 0]
    assert step.slots.num_free == step.slots.capacity - 4 - 3
    assert not set(step.slots.free_slots().tolist()) & set(path_slots)
    assert (committed.rows.tolist(), committed.counts.tolist()) == ([2], [4])
    assert committed.tokens[0].tolist() == [12, 14, 15, 99, *[-1] * (committed.tokens.shape[1] - 4)]
    assert committed.features is not None
    rows = [step.rows.slots.tolist().index(slot) for slot in path_slots]
    assert committed.features[0, :4, 0].tolist() == [0, *rows]
    assert committed.scores is not None
    assert committed.tokens.flatten()[committed.scores.places].tolist() == [12, 14, 15, 99]
    expected = step.logits[[0, 2, 4, 5]]
    step.logits.fill_(0.0)  # as the next captured forward would
    assert torch.equal(committed.scores.logits, expected)


def test_with_nothing_accepted_only_extend_rows_stay() -> None:
    step = Step([98, 0, 0, 0, 0, 0])
    assert (int(step.committed.tokens[0, 0]), step.committed.counts.tolist()) == (98, [1])
    assert step.committed.scores is None
    assert step.slots.num_free == step.slots.capacity - 4
    assert set(step.node_slots) <= set(step.slots.free_slots().tolist())
    extend_slots = step.rows.slots[: step.rows.num_extend_rows].tolist()
    assert [int(step.table.slots[2, 7]), *step.table.slots[0, 3:6].tolist()] == extend_slots
