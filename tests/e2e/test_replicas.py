"""Three server processes, a trainer process and a Redis server, under a load of texts that the drafter is bad at.

Whatever befalls trainer and Redis: no request fails, no token is wrong, and all serve the same weights soon after.
"""

import statistics
import time
from collections.abc import Iterator

import pytest

from adaptation.replicas.redis_store import LEASE_SECONDS
from adaptation.replicas.wire import sign
from tests.redis_server import redis_server
from tests.replica_parts import Fleet, fleet

RECOVERY_SECONDS = 10.0
LEARNING_SECONDS = 60.0
STALL_SECONDS = 10.0
COMMAND_SECONDS = LEASE_SECONDS / 2


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("replicas")
    with redis_server(folder) as redis, fleet(folder, redis) as made:
        yield made


@pytest.fixture(autouse=True)
def _no_wrong_token(running: Fleet) -> Iterator[None]:
    yield
    running.check()


def learns(running: Fleet) -> None:
    """All go on from what they agree on."""
    running.load.change()
    before = running.newest()
    took = running.wait(lambda: running.agree(beyond=before), LEARNING_SECONDS)
    print(f"a newer version served by all after {took:.1f} s")


def recovers(running: Fleet, what: str, beyond: tuple[int, int] = (0, -1)) -> None:
    took = running.wait(lambda: running.agree(beyond), RECOVERY_SECONDS)
    print(f"after {what} all served the same weights within {took:.1f} s")


def test_what_all_are_asked_becomes_weights_that_all_serve(running: Fleet) -> None:
    learns(running)
    states = running.states()
    assert {state["replicas"]["role"] for state in states} == {"following"}
    assert all(state["publishes"] == 0 and state["replicas"]["queries"]["sent"] > 0 for state in states)


def test_an_operator_of_a_follower_is_sent_to_the_leader(running: Fleet) -> None:
    for command in ("pause", "resume", "rollback"):
        answer = running.replicas[0].command(command)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "not_leading")
    running.wait(running.agree, RECOVERY_SECONDS)  # weights may be on their way


def test_a_forged_version_is_refused_and_replaced(running: Fleet) -> None:
    forged = sign("version", {"epoch": 10**6}, None)

    def is_noticed() -> bool:
        # put there again, for the leader may have announced a version before anybody looked
        running.redis.client.set(running.redis.key("version"), forged)
        return any(state["replicas"]["versions"].get("forged") for state in running.states())

    running.wait(is_noticed, 5.0)
    recovers(running, "a forged version")


@pytest.mark.slow
def test_a_killed_trainer_is_replaced_by_another(running: Fleet) -> None:
    """What waits for it meanwhile is heard by the next one, and what waits twice is heard once."""
    epoch, _ = running.newest()
    running.trainer.kill()
    key = running.redis.key("queries")
    running.wait(lambda: running.redis.client.xlen(key) > 3, LEARNING_SECONDS)
    for _, fields in running.redis.client.xrange(key, count=3):
        running.redis.client.xadd(key, fields)
    running.begin_trainer()
    recovers(running, "the trainer was killed and another one was ready", beyond=(epoch + 1, -1))
    learns(running)


@pytest.mark.slow
def test_a_killed_redis_that_comes_back_empty(running: Fleet) -> None:
    running.redis.kill()
    running.wait(lambda: {state["replicas"]["role"] for state in running.states()} == {"alone"}, 30.0)
    running.check()
    running.redis.begin()
    recovers(running, "Redis came back empty")
    learns(running)


@pytest.mark.slow
def test_redis_stalls(running: Fleet) -> None:
    running.redis.freeze()
    time.sleep(STALL_SECONDS)
    assert not any(state["replicas"]["connected"] for state in running.states())
    running.redis.thaw()
    recovers(running, f"a stall of {STALL_SECONDS:.0f} s")
    learns(running)


@pytest.mark.slow
def test_both_are_killed_and_come_back_with_nothing(running: Fleet) -> None:
    running.redis.kill()
    running.trainer.kill()
    running.redis.begin()
    recovers(running, "Redis was emptied with no one to learn")
    running.begin_trainer()
    recovers(running, "and a trainer was ready")
    learns(running)


@pytest.mark.slow
def test_no_request_waits_for_redis(running: Fleet) -> None:
    """A command to a store that says nothing takes COMMAND_SECONDS: a client that waited for one would be as late."""
    usual = _median_seconds(running)
    running.redis.freeze()
    stalled = _median_seconds(running)
    running.redis.thaw()
    recovers(running, "a stall under load")
    print(f"median {usual:.3f} s, and {stalled:.3f} s while Redis says nothing")
    assert stalled < usual + COMMAND_SECONDS / 2


def _median_seconds(running: Fleet) -> float:
    """What half of the requests take at most, now."""
    time.sleep(5)
    running.load.taken()
    time.sleep(15)
    taken = running.load.taken()
    assert len(taken) >= 20
    return statistics.median(taken)
