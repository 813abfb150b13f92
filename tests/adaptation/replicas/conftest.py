from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.redis_server import Redis, RedisCluster, RedisServer, redis_cluster, redis_server


@pytest.fixture
def one_server(tmp_path: Path) -> Iterator[RedisServer]:
    """A Redis server of this test alone."""
    with redis_server(tmp_path) as running:
        yield running


@pytest.fixture(scope="session")
def running_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisCluster]:
    with redis_cluster(tmp_path_factory.mktemp("cluster")) as running:
        yield running


@pytest.fixture
def cluster(running_cluster: RedisCluster) -> RedisCluster:
    """Three servers, empty."""
    running_cluster.client.flushall()
    return running_cluster


@pytest.fixture
def server(request: pytest.FixtureRequest) -> Redis:
    """The one that a test is parametrised with; one server without that."""
    running: Redis = request.getfixturevalue(getattr(request, "param", "one_server"))
    return running
