"""One command at a time to a real server, and what is said when there is none."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from adaptation.records import StoreLost, StoreRefused
from adaptation.replicas.redis_store import RedisStore
from tests.redis_server import RedisServer, redis_server


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    with redis_server(tmp_path) as running:
        yield running


@pytest.fixture
def store(server: RedisServer) -> Iterator[RedisStore]:
    made = RedisStore(server.url, timeout_seconds=0.3)
    yield made
    made.close()


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


def test_a_server_that_says_nothing_is_not_waited_for(server: RedisServer, store: RedisStore) -> None:
    store.command("SET", "key", "value")
    server.freeze()
    began = time.monotonic()
    with pytest.raises(StoreLost):
        store.command("GET", "key")
    assert time.monotonic() - began < 5
    server.thaw()
    assert store.command("GET", "key") == b"value"  # and not the answer to what was asked before


@pytest.mark.parametrize("url", ["localhost:6379", "http://localhost", ""])
def test_what_is_no_url_is_refused_at_once(url: str) -> None:
    with pytest.raises(ValueError, match="URL"):
        RedisStore(url, timeout_seconds=1.0)
