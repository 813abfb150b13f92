"""A real server: commands, the lease, the version and the queries in it, and what is reported when there is none."""

import random
import time
from collections.abc import Iterator
from contextlib import closing

import pytest

from adaptation.records import Refused, StoreLost, StoreRefused
from adaptation.replicas.redis_store import CHUNK_BYTES, Lease, QueryMessage, RedisStore
from tests.adaptation.worlds import Clock
from tests.redis_server import Redis, RedisCluster

ON_ONE = pytest.mark.parametrize("server", ["one_server"], indirect=True)


@pytest.fixture(params=["one_server", "cluster"])
def server(request: pytest.FixtureRequest) -> Redis:
    running: Redis = request.getfixturevalue(request.param)
    return running


@pytest.fixture
def store(server: Redis) -> Iterator[RedisStore]:
    with closing(connected(server.url)) as made:
        yield made


@pytest.fixture
def other(server: Redis) -> Iterator[RedisStore]:
    with closing(connected(server.url, "two")) as made:
        yield made


def connected(url: str, name: str = "one", *, timeout_seconds: float = 5.0, max_queries: int = 100) -> RedisStore:
    return RedisStore(url, "here", name=name, timeout_seconds=timeout_seconds, max_queries=max_queries)


def test_a_server_that_is_gone_is_lost_until_it_is_back(server: Redis, store: RedisStore) -> None:
    store.command("SET", "key", "value")
    server.kill()
    with pytest.raises(StoreLost) as lost:
        store.command("GET", "key")
    assert not isinstance(lost.value, StoreRefused)
    server.begin()
    assert store.command("GET", "key") is None


def test_a_server_that_says_nothing_is_not_waited_for(server: Redis) -> None:
    store = connected(server.url, timeout_seconds=0.3)
    store.command("SET", "key", "value")
    server.freeze()
    began = time.monotonic()
    with pytest.raises(StoreLost):
        store.command("GET", "key")
    assert time.monotonic() - began < 5
    server.thaw()
    assert store.command("GET", "key") == b"value"  # and not the answer to what was asked before
    store.close()


@pytest.mark.parametrize("url", ["localhost:6379", "http://localhost", ""])
def test_what_is_no_url_is_refused_at_once(url: str) -> None:
    with pytest.raises(ValueError, match="URL"):
        connected(url)


def test_any_node_leads_to_the_keys_wherever_they_move(cluster: RedisCluster) -> None:
    for node in cluster.nodes:
        with closing(connected(node.url)) as store:
            store.put("a", DATA)
            cluster.move("{here}:weights:a")
            assert store.get("a", len(DATA)) == DATA


LONG = 1000.0


def lease(store: RedisStore, clock: Clock, seconds: float = LONG) -> Lease:
    return Lease(store, seconds=seconds, clock=clock)


def later(clock: Clock) -> None:
    clock.now += LONG


def test_a_lease_that_is_not_kept_runs_out(store: RedisStore, other: RedisStore) -> None:
    clock = Clock()
    one, two = lease(store, clock, seconds=0.05), lease(other, clock)
    assert one.hold(0)
    while not two.hold(0):
        later(clock)
    assert two.epoch == 2
    later(clock)
    assert not one.hold(0)


def test_a_leader_that_knows_too_little_leads_anew(store: RedisStore, other: RedisStore) -> None:
    clock = Clock()
    one, follows = lease(store, clock), Lease(other, clock=clock, eligible=False)
    one.hold(0)
    follows.raise_epoch(7)
    follows.raise_epoch(3)
    later(clock)
    assert one.hold(0)
    assert one.epoch == 8
    assert not follows.hold(0)


def test_a_store_that_was_lost_is_asked_at_once(server: Redis, store: RedisStore, other: RedisStore) -> None:
    """Another one may lead by now."""
    clock = Clock()
    one, two = lease(store, clock), lease(other, clock)
    one.hold(0)
    later(clock)
    server.kill()
    with pytest.raises(StoreLost):
        one.hold(0)
    server.begin()
    assert two.hold(1)
    assert not one.hold(0)


def test_epochs_rise_whatever_happens(server: Redis, store: RedisStore, other: RedisStore) -> None:
    """Two that hold, give up, lose and forget at random: never two with one epoch, never a lower one later."""
    clock, rng = Clock(), random.Random(0)
    both = [lease(one, clock) for one in (store, other)]
    known, seen = 0, dict[int, str]()
    for _ in range(300):
        one = rng.choice(both)
        match rng.randrange(6):
            case 0:
                one.release()
            case 1:
                server.client.delete("{here}:lease")
            case 2:
                server.client.flushall()
            case _:
                later(clock)
        was = one.epoch
        if one.hold(known) and one.epoch != was:
            assert one.epoch > known
            known = one.epoch
        if one.epoch:
            assert seen.setdefault(one.epoch, one._store.name) == one._store.name


DATA = bytes(range(256)) * 10_000  # three pieces


def leads(store: RedisStore) -> int:
    """# -> the epoch"""
    held = lease(store, Clock())
    held.hold(0)
    return held.epoch


@pytest.mark.parametrize("size", [1, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, len(DATA)])
def test_weights_come_back_whole(store: RedisStore, size: int) -> None:
    store.put("a", DATA[:size])
    assert store.has("a", size)
    assert store.get("a", size) == DATA[:size]


def test_sending_ends_with_the_right_to(store: RedisStore) -> None:
    may = iter([True, True, False])
    assert not store.put("a", DATA, lambda: next(may))
    assert not store.has("a", len(DATA))
    assert store.put("a", DATA)
    assert store.put("a", DATA, lambda: False), "they are there"


def test_a_missing_piece_is_seen(server: Redis, store: RedisStore) -> None:
    store.put("a", DATA)
    server.client.hdel("{here}:weights:a", "1")
    assert not store.has("a", len(DATA))
    with pytest.raises(Refused, match="piece 1") as refused:
        store.get("a", len(DATA))
    assert refused.value.reason == "torn"


def test_the_leader_announces_and_what_it_announced_stays(server: Redis, store: RedisStore) -> None:
    epoch = leads(store)
    for name, before in (("a", "a"), ("b", "a")):
        store.put(name, DATA)
        assert store.announce(epoch, name.encode(), name, before)
        assert store.current() == name.encode()
    assert server.client.ttl("{here}:weights:b") == -1
    assert 0 < server.client.ttl("{here}:weights:a") <= 600  # for one that is still reading it


def test_no_other_does(store: RedisStore, other: RedisStore) -> None:
    store.put("a", DATA)
    assert not store.announce(1, b"raw", "a", "a")  # no one leads
    epoch = leads(other)
    assert not store.announce(epoch, b"raw", "a", "a")  # another one leads
    assert not store.share(epoch, b"state")
    assert (store.current(), store.shared()) == (None, None)


def test_a_leader_of_an_earlier_epoch_does_not(server: Redis, store: RedisStore) -> None:
    old = leads(store)
    server.client.delete("{here}:lease")
    new = leads(store)
    store.put("a", DATA)
    assert not store.announce(old, b"old", "a", "a")
    assert not store.share(old, b"old")
    assert store.announce(new, b"new", "a", "a")
    assert store.share(new, b"new")
    assert (store.current(), store.shared()) == (b"new", b"new")


def test_weights_that_are_not_there_are_not_announced(store: RedisStore) -> None:
    assert not store.announce(leads(store), b"raw", "a", "a")


def test_what_was_forgotten_is_reinstated_once(store: RedisStore) -> None:
    assert not store.reinstate(b"raw", "a")  # its weights first
    store.put("a", DATA)
    assert store.reinstate(b"raw", "a")
    assert not store.reinstate(b"other", "a")
    assert store.current() == b"raw"


def joined(store: RedisStore) -> RedisStore:
    store.join()
    return store


def message(number: int, size: int = 10) -> QueryMessage:
    return QueryMessage(b"%d" % number, bytes(size))


def received(store: RedisStore, most: int = 10) -> list[QueryMessage | None]:
    return [message for _, message in store.receive(most)]


def test_what_was_not_done_is_handed_to_the_next_leader(server: Redis, store: RedisStore, other: RedisStore) -> None:
    one, two = joined(store), joined(other)
    for number in range(5):
        one.send(message(number))
    (first, _), *_ = one.receive(3)
    one.acknowledge([first], {"somebody": 7})
    assert two.take_over() == {"somebody": 7}
    assert received(two, 1) == [message(1)]
    assert received(two, 1) == [message(2)]
    got: list[QueryMessage | None] = []
    while batch := received(two):
        got += batch
    assert (got or received(two)) == [message(3), message(4)]
    assert server.client.xlen("{here}:queries") == 4


def test_of_too_many_the_oldest_go(server: Redis, store: RedisStore) -> None:
    one = joined(connected(server.url, max_queries=5))
    for number in range(50):
        one.send(message(number, size=10_000))
    assert server.client.xlen("{here}:queries") <= 7
    assert received(one)[-1] == message(49, size=10_000)


@ON_ONE
def test_a_full_server_refuses(server: Redis, store: RedisStore) -> None:
    one = joined(store)
    server.client.config_set("maxmemory", "1mb")
    with pytest.raises(StoreRefused, match="maxmemory"):
        one.send(message(0, size=10_000_000))


def test_without_the_group_the_store_counts_as_lost(server: Redis, store: RedisStore) -> None:
    one = joined(store)
    server.client.flushall()
    with pytest.raises(StoreLost):
        one.receive(1)
    one.join()
    assert received(one) == []
