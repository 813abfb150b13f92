import random

from adaptation.replicas.backoff import Backoff


def test_waits_double_up_to_a_bound_and_are_never_the_same_for_two() -> None:
    backoff = Backoff(first_seconds=0.1, most_seconds=1.0, rng=random.Random(0))
    waits = [backoff.next() for _ in range(6)]
    bounds = [0.1, 0.2, 0.4, 0.8, 1.0, 1.0]
    assert all(bound / 2 <= wait <= bound for wait, bound in zip(waits, bounds, strict=True))
    other = Backoff(first_seconds=0.1, most_seconds=1.0, rng=random.Random(1))
    assert waits != [other.next() for _ in range(6)]


def test_they_begin_anew_once_the_store_was_there() -> None:
    backoff = Backoff(first_seconds=0.1, most_seconds=1.0, rng=random.Random(0))
    for _ in range(5):
        backoff.next()
    backoff.reset()
    assert backoff.next() <= 0.1
