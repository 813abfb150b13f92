"""llama.cpp judges all tests of this folder."""

from collections.abc import Iterator

import pytest

from tests.conformance.judges import LlamaCpp


@pytest.fixture(scope="session")
def llama_cpp() -> Iterator[LlamaCpp]:
    judge = LlamaCpp()
    yield judge
    judge.close()
