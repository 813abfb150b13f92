"""What others put into the store: it is refused for a stated reason, changes no weights, and is mended."""

import hashlib
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from adaptation.replicas.redis_store import CHUNK_BYTES
from adaptation.replicas.wire import QueryCodec, Secret, VersionRecord, sign, weights_to_bytes
from drafters.network.checkpoint import weights_of
from tests.adaptation.drafts import same
from tests.adaptation.replicas.members import SHAPE, Member, agreed, member, until
from tests.adaptation.samples import drafter, feedback
from tests.redis_server import RedisServer

SECRET = "the secret of ours"
OURS = SECRET.encode()


@pytest.fixture
def both(server: RedisServer, tmp_path: Path) -> Iterator[tuple[Member, Member]]:
    """A leader that has published, and one that follows it."""
    with (
        member(tmp_path / "leader", server.url, redis_secret=SECRET) as leader,
        member(tmp_path / "follower", server.url, redis_secret=SECRET) as follower,
    ):
        leader.exchange.step()
        leader.bring(seed=1)
        until([leader, follower], lambda: agreed([leader, follower]) and follower.status.number == 1)
        yield leader, follower


def announced(server: RedisServer, both: tuple[Member, Member], data: bytes, secret: Secret, **changes: Any) -> None:
    """Somebody puts weights into the store, and a version that names them."""
    known = both[0].exchange._replica.state.record
    version = replace(known, number=2, parent=known.sha256, sha256=hashlib.sha256(data).hexdigest())
    version = replace(version, num_bytes=len(data), leader="somebody")
    _put(server, replace(version, **changes), data, secret)


def _put(server: RedisServer, version: VersionRecord, data: bytes, secret: Secret) -> None:
    prefix = server.key("version").removesuffix(b":version")
    pieces = {number: data[number * CHUNK_BYTES :][:CHUNK_BYTES] for number in range(-(-len(data) // CHUNK_BYTES))}
    server.client.hset(prefix + b":weights:" + version.sha256.encode(), mapping=pieces)
    server.client.set(prefix + b":version", sign("version", version, secret))


def other_weights(**changed: float) -> bytes:
    weights = {name: value.clone() for name, value in weights_of(drafter(9)).items()}
    for name, value in changed.items():
        weights[name.replace("__", ".")].view(-1)[0] = value
    return weights_to_bytes(weights)


def refused_and_mended(both: tuple[Member, Member], reason: str) -> None:
    leader, follower = both
    follower.exchange.step()
    follower.exchange.step()
    assert follower.status.versions.get(reason) == 1
    assert same(follower.served, weights_of(drafter(1)))
    until(both, lambda: agreed(both) and same(follower.served, weights_of(drafter(1))))
    leader.bring(seed=2)
    until(both, lambda: agreed(both) and same(follower.served, weights_of(drafter(2))))


def test_a_version_of_ours_is_followed(server: RedisServer, both: tuple[Member, Member]) -> None:
    """What the tests below do wrong, done right."""
    follower = both[1]
    announced(server, both, other_weights(), OURS)
    until([follower], lambda: same(follower.served, weights_of(drafter(9))))


@pytest.mark.parametrize("secret", [None, b"the secret of others"], ids=["unsigned", "signed"])
def test_a_forged_version(server: RedisServer, both: tuple[Member, Member], secret: Secret) -> None:
    announced(server, both, other_weights(), secret)
    refused_and_mended(both, "forged")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"fingerprint": "another model"}, "foreign"),
        ({"number": 0}, "old"),
        ({"number": 1}, "fork"),
        ({"parent": "f" * 64}, "fork"),
        ({"num_bytes": 10**9}, "misfit"),
        ({"sha256": "f" * 64}, "torn"),
    ],
)
def test_a_version_that_cannot_be(
    server: RedisServer, both: tuple[Member, Member], changes: dict[str, Any], reason: str
) -> None:
    announced(server, both, other_weights(), OURS, **changes)
    refused_and_mended(both, reason)


def test_weights_that_are_no_numbers(server: RedisServer, both: tuple[Member, Member]) -> None:
    announced(server, both, other_weights(lm_head__weight=math.nan), OURS)
    refused_and_mended(both, "not_finite")


def test_weights_of_another_layout(server: RedisServer, both: tuple[Member, Member]) -> None:
    """Of the same number of bytes, so that only a name tells."""
    announced(server, both, other_weights().replace(b"lm_head.weight", b"lm_head.weighs"), OURS)
    refused_and_mended(both, "misfit")


def test_weights_that_were_altered_in_the_store_are_put_there_again(
    server: RedisServer, both: tuple[Member, Member], tmp_path: Path
) -> None:
    leader = both[0]
    key = next(key for key in server.client.keys("*:weights:*") if leader.status.served_sha256.encode() in key)
    piece = bytearray(server.client.hget(key, "0"))
    piece[-1] ^= 1
    server.client.hset(key, "0", bytes(piece))
    with member(tmp_path / "new", server.url, redis_secret=SECRET) as new:
        new.exchange.step()
        assert new.status.versions["torn"] == 1
        until([leader, new], lambda: agreed([leader, new]) and same(new.served, weights_of(drafter(1))))


def test_queries_of_others_are_not_heard(server: RedisServer, both: tuple[Member, Member]) -> None:
    leader = both[0]
    origin: dict[str, Any] = {"sender": "somebody", "sequence": 0, "first_weights": "", "weights": ""}
    made, key, fingerprint = feedback(0), server.key("queries"), leader.exchange._replica.state.fingerprint
    poisoned = replace(made, features=made.features * math.nan)
    for codec, query in (
        (QueryCodec(fingerprint, SHAPE, None), made),
        (QueryCodec("another model", SHAPE, OURS), made),
        (QueryCodec(fingerprint, SHAPE, OURS), poisoned),
    ):
        message = codec.encode(query, **origin)
        server.client.xadd(key, {"header": message.header, "tensors": message.tensors})
    server.client.xadd(key, {"no": "query"})
    until([leader], lambda: server.client.xlen(key) == 0)
    assert leader.status.queries == {"forged": 1, "foreign": 1, "not_finite": 1, "misfit": 1}


def test_a_state_that_others_left_is_not_taken_over(server: RedisServer, both: tuple[Member, Member]) -> None:
    leader, follower = both
    key = server.key("epoch").replace(b"epoch", b"state")
    leader.exchange._replica.lease.release()
    server.client.set(key, b"\n{}")
    before = len(follower.events)
    until([follower], lambda: follower.status.epoch == 2)
    assert len(follower.events) == before
