"""Who gives way: importance, then patience, then cost, then age."""

import torch

from service.engine.prefix_cache import NoPrefixCache, PrefixCache
from service.engine.sequence import Sequence
from service.engine.victims import cheapest, sheltered
from tests.service.engine.test_scheduler import sequence_of

CPU = torch.device("cpu")
NOTHING_KEPT = NoPrefixCache(CPU)


def running(number: int, computed: int, *, priority: int = 0, preemptions: int = 0) -> Sequence:
    sequence = sequence_of(max(1, computed), priority=priority)
    sequence.number, sequence.num_computed, sequence.preemptions = number, computed, preemptions
    return sequence


def test_the_oldest_is_sheltered_wherever_it_stands() -> None:
    first, second = running(1, 5), running(2, 1)
    assert sheltered([second, first]) is first
    assert cheapest([second, first], first, NOTHING_KEPT) is second
    assert cheapest([first], first, NOTHING_KEPT) is None


def test_least_to_compute_again_and_the_newest_of_equals() -> None:
    old, large, small, newer = running(0, 1), running(1, 9), running(2, 4), running(3, 4)
    assert cheapest([old, large, small, newer], old, NOTHING_KEPT) is newer
    assert cheapest([old, large, small], old, NOTHING_KEPT) is small


def test_importance_before_patience_before_cost() -> None:
    old, small, tired = running(0, 1), running(1, 30), running(2, 3, preemptions=2)
    assert cheapest([old, small, tired], old, NOTHING_KEPT) is small
    unimportant = running(3, 99, priority=5, preemptions=7)
    assert cheapest([old, small, tired, unimportant], old, NOTHING_KEPT) is unimportant


def test_what_others_keep_alive_costs_nothing() -> None:
    cache = PrefixCache(CPU)
    shared = list(range(50))
    cache.release(cache.acquire("", shared), shared, torch.arange(1, 50))
    old, lone, sharing = running(0, 1), running(1, 20), running(2, 45)
    sharing.lease = cache.acquire("", shared)
    assert cheapest([old, lone, sharing], old, cache) is lone
    old.lease = cache.acquire("", shared)
    assert cheapest([old, lone, sharing], old, cache) is sharing
