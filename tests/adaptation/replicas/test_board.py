"""Versions in a real server: whole or refused, and written by the one that leads alone."""

from collections.abc import Iterator
from contextlib import closing

import pytest

from adaptation.records import Refused
from adaptation.replicas.board import CHUNK_BYTES, Board
from adaptation.replicas.lease import Lease
from adaptation.replicas.redis_store import RedisStore
from tests.adaptation.worlds import Clock
from tests.redis_server import RedisServer

DATA = bytes(range(256)) * 10_000  # three pieces


@pytest.fixture
def store(server: RedisServer) -> Iterator[RedisStore]:
    with closing(RedisStore(server.url, timeout_seconds=5.0)) as made:
        yield made


@pytest.fixture
def board(store: RedisStore) -> Board:
    return Board(store, "here", name="one")


def leads(store: RedisStore, board: Board, name: str = "one") -> int:
    lease = Lease(store, board.lease_key, board.epoch_key, name=name, seconds=1000.0, clock=Clock())
    lease.hold(0)
    return lease.epoch


@pytest.mark.parametrize("size", [1, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, len(DATA)])
def test_weights_come_back_whole(board: Board, size: int) -> None:
    board.put("a", DATA[:size])
    assert board.has("a", size)
    assert board.get("a", size) == DATA[:size]


def test_a_missing_piece_is_seen(server: RedisServer, board: Board) -> None:
    board.put("a", DATA)
    server.client.hdel("here:weights:a", "1")
    assert not board.has("a", len(DATA))
    with pytest.raises(Refused, match="piece 1") as refused:
        board.get("a", len(DATA))
    assert refused.value.reason == "torn"


def test_the_leader_announces_and_what_it_announced_stays(server: RedisServer, store: RedisStore, board: Board) -> None:
    epoch = leads(store, board)
    for name, before in (("a", "a"), ("b", "a")):
        board.put(name, DATA)
        assert board.announce(epoch, name.encode(), name, before)
        assert board.current() == name.encode()
    assert server.client.ttl("here:weights:b") == -1
    assert 0 < server.client.ttl("here:weights:a") <= 600  # for whoever is still reading it


def test_nobody_else_does(store: RedisStore, board: Board) -> None:
    board.put("a", DATA)
    assert not board.announce(1, b"raw", "a", "a")  # nobody leads
    epoch = leads(store, board, "two")
    assert not board.announce(epoch, b"raw", "a", "a")  # another one leads
    assert not board.share(epoch, b"state")
    assert (board.current(), board.shared()) == (None, None)


def test_a_leader_of_an_earlier_epoch_does_not(server: RedisServer, store: RedisStore, board: Board) -> None:
    old = leads(store, board)
    server.client.delete("here:lease")
    new = leads(store, board)
    board.put("a", DATA)
    assert not board.announce(old, b"old", "a", "a")
    assert not board.share(old, b"old")
    assert board.announce(new, b"new", "a", "a")
    assert board.share(new, b"new")
    assert (board.current(), board.shared()) == (b"new", b"new")


def test_weights_that_are_not_there_are_not_announced(store: RedisStore, board: Board) -> None:
    assert not board.announce(leads(store, board), b"raw", "a", "a")


def test_what_was_forgotten_is_given_back_once(board: Board) -> None:
    assert not board.give_back(b"raw", "a")  # its weights first
    board.put("a", DATA)
    assert board.give_back(b"raw", "a")
    assert not board.give_back(b"other", "a")
    assert board.current() == b"raw"
