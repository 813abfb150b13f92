"""Letters through a real server: each at least once, bounded, and what one leader left the next one gets."""

from collections.abc import Iterator
from contextlib import closing

import pytest

from adaptation.records import StoreLost, StoreRefused
from adaptation.replicas.redis_store import RedisStore
from adaptation.replicas.stream import Letter, QueryStream
from tests.redis_server import RedisServer


@pytest.fixture
def store(server: RedisServer) -> Iterator[RedisStore]:
    with closing(RedisStore(server.url, timeout_seconds=5.0)) as made:
        yield made


def stream(store: RedisStore, name: str = "one", most_letters: int = 100) -> QueryStream:
    made = QueryStream(store, "here", name=name, most_letters=most_letters)
    made.join()
    return made


def letter(number: int, size: int = 10) -> Letter:
    return Letter(b"%d" % number, bytes(size))


def received(stream: QueryStream, most: int = 10) -> list[Letter | None]:
    return [one.letter for one in stream.receive(most)]


def test_letters_arrive_in_order_and_once(store: RedisStore) -> None:
    one = stream(store)
    for number in range(5):
        one.send(letter(number))
    assert received(one, 3) == [letter(0), letter(1), letter(2)]
    assert received(one, 3) == [letter(3), letter(4)]
    assert received(one) == []


def test_joining_again_changes_nothing(store: RedisStore) -> None:
    one = stream(store)
    one.send(letter(0))
    one.join()
    assert received(one) == [letter(0)]


def test_what_was_not_done_is_handed_to_the_next_leader(server: RedisServer, store: RedisStore) -> None:
    one, two = stream(store), stream(store, "two")
    for number in range(5):
        one.send(letter(number))
    first, *_ = one.receive(3)
    one.done([first.number], {"somebody": 7})
    assert two.take_over() == {"somebody": 7}
    assert received(two, 1) == [letter(1)]
    assert received(two, 1) == [letter(2)]
    got: list[Letter | None] = []
    while batch := received(two):
        got += batch
    assert (got or received(two)) == [letter(3), letter(4)]
    assert server.client.xlen("here:queries") == 4


def test_what_is_done_is_gone(server: RedisServer, store: RedisStore) -> None:
    one = stream(store)
    for number in range(3):
        one.send(letter(number))
    one.done([delivered.number for delivered in one.receive(3)], {"a": 3, "b": 4})
    assert server.client.xlen("here:queries") == 0
    assert server.client.xpending("here:queries", "learner")["pending"] == 0
    assert stream(store, "two").take_over() == {"a": 3, "b": 4}


def test_of_too_many_the_oldest_go(server: RedisServer, store: RedisStore) -> None:
    one = stream(store, most_letters=5)
    for number in range(50):
        one.send(letter(number, size=10_000))
    assert server.client.xlen("here:queries") <= 7
    assert received(one)[-1] == letter(49, size=10_000)


def test_what_is_no_letter_is_delivered_as_none(server: RedisServer, store: RedisStore) -> None:
    one = stream(store)
    server.client.xadd("here:queries", {"something": "else"})
    assert received(one) == [None]


def test_a_full_server_refuses(server: RedisServer, store: RedisStore) -> None:
    one = stream(store)
    server.client.config_set("maxmemory", "1mb")
    with pytest.raises(StoreRefused, match="maxmemory"):
        one.send(letter(0, size=10_000_000))


def test_without_the_group_the_store_counts_as_lost(server: RedisServer, store: RedisStore) -> None:
    one = stream(store)
    server.client.flushall()
    with pytest.raises(StoreLost):
        one.receive(1)
    one.join()
    assert received(one) == []
