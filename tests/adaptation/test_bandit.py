import json
import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adaptation.bandit import Bandit, BanditRules
from adaptation.policy import Arm, QueryReport, State
from tests.adaptation.worlds import World, serve

RULES = BanditRules(
    batch_queries={"head": 2, "full": 3},
    alpha=0.10,
    s_min=5.0,
    warm_up_queries=10,
    cold_start_events=8,
    epsilon=(0.30, 0.10),
    settling_queries=2,
    measured_queries=4,
    payback_queries=4,
    explore_share=1.0,
    explore_queries=1e9,
    trials={"head": 1, "full": 1},
)
NONE = (0.0, 0.0)


def bandit(*, seed: int = 0, **changes: Any) -> Bandit:
    return Bandit(replace(RULES, **changes), rng=random.Random(seed))


def report(tokens: int = 20, signal: float | None = 8.0, training: float = 0.0, cost: float = 10.0) -> QueryReport:
    return QueryReport(
        emitted_tokens=tokens, draft_cost=cost / 4, verify_cost=cost * 3 / 4, training_cost=training, signal=signal
    )


def feed(policy: Bandit, count: int, query: QueryReport | None = None) -> list[str]:
    return [policy.decide(query or report()).reason for _ in range(count)]


def update_of(policy: Bandit, arm: Arm) -> None:
    """Bring a fresh bandit to the point where the update of an arm has begun; throughput before it is 2."""
    feed(policy, RULES.warm_up_queries)
    feed(policy, RULES.batch_queries["head"])
    assert policy.take_update() == "head"
    if arm == "full":
        policy.discarded()
        feed(policy, RULES.settling_queries + RULES.batch_queries["full"])
        assert policy.take_update() == "full"


def test_nothing_is_decided_during_the_warm_up() -> None:
    assert feed(bandit(), 11) == ["warm_up"] * 10 + ["untried"]


def test_each_arm_is_tried_before_it_is_judged_the_cheaper_one_first() -> None:
    policy = bandit()
    feed(policy, 10)
    assert [policy.decide(report()).arm for _ in range(2)] == ["head", "head"]
    assert policy.take_update() == "head"
    assert policy.decide(report()).arm == "full"


def test_the_value_of_an_arm_is_its_gain_per_signal() -> None:
    policy = bandit()
    update_of(policy, "head")
    policy.published(1.25)
    feed(policy, 2, report(tokens=1))  # what they were served with says nothing
    assert policy.values == {"head": 0.5 / 8.0, "full": 0.0}


def test_values_are_means_at_first_and_then_move_slowly() -> None:
    policy = bandit(alpha=0.4, epsilon=NONE)
    update_of(policy, "full")
    for ratio, value in ((1.8, 0.2), (1.4, 0.15), (1.4, 0.13)):
        policy.published(tau_ratio=ratio)
        feed(policy, 2)
        assert policy.values["full"] == pytest.approx(value)
        feed(policy, 3)
        assert policy.take_update() == "full"


def test_training_is_paid_by_the_update_wherever_it_fell() -> None:
    policy = bandit()
    update_of(policy, "head")
    feed(policy, 3, report(training=1.0))  # while it trains
    policy.published(1.5)
    feed(policy, 2, report(training=2.0))  # and what is charged late
    assert policy.values["head"] == pytest.approx((120 / (40.0 + 3.0 + 4.0) - 2.0) / 8.0)


def explored(policy: Bandit, queries: int, training: float) -> int:
    """Updates beyond the first of each arm, when each one takes so much and is refused."""
    updates = 0
    for _ in range(queries):
        policy.decide(report(training=0.0))
        if policy.take_update() is not None:
            policy.decide(report(training=training))
            policy.discarded()
            updates += 1
    return updates - 2


def test_exploring_what_brings_nothing_costs_a_share_of_the_time() -> None:
    free = bandit(epsilon=(1.0, 1.0))
    frugal = bandit(epsilon=(1.0, 1.0), explore_queries=6.0, explore_share=0.01)
    assert explored(free, 2000, training=20.0) > 300
    # an update takes as much as two queries: 6 queries at once, then one update in 200 queries
    assert explored(frugal, 2000, training=20.0) in range(2, 14)


def test_changed_traffic_may_be_explored_at_once() -> None:
    policy = bandit(epsilon=(1.0, 1.0), explore_queries=6.0, explore_share=0.0)
    explored(policy, 500, training=20.0)
    assert "explore" not in feed(policy, 50)
    policy.traffic_changed()
    assert feed(policy, 1) == ["untried"]
    explored(policy, 20, training=1.0)
    assert "explore" in feed(policy, 10)


def test_what_pays_does_not_use_up_the_budget() -> None:
    policy = bandit(epsilon=(1.0, 1.0), explore_queries=6.0, explore_share=0.0)
    for _ in range(500):
        policy.decide(report())
        if policy.take_update() is not None:
            policy.decide(report(training=10.0))
            policy.published(tau_ratio=1.5)
    assert "explore" in feed(policy, 20)


def test_training_before_an_update_does_not_lower_its_baseline() -> None:
    policy = bandit()
    feed(policy, 12, report(training=50.0))
    assert policy.take_update() == "head"
    policy.published(1.0)
    feed(policy, 2)
    assert policy.values["head"] == 0.0


def test_a_discarded_update_is_worth_minus_its_time() -> None:
    policy = bandit()
    update_of(policy, "head")
    feed(policy, 1, report(training=10.0))
    policy.discarded()
    assert feed(policy, 2, report(tokens=1)) == ["untried", "untried"]
    assert policy.values["head"] == pytest.approx((80 / 50.0 - 2.0) / 8.0)


def rests(policy: Bandit) -> bool:
    return policy.resting


def test_it_rests_while_no_arm_promises_a_gain() -> None:
    policy = bandit(epsilon=NONE)
    assert not rests(policy)
    tried(policy, 15, 12)
    assert rests(policy)
    policy.traffic_changed()
    assert not rests(policy)
    feed(policy, 3)
    assert policy.take_update() is not None
    policy.published(tau_ratio=1.5)
    feed(policy, 2)
    feed(policy, 4)
    other = policy.take_update()
    assert other is not None
    assert not rests(policy)
    policy.published(tau_ratio=0.9)
    feed(policy, 2)
    assert not rests(policy)  # one arm has paid


def test_an_arm_whose_update_was_too_small_to_count_is_tried_again() -> None:
    policy = bandit(epsilon=NONE)
    update_of(policy, "head")
    policy.discarded(counted=False)
    assert [policy.decide(report()).choice for _ in range(5)] == ["full", "full", "full", "head", "head"]
    assert policy.values["head"] == 0.0


def test_what_is_known_of_an_arm_outlasts_an_update_too_small_to_count() -> None:
    policy = bandit(epsilon=NONE)
    tried(policy, 15, 12)
    values = policy.values
    policy._now.signals["head"] = [8.0, 8.0]
    assert policy.take_update() == "head"
    policy.discarded(counted=False)
    assert feed(policy, 4) == ["no_gain"] * 4
    assert policy.values == values
    assert policy.resting


def fruitless(policy: Bandit, updates: int) -> None:
    """So many updates in a row that were trained and refused."""
    for _ in range(updates):
        while policy.take_update() is None:
            feed(policy, 1)
        policy.discarded()
        feed(policy, RULES.settling_queries)


def lucky() -> Bandit:
    """Both arms have paid so much that refused updates, which cost nothing, never use it up."""
    policy = bandit(epsilon=NONE)
    tried(policy, 40, 40)
    return policy


def test_it_gives_up_after_eight_updates_in_a_row_that_were_not_published() -> None:
    policy = lucky()
    fruitless(policy, 7)
    assert (policy.resting, policy.decide(report()).reason) == (False, "gain")
    fruitless(policy, 1)
    assert max(policy.values.values()) > 0
    assert (policy.resting, policy.decide(report()).reason) == (True, "no_gain")


def test_it_does_not_give_up_on_what_is_published_now_and_then() -> None:
    policy = lucky()
    for _ in range(3):
        fruitless(policy, 7)
        while policy.take_update() is None:
            feed(policy, 1)
        policy.published(tau_ratio=1.01)
        feed(policy, RULES.settling_queries)
    assert not policy.resting


def test_other_traffic_makes_it_try_again_what_it_had_given_up() -> None:
    policy = lucky()
    fruitless(policy, 8)
    policy.traffic_changed()
    assert not policy.resting
    assert policy.decide(report()).reason == "untried"


def test_both_arms_are_tried_anew_when_traffic_has_changed_what_teaches_more_first() -> None:
    policy = bandit(epsilon=NONE)
    tried(policy, 15, 12)
    assert feed(policy, 1) == ["no_gain"]
    policy.traffic_changed()
    assert policy.values == {"head": 0.0, "full": 0.0}
    assert [policy.decide(report()).choice for _ in range(5)] == ["full"] * 3 + ["head"] * 2
    assert policy.take_update() == "full"


@pytest.mark.parametrize(("training", "full"), [(0.0, 5), (1e3, 1)])
def test_an_arm_is_tried_as_often_as_it_needs_where_that_costs_little(training: float, full: int) -> None:
    policy = bandit(epsilon=NONE, explore_queries=6.0, trials={"head": 1, "full": 5})
    feed(policy, RULES.warm_up_queries)
    taken: list[Arm] = []
    while not policy.resting:
        feed(policy, 1)
        arm = policy.take_update()
        if arm is not None:
            taken.append(arm)
            feed(policy, 1, report(training=training if arm == "full" else 0.0))
            policy.discarded()
            feed(policy, RULES.settling_queries)
    assert (taken.count("head"), taken.count("full")) == (1, full)


def test_an_update_is_charged_the_measured_queries_share_of_its_time() -> None:
    policy = bandit(payback_queries=40)
    update_of(policy, "head")
    feed(policy, 1, report(training=10.0))
    policy.published(1.25)
    feed(policy, 2)
    assert policy.values["head"] == pytest.approx((100 / (40.0 + 1.0) - 2.0) / 8.0)


@pytest.mark.parametrize(("signal", "value"), [(4.99, 0.0), (5.0, 0.5 / 5.0)])
def test_an_update_on_little_signal_says_nothing(signal: float, value: float) -> None:
    policy = bandit()
    feed(policy, 10)
    feed(policy, 2, report(signal=signal))
    assert policy.take_update() == "head"
    policy.published(1.25)
    feed(policy, 2)
    assert policy.values["head"] == value


def test_learning_goes_on_while_an_update_settles() -> None:
    policy = bandit()
    update_of(policy, "head")
    policy.published(1.25)
    assert feed(policy, 6) == ["untried"] * 6


def test_there_is_one_update_at_a_time() -> None:
    policy = bandit()
    update_of(policy, "head")
    feed(policy, 5)
    assert policy.take_update() is None
    policy.published(1.0)
    feed(policy, 1)
    assert policy.take_update() is None
    feed(policy, 1)
    assert policy.take_update() == "full"


def tried(policy: Bandit, head_tokens: int, full_tokens: int) -> None:
    """Let both arms be tried; throughput before each is 2."""
    update_of(policy, "head")
    policy.published(head_tokens / 20)
    feed(policy, 6)
    assert policy.take_update() == "full"
    policy.published(full_tokens / 20)
    feed(policy, 2)


@pytest.mark.parametrize(
    ("head_tokens", "full_tokens", "choice", "reason"),
    [(22, 30, "full", "gain"), (30, 22, "head", "gain"), (15, 22, "full", "gain"), (15, 12, "skip", "no_gain")],
)
def test_the_larger_gain_wins_and_none_is_skipped(head_tokens: int, full_tokens: int, choice: str, reason: str) -> None:
    policy = bandit(epsilon=NONE)
    tried(policy, head_tokens, full_tokens)
    decision = policy.decide(report(signal=3.0))
    assert (decision.choice, decision.reason) == (choice, reason)


def test_what_is_published_with_a_kept_full_update_in_it_is_the_full_arms_gain() -> None:
    policy = bandit()
    update_of(policy, "full")
    policy.discarded(counted=False)  # trained on
    while (arm := policy.take_update()) != "head":
        if arm is not None:
            policy.discarded(counted=False)
        feed(policy, 1)
    before = dict(policy.values)
    policy.published(tau_ratio=1.5)
    feed(policy, RULES.settling_queries)
    assert policy.values["head"] == before["head"]
    assert policy.values["full"] > before["full"]


def test_exploring_falls_over_the_cold_start_and_stays() -> None:
    policy = bandit()
    seen = [policy.epsilon]
    for _ in range(12):
        while policy.take_update() is None:
            feed(policy, 1)
        policy.discarded()
        feed(policy, 2)
        seen.append(policy.epsilon)
    assert seen[:9] == pytest.approx([0.30 - 0.025 * event for event in range(9)])
    assert seen[8:] == pytest.approx([0.10] * 5)


def explores(policy: Bandit, queries: int, *, ratio: float) -> Counter[str]:
    """Arms that queries explore, where every update makes the drafter so many times better."""
    counts: Counter[str] = Counter()
    for _ in range(queries):
        decision = policy.decide(report())
        counts[decision.choice] += decision.reason == "explore"
        if policy.take_update() is not None:
            policy.published(tau_ratio=ratio)
    return counts


def test_where_an_arm_pays_exploring_stays_within_epsilon_and_tries_what_was_tried_least() -> None:
    policy = bandit(cold_start_events=2)
    tried(policy, 30, 22)
    counts = explores(policy, 5000, ratio=1.5)
    assert 0.05 < counts.total() / 5000 < 0.12
    assert counts["full"] > 5 * counts["head"]


def test_where_no_arm_pays_exploring_waits_for_its_budget_alone() -> None:
    policy = bandit(cold_start_events=2)
    tried(policy, 15, 12)
    counts = explores(policy, 5000, ratio=0.9)
    assert counts.total() > 750, "more than a share of epsilon"
    assert 0.3 < counts["head"] / counts["full"] < 0.8, "as many updates of each; heads need fewer queries"


def test_what_is_explored_is_an_update_and_no_rest() -> None:
    policy = bandit(cold_start_events=2)
    tried(policy, 15, 12)
    while policy.resting:
        assert feed(policy, 1) in (["no_gain"], ["explore"])
    while policy.take_update() is None:
        assert feed(policy, 1) == ["explore"]
    policy.discarded()
    feed(policy, RULES.settling_queries)
    assert policy.resting


@pytest.mark.parametrize(
    "query",
    [
        report(signal=float("nan")),
        report(signal=float("inf")),
        report(signal=-1.0),
        report(training=float("nan")),
        report(training=-1.0),
        report(cost=0.0),
        report(cost=float("inf")),
        report(tokens=-1),
    ],
    ids=str,
)
def test_senseless_numbers_change_nothing(query: QueryReport) -> None:
    policy = bandit()
    update_of(policy, "head")
    before = policy.state()
    assert policy.decide(query).reason == "unusable"
    assert policy.state() == before


def test_a_query_that_must_not_be_learnt_from_counts_all_the_same() -> None:
    policy = bandit()
    update_of(policy, "head")
    policy.published(1.25)
    assert feed(policy, 6, report(tokens=25, signal=None)) == ["not_admitted"] * 6
    assert policy.values["head"] > 0
    assert policy.take_update() is None


def test_a_rollback_during_an_update_forgets_it() -> None:
    policy = bandit()
    update_of(policy, "head")
    policy.reset()
    with pytest.raises(AssertionError, match="never began"):
        policy.published(1.0)
    feed(policy, 12)
    assert policy.take_update() == "head"


def test_a_rollback_forgets_everything() -> None:
    policy = bandit()
    tried(policy, 30, 30)
    policy.reset()
    assert policy.values == {"head": 0.0, "full": 0.0}
    assert policy.epsilon == 0.30
    assert policy.take_update() is None
    assert feed(policy, 11) == ["warm_up"] * 10 + ["untried"]


_event = st.one_of(
    st.tuples(st.integers(0, 60), st.none() | st.floats(0, 40), st.sampled_from([0.0, 1.5])),
    st.sampled_from([0.8, 1.3, "discarded"]),
)


def play(policy: Bandit, events: list[object]) -> list[object]:
    seen: list[object] = []
    for event in events:
        if isinstance(event, tuple):
            seen.append(policy.decide(report(tokens=event[0], signal=event[1], training=event[2])))
            seen.append(policy.take_update())
        elif training(policy.state()):
            policy.published(event) if isinstance(event, float) else policy.discarded()
        seen.append(policy.values)
    return seen


def training(state: State) -> bool:
    knowledge = state["knowledge"]
    assert isinstance(knowledge, dict)
    update = knowledge["update"]
    return isinstance(update, dict) and update["stage"] == "training"


@given(st.lists(_event, min_size=20, max_size=80), st.lists(_event, max_size=80), st.integers(0, 5))
def test_it_goes_on_exactly_where_it_stopped(before: list[object], after: list[object], seed: int) -> None:
    first = bandit(seed=seed, warm_up_queries=2)
    play(first, before)
    if training(first.state()):
        first.discarded()
    resumed = bandit(seed=99, warm_up_queries=2)
    stored = json.loads(json.dumps(first.state()))
    resumed.restore(stored)
    assert resumed.state() == stored
    first.restore(stored)  # nor does it have samples any more
    assert play(first, after) == play(resumed, after)


def test_an_update_that_was_training_is_lost_with_its_process() -> None:
    policy = bandit()
    update_of(policy, "head")
    resumed = bandit()
    resumed.restore(policy.state())
    feed(resumed, 3)
    assert resumed.take_update() == "full"


def foreign_states() -> list[State]:
    good = bandit().state()
    knowledge = good["knowledge"]
    assert isinstance(knowledge, dict)
    return [
        {},
        {"knowledge": knowledge},
        {**good, "more": 1},
        {**good, "knowledge": {**knowledge, "num_queries": -1}},
        {**good, "knowledge": {**knowledge, "values": {"head": 0.0}}},
        {**good, "knowledge": {**knowledge, "values": {"head": 0.0, "full": float("nan")}}},
        {**good, "knowledge": {**knowledge, "num_measured": {"full": 1}}},
        {**good, "knowledge": {**knowledge, "surprise": 1}},
        {**good, "random": [3, [1, 2, 3], None]},
    ]


@pytest.mark.parametrize("state", foreign_states())
def test_a_foreign_state_is_refused_and_changes_nothing(state: State) -> None:
    policy = bandit()
    feed(policy, 5)
    before = policy.state()
    with pytest.raises(ValueError):  # noqa: PT011  the words are those of whoever notices first
        policy.restore(state)
    assert policy.state() == before


@pytest.mark.parametrize("seed", range(5))
def test_it_learns_which_update_pays(seed: int) -> None:
    """Replays see at once that nothing more is gained at the ceiling, where exploring stops for its budget alone."""
    world = World(gains={"head": 0.04, "full": 0.04}, costs={"head": 2.0, "full": 400.0}, ceiling=4.0)
    policy = bandit(seed=seed, explore_queries=8.0, explore_share=0.01, payback_queries=40)
    served = serve(policy, world, queries=400, rng=random.Random(seed))
    assert world.throughput > 3.0
    assert served.updates["head"] > 5 * served.updates["full"]


@pytest.mark.parametrize("seed", range(5))
def test_it_stops_where_nothing_can_be_gained(seed: int) -> None:
    world = World(gains={"head": 0.0, "full": 0.0}, costs={"head": 20.0, "full": 200.0}, ceiling=3.0)
    policy = bandit(seed=seed, payback_queries=40)
    served = serve(policy, world, queries=400, rng=random.Random(seed))
    assert max(policy.values.values()) < 0
    # Two updates that try the arms; then a tenth of the queries explores, and it takes two or three for an update.
    assert served.updates.total() < 400 * 0.3 / 2
