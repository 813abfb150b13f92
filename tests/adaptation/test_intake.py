"""Whose queries become samples, whose texts judge, and whose leave no trace."""

import random
from dataclasses import replace

import torch

from adaptation.bandit import Bandit
from adaptation.feedback import FeedbackFilter, Quota
from adaptation.learner import policy_of
from adaptation.samples import SampleBuffers, ValidationSet, training_sample
from drafters.feedback import QueryFeedback
from tests.adaptation.samples import feedback, undrafted
from tests.adaptation.worlds import Clock
from tests.tuned import tuned

torch.set_num_threads(1)


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
        config, tuning = tuned({"policy": "head_only", **knobs})
        self.buffers = SampleBuffers(
            {"head": 100, "full": 100},
            replay_texts=100,
            update_samples=update_samples,
            rng=random.Random(0),
        )
        self.validation = ValidationSet(share=share, enough=4, max_texts=1000, rng=random.Random(0))
        self.policy = policy_of(config, tuning, rng=random.Random(0))
        quota = Quota(
            client_share=client_share,
            free_queries=client_free_queries,
            query_positions=query_positions,
            clock=Clock(),
        )
        self.feedback_filter = FeedbackFilter(self.policy, quota, self.buffers, self.validation)

    def take(self, heard: QueryFeedback, *, learning: bool = True) -> tuple[bool, bool]:
        """Whether it became a sample, and whether its text may judge."""
        before = self.buffers.counts["head"]
        taken = self.feedback_filter.take(heard, training_cost=0.0, learning=learning)
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
    parts.feedback_filter.take(feedback(21, store=False), training_cost=0.0, learning=True)
    heard = parts.buffers.take("full")
    assert len(heard) == sum(learnt for learnt, _ in fates)
    assert all(sample.example is not None for sample in heard)


def test_what_must_not_be_stored_leaves_no_trace() -> None:
    parts = Parts()
    for seed in range(20):
        heard = feedback(seed)
        private = replace(heard, query=replace(heard.query, store=False))
        taken = parts.feedback_filter.take(private, training_cost=0.0, learning=True)
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


def test_a_query_for_which_nobody_drafted_teaches_and_judges_too() -> None:
    parts = Parts(policy="full_only")
    taken = [parts.feedback_filter.take(undrafted(seed), training_cost=0.0, learning=True) for seed in range(40)]
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


def test_the_policy_hears_of_every_query() -> None:
    parts = Parts(policy="bandit", warm_up_queries=10)
    for seed in range(10):
        parts.take(feedback(seed))
    assert isinstance(parts.policy, Bandit)
    assert parts.feedback_filter.decisions == {"skip:warm_up": 10}
