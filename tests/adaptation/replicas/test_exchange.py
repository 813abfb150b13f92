"""Replicas around a real Redis server: one leads, all serve what it serves, and a server that forgets or freezes costs
nothing but time."""

import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from adaptation.records import StoreLost
from adaptation.replicas.exchange import Exchange
from adaptation.replicas.redis_store import Part
from drafters.feedback import QueryFeedback
from drafters.network.checkpoint import weights_of
from tests.adaptation.drafts import same
from tests.adaptation.replicas.members import Member, agreed, member, until
from tests.adaptation.samples import Bench, bench, drafter, feedback
from tests.redis_server import Redis
from tests.tuned import settled

ON_BOTH = pytest.mark.parametrize("server", ["one_server", "cluster"], indirect=True)


@pytest.fixture
def leader(server: Redis, tmp_path: Path) -> Iterator[Member]:
    with member(tmp_path / "leader", server.url) as one:
        one.exchange.step()
        yield one


@pytest.fixture
def follower(server: Redis, leader: Member, tmp_path: Path) -> Iterator[Member]:
    with member(tmp_path / "follower", server.url) as one:
        one.exchange.step()
        yield one


def _is_heard(leader: Member, count: int) -> bool:
    return leader.status.queries.get("observed") == count


def _follows(leader: Member, follower: Member, number: int) -> bool:
    """All serve the version of this number."""
    return agreed([leader, follower]) and follower.status.number == number


def test_the_first_leads_and_the_next_follows(leader: Member, follower: Member) -> None:
    assert (leader.status.role, follower.status.role) == ("leading", "following")
    until([leader, follower], lambda: agreed([leader, follower]))
    assert follower.status.leader == leader.status.name
    assert follower.status.versions == {"announced": 0}  # equal weights need not be fetched


@ON_BOTH
def test_what_the_leader_serves_all_serve(leader: Member, follower: Member) -> None:
    leader.bring(seed=1)
    until([leader, follower], partial(_follows, leader, follower, 1))
    assert same(leader.served, follower.served)
    assert same(follower.served, weights_of(drafter(1)))
    assert follower.status.versions["followed"] == 1


def test_a_rollback_reaches_all(leader: Member, follower: Member) -> None:
    leader.bring(seed=1)
    until([leader, follower], lambda: follower.status.number == 1)
    leader.worker.ask(leader.learner.rollback).result()
    until([leader, follower], partial(_follows, leader, follower, 2))
    assert same(follower.served, weights_of(drafter()))


@ON_BOTH
def test_queries_of_all_teach_the_leader_and_its_updates_reach_all(leader: Member, follower: Member) -> None:
    while "published" not in [event.kind for event in leader.events]:
        sent = follower.status.queries.get("sent", 0)
        assert sent < 100, leader.events
        follower.end(2, first_seed=2 * sent)
        leader.end(2, first_seed=2 * sent + 2)
        until([leader, follower], partial(_is_heard, leader, sent + 2))
        assert settled(leader.worker, 20)
    until([leader, follower], lambda: agreed([leader, follower]) and follower.status.number >= 1)
    assert same(leader.served, follower.served)
    assert not same(follower.served, weights_of(drafter()))
    assert follower.status.queries == {"sent": leader.status.queries["observed"]}
    assert {event.kind for event in follower.events} == {"loaded"}


def test_served_versions_are_recognised_by_their_weights(leader: Member, follower: Member) -> None:
    """The follower has version 1 where the leader has version 2, and they are the same."""
    leader.bring(seed=1)
    leader.bring(seed=2)
    until([leader, follower], partial(_follows, leader, follower, 1))
    assert (leader.weights.version, follower.weights.version) == (2, 1)
    heard: list[tuple[int, int]] = []

    def observe(reported: QueryFeedback) -> None:
        heard.append((reported.query.first_version, reported.query.version))

    leader.learner.observe = observe  # type: ignore[method-assign, assignment]
    follower.exchange.offer(feedback(0, version=1))
    follower.exchange.offer(feedback(1, version=0))
    until([leader, follower], lambda: len(heard) == 2)
    assert heard == [(2, 2), (-1, -1)]


def test_what_must_not_be_stored_does_not_leave(server: Redis, leader: Member, follower: Member) -> None:
    made = feedback(0)
    follower.exchange.offer(replace(made, query=replace(made.query, store=False)))
    follower.exchange.step()
    assert follower.status.queries == {"not_stored": 1}
    assert server.client.xlen(server.key("queries")) == 0


def test_of_too_many_queries_the_oldest_are_dropped(server: Redis, leader: Member, tmp_path: Path) -> None:
    with member(tmp_path / "small", server.url, max_queries=3) as small:
        small.exchange.step()
        small.end(5)
        assert small.status.queries["queue_full"] == 2
        small.exchange.step()
        assert small.status.queries["sent"] == 3


@ON_BOTH
def test_a_follower_takes_over_with_all_that_was_known_and_left(
    server: Redis, leader: Member, follower: Member
) -> None:
    leader.bring(seed=1)
    until([leader, follower], partial(_follows, leader, follower, 1))
    shared = leader.learner.shared()
    until([leader], lambda: server.client.exists(server.key("epoch").replace(b"epoch", b"state")) == 1)
    follower.end(3)
    follower.exchange.step()
    leader.exchange._replica.lease.release()
    until([follower], lambda: follower.status.queries.get("observed") == 3)
    assert (follower.status.role, follower.status.epoch, follower.status.number) == ("leading", 2, 2)
    assert same(follower.served, weights_of(drafter(1)))
    assert set(follower.learner.shared()) == set(shared)
    until([leader, follower], lambda: leader.status.epoch == 2 and agreed([leader, follower]))
    assert leader.status.role == "following"


def test_queries_a_dead_leader_had_taken_are_heard_by_the_next(server: Redis, leader: Member, follower: Member) -> None:
    follower.end(2)
    follower.exchange.step()
    taken = leader.exchange._replica.store.receive(2)
    assert len(taken) == 2
    leader.exchange._replica.lease.release()
    until([follower], lambda: follower.status.queries.get("observed") == 2)
    assert server.client.xlen(server.key("queries")) == 0


@ON_BOTH
def test_an_emptied_server_is_filled_again_by_the_replica_that_serves(
    server: Redis, leader: Member, follower: Member
) -> None:
    leader.bring(seed=1)
    until([leader, follower], partial(_follows, leader, follower, 1))
    server.client.flushall()
    follower.exchange._replica.lease._ask_at = float("inf")  # it shall not lead
    follower.exchange.step()
    assert server.client.exists(server.key("version")) == 1
    until([leader, follower], lambda: agreed([leader, follower]) and follower.status.epoch == leader.status.epoch > 1)
    assert same(follower.served, weights_of(drafter(1)))


def test_a_leader_that_knows_nothing_is_not_stopped_by_what_others_know(
    server: Redis, leader: Member, follower: Member, tmp_path: Path
) -> None:
    for seed in (1, 2):
        leader.bring(seed)
        until([leader, follower], partial(_follows, leader, follower, seed))
    server.kill()
    server.begin()
    with member(tmp_path / "fresh", server.url) as fresh:
        fresh.exchange.step()
        assert (fresh.status.role, fresh.status.epoch, fresh.status.number) == ("leading", 1, 0)
        follower.exchange.attempt()
        until([fresh, follower], lambda: agreed([fresh, follower]) and fresh.status.epoch > 1)
        assert same(follower.served, weights_of(drafter()))
        assert follower.status.versions["old"] >= 1 or follower.status.versions["fork"] >= 1


@pytest.mark.parametrize("secret", [None, "the secret of all", "another secret of all"])
def test_what_0_3_0_left_is_taken_over_if_it_may_be_followed(server: Redis, tmp_path: Path, secret: str | None) -> None:
    """It had names without braces."""
    with member(tmp_path / "old", server.url, redis_secret=secret and "the secret of all") as old:
        old.exchange.step()
        old.bring(seed=1)
        old.end(1)
        until([old], lambda: old.status.number == 1 and agreed([old]))
        until([old], lambda: len(server.client.keys("*:state")) == 1)
        old.exchange._replica.lease.release()
    for key in server.client.keys("{*"):
        server.client.rename(key, key.replace(b"{", b"").replace(b"}", b""))
    is_followed = secret != "another secret of all"
    with member(tmp_path / "new", server.url, redis_secret=secret) as new:
        until([new], lambda: new.status.role == "leading" and agreed([new]))
        assert same(new.served, weights_of(drafter(int(is_followed))))
        assert (new.status.epoch, new.status.number) == ((2, 2) if is_followed else (1, 0))
        stays = [key for key in server.client.keys("adaptree:*") if server.client.ttl(key) == -1]
        assert bool(stays) is not is_followed
        new.exchange._connect()
        assert new.exchange.attempt()


def test_an_update_from_before_a_pause_of_the_leader_is_fenced_off(leader: Member, follower: Member) -> None:
    """It wakes up after another one has taken over, and does not know yet."""
    leader.exchange._replica.lease.release()
    follower.exchange._replica.lease._ask_at = 0.0
    until([follower], lambda: follower.status.role == "leading" and follower.status.epoch == 2)
    leader.bring(seed=1)
    leader.exchange._leader.step(1)
    assert leader.status.versions["announced"] == 1  # the one before
    until([leader, follower], lambda: agreed([leader, follower]) and leader.status.epoch == 2)
    assert same(leader.served, weights_of(drafter()))


def test_weights_that_take_longer_to_send_than_a_lease_lasts_are_announced(
    server: Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("adaptation.replicas.redis_store.CHUNK_BYTES", 1 << 12)
    with (
        member(tmp_path / "leader", server.url, lease_seconds=1.0) as leader,
        member(tmp_path / "other", server.url, lease_seconds=1.0) as other,
    ):
        until([leader, other], lambda: leader.status.role == "leading" and agreed([leader, other]))
        leader.bring(seed=1)
        at_once, num_pieces = (
            leader.exchange._replica.store.command,
            len(leader.exchange._replica.served.now().data) >> 12,
        )

        def slow(*parts: Part) -> object:
            if parts[0] == "HSET":
                time.sleep(2.0 / num_pieces)
                other.exchange.attempt()
            return at_once(*parts)

        monkeypatch.setattr(leader.exchange._replica.store, "command", slow)
        leader.exchange.step()
        assert (leader.status.role, leader.status.epoch, leader.status.number) == ("leading", 1, 1)
        until([leader, other], lambda: agreed([leader, other]))
        assert same(other.served, weights_of(drafter(1)))


def test_without_a_server_each_learns_alone(server: Redis, tmp_path: Path) -> None:
    with member(tmp_path / "a", server.url, lease_seconds=0.5) as one:
        one.exchange.step()
        server.kill()
        until([one], lambda: one.status.role == "alone")
        for first_seed in range(0, 80, 8):
            one.end(8, first_seed=first_seed)
            assert settled(one.worker, 20)
            if "published" in [event.kind for event in one.events]:
                break
        assert one.events[-1].kind == "published"
        assert (one.status.connected, one.status.connections_lost) == (False, 1)


def test_a_server_that_refuses_from_the_start_is_named_once(
    server: Redis, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server.client.config_set("requirepass", "another")
    with caplog.at_level("WARNING"), member(tmp_path / "a", server.url, lease_seconds=0.5) as one:
        until([one], lambda: one.status.role == "alone")
        one.exchange.attempt()
    (warning,) = [record.getMessage() for record in caplog.records if "other replicas" in record.getMessage()]
    assert "Authentication required" in warning


def test_what_was_learnt_alone_gives_way_to_what_is_announced(server: Redis, leader: Member, follower: Member) -> None:
    leader.bring(seed=1)
    until([leader, follower], partial(_follows, leader, follower, 1))
    follower.bring(seed=5)
    assert same(follower.served, weights_of(drafter(5)))
    until([leader, follower], lambda: same(follower.served, weights_of(drafter(1))) and agreed([leader, follower]))


def test_a_frozen_server_holds_no_one_up_and_sends_nothing_twice(
    server: Redis, leader: Member, follower: Member
) -> None:
    follower.exchange.start()
    server.freeze()
    follower.end(3)  # never waits
    with pytest.raises(StoreLost):
        leader.exchange.step()
    assert follower.exchange._thread.is_alive()
    server.thaw()
    until([leader], lambda: leader.status.queries.get("observed") == 3)
    assert follower.exchange.stop()
    assert agreed([leader, follower])


def test_an_error_of_ours_does_not_end_the_thread(
    leader: Member, follower: Member, monkeypatch: pytest.MonkeyPatch
) -> None:
    def boom(_: Exchange) -> None:
        raise RuntimeError("boom")

    monkeypatch.setattr(Exchange, "step", boom)
    assert not follower.exchange.attempt()
    monkeypatch.undo()
    leader.bring(seed=1)
    until([leader, follower], partial(_follows, leader, follower, 1))
    assert follower.status.connections_lost == 1


def test_replicas_of_other_models_share_a_server_and_nothing_else(
    server: Redis, leader: Member, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.adaptation.replicas.members.TARGET", "another target")
    with member(tmp_path / "other", server.url) as other:
        other.exchange.step()
        assert (leader.status.role, other.status.role) == ("leading", "leading")


# What a learner offers to those it learns with: its weights, and what it knows of its arms.


def experienced(folder: Path, policy: str) -> Bench:
    tried = bench(folder, policy=policy, warm_up_queries=2)
    for seed in range(9):
        tried.observe(feedback, seed)
    return tried


@pytest.mark.parametrize("policy", ["bandit", "head_only", "never"])
def test_what_one_knows_another_goes_on_from(tmp_path: Path, policy: str) -> None:
    one, two = experienced(tmp_path / "one", policy), bench(tmp_path / "two", policy=policy)
    two.learner.inherit(one.learner.shared())
    assert two.learner.shared() == one.learner.shared()
    assert two.events == []


def test_the_next_learner_after_a_paused_one_is_paused_until_resumed(tmp_path: Path) -> None:
    one, two = experienced(tmp_path / "one", "bandit"), bench(tmp_path / "two", policy="bandit")
    before = one.learner.shared()
    one.learner.pause()
    two.learner.inherit(one.learner.shared())
    assert two.learner.paused
    two.learner.inherit(before)
    assert two.learner.paused, "what is older than the pause does not end it"
    two.learner.resume()
    assert [(event.kind, event.reason) for event in two.events] == [("paused", "inherited"), ("resumed", "operator")]


@pytest.mark.parametrize("shared", [{}, {"policy": 3}, {"policy": {"knowledge": {}, "random": []}}])
def test_what_is_no_knowledge_is_reported_and_changes_nothing(tmp_path: Path, shared: dict[str, object]) -> None:
    tried = experienced(tmp_path, "bandit")
    before = tried.learner.shared()
    tried.learner.inherit(shared)  # type: ignore[arg-type]
    assert tried.learner.shared() == before
    assert [event.kind for event in tried.events] == ["restored"]
