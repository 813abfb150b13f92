"""Never slower, in a world whose clock is a formula: drafters that lie, that are useless, perfect, or change."""

import random
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from drafters.calibration import SurvivalCalibration
from drafters.decision import CAP_STEPS, SHARE, RegretLedger
from drafters.tree import DraftTree
from kernels.survival import correct_survival
from service.engine.budget import CostBudget, StepLoad
from service.engine.costs import CostTable, DraftCosts
from service.engine.draft_gate import SequenceGain
from tests.service.engine.harness import budget_of, load_of, step_stats
from tests.service.engine.test_budget import nodes_of

DRAFT_SECONDS = 0.2
OTHER_SECONDS = 0.05
DEPTH = 8
TEXT = 50
"""Steps from one text that begins to the next."""
OTHERS = pytest.mark.slow(
    "8,000 steps each; these bound losses in more worlds", covers="service/engine/budget.py drafters/decision.py"
)
OTHER_WORLDS = ((1, 0.7), (1, 1.0), (4, 0.7), (4, 1.0), (4, 1.4), (32, 1.0), (32, 1.4))


def true_seconds(rows: float) -> float:
    return 1.0 + 0.03 * rows


def table(error: float = 1.0) -> CostTable:
    """The true costs times an error of the measurement."""
    rows = np.array([1.0, 256.0])
    return CostTable(
        sequences=np.array([1.0]),
        contexts=np.array([1.0]),
        rows=rows,
        seconds=error * np.array([[[true_seconds(count) for count in rows]]]),
    )


class World:
    """Chains of DEPTH nodes for each of `batch` sequences, a node accepted with probability `truth` given its parent,
    whatever the drafter `claims`. In every second step, or in every one, one may read so many rows of its prompt; where
    it is every second, only then texts are followed. Time passes as the formulas say."""

    def __init__(
        self,
        batch: int,
        claims: float,
        *,
        error: float = 1.0,
        noise: float = 0.0,
        follow_seconds: float = 0.0,
        reads_every: int = 0,
        prompt_rows: int = 1,
    ) -> None:
        drafts = DraftCosts(batches=np.ones(1), seconds=np.array([DRAFT_SECONDS]))
        self.ledger = RegretLedger()
        self.policy = CostBudget(table(error), drafts, self.ledger)
        self.calibration = SurvivalCalibration()
        self.rng = random.Random(0)
        self.batch, self.claims, self.noise = batch, claims, noise
        self.follow_seconds, self.reads_every, self.prompt_rows = follow_seconds, reads_every, prompt_rows
        self.tokens, self.seconds, self.drafted_steps = 0, 0.0, 0
        self.saved_seconds = 0.0  # by the records of the steps
        self.texts: list[SequenceGain] = []
        self.followed: list[bool] = []  # step by step
        self.drafted: list[bool] = []

    @property
    def plain_speed(self) -> float:
        drafting = self.batch - (1 / self.reads_every if self.reads_every else 0)
        return drafting / (true_seconds(drafting + (self.batch - drafting) * self.prompt_rows) + OTHER_SECONDS)

    @property
    def lost_seconds(self) -> float:
        """Beyond what plain decoding would have taken for the same tokens."""
        return self.seconds - self.tokens / self.plain_speed

    def speed(self, steps: int, truth: Callable[[], float]) -> float:
        """Tokens per second over so many steps."""
        tokens, seconds = self.tokens, self.seconds
        for _ in range(steps):
            self.step(truth())
        return (self.tokens - tokens) / (self.seconds - seconds)

    def step(self, truth: float) -> None:
        reads = self.reads_every > 0 and len(self.drafted) % self.reads_every == 0
        begins = len(self.drafted) % TEXT < 2  # with and without a prompt that is read
        drafting, batch = self.batch - reads, self.batch
        rows = drafting + reads * self.prompt_rows
        if begins:
            self.texts = [SequenceGain() for _ in range(batch)]
        load = load_of(decoding=self.texts[:drafting], free_slots=10_000, prefilling=tuple(self.texts[drafting:]))
        budget = self.policy.decide(replace(load, num_rows=rows, num_sequences=batch), starts=begins)
        load, drafted, followed = budget.load, budget.drafted, budget.followed
        keep, lengths = ([0] * drafting, [0] * drafting)
        if drafted:
            asked_keep, asked_lengths = self._draft(load.num_drafting, truth, load)
            keep[: load.num_drafting], lengths[: load.num_drafting] = asked_keep, asked_lengths
        accepted = sum(lengths)
        verify = true_seconds(rows + sum(keep)) * self.rng.uniform(1 - self.noise, 1 + self.noise)
        draft, follow = DRAFT_SECONDS * drafted, self.follow_seconds * (followed and reads == (self.reads_every > 0))
        self.tokens += load.num_decoding + accepted
        self.seconds += verify + draft + follow + OTHER_SECONDS
        self.ledger.accrue(verify + draft + follow + OTHER_SECONDS)
        self.drafted_steps += drafted
        self.drafted.append(drafted)
        self.followed.append(followed)
        stats = step_stats(
            sum(keep),
            accepted,
            accepted_per_sequence=tuple(length for length, nodes in zip(lengths, keep, strict=True) if nodes),
            draft_seconds=draft,
            verify_seconds=verify,
            follow_seconds=follow,
            other_seconds=OTHER_SECONDS + follow,
        )
        self.policy.learn(budget_of(load, keep, drafted=drafted, followed=followed), stats)
        self.saved_seconds += stats.saved_seconds or 0.0

    def _draft(self, lines: int, truth: float, load: StepLoad) -> tuple[list[int], list[int]]:
        places = torch.arange(DEPTH).expand(lines, -1)
        survival = torch.full(places.shape, self.claims).cumprod(1)
        raw = DraftTree(places, places - 1, places + 1, survival, torch.full((lines,), DEPTH))
        corrected, claimed, buckets = correct_survival(raw, torch.full((lines,), DEPTH), self.calibration.rates)
        candidates = raw._replace(survival=corrected)
        keep = nodes_of(self.policy, candidates, torch.full((lines,), DEPTH), load)
        chosen = torch.tensor(keep)
        lengths = torch.tensor([min(count, self._survived(truth)) for count in keep])
        kept = places < chosen[:, None]
        tree = DraftTree(places, places - 1, (places + 1) * kept, candidates.survival * kept, chosen)
        text = torch.arange(DEPTH + 1).where(torch.arange(DEPTH + 1) < lengths[:, None], DEPTH)
        self.calibration.learn(tree, claimed, buckets, text, lengths + 1)
        found: list[int] = lengths.tolist()
        return keep, found

    def _survived(self, truth: float) -> int:
        count = 0
        while count < DEPTH and self.rng.random() < truth:
            count += 1
        return count


@pytest.mark.parametrize(
    ("claims", "truth"),
    [(0.05, 0.0), (1.0, 0.0), (0.3, 0.3), *(pytest.param(*other, marks=OTHERS) for other in ((0.5, 0.0), (0.1, 0.1)))],
)
@pytest.mark.parametrize(
    ("batch", "error"), [(1, 1.4), (32, 0.7), *(pytest.param(*other, marks=OTHERS) for other in OTHER_WORLDS)]
)
def test_a_drafter_that_costs_more_than_it_brings_loses_the_cap_and_a_share_of_the_time(
    claims: float, truth: float, batch: int, error: float
) -> None:
    world = World(batch, claims, error=error, noise=0.1)
    one_action = true_seconds(batch * (1 + DEPTH))
    for _ in range(8):
        world.speed(1_000, lambda: truth)
        # The table is off by up to two fifths; what a plain step takes is known to a tenth soon.
        bound = 1.1 * (CAP_STEPS * error * true_seconds(1) + SHARE * world.seconds) + one_action
        assert world.lost_seconds <= bound + 0.1 * world.drafted_steps * (error < 1)


@pytest.mark.parametrize(("follow_seconds", "pays"), [(0.0, True), (0.4, False)])
def test_what_following_the_texts_takes_counts(follow_seconds: float, pays: bool) -> None:
    world = World(8, 0.6, noise=0.1, follow_seconds=follow_seconds)
    world.speed(300, lambda: 0.5)
    assert world.speed(2_000, lambda: 0.5) >= (1.1 if pays else 0.98) * world.plain_speed
    assert (world.drafted_steps > 1_600) == pays


@pytest.mark.parametrize(("follow_seconds", "pays"), [(0.0, True), (1.5, False)])
def test_those_who_read_their_prompts_are_of_one_batch_with_those_who_draft(follow_seconds: float, pays: bool) -> None:
    world = World(16, 0.7, noise=0.1, follow_seconds=follow_seconds, reads_every=2)
    world.speed(300, lambda: 0.65)
    assert world.speed(4_000, lambda: 0.65) >= (1.1 if pays else 0.98) * world.plain_speed
    assert (world.drafted_steps > 4_000) == pays


@pytest.mark.parametrize("prompt_rows", [1, 200])
def test_what_drafting_gains_is_found_where_every_step_reads(prompt_rows: int) -> None:
    good = World(4, 0.8, noise=0.1, reads_every=1, prompt_rows=prompt_rows)
    good.speed(300, lambda: 0.85)
    assert good.speed(1_000, lambda: 0.85) >= 1.5 * good.plain_speed
    bad = World(4, 0.8, noise=0.1, reads_every=1, prompt_rows=prompt_rows)
    bad.speed(4_000, lambda: 0.0)
    assert bad.drafted_steps
    one_action = true_seconds(prompt_rows + 4 * (1 + DEPTH))
    assert bad.lost_seconds <= 1.1 * (CAP_STEPS * true_seconds(1) + SHARE * bad.seconds) + one_action


def test_texts_are_not_followed_where_drafts_do_not_pay() -> None:
    world = World(16, 0.8, noise=0.1, follow_seconds=0.1)
    world.speed(3_000, lambda: 0.0)
    assert world.speed(10_000, lambda: 0.0) >= 0.98 * world.plain_speed
    assert any(world.drafted[3_000:]), "it is tried again"
    assert sum(world.followed[3_000:]) < 0.05 * 10_000


@pytest.mark.parametrize("truth", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("batch", [1, 4])
def test_the_seconds_saved_are_those_that_plain_decoding_would_take_more(truth: float, batch: int) -> None:
    world = World(batch, 0.7, noise=0.1, follow_seconds=0.05)
    world.speed(500, lambda: truth)
    plain_seconds = world.seconds - world.lost_seconds
    assert world.seconds + world.saved_seconds == pytest.approx(plain_seconds, rel=0.06)


def test_a_perfect_drafter_is_worth_four_times_plain() -> None:
    world = World(1, 0.9)
    world.speed(50, lambda: 1.0)
    assert world.speed(500, lambda: 1.0) >= 4 * world.plain_speed


def test_hiccups_of_the_clock_do_not_speak_for_a_drafter_that_is_never_right() -> None:
    world = World(1, 0.05, noise=0.9)
    world.speed(3_000, lambda: 0.0)
    assert world.speed(3_000, lambda: 0.0) >= 0.97 * world.plain_speed


def test_drafting_comes_back_when_texts_change() -> None:
    world = World(2, 0.8, noise=0.1)
    world.speed(500, lambda: 0.0)
    world.speed(300, lambda: 0.85)
    assert world.speed(500, lambda: 0.85) >= 1.5 * world.plain_speed


def test_it_is_suspended_when_texts_change_for_the_worse() -> None:
    world = World(2, 0.8, noise=0.1)
    assert world.speed(500, lambda: 0.85) >= 1.5 * world.plain_speed
    world.speed(100, lambda: 0.0)
    assert world.speed(2_000, lambda: 0.0) >= 0.98 * world.plain_speed


def test_a_step_without_nodes_is_taken_where_its_outcome_could_change_the_decision() -> None:
    clear, doubtful = World(1, 0.9), World(1, 0.3, noise=0.1)
    clear.speed(1_000, lambda: 1.0)
    assert 1 <= 1_000 - clear.drafted_steps <= 4
    doubtful.speed(200, lambda: 0.28)
    assert 4 <= 200 - sum(doubtful.drafted) < 60


def test_other_weights_are_tried_at_once() -> None:
    world = World(2, 0.8, noise=0.1)
    world.speed(1_010, lambda: 0.0)
    assert not world.drafted[-1]
    world.policy.on_weights_changed()
    world.speed(100, lambda: 0.85)
    assert sum(world.drafted[-100:]) > 90


def test_a_step_that_verifies_what_a_grammar_forces_is_no_plain_one() -> None:
    policy = CostBudget(table(), DraftCosts(batches=np.ones(1), seconds=np.array([DRAFT_SECONDS])), RegretLedger())
    load = load_of(1)

    def steps(nodes: int, other_seconds: float) -> float:
        """What a plain step is then assumed to take."""
        for _ in range(20):
            stats = step_stats(nodes, nodes, verify_seconds=true_seconds(1 + nodes), other_seconds=other_seconds)
            reason = "forced" if nodes else "suspended"
            policy.learn(budget_of(load, [nodes], reason, drafted=False, followed=False), stats)
        return policy._plain_seconds(load)

    plain = steps(0, OTHER_SECONDS)
    assert steps(48, 1.0) == plain
    assert steps(0, OTHER_SECONDS) == pytest.approx(plain, rel=0.02)


def test_rows_that_pad_trees_are_paid_for() -> None:
    policy = CostBudget(table(), DraftCosts(batches=np.ones(1), seconds=np.array([DRAFT_SECONDS])), RegretLedger())
    load, verify = load_of(1), true_seconds(1 + 60)
    budget = budget_of(load, [2], node_rows=(60,))
    stats = step_stats(2, 1, draft_seconds=DRAFT_SECONDS, verify_seconds=verify, other_seconds=OTHER_SECONDS)
    assert policy.learn(budget, stats) == pytest.approx(verify)
    lost = DRAFT_SECONDS + verify + OTHER_SECONDS - 2 * true_seconds(1)
    assert policy.outlook(load).lost_seconds == pytest.approx(lost)


def test_a_trial_begins_with_a_text() -> None:
    world = World(2, 0.8, noise=0.1)
    world.speed(8_000, lambda: 0.0)
    begun = [step for step in range(1, 8_000) if world.drafted[step] and not world.drafted[step - 1]]
    trials = [step for step in begun if step > 500]
    assert trials
    assert all(step % TEXT < 2 for step in trials)


def test_plain_steps_in_a_row_are_learnt_from_now_and_then() -> None:
    costs = table()
    policy = CostBudget(costs, DraftCosts(batches=np.ones(1), seconds=np.array([DRAFT_SECONDS])), RegretLedger())
    load = load_of(num_drafting=0)
    plain = budget_of(load, [0], "suspended", drafted=False, followed=False)

    def learnt(steps: int, seconds: float) -> int:
        stats = step_stats(draft_seconds=0.0, verify_seconds=seconds, other_seconds=OTHER_SECONDS)
        return sum(policy.learn(plain, replace(stats)) is not None for _ in range(steps))

    first, later = learnt(20, true_seconds(1)), learnt(200, true_seconds(1))
    assert first >= 10
    assert 200 / 6 <= later <= 200 / 3
    learnt(200, 2 * true_seconds(1))  # the machine became slower
    now = float(policy.step_seconds(load, 0)[0])
    assert now == pytest.approx(2 * true_seconds(1) + OTHER_SECONDS, rel=0.05)
