"""One leader at a time, each with a higher epoch than any before, on a real server."""

import random
from collections.abc import Iterator
from contextlib import closing

import pytest

from adaptation.records import StoreLost
from adaptation.replicas.lease import Lease, NeverLeads
from adaptation.replicas.redis_store import RedisStore
from tests.adaptation.worlds import Clock
from tests.redis_server import RedisServer

LONG = 1000.0


@pytest.fixture
def store(server: RedisServer) -> Iterator[RedisStore]:
    with closing(RedisStore(server.url, timeout_seconds=5.0)) as made:
        yield made


def lease(store: RedisStore, name: str, clock: Clock, seconds: float = LONG) -> Lease:
    return Lease(store, "lease", "epoch", name=name, seconds=seconds, clock=clock)


def later(clock: Clock) -> None:
    clock.now += LONG


def test_the_first_holds_it_and_the_second_does_not(store: RedisStore) -> None:
    clock = Clock()
    one, two = lease(store, "one", clock), lease(store, "two", clock)
    assert (one.hold(0), two.hold(0)) == (True, False)
    later(clock)
    assert (two.hold(0), one.hold(0)) == (False, True)
    assert (one.epoch, two.epoch) == (1, 0)


def test_whoever_comes_next_has_a_higher_epoch(store: RedisStore) -> None:
    clock = Clock()
    one, two = lease(store, "one", clock), lease(store, "two", clock)
    one.hold(0)
    one.give_up()
    assert two.hold(0)
    assert two.epoch == 2
    later(clock)
    assert not one.hold(0)


def test_a_lease_that_is_not_kept_runs_out(store: RedisStore) -> None:
    clock = Clock()
    one, two = lease(store, "one", clock, seconds=0.05), lease(store, "two", clock)
    assert one.hold(0)
    while not two.hold(0):
        later(clock)
    assert two.epoch == 2
    later(clock)
    assert not one.hold(0)


def test_what_is_known_is_always_exceeded(server: RedisServer, store: RedisStore) -> None:
    clock = Clock()
    one = lease(store, "one", clock)
    assert one.hold(41)
    assert one.epoch == 42
    server.client.flushall()
    later(clock)
    assert one.hold(42)
    assert one.epoch == 43


def test_a_leader_that_knows_too_little_leads_anew(store: RedisStore) -> None:
    clock = Clock()
    one, other = lease(store, "one", clock), NeverLeads(store, "epoch")
    one.hold(0)
    other.raise_epoch(7)
    other.raise_epoch(3)
    later(clock)
    assert one.hold(0)
    assert one.epoch == 8
    assert not other.hold(0)


def test_between_turns_nothing_is_asked(server: RedisServer, store: RedisStore) -> None:
    clock = Clock()
    one = lease(store, "one", clock)
    one.hold(0)
    asked = server.client.info("commandstats")["cmdstat_eval"]["calls"]
    for _ in range(10):
        assert one.hold(0)
    assert server.client.info("commandstats")["cmdstat_eval"]["calls"] == asked


def test_a_store_that_was_lost_is_asked_at_once(server: RedisServer, store: RedisStore) -> None:
    """Another one may lead by now."""
    clock = Clock()
    one, two = lease(store, "one", clock), lease(store, "two", clock)
    one.hold(0)
    later(clock)
    server.kill()
    with pytest.raises(StoreLost):
        one.hold(0)
    server.begin()
    assert two.hold(1)
    assert not one.hold(0)


def test_epochs_rise_whatever_happens(server: RedisServer, store: RedisStore) -> None:
    """Two that hold, give up, lose and forget at random: never two with one epoch, never a lower one later."""
    clock, rng = Clock(), random.Random(0)
    both = [lease(store, name, clock) for name in ("one", "two")]
    known, seen = 0, dict[int, str]()
    for _ in range(300):
        one = rng.choice(both)
        match rng.randrange(6):
            case 0:
                one.give_up()
            case 1:
                server.client.delete("lease")
            case 2:
                server.client.flushall()
            case _:
                later(clock)
        was = one.epoch
        if one.hold(known) and one.epoch != was:
            assert one.epoch > known
            known = one.epoch
        if one.epoch:
            assert seen.setdefault(one.epoch, one._name) == one._name
