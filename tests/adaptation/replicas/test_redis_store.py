"""A real server: commands, the lease, the version and the queries in it, and what is said when there is none."""

import random
import time
from collections.abc import Iterator
from contextlib import closing

import pytest

from adaptation.records import Refused, StoreLost, StoreRefused
from adaptation.replicas.redis_store import CHUNK_BYTES, Lease, QueryMessage, QueryStream, RedisStore, VersionStore
from tests.adaptation.worlds import Clock
from tests.redis_server import RedisServer


@pytest.fixture
def store(server: RedisServer) -> Iterator[RedisStore]:
    with closing(RedisStore(server.url, timeout_seconds=5.0)) as made:
        yield made


def test_bytes_come_back_as_they_went(store: RedisStore) -> None:
    value = bytes(range(256))
    store.command("SET", "key", value)
    assert store.command("GET", "key") == value
    assert store.command("GET", "another") is None


def test_a_script_is_one_command(store: RedisStore) -> None:
    assert store.script("redis.call('SET', KEYS[1], ARGV[1]) return ARGV[2] + 1", ["key"], [b"\x00", 4]) == 5
    assert store.command("GET", "key") == b"\x00"


def test_a_refusal_is_told_from_silence(store: RedisStore) -> None:
    store.command("SET", "key", "text")
    with pytest.raises(StoreRefused, match="WRONGTYPE"):
        store.command("XADD", "key", "*", "field", "value")


def test_a_server_that_is_gone_is_lost_until_it_is_back(server: RedisServer, store: RedisStore) -> None:
    store.command("SET", "key", "value")
    server.kill()
    with pytest.raises(StoreLost) as lost:
        store.command("GET", "key")
    assert not isinstance(lost.value, StoreRefused)
    server.begin()
    assert store.command("GET", "key") is None


def test_a_server_that_says_nothing_is_not_waited_for(server: RedisServer) -> None:
    store = RedisStore(server.url, timeout_seconds=0.3)
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
        RedisStore(url, timeout_seconds=1.0)


LONG = 1000.0


def lease(store: RedisStore, name: str, clock: Clock, seconds: float = LONG) -> Lease:
    return Lease(store, "here", name=name, seconds=seconds, clock=clock)


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
    one.release()
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
    one, other = lease(store, "one", clock), Lease(store, "here", name="two", clock=clock, eligible=False)
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
                one.release()
            case 1:
                server.client.delete("here:lease")
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


DATA = bytes(range(256)) * 10_000  # three pieces


@pytest.fixture
def versions(store: RedisStore) -> VersionStore:
    return VersionStore(store, "here", name="one")


def leads(store: RedisStore, name: str = "one") -> int:
    """# -> the epoch"""
    held = lease(store, name, Clock())
    held.hold(0)
    return held.epoch


@pytest.mark.parametrize("size", [1, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, len(DATA)])
def test_weights_come_back_whole(versions: VersionStore, size: int) -> None:
    versions.put("a", DATA[:size])
    assert versions.has("a", size)
    assert versions.get("a", size) == DATA[:size]


def test_a_missing_piece_is_seen(server: RedisServer, versions: VersionStore) -> None:
    versions.put("a", DATA)
    server.client.hdel("here:weights:a", "1")
    assert not versions.has("a", len(DATA))
    with pytest.raises(Refused, match="piece 1") as refused:
        versions.get("a", len(DATA))
    assert refused.value.reason == "torn"


def test_the_leader_announces_and_what_it_announced_stays(
    server: RedisServer, store: RedisStore, versions: VersionStore
) -> None:
    epoch = leads(store)
    for name, before in (("a", "a"), ("b", "a")):
        versions.put(name, DATA)
        assert versions.announce(epoch, name.encode(), name, before)
        assert versions.current() == name.encode()
    assert server.client.ttl("here:weights:b") == -1
    assert 0 < server.client.ttl("here:weights:a") <= 600  # for whoever is still reading it


def test_nobody_else_does(store: RedisStore, versions: VersionStore) -> None:
    versions.put("a", DATA)
    assert not versions.announce(1, b"raw", "a", "a")  # nobody leads
    epoch = leads(store, "two")
    assert not versions.announce(epoch, b"raw", "a", "a")  # another one leads
    assert not versions.share(epoch, b"state")
    assert (versions.current(), versions.shared()) == (None, None)


def test_a_leader_of_an_earlier_epoch_does_not(server: RedisServer, store: RedisStore, versions: VersionStore) -> None:
    old = leads(store)
    server.client.delete("here:lease")
    new = leads(store)
    versions.put("a", DATA)
    assert not versions.announce(old, b"old", "a", "a")
    assert not versions.share(old, b"old")
    assert versions.announce(new, b"new", "a", "a")
    assert versions.share(new, b"new")
    assert (versions.current(), versions.shared()) == (b"new", b"new")


def test_weights_that_are_not_there_are_not_announced(store: RedisStore, versions: VersionStore) -> None:
    assert not versions.announce(leads(store), b"raw", "a", "a")


def test_what_was_forgotten_is_reinstated_once(versions: VersionStore) -> None:
    assert not versions.reinstate(b"raw", "a")  # its weights first
    versions.put("a", DATA)
    assert versions.reinstate(b"raw", "a")
    assert not versions.reinstate(b"other", "a")
    assert versions.current() == b"raw"


def stream(store: RedisStore, name: str = "one", max_queries: int = 100) -> QueryStream:
    made = QueryStream(store, "here", name=name, max_queries=max_queries)
    made.join()
    return made


def message(number: int, size: int = 10) -> QueryMessage:
    return QueryMessage(b"%d" % number, bytes(size))


def received(stream: QueryStream, most: int = 10) -> list[QueryMessage | None]:
    return [message for _, message in stream.receive(most)]


def test_letters_arrive_in_order_and_once(store: RedisStore) -> None:
    one = stream(store)
    for number in range(5):
        one.send(message(number))
    assert received(one, 3) == [message(0), message(1), message(2)]
    assert received(one, 3) == [message(3), message(4)]
    assert received(one) == []


def test_joining_again_changes_nothing(store: RedisStore) -> None:
    one = stream(store)
    one.send(message(0))
    one.join()
    assert received(one) == [message(0)]


def test_what_was_not_done_is_handed_to_the_next_leader(server: RedisServer, store: RedisStore) -> None:
    one, two = stream(store), stream(store, "two")
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
    assert server.client.xlen("here:queries") == 4


def test_what_is_done_is_gone(server: RedisServer, store: RedisStore) -> None:
    one = stream(store)
    for number in range(3):
        one.send(message(number))
    one.acknowledge([entry_id for entry_id, _ in one.receive(3)], {"a": 3, "b": 4})
    assert server.client.xlen("here:queries") == 0
    assert server.client.xpending("here:queries", "learner")["pending"] == 0
    assert stream(store, "two").take_over() == {"a": 3, "b": 4}


def test_of_too_many_the_oldest_go(server: RedisServer, store: RedisStore) -> None:
    one = stream(store, max_queries=5)
    for number in range(50):
        one.send(message(number, size=10_000))
    assert server.client.xlen("here:queries") <= 7
    assert received(one)[-1] == message(49, size=10_000)


def test_what_is_no_letter_is_delivered_as_none(server: RedisServer, store: RedisStore) -> None:
    one = stream(store)
    server.client.xadd("here:queries", {"something": "else"})
    assert received(one) == [None]


def test_a_full_server_refuses(server: RedisServer, store: RedisStore) -> None:
    one = stream(store)
    server.client.config_set("maxmemory", "1mb")
    with pytest.raises(StoreRefused, match="maxmemory"):
        one.send(message(0, size=10_000_000))


def test_without_the_group_the_store_counts_as_lost(server: RedisServer, store: RedisStore) -> None:
    one = stream(store)
    server.client.flushall()
    with pytest.raises(StoreLost):
        one.receive(1)
    one.join()
    assert received(one) == []
