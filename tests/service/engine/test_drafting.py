"""The draft stage: what the drafter is given, and how far its candidates are cut before they are verified."""

from collections.abc import Sequence as Items
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from drafters.decision import RegretLedger
from drafters.memory_counts import MemoryCounts
from drafters.protocol import Committed, DraftContext, Noise, RankOutcomes, Read, StepTimes
from drafters.tree import Candidates, DraftTree, VerifyResult
from service.engine.budget import Budget, CostBudget, DraftBudget, FixedBudget, StepLoad
from service.engine.costs import FREE, CostTable
from service.engine.drafting import DraftStage
from service.engine.requests import SamplingParams, Scope, SpeculationParams
from service.engine.rows import Scheduled
from service.engine.sampling import SamplingState
from service.engine.scheduler import StepBatch
from service.engine.sequence import Sequence
from service.engine.stats import StepStats
from tests.service.engine.harness import greedy, request, step_stats
from tests.service.engine.test_budget import candidates_of
from tests.service.engine.test_scheduler import sequence_of
from tests.tiny_models import VOCAB_SIZE

CPU = torch.device("cpu")


class Recorder:
    """Proposes the same six-node path to everyone and keeps what it was given."""

    name, sources, tap_layers, reads_prompts, wants_scores, ready = "recorder", ("recorder",), (), False, False, True
    needs_roots = False

    def __init__(self) -> None:
        self.started: list[DraftContext] = []
        self.asked: list[tuple[list[int], Noise]] = []
        self.version = 0
        self.num_blocks = 0

    def start(self, contexts: Items[DraftContext]) -> None:
        self.started += contexts

    def on_weights_changed(self) -> None:
        self.renewed = True

    def grow(self, rows: Tensor, noise: Noise) -> Candidates:
        self.asked.append((rows.tolist(), noise))
        self.num_blocks += rows.shape[0]
        return candidates_of([[0.9, 0.8, 0.7, 0.6, 0.5, 0.4]] * rows.shape[0])

    def read(self, read: Read) -> None: ...

    def commit(self, committed: Committed) -> None: ...

    def timed(self, times: StepTimes) -> None: ...

    def forget(self, scope: str | None = None) -> None: ...

    def credits(self) -> dict[str, int]:
        return {}

    def finish(self, rows: Items[int]) -> list[int]:
        return [0] * len(rows)

    def rank_outcomes(self) -> RankOutcomes:
        return RankOutcomes({"1": 2.0}, {"1": 1.0})

    def memory_counts(self) -> MemoryCounts:
        return MemoryCounts(reserved_bytes=self.num_blocks)


def decoding(
    row: int, generated: int = 3, max_tokens: int = 100, speculation: SpeculationParams | None = None
) -> Sequence:
    sequence = sequence_of(8, max_tokens=max_tokens)
    sequence.request = request("r", [2] * 8, greedy(max_tokens), speculation=speculation)
    sequence.row, sequence.tokens = row, [2] * (8 + generated)
    sequence.gain.may_draft = sequence.max_nodes != 0
    sequence.num_computed = len(sequence.tokens) - 1
    return sequence


def batch_of(*sequences: Sequence, reading: int = 0) -> StepBatch:
    items = [Scheduled.of(sequence, 1) for sequence in sequences]
    for row in range(reading):
        prompt = sequence_of(20)
        prompt.row = 20 + row
        items.append(Scheduled.of(prompt, 5))
    return StepBatch(items, [])


def draft(stage: DraftStage, batch: StepBatch, num_free_slots: int) -> tuple[DraftTree, DraftBudget]:
    return stage.draft(stage.arrange(batch, num_free_slots))


def sizes(*sequences: Sequence, free: int = 100, budget: int = 5, reading: int = 0) -> list[int]:
    stage = DraftStage(Recorder(), FixedBudget(99), max_budget=budget, device=CPU)
    tree, _ = draft(stage, batch_of(*sequences, reading=reading), free)
    assert tree.batch == len(sequences) + reading
    found: list[int] = tree.num_nodes.tolist()
    return found


def test_nothing_is_drafted_that_could_not_be_emitted() -> None:
    """With m tokens left, m - 1 drafted ones and the bonus token fill them."""
    ends = [decoding(0, generated=10 - left, max_tokens=10) for left in (1, 2, 4, 9)]
    assert sizes(*ends) == [0, 1, 3, 5]


def test_prompts_get_no_tree_and_leave_room_for_their_rows() -> None:
    assert sizes(decoding(0), reading=2) == [5, 0, 0]
    assert sizes(decoding(0), reading=2, free=1 + 2 * 5 + 3) == [3, 0, 0]
    assert sizes(reading=1) == [0]


@pytest.mark.parametrize(
    ("free", "keep", "reason"),
    [(50, [2, 1, 2], "fixed"), (5, [2, 1, 2], "fixed"), (4, [1, 1, 1], "slots")],
)
def test_a_fixed_budget_obeys_slots(free: int, keep: list[int], reason: str) -> None:
    stage = DraftStage(Recorder(), FixedBudget(2), max_budget=5, device=CPU)
    batch = batch_of(*(decoding(row, speculation=SpeculationParams(max_budget=3 - row % 2 * 2)) for row in range(3)))
    tree, budget = draft(stage, batch, 3 + free)
    assert (tree.num_nodes.tolist(), list(budget.node_rows), budget.reason) == (keep, keep, reason)


@pytest.mark.parametrize(
    ("key", "trace", "scope"), [("k", False, "k"), ("k", True, "k"), ("", False, ""), ("", True, None)]
)
def test_what_is_shown_is_drafted_from_the_past_of_a_key_alone(key: str, trace: bool, scope: str | None) -> None:
    recorder, sequence = Recorder(), decoding(0, speculation=SpeculationParams(trace=trace))
    sequence.request = replace(sequence.request, scope=Scope(key, "n"))
    DraftStage(recorder, FixedBudget(9), max_budget=5, device=CPU).start([sequence])
    assert [context.scope for context in recorder.started] == [scope]


def test_the_drafter_gets_each_sequence_that_starts() -> None:
    recorder = Recorder()
    stage = DraftStage(recorder, FixedBudget(9), max_budget=5, device=CPU)
    again = decoding(3, generated=4)
    stage.start([])
    stage.start([again])
    private = decoding(1)
    private.request = replace(private.request, store=False)
    stage.start([private])
    context, other = recorder.started
    assert (context.row, list(context.tokens), context.num_generated) == (3, again.tokens, 4)
    assert (context.store, other.store) == (True, False)


def test_the_drafter_is_given_the_noise_of_the_roots() -> None:
    recorder = Recorder()
    stage = DraftStage(recorder, FixedBudget(9), max_budget=5, device=CPU)
    one, two = decoding(4, generated=2), decoding(6)
    params = SamplingParams(seed=-5, max_tokens=9, temperature=0.5)
    one.sampling = SamplingState(params, [2] * 8, eos_ids=frozenset(), vocab=VOCAB_SIZE, device=CPU)
    draft(stage, batch_of(one, two), 100)
    ((rows, noise),) = recorder.asked
    assert rows == [4, 6]
    assert noise.seeds.tolist() == [-5, 0]
    assert noise.temperatures.tolist() == [0.5, 0.0]
    assert noise.positions.tolist() == [9, 10]


def test_a_drafter_that_no_one_wants_is_not_asked() -> None:
    recorder = Recorder()
    stage = DraftStage(recorder, FixedBudget(9), max_budget=5, device=CPU)
    off = SpeculationParams(enabled=False)
    tree, budget = draft(stage, batch_of(decoding(0, speculation=off), reading=1), 100)
    assert tree.num_nodes.tolist() == [0, 0]
    assert recorder.asked == []
    assert budget.followed, "for the text whose prompt is being read"
    _, budget = draft(stage, batch_of(decoding(0, speculation=off)), 100)
    assert not budget.followed


class Watcher(Budget):
    """A budget of two nodes that keeps what it was given, and refuses while `reason` is set."""

    def __init__(self) -> None:
        self.reason: str | None = None
        self.loads: list[StepLoad] = []
        self.outcomes: list[tuple[DraftBudget, StepStats]] = []
        self.renewals = 0

    def decide(self, load: StepLoad, *, starts: bool) -> DraftBudget:
        self.loads.append(load)
        budget = FixedBudget(2).decide(load, starts=starts)
        if self.reason is None:
            return budget
        return replace(budget, load=load.arranged(()), reason=self.reason, drafted=False, followed=False)

    def on_weights_changed(self) -> None:
        self.renewals += 1

    def learn(self, budget: DraftBudget, stats: StepStats) -> float | None:
        self.outcomes.append((budget, stats))
        return 7.0


def committed(tree: DraftTree, accepted: int) -> Committed:
    """Chains of which so many nodes were accepted."""
    nothing = torch.zeros(tree.batch, 0, dtype=torch.int64)
    counts = torch.full((tree.batch,), accepted)
    spoken = torch.cat([tree.tokens[:, :accepted], nothing.new_full((tree.batch, 1), -1)], 1)
    result = VerifyResult(nothing, counts, nothing)
    return Committed(counts, spoken, counts + 1, tree, result, None, counts, nothing)


def watched() -> tuple[DraftStage, Recorder, Watcher]:
    recorder, watcher = Recorder(), Watcher()
    return DraftStage(recorder, watcher, max_budget=5, device=CPU), recorder, watcher


def test_the_policy_is_given_the_load_and_what_became_of_it() -> None:
    stage, _, watcher = watched()
    _, budget = draft(stage, batch_of(decoding(0), decoding(1), reading=1), 100)
    stage.learn(budget, stats := step_stats(nodes=4, accepted=2))
    assert (stats.predicted_verify_seconds, stats.survival_error) == (7.0, None)
    assert (stats.drafted_blocks, stats.rank_predicted, stats.rank_right) == (2, {}, {})
    assert stats.memory == MemoryCounts(reserved_bytes=2)
    ((reported, taken),) = watcher.outcomes
    load = reported.load
    assert (load.num_rows, load.num_decoding, load.num_sequences, load.free_slots) == (7, 2, 3, 93)
    assert (load.context, load.num_unscored) == ((11 + 11 + 5) / 3, 5)
    assert (reported.drafted, reported.followed, taken.drafted_nodes, taken.accepted_tokens) == (True, True, 4, 2)
    assert (taken.draft_seconds, taken.verify_seconds, taken.other_seconds) == (1.0, 2.0, 3.0)


def test_a_suspended_policy_asks_no_drafter() -> None:
    stage, recorder, watcher = watched()
    watcher.reason = "suspended"
    tree, budget = draft(stage, batch_of(decoding(0), reading=1), 100)
    assert (tree.num_nodes.tolist(), budget.reason, recorder.asked) == ([0, 0], "suspended", [])
    stage.learn(budget, step_stats())
    assert (watcher.outcomes[0][0].drafted, budget.followed) == (False, False)


def test_what_is_known_is_verified_without_the_drafter_and_its_time() -> None:
    stage, recorder, watcher = watched()
    watcher.reason = "suspended"
    again = decoding(0)
    again.request = replace(again.request, replayed=(tuple([2] * 9),))
    tree, budget = draft(stage, batch_of(again), 100)
    assert (budget.reason, tree.num_nodes.tolist(), recorder.asked) == ("forced", [2], [])
    assert not budget.drafted


def test_survival_is_corrected_by_what_became_of_trees() -> None:
    stage, _, _ = watched()
    for _ in range(64):
        tree, budget = draft(stage, batch_of(decoding(0)), 100)
        stage.observe(committed(tree, 0), budget)
        stage.learn(budget, stats := step_stats(nodes=2))
    assert tree.survival[0, 0] < 0.2  # 0.9 claimed, never right
    assert stats.survival_error is not None
    assert stats.survival_error > 0
    assert (stats.drafted_blocks, stats.rank_predicted, stats.rank_right) == (1, {"1": 2.0}, {"1": 1.0})


def test_a_new_version_of_the_drafter_gets_another_chance() -> None:
    stage, recorder, watcher = watched()
    for _ in range(64):
        tree, budget = draft(stage, batch_of(decoding(0)), 100)
        stage.observe(committed(tree, 0), budget)
        stage.learn(budget, step_stats(nodes=2))
    before = float(tree.survival[0, 0])
    recorder.version = 1
    tree, _ = draft(stage, batch_of(decoding(0)), 100)
    assert tree.survival[0, 0] > 1.5 * before
    assert watcher.renewals == 1


def weights_in(stage: DraftStage) -> list[list[float]]:
    """Weights of the decoding sequences in each step from now on that has trees."""
    prune, seen = stage._pruning.prune, list[list[float]]()

    def noted(*given: Any) -> Any:
        seen.append(given[4].tolist())
        return prune(*given)

    stage._pruning.prune = noted  # type: ignore[method-assign, assignment]
    return seen


def test_why_costs_allow_no_node_is_reported() -> None:
    rows = np.array([1.0, 100.0])
    dear = CostTable(sequences=np.ones(1), contexts=np.ones(1), rows=rows, seconds=np.array([[[1.0, 1e6]]]))
    for max_tokens, reason in ((100, "does_not_pay"), (4, "no_candidates")):
        stage = DraftStage(Recorder(), policy := CostBudget(dear, FREE, RegretLedger()), max_budget=5, device=CPU)
        for _ in range(2):  # baseline probes
            policy.learn(draft(stage, batch_of(decoding(0)), 100)[1], step_stats())
        _, decided = draft(stage, batch_of(decoding(0, max_tokens=max_tokens)), 100)
        assert decided.tree_sizes is not None
        stage.count_nodes(decided, decided.tree_sizes.tolist())
        assert (decided.reason, decided.num_nodes) == (reason, (0,))
