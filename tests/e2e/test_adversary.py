"""Honest clients beside one that asks for as much as it may."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.e2e.adversary import KINDS, SMALL, Adversary, Crowd, crowd_of, measure_embedded, settings_of
from tests.processes import serving_tiny

MOST_GROWTH_MIB = 300


ADDRESSES = pytest.mark.slow(
    "clients without keys are distinguished by one function", covers="service/api service/door.py"
)


@pytest.fixture(scope="module", params=[True, pytest.param(False, marks=ADDRESSES)], ids=["keys", "addresses"])
def crowd(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Crowd]:
    """On a server that runs eight sequences, and lets 64 wait."""
    folder, settings = tmp_path_factory.mktemp("crowd"), settings_of(keyed=request.param)
    server = serving_tiny(folder, max_sequences=8, **settings)
    yield crowd_of(server, "tiny", keyed=request.param, sizes=SMALL, tokens=24)
    server.end()


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_honest_streams_are_answered_beside_an_adversary(crowd: Crowd, kind: Callable[[Adversary], None]) -> None:
    assert crowd.alone
    before, (at_once, _) = crowd.resident_mib, KINDS[kind]
    phase = crowd.together(kind, at_once // 8 or 2)
    assert phase.failures[:3] == []
    assert phase.peak_mib - before < MOST_GROWTH_MIB


@pytest.mark.slow
def test_honest_streams_beside_an_adversary_of_the_embedded_model(tmp_path: Path) -> None:
    report = measure_embedded(tmp_path, 10, keyed=True)
    assert not [phase["failures"] for one in report["kinds"].values() for phase in (one["ordinary"], one["adversary"])]
    assert report["grown_mib"]["peak"] <= MOST_GROWTH_MIB
