"""A server that several modules ask, since starting one takes longer than most tests."""

from collections.abc import Iterator

import openai
import pytest

from tests.processes import Process, serving_tiny


@pytest.fixture(scope="session")
def tiny_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    """A random model without keys or limits."""
    running = serving_tiny(tmp_path_factory.mktemp("tiny"), kv_cache="200MiB")
    yield running
    running.end()


@pytest.fixture(scope="session")
def client(tiny_server: Process) -> Iterator[openai.OpenAI]:
    """The official client of that server."""
    with tiny_server.official() as official:
        yield official
