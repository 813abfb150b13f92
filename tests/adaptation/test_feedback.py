"""Whose queries become samples, whose texts judge, and whose leave no trace."""

import random
import time
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adaptation.feedback import FeedbackFilter, RecordingSampler, TrafficMonitor
from adaptation.replay_buffer import ReplayBuffer
from adaptation.samples import Quota, SampleBuffers, ValidationSet, training_sample
from drafters.feedback import QueryFeedback
from tests.adaptation.samples import feedback, undrafted
from tests.adaptation.worlds import Clock
from tests.tiny_models import VOCAB_SIZE
from tests.tuned import tuned


class Parts:
    def __init__(
        self,
        *,
        share: float = 0.5,
        update_samples: int = 9,
        query_positions: int = 32,
        client_share: float = 0.25,
        client_free_queries: int = 16,
        **knobs: object,
    ) -> None:
        _, _, policy = tuned({"policy": "head_only", **knobs})
        assert policy is not None
        self.buffers = SampleBuffers(
            {"head": 100, "full": 100},
            ReplayBuffer(1 << 30, client_share=1.0),
            update_samples=update_samples,
        )
        self.validation = ValidationSet(share=share, enough=4, max_texts=1000, rng=random.Random(0))
        self.policy = policy
        quota = Quota(
            client_share=client_share,
            free_queries=client_free_queries,
            query_positions=query_positions,
            clock=Clock(),
        )
        self.feedback_filter = FeedbackFilter(
            policy,
            quota,
            self.buffers,
            self.validation,
            sampler=RecordingSampler(1.0),
            traffic=TrafficMonitor(VOCAB_SIZE),
        )

    def take(self, heard: QueryFeedback, *, learning: bool = True) -> tuple[bool, bool]:
        """Whether it became a sample, and whether its text may judge."""
        before = self.buffers.counts["head"]
        taken = self.feedback_filter.take(heard, learning=learning)
        return self.buffers.counts["head"] > before, taken.validates


def test_a_query_is_learnt_from_or_judges_never_both() -> None:
    parts = Parts()
    fates = [parts.take(feedback(seed)) for seed in range(40)]
    assert {(True, False), (False, True)} == set(fates)
    assert len(parts.validation.texts) == sum(judges for _, judges in fates)


def test_all_that_is_learnt_from_is_rehearsed_by_full_updates_whatever_arm_it_went_to() -> None:
    parts = Parts(update_samples=100)
    fates = [parts.take(feedback(seed)) for seed in range(20)]
    assert parts.take(feedback(20), learning=False)[0] is False
    parts.feedback_filter.take(feedback(21, store=False), learning=True)
    heard = parts.buffers.take("full")
    assert len(heard) == sum(learnt for learnt, _ in fates)
    assert all(sample.example is not None for sample in heard)


def test_what_must_not_be_stored_leaves_no_trace() -> None:
    parts = Parts()
    for seed in range(20):
        heard = feedback(seed)
        private = replace(heard, query=replace(heard.query, store=False))
        taken = parts.feedback_filter.take(private, learning=True)
        assert (taken.text, taken.validates, taken.admission.reason) == (None, False, "not_stored")
    assert (parts.buffers.counts["head"], parts.validation.texts) == (0, ())
    assert parts.feedback_filter.refusals == {"not_stored": 20}
    assert parts.feedback_filter.decisions == {"skip:not_admitted": 20}


def test_a_client_beyond_its_share_neither_teaches_nor_judges() -> None:
    parts = Parts(client_free_queries=0, client_share=0.25)
    greedy = 0
    for seed in range(60):
        for client in "bcdefgh":
            parts.take(feedback(seed, client=client, rejected=1))
        for _ in range(5):
            taught, judges = parts.take(feedback(seed, client="a", rejected=12))
            greedy += taught or judges
    assert parts.feedback_filter.refusals["over_share"] > 100
    assert greedy < 60


def test_while_paused_nothing_is_learnt() -> None:
    parts = Parts()
    fates = [parts.take(feedback(seed), learning=False) for seed in range(20)]
    assert not any(taught for taught, _ in fates)
    assert any(judges for _, judges in fates)


def test_a_query_for_which_no_one_drafted_teaches_and_judges_too() -> None:
    parts = Parts(policy="full_only")
    taken = [parts.feedback_filter.take(undrafted(seed), learning=True) for seed in range(40)]
    samples = parts.buffers.take("full")
    assert len(samples) + len(parts.validation.texts) == 40
    assert len(parts.validation.texts) > 10
    assert all(one.admission.positions == 16 for one in taken)
    assert {(sample.signal, sample.num_rejected, sample.draft_labels.count) for sample in samples} == {(16.0, 0, 0)}
    assert all(sample.example is not None for sample in samples)


def test_it_teaches_no_more_than_one_query_may() -> None:
    parts = Parts(policy="full_only", share=0.0, query_positions=12)
    parts.take(replace(feedback(0, rejected=10), query=replace(feedback(0).query, plain_steps=30)))
    (sample,) = parts.buffers.take("full")
    heard = training_sample(feedback(0, rejected=10), most_rejected=12)
    assert sample.num_rejected == 10
    assert heard.signal < sample.signal <= heard.signal + 2


POSITIONS = 32


def quota(clock: Clock | None = None, *, share: float = 0.25, free: int = 0, max_clients: int = 4096) -> Quota:
    return Quota(
        client_share=share,
        free_queries=free,
        query_positions=POSITIONS,
        half_life_seconds=600.0,
        max_clients=max_clients,
        clock=clock or Clock(),
    )


def test_a_single_client_is_learnt_from_without_limit() -> None:
    clock = Clock()
    fair = quota(clock)
    for _ in range(2000):
        clock.now += 7.3
        assert fair.admit("only", 20, store=True).admitted


def test_one_who_sends_little_does_not_stop_one_who_sends_much() -> None:
    clock = Clock()
    fair = quota(clock, free=16)
    admitted = 0
    for second in range(1, 3601):
        clock.now += 1.0
        if second % 30 == 0:
            fair.admit("prober", 3, store=True)
        if second % 6 == 0:
            admitted += fair.admit("user", POSITIONS, store=True).admitted
    assert admitted >= 6 * 10  # at least ten queries per half-life of ten minutes


def test_equal_clients_are_not_refused_for_a_rounded_share() -> None:
    for num_clients in range(1, 60):
        fair = quota(share=0.001)
        for _ in range(5):
            assert all(fair.admit(str(client), 20, store=True).admitted for client in range(num_clients))


def test_the_quota_remembers_no_one_whose_queries_must_not_be_stored() -> None:
    fair = quota()
    for _ in range(100):
        assert fair.admit("private", 20, store=False).reason == "not_stored"
    assert len(vars(fair)["_uses"]) == 0


_queries = st.lists(
    st.tuples(st.integers(0, 7), st.integers(1, 60), st.sampled_from([0.0, 1.0, 30.0, 2000.0])), max_size=200
)


@given(_queries, st.sampled_from([0.2, 0.5, 1.0]), st.sampled_from([0, 2]))
def test_no_client_ever_exceeds_its_share_by_more_than_a_query(
    queries: list[tuple[int, int, float]], share: float, free: int
) -> None:
    """An independent account with exact forgetting at the quota's own ticks."""
    clock = Clock()
    fair = quota(clock, share=share, free=free)
    tick = 600.0 / 64
    taken = [0.0] * 8
    started, ticks = clock.now, 0
    for client, positions, pause in queries:
        clock.now += pause
        passed = int((clock.now - started) / tick) - ticks
        ticks += passed
        taken = [amount * 0.5 ** (passed / 64) for amount in taken]
        before = list(taken)
        admission = fair.admit(str(client), positions, store=True)
        taken[client] += admission.positions
        assert admission.positions <= POSITIONS
        if admission.admitted:
            # What the quota calls negligible it forgets; the account does not.
            assert before[client] <= max(free * POSITIONS, fair.share * sum(before)) + 0.1
        else:
            assert before[client] >= fair.share * sum(before) - 0.1


@given(_queries)
def test_somebody_is_always_admitted(queries: list[tuple[int, int, float]]) -> None:
    clock = Clock()
    fair = quota(clock)
    for client, positions, pause in queries:
        clock.now += pause
        fair.admit(str(client), positions, store=True)
    assert any(fair.admit(str(client), 1, store=True).admitted for client in range(8))


def test_memory_and_time_are_bounded_under_a_crowd_of_names() -> None:
    fair = quota(max_clients=1000)
    started = time.perf_counter()
    for number in range(50_000):
        fair.admit(f"client-{number}", 20, store=True)
        assert len(vars(fair)["_uses"]) <= 1000
    assert time.perf_counter() - started < 10


def test_a_crowd_of_names_does_not_wash_a_heavy_client_clean() -> None:
    fair = quota(max_clients=100, share=0.05)
    for number in range(2000):
        fair.admit("heavy", 20, store=True)
        fair.admit(f"{number % 40}", 20, store=True)
    while fair.admit("heavy", 20, store=True).admitted:
        pass
    for number in range(150):
        fair.admit(f"new-{number}", 1, store=True)
    assert fair.admit("heavy", 20, store=True).reason == "over_share"


def test_who_is_gone_is_forgotten() -> None:
    clock = Clock()
    fair = quota(clock)
    for client in "abcdefgh":
        for _ in range(5):
            fair.admit(client, 20, store=True)
    assert fair.share == 0.25
    clock.now += 600.0 * 20
    fair.admit("new", 20, store=True)
    assert len(vars(fair)["_uses"]) == 1
    assert fair.share == 1.0


def test_names_are_not_kept() -> None:
    fair = quota()
    fair.admit("sk-very-secret-key", 20, store=True)
    assert "secret" not in repr({name: repr(value) for name, value in vars(fair).items()})
    other = quota()
    other.admit("sk-very-secret-key", 20, store=True)
    assert set(vars(fair)["_uses"]).isdisjoint(vars(other)["_uses"])


def test_any_text_is_a_name() -> None:
    assert quota().admit("\ud800 naïve \0", 1, store=True).admitted
    assert quota().admit("", 1, store=True).admitted


@pytest.mark.parametrize("share", [1.0, 1 / 16, 1 / 32])
@pytest.mark.parametrize("least", [0.0, 1.0])
def test_a_share_is_recorded_in_a_row(share: float, least: float) -> None:
    asked = RecordingSampler(1 / 16, least=least)
    assert all(asked.draws() for _ in range(320))
    asked.share = share
    drawn, share = [asked.draws() for _ in range(1024)], max(share, least)
    assert sum(drawn) == 1024 * share
    turns = sum(one != other for one, other in pairwise(drawn))
    assert turns <= 2 * 1024 * share / 8
    asked.share = 1.0
    assert all(asked.draws() for _ in range(100))
